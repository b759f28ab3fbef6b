"""From deliveries to outcomes: the straight line of joined mode.

A group is claimed with one statement, run on one transaction and committed once. `run` decides a *prefix* of what it
was given (G8): a delivery that fails, or finds a rival on its key, ends the prefix; the lane presents the rest again.
So order inside a lane is kept by construction, and every detour (rerun, count, reject, dead letter) starts from a
rolled-back transaction.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_delay, wait_exponential, wait_random
from tenacity.stop import stop_base

from idemconsumer.engine.blame import HandlerFailed, describe
from idemconsumer.engine.endings import Endings, FailedBehind, final
from idemconsumer.engine.group_sizes import GroupSizes
from idemconsumer.engine.suspects import Suspects
from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import CommitUnknown, ConfigurationError, Contention, StoreUnavailable
from idemconsumer.handlers.batch import Items
from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message import codecs
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import NullObserver, Observer, Point
from idemconsumer.ports.store import Claims, JoinedStore
from idemconsumer.rules.values import Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import Settlement, Verdict, judge, settle
from idemconsumer.user_code.call import call_in_transaction
from idemconsumer.user_code.cancellation import isolated
from idemconsumer.user_code.time_limit import TimeLimit

log = structlog.get_logger("idemconsumer")

_FREE_RETRIES = 50  # in a row, about half a minute; after that contention is the handler's failure like any other


class _Cut(Exception):
    """Only the first `length` messages of the group can run now: the next one is busy."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length


