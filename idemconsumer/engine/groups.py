"""What follows when a group's transaction fails: who is to blame, and what runs again.

Every detour (rerun, count, reject, dead letter) starts from a rolled-back transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from idemconsumer.engine.blame import HandlerFailed, describe
from idemconsumer.engine.delivery_log import DeliveryLog
from idemconsumer.engine.endings import Endings, FailedBehind
from idemconsumer.engine.group_sizes import GroupSizes
from idemconsumer.engine.lost_connections import LostConnections
from idemconsumer.engine.transaction import Cut, Transactions
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import CommitUnknown, ConfigurationError, ConnectionLost, Contention, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.ports.observer import Point
from idemconsumer.ports.tracing import Tracing
from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.stores.joined import PostgresStore


class Groups:
    """Commits groups in one transaction each, and smaller ones after a failure."""

    def __init__(
        self,
        store: PostgresStore,
        at: Callable[[Point, str, Sequence[bytes]], None],
        sizes: GroupSizes,
        endings: Endings,
        lost_connections: LostConnections,
        deliveries: DeliveryLog,
        tracing: Tracing,
    ) -> None:
        self._transactions = Transactions(store, at, sizes, endings, lost_connections, deliveries, tracing)
        self._at = at
        self._sizes = sizes
        self._endings = endings
        self._lost_connections = lost_connections

    async def run(self, group: Sequence[Work], *, defer: bool, behind: FailedBehind | None = None) -> list[Outcome]:
        """Claim, run and commit `group`, or a prefix of it; `behind` is counted if all of it commits at once."""
        handler, lost, whole = group[0].handler, False, len(group)
        if self._lost_connections:
            for index, work in enumerate(group):
                if (loss := await self._lost_connections.judge(work.key)) is None:
                    continue
                if index == 0:
                    return [await self._lost_again(work, loss)]
                work.suspicion, group = Suspicion.BEGUN, group[:index]  # it comes next, and alone
                break
        while True:
            try:
                all_of = behind if len(group) == whole else None
                return await self._transactions.commit(group, defer=defer, behind=all_of, look=lost)
            except Cut as cut:
                group = group[: cut.length]
            except CommitUnknown as unknown:
                if behind is not None:
                    behind.in_doubt, behind = True, None
                # Only a new claim can tell: it finds the record, inserts it, or is busy while the old one lives (J4).
                log.warning("commit unknown, claiming again", **group[0].named, messages=len(group), error=str(unknown))
                for work in group:  # the statement of one of them may be what the connection was lost over
                    work.eager = True
                if lost:  # the group itself may be why: idle for so long that the server ended its transaction
                    self._sizes.lost(handler)
                    group = group[: max(1, len(group) // 2)]
                lost = True
            except Contention as contention:
                gate_shut = self._sizes.collided(handler, contention)
                if len(group) == 1:
                    return [await self._endings.collided(group[0], contention)]
                if not gate_shut:  # the row may be held for long: let those before its message through
                    group = group[: len(group) // 2]
            except StoreUnavailable:
                self._sizes.lost(handler)  # as for an unknown commit
                raise
            except ConfigurationError:
                raise
            except HandlerFailed as failed:
                if (loss := failed.lost) is not None:
                    self._sizes.lost(handler)
                    if failed.index is not None:
                        self._lost_connections.lost(group[failed.index].key, loss)
                        raise loss from loss.__cause__
                if failed.index is not None:
                    return await self._around(group, failed.index, failed, defer=defer)
                self._at(Point.ROLLED_BACK, handler.name, [work.key for work in group])
                # Smaller batches show which item it is, at the latest a batch of one (G10).
                return await self._in_parts(group, (len(group) + 1) // 2, defer=defer)
            except Exception as error:  # noqa: BLE001 - any error of the database at the seal or at COMMIT
                # Refused at the seal or at COMMIT, so it fits no message yet: running one by one shows which it is.
                self._at(Point.ROLLED_BACK, handler.name, [work.key for work in group])
                if len(group) == 1:
                    return [await self._fail(group[0], error)]
                return await self._in_parts(group, 1, defer=defer)

    async def _around(self, group: Sequence[Work], index: int, cause: HandlerFailed, *, defer: bool) -> list[Outcome]:
        """G2: rerun and commit what came before the failed one, then decide about that one."""
        self._at(Point.ROLLED_BACK, group[0].handler.name, [work.key for work in group])
        failed, error = group[index], cause.error
        if index == 0:
            return [await self._fail(failed, error)]
        final = self._endings.would_end(failed, error)
        behind = None if final or failed.suspicion is Suspicion.COUNTED else FailedBehind(failed.claim, describe(error))
        outcomes = await self.run(group[:index], defer=defer, behind=behind)
        if len(outcomes) < index or _stops(outcomes):
            return outcomes
        if not final:
            if behind is not None and behind.in_doubt:
                behind.counted = all(outcome.kind is OutcomeKind.DUPLICATE for outcome in outcomes)
            self._sizes.failed(failed.handler)
            self._lost_connections.ended(failed.key)
            self._endings.is_spared(failed, error)
            await self._endings.count(failed, error, behind)
            if not self._endings.ends(failed):
                return [*outcomes, await self._endings.conclude(failed, error)]
        # G7: it may have been decided by what was rolled back, or by what a neighbour did to the transaction.
        (again,) = await self.run([failed], defer=defer)
        return outcomes if again.kind is OutcomeKind.BUSY and not defer else [*outcomes, again]

    async def _in_parts(self, group: Sequence[Work], size: int, *, defer: bool) -> list[Outcome]:
        """Run groups of `size` one after another, up to one that is not decided whole."""
        outcomes: list[Outcome] = []
        for start in range(0, len(group), size):
            outcomes += await self.run(group[start : start + size], defer=defer)
            if len(outcomes) < min(start + size, len(group)) or _stops(outcomes):
                break
        return outcomes

    async def _lost_again(self, work: Work, loss: ConnectionLost) -> Outcome:
        """B13: from now on it is counted before each run, and runs alone; what was counted has failed."""
        if work.suspicion is Suspicion.COUNTED:
            outcome = await self._endings.lost(work, loss)
            if outcome.kind is OutcomeKind.DEAD:
                self._lost_connections.ended(work.key)
            work.suspicion = Suspicion.BEGUN
            return outcome
        work.suspicion = Suspicion.BEGUN
        return Outcome(OutcomeKind.RETRYING, attempt=work.attempt, reason="retry")

    async def _fail(self, work: Work, error: Exception) -> Outcome:
        self._sizes.failed(work.handler)
        self._lost_connections.ended(work.key)
        return await self._endings.failed(work, error)


def _stops(outcomes: Sequence[Outcome]) -> bool:
    """Whether the last one must run again, so that nothing behind it may run first."""
    return bool(outcomes) and outcomes[-1].kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY)
