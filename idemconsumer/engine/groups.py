"""Groups of joined mode: one transaction that claims, runs the handlers, completes, seals and commits. When it fails,
this module decides which message is to blame, and what runs again.

Every exceptional path (rerun, count, reject, dead letter) starts from a rolled-back transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from idemconsumer.engine import decoding as reading
from idemconsumer.engine.blame import HandlerFailed, describe
from idemconsumer.engine.delivery_log import DeliveryLog
from idemconsumer.engine.endings import Endings, FailedBehind
from idemconsumer.engine.evidence import LostConnections
from idemconsumer.engine.failing import Subject
from idemconsumer.engine.group_sizes import GroupSizes
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import (
    BadMessage,
    CommitUnknown,
    ConfigurationError,
    ConnectionLost,
    Contention,
    NotReadNow,
    RunEagerly,
    StoreUnavailable,
)
from idemconsumer.handlers.batch import Items
from idemconsumer.handlers.handler import Call
from idemconsumer.logs import log
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point
from idemconsumer.ports.tracing import Tracing
from idemconsumer.rules.habits import Habits
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.rules.verdicts import Verdict, final
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.decided import decided
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.user_code.call import call_in_transaction, without_exit
from idemconsumer.user_code.cancellation import isolated
from idemconsumer.user_code.time_limit import TimeLimit


class Cut(Exception):
    """Only the first `length` messages of the group can run now. The next one is busy, or must not run with them."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class Groups:
    """Commits a whole group, or smaller groups after a failure."""

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
        self._store = store
        self._at = at
        self._sizes = sizes
        self._endings = endings
        self._deliveries = deliveries
        self._lost_connections = lost_connections
        self._tracing = tracing
        self._habits: dict[str, Habits] = {}

    async def run(self, group: Sequence[Work], *, defer: bool, behind: FailedBehind | None = None) -> list[Outcome]:
        """Claim, run and commit `group`, or a prefix of it. If all of it commits at once, `behind` is counted there."""
        handler, lost, whole = group[0].handler, False, len(group)
        if self._lost_connections:
            for index, work in enumerate(group):
                if (loss := await self._lost_connections.judge(work.key)) is None:
                    continue
                if index == 0:
                    return [await self._lost_again(work, loss)]
                work.suspicion, group = Suspicion.BEGUN, group[:index]  # it runs next, and alone
                break

        async def commit() -> list[Outcome]:
            all_of = behind if len(group) == whole else None
            return await self._commit(group, defer=defer, behind=all_of, look=lost)

        async def doubted(unknown: CommitUnknown) -> None:
            nonlocal group, behind, lost
            if behind is not None:
                behind.in_doubt, behind = True, None
            # Only a new claim can tell: it reads the record, inserts it, or is busy while the old session lives (J4).
            log.warning("commit unknown, claiming again", **group[0].named, messages=len(group), error=str(unknown))
            for work in group:  # the statement of one of them may have broken the connection
                work.eager = True
            if lost:  # perhaps because of the group: it was idle for so long that the server ended its transaction
                self._sizes.lost(handler)
                group = group[: max(1, len(group) // 2)]
            lost = True

        while True:
            try:
                return await decided(commit, doubted)
            except Cut as cut:
                group = group[: cut.length]
            except Contention as contention:
                gate_shut = self._sizes.collided(handler, contention)
                if len(group) == 1:
                    return [await self._endings.collided(group[0], contention)]
                if not gate_shut:  # the row may be locked for long: let the messages before this one commit
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
                # Refused at the seal or at COMMIT, so no message is known to be at fault: running one by one shows it.
                self._at(Point.ROLLED_BACK, handler.name, [work.key for work in group])
                if len(group) == 1:
                    return [await self._fail(group[0], error)]
                return await self._in_parts(group, 1, defer=defer)

    async def _around(self, group: Sequence[Work], index: int, cause: HandlerFailed, *, defer: bool) -> list[Outcome]:
        """Rerun and commit the messages before the failed one, then decide about that one (G2)."""
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
            if not self._endings.ends(failed, failed.attempts):
                return [*outcomes, await self._endings.conclude(failed, error)]
        # G7: its failure may be due to a message that was rolled back, or to a neighbour's change of the transaction.
        (again,) = await self.run([failed], defer=defer)
        return outcomes if again.kind is OutcomeKind.BUSY and not defer else [*outcomes, again]

    async def _in_parts(self, group: Sequence[Work], size: int, *, defer: bool) -> list[Outcome]:
        """Run groups of `size` one after another, until one is not decided as a whole."""
        outcomes: list[Outcome] = []
        for start in range(0, len(group), size):
            outcomes += await self.run(group[start : start + size], defer=defer)
            if len(outcomes) < min(start + size, len(group)) or _stops(outcomes):
                break
        return outcomes

    async def _lost_again(self, work: Work, loss: ConnectionLost) -> Outcome:
        """From now on the message is counted before each run, and runs alone; a counted run has failed (B13)."""
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

    # ----------------------------------------------------------------------------------------------- one transaction
    async def _commit(
        self, group: Sequence[Work], *, defer: bool, behind: FailedBehind | None, look: bool
    ) -> list[Outcome]:
        """One outcome for each; only the first one's if its key is busy and `defer` is false. Raises Cut if not all of
        them can run in one transaction.

        `look`: check after each handler whether its connection broke unnoticed, since a COMMIT has just failed.
        """
        handler, now = group[0].handler, asyncio.get_running_loop().time
        name = handler.name
        if handler.decodes and (later := await self._renew(group)) is not None:
            return [later]
        leaders: dict[bytes, Work] = {}
        for work in group:  # G1: a key runs once; its later deliveries are judged by the first one's result
            leaders.setdefault(work.key, work)
        keys = list(leaders)
        results: dict[bytes, StoredResult] = {}
        # One gate per app, since handlers that write to the same table collide too: two of them on 10 rows did 240/s
        # behind a gate each, and 5,000/s behind a common one. With a table each they do 4,400/s instead of 7,600/s.
        gate = handler.app if self._sizes.of(handler).gated(now()) else None
        async with self._store.transaction(group=len(keys), gate=gate) as claims:
            found = dict(zip(keys, await claims.claim([work.claim for work in leaders.values()]), strict=True))
            for key, work in leaders.items():
                work.claimed(found[key])
            verdicts = {key: work.judge(found[key]) for key, work in leaders.items()}
            if not defer:
                busy = next((i for i, work in enumerate(group) if verdicts[work.key] is Verdict.BUSY), None)
                if busy:
                    raise Cut(busy)
                if busy == 0:
                    return [Outcome(OutcomeKind.BUSY)]
            self._at(Point.CLAIMED, name, keys)
            new = [i for i, work in enumerate(group) if leaders[work.key] is work and verdicts[work.key] is Verdict.RUN]
            if new:
                self._tracing.begun()
            began = now()
            try:
                if handler.batch:
                    results = await self._handle_batch(claims, group, new, look=look) if new else {}
                else:
                    for index in new:
                        key, result = group[index].key, await self._handle(claims, index, group[index], look=look)
                        self._at(Point.HANDLED, name, (key,))
                        if result is not None:
                            results[key] = result
                        if claims.lasting and index != new[-1]:
                            raise Cut(index + 1)
                handled = now()
                self._at(Point.SEALING, name, keys)
                ended = [key for key in keys if verdicts[key] is not Verdict.BUSY]  # a busy one has not run
                begun = {work.key for work in group if work.attempts or work.suspicion is Suspicion.MARKED}
                failed = None if behind is None else (behind.claim, behind.error)
                logged = self._deliveries.applied([group[index] for index in new])
                attempts = await claims.complete(
                    list(results.items()), [key for key in ended if key in begun], failed=failed, logged=logged
                )
                seconds = handled - began + self._sizes.beyond_commit(now() - handled)
            except RunEagerly as unforeseen:
                raise _eagerly(group, new, unforeseen, claims) from unforeseen
        if behind is not None:
            behind.attempts = attempts
        if logged is not None:
            for index in new:
                group[index].logged = True
        self._at(Point.COMMITTED, name, keys)
        self._sizes.committed(handler, len(new), seconds, now(), len(group) - len(new))
        self._sizes.repeated(handler, 0 if new else len(group))
        if new:
            tenants = (group[index].tenant for index in new)
            self._endings.failing.succeeded(Subject.handler(handler), ended, tenants)
        self._endings.contended.ended(*ended)
        self._lost_connections.ended(*ended)
        outcomes = []
        for work in group:
            if verdicts[work.key] is not Verdict.RUN:
                outcomes.append(await self._endings.replay(work, found[work.key]))
            elif leaders[work.key] is work:
                result = results.get(work.key)
                outcomes.append(final(OutcomeKind.APPLIED, State.COMPLETED, result, attempt=work.attempt))
            else:
                first = leaders[work.key].claim
                left = first.record(State.COMPLETED, results.get(work.key))
                outcomes.append(await self._endings.replay(work, left))
        return outcomes

    async def _renew(self, group: Sequence[Work]) -> Outcome | None:
        """Decode again for messages that ran before. Returns the first one's outcome if it cannot be decoded now
        (D26)."""
        for index, work in enumerate(group):
            try:
                await reading.renew(work.handler, _call(work))
            except NotReadNow as refusal:
                if index:
                    raise Cut(index) from None
                return self._endings.not_now(work, refusal)
            except BadMessage as bad:
                raise HandlerFailed(index, bad) from bad
        return None

    async def _handle_batch(
        self, claims: PostgresClaims, group: Sequence[Work], new: Sequence[int], *, look: bool
    ) -> dict[bytes, StoredResult]:
        """Run a batch handler once, for those of `group` that are new, and return their results."""
        new_work = [group[index] for index in new]
        payloads = [_payload(index, group[index]) for index in new]
        items = Items(payloads, [_call(work).message(work.attempt) for work in new_work])
        head = next((work for work in new_work if work.suspected), new_work[0])
        try:
            await self._handle(claims, None if len(new_work) > 1 else 0, head, items, look=look)
        except HandlerFailed as failed:
            if failed.index is not None:
                failed.index = new[failed.index]
            raise
        self._at(Point.HANDLED, new_work[0].handler.name, [work.key for work in new_work])
        return {work.key: result for i, work in enumerate(new_work) if (result := items.stored(i)) is not None}

    async def _handle(
        self, claims: PostgresClaims, index: int | None, work: Work, items: Items | None = None, *, look: bool
    ) -> StoredResult | None:
        """Run one handler, of `work` or of a whole batch, on the group's transaction.

        Raises HandlerFailed with `index`; if a batch handler names the item at fault, with that item's index.

        A suspect runs in a task of its own (B10). Any other handler that cancels its task ends its lane, and so its
        worker; its message is then delivered again, as a suspect.
        """
        handler, alone = work.handler, index

        def accept(value: object) -> StoredResult | None:
            nonlocal index
            if items is not None and (failed := items.first_failed()):
                index, error = failed
                raise error
            # The transaction must be open, and not failed.
            claims.check(look=look)  # J8
            return codecs.encode_result(value)

        try:
            limit = TimeLimit(handler.options.timeout)
            run = self._started(claims, work, items)
            return await call_in_transaction(
                claims, isolated(without_exit(run)) if work.suspected else run, limit, accept
            )
        except Exception as error:
            failed = HandlerFailed(index, error)
            if failed.lost is not None:
                failed.index = alone  # whichever item a batch has named
            elif isinstance(error, StoreUnavailable | Contention) and not error.by_function:
                raise
            raise failed from error

    def _started(self, claims: PostgresClaims, work: Work, items: Items | None) -> Awaitable[Any]:
        """The run of a handler. Nothing here keeps its Tx: if that is alive afterwards, the handler kept it (J19)."""
        handler = work.handler
        tx = claims.tx(self._habits_of(work)) if handler.needs_tx else None
        return handler.run(_call(work), tx, work.attempt) if items is None else handler.run_batch(items, tx)

    def _habits_of(self, work: Work) -> Habits | None:
        """The handler's habits. None: all statements of this run are waited for."""
        if work.eager or work.suspected:
            return None
        return self._habits.setdefault(work.handler.name, Habits(work.handler.options.timeout))


def _stops(outcomes: Sequence[Outcome]) -> bool:
    """Whether the last message must run again, so that no message behind it may run first."""
    return bool(outcomes) and outcomes[-1].kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY)


def _eagerly(group: Sequence[Work], new: Sequence[int], unforeseen: RunEagerly, claims: PostgresClaims) -> Exception:
    """What follows when a pipelined statement has failed, or its answer is asked for too late (J27).

    The failure decides nothing; the next run, which waits for each answer, does. A lost connection may be any message's
    fault, and the item of a batch is not known.
    """
    if unforeseen.error is None:
        return Cut(len(group))
    cause = claims.diagnose(unforeseen.error)
    if isinstance(cause, Contention) and len(group) > 1:
        return cause
    whose = None if unforeseen.run is None or group[0].handler.batch else new[unforeseen.run]
    for work in group if whose is None or isinstance(cause, StoreUnavailable) else [group[whose]]:
        work.eager = True
    if isinstance(cause, ConnectionLost):  # with another connection it shows whose it was
        return Cut(len(group))
    return cause if isinstance(cause, StoreUnavailable) else Cut(whose or len(group))


def _payload(index: int, work: Work) -> object:
    """The payload of an item, for one run of a batch. Raises HandlerFailed."""
    try:
        return work.handler.payload(_call(work))
    except Exception as error:
        raise HandlerFailed(index, error) from error


def _call(work: Work) -> Call:
    assert work.call is not None
    return work.call