class _Abandoned(stop_base):
    """Ends the waiting for a rival once the broker has taken the delivery back (D10)."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, retry_state: RetryCallState) -> bool:
        return self._work.abandoned()


class Engine:
    """Owns the transaction of every group. Raises StoreUnavailable when nothing could be decided."""

    def __init__(
        self,
        store: JoinedStore,
        observer: Observer | None = None,
        *,
        lanes: int = 1,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._at = (observer or NullObserver()).at
        self._sizes = GroupSizes(lanes=lanes, most_locks=store.most_locks)
        self.endings = Endings(store, self._at, chance)
        self._suspects = Suspects(store, self._at)

    def group_size(self, handler: BoundHandler) -> int:
        """How many messages the next group of this handler may hold."""
        return self._sizes.of(handler).size

    def max_group_size(self, handler: BoundHandler) -> int:
        """How many messages a group of this handler may ever hold."""
        return self._sizes.of(handler).cap

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The committed records of these keys; None where there is none."""
        return await self._store.peek(keys)

    async def process(self, work: Work) -> Outcome:
        """One message, to the end of one attempt."""
        return (await self.run([work]))[0]

    async def run(self, group: Sequence[Work], *, defer: bool = False) -> list[Outcome]:
        """Outcomes of at least the first of `group`, all of one handler; those without an outcome were not decided.

        A busy head is waited for up to the handler's `wait`; with `defer` busy ones are reported and the others run.
        """
        head = group[0]
        defer = defer or head.handler.options.on_busy == "defer"
        if head.refusal is not None:
            return [await self.endings.refuse(head, head.refusal)]
        together = _together(group)
        if any(work.suspected for work in together):
            return await self._suspected(together, defer=defer)
        outcomes = await self._run_group(together, defer=defer)
        if outcomes[0].kind is OutcomeKind.BUSY and not defer:
            return [await self._wait(head)]
        return outcomes

    async def replay_committed(self, group: Sequence[Work]) -> list[Outcome | None]:
        """The outcome of each that a committed record decides, else None. One statement reads all records."""
        outcomes: list[Outcome | None] = []
        for work, record in zip(group, await self._store.peek([work.key for work in group]), strict=True):
            undecided = record is None or not _decided(work, record)
            outcomes.append(None if record is None or undecided else await self.endings.replay(work, record))
        return outcomes

    # -------------------------------------------------------------------------------------------------------- groups
    async def _run_group(
        self, group: Sequence[Work], *, defer: bool, behind: FailedBehind | None = None
    ) -> list[Outcome]:
        """Claim, run and commit `group`, or a prefix of it; `behind` is counted if all of it commits at once."""
        handler, lost, whole = group[0].handler, False, len(group)
        while True:
            try:
                return await self._commit_group(group, defer=defer, behind=behind if len(group) == whole else None)
            except _Cut as cut:
                group = group[: cut.length]
            except CommitUnknown as unknown:
                if behind is not None:
                    behind.in_doubt, behind = True, None
                # Only a new claim can tell: it finds the record, inserts it, or is busy while the old one lives (J4).
                log.warning("commit unknown, claiming again", handler=handler.name, error=str(unknown))
                if lost:  # the group itself may be why: idle for so long that the server ended its transaction
                    self._sizes.lost(handler)
                    group = group[: max(1, len(group) // 2)]
                lost = True
            except Contention as contention:
                gate_shut = self._sizes.collided(handler, contention)
                if len(group) == 1:
                    work = group[0]
                    work.collisions += 1
                    if work.collisions % _FREE_RETRIES == 0:
                        return [await self._fail(work, contention)]
                    return [self.endings.free_retry(work, contention)]
                if not gate_shut:  # the row may be held for long: let those before its message through
                    group = group[: len(group) // 2]
            except StoreUnavailable:
                self._sizes.lost(handler)  # as for an unknown commit
                raise
            except ConfigurationError:
                raise
            except HandlerFailed as failed:
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

    async def _commit_group(self, group: Sequence[Work], *, defer: bool, behind: FailedBehind | None) -> list[Outcome]:
        handler, now = group[0].handler, asyncio.get_running_loop().time
        name = handler.name
        leaders: dict[bytes, Work] = {}
        for work in group:  # G1: a key runs once; its later deliveries are judged by what the first one leaves
            leaders.setdefault(work.key, work)
        keys = list(leaders)
        results: dict[bytes, StoredResult] = {}
        # One gate per app, since handlers that write to the same table collide too: two of them on 10 rows did 240/s
        # behind a gate each, and 5,000/s behind a common one. With a table each they do 4,400/s instead of 7,600/s.
        gate = handler.app if self._sizes.of(handler).gated(now()) else None
        async with self._store.transaction(group=len(keys), gate=gate) as claims:
            found = dict(zip(keys, await claims.claim([work.claim for work in leaders.values()]), strict=True))
            verdicts = {key: judge(found[key], work.claim.fingerprint) for key, work in leaders.items()}
            if not defer:
                busy = next((i for i, work in enumerate(group) if verdicts[work.key] is Verdict.BUSY), None)
                if busy:
                    raise _Cut(busy)
                if busy == 0:
                    return [Outcome(OutcomeKind.BUSY)]
            self._at(Point.CLAIMED, name, keys)
            new = [i for i, work in enumerate(group) if leaders[work.key] is work and verdicts[work.key] is Verdict.RUN]
            began = now()
            if handler.batch:
                results = await self._handle_batch(claims, group, new) if new else {}
            else:
                for index in new:
                    key, result = group[index].key, await self._handle(claims, index, group[index])
                    self._at(Point.HANDLED, name, (key,))
                    if result is not None:
                        results[key] = result
            seconds = now() - began
            self._at(Point.SEALING, name, keys)
            begun = [work.key for work in group if work.attempts or work.suspicion is Suspicion.MARKED]
            ended = [key for key in begun if verdicts[key] is not Verdict.BUSY]
            failed = None if behind is None else (behind.claim, behind.error)
            attempts = await claims.complete(list(results.items()), ended, failed=failed)
        if behind is not None:
            behind.attempts = attempts
        self._at(Point.COMMITTED, name, keys)
        self._sizes.committed(handler, len(new), seconds, now())
        outcomes = []
        for work in group:
            if verdicts[work.key] is not Verdict.RUN:
                outcomes.append(await self.endings.replay(work, found[work.key]))
            elif leaders[work.key] is work:
                outcomes.append(final(OutcomeKind.APPLIED, work, State.COMPLETED, results.get(work.key)))
            else:
                left = Record(State.COMPLETED, leaders[work.key].claim.fingerprint, results.get(work.key))
                outcomes.append(await self.endings.replay(work, left))
        return outcomes

    async def _handle_batch(
        self, claims: Claims, group: Sequence[Work], new: Sequence[int]
    ) -> dict[bytes, StoredResult]:
        """Run a batch handler once, for those of `group` that are new, and return their results."""
        new_work = [group[index] for index in new]
        items = Items(
            [_call(work).payload for work in new_work], [_call(work).message(work.attempt) for work in new_work]
        )
        head = next((work for work in new_work if work.suspected), new_work[0])
        try:
            await self._handle(claims, None if len(new_work) > 1 else 0, head, items)
        except HandlerFailed as failed:
            if failed.index is not None:
                failed.index = new[failed.index]
            raise
        self._at(Point.HANDLED, new_work[0].handler.name, [work.key for work in new_work])
        return {work.key: result for i, work in enumerate(new_work) if (result := items.stored(i)) is not None}

    async def _handle(
        self, claims: Claims, index: int | None, work: Work, items: Items | None = None
    ) -> StoredResult | None:
        """Run one handler, of `work` or of a whole batch, on the group's transaction.

        Raises HandlerFailed with `index`, unless the handler of a batch names the item.

        A suspect runs in a task of its own. Any other handler that cancels its task ends its lane, and so its worker,
        and its message comes again as a suspect.
        """
        handler = work.handler

        def accept(value: object) -> StoredResult | None:
            nonlocal index
            if items is not None and (failed := items.first_failed()):
                index, error = failed
                raise error
            claims.check()  # J8
            return codecs.encode(value)

        try:
            limit = TimeLimit(handler.options.timeout)
            tx = claims.tx() if handler.needs_tx else None
            run = handler.run(_call(work), tx, work.attempt) if items is None else handler.run_batch(items, tx)
            return await call_in_transaction(claims, isolated(run) if work.suspected else run, limit, accept)
        except (StoreUnavailable, Contention):
            raise
        except Exception as error:
            raise HandlerFailed(index, error) from error

    async def _around(self, group: Sequence[Work], index: int, cause: HandlerFailed, *, defer: bool) -> list[Outcome]:
        """G2: rerun and commit what came before the failed one, then decide about that one."""
        self._at(Point.ROLLED_BACK, group[0].handler.name, [work.key for work in group])
        failed, error = group[index], cause.error
        if index == 0:
            return [await self._fail(failed, error)]
        final = self.endings.would_end(failed, error)
        behind = None if final or failed.suspicion is Suspicion.COUNTED else FailedBehind(failed.claim, describe(error))
        outcomes = await self._run_group(group[:index], defer=defer, behind=behind)
        if len(outcomes) < index or _stops(outcomes):
            return outcomes
        if not final:
            if behind is not None and behind.in_doubt:
                behind.counted = all(outcome.kind is OutcomeKind.DUPLICATE for outcome in outcomes)
            self._sizes.failed(failed.handler)
            await self.endings.count(failed, error, behind)
            if not self.endings.ends(failed, error):
                return [*outcomes, await self.endings.conclude(failed, error)]
        # G7: it may have been decided by what was rolled back, or by what a neighbour did to the transaction.
        (again,) = await self._run_group([failed], defer=defer)
        return outcomes if again.kind is OutcomeKind.BUSY and not defer else [*outcomes, again]

    async def _in_parts(self, group: Sequence[Work], size: int, *, defer: bool) -> list[Outcome]:
        """Run groups of `size` one after another, up to one that is not decided whole."""
        outcomes: list[Outcome] = []
        for start in range(0, len(group), size):
            outcomes += await self._run_group(group[start : start + size], defer=defer)
            if len(outcomes) < min(start + size, len(group)) or _stops(outcomes):
                break
        return outcomes

    # ------------------------------------------------------------------------------------------------ busy, suspects
    async def _fail(self, work: Work, error: Exception) -> Outcome:
        self._sizes.failed(work.handler)
        return await self.endings.failed(work, error)

    async def _wait(self, head: Work) -> Outcome:
        """J5: claim again and again until the rival ends or `wait` is over; no connection is held in between."""

        async def again() -> Outcome:
            rerun = self._begin if head.suspected else self._run_group
            return (await rerun([head], defer=True))[0]

        poll = AsyncRetrying(
            retry=retry_if_result(lambda outcome: outcome.kind is OutcomeKind.BUSY),
            wait=wait_exponential(multiplier=0.05, max=1.0) + wait_random(0, 0.05),
            stop=stop_after_delay(head.handler.options.wait) | _Abandoned(head),
            retry_error_callback=lambda polled: Outcome(OutcomeKind.BUSY, attempt=head.attempt),
        )
        outcome: Outcome = await poll(again)
        return outcome

    async def _suspected(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """`_begin`, then take back what it put on record about those that did not run."""
        head = group[0]
        try:
            outcomes = await self._begin(group, defer=defer)
            if outcomes[0].kind is OutcomeKind.BUSY and not defer:
                outcomes = [await self._wait(head)]
        except asyncio.CancelledError:
            with suppress(Exception):
                await self._suspects.uncount(head)
                await self._suspects.unmark(group)
            raise
        except StoreUnavailable:
            self._suspects.cut_off(group)
            raise
        ended = {work for work, outcome in zip(group, outcomes, strict=False) if settle(outcome) is Settlement.FINISH}
        await self._suspects.unmark([work for work in group if work not in ended])
        if outcomes[0].kind is OutcomeKind.BUSY:  # it did not run, and may be given back before it does
            await self._suspects.uncount(head)
        return outcomes

    async def _begin(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """A group with suspects in it. The finished ones are replayed together; the others run after it was put on
        record that they begin: as a group, or alone if they were begun before."""
        suspects = [work for work in group if work.suspected]
        self._suspects.take_over(suspects)
        records = zip(suspects, await self._store.peek([work.key for work in suspects]), strict=True)
        final = {work: record for work, record in records if record is not None and _decided(work, record)}
        if replayed := [await self.endings.replay(work, final[work]) for work in takewhile(final.__contains__, group)]:
            await self._suspects.unmark(group[: len(replayed)])
            return replayed
        head = group[0]
        together = list(takewhile(lambda work: not work.alone, group))
        shared = len(together) > 1 or not head.suspected or head.suspicion is Suspicion.MARKED
        if shared and (together := await self._suspects.mark(together, final)):
            return await self._run_group(together, defer=defer)
        await self._suspects.count(head)
        if head.attempts > head.handler.options.max_attempts:
            error = f"{head.attempts - 1} attempts began and none of them ended"
            outcome = await self.endings.bury(head, "killed_worker", error)
            if outcome.kind is OutcomeKind.RETRYING:  # a rival runs it right now, and may give its own count back
                await self._suspects.uncount(head)
            return [outcome]
        return await self._run_group([head], defer=defer)


def _call(work: Work) -> Call:
    assert work.call is not None
    return work.call


def _decided(work: Work, record: Record) -> bool:
    return judge(record, work.claim.fingerprint) is not Verdict.BUSY


def _together(group: Sequence[Work]) -> list[Work]:
    """Those that may share the next transaction. What failed before is a batch of its own: a larger one would fail
    with it again, and it would have to be searched for again."""
    if group[0].handler.batch:
        group = list(takewhile(lambda work: not work.attempts, group)) or group[:1]
    return list(takewhile(lambda work: work.refusal is None, group))


def _stops(outcomes: Sequence[Outcome]) -> bool:
    """Whether the last one must run again, so that nothing behind it may run first."""
    return bool(outcomes) and outcomes[-1].kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY)
