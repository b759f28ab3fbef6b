"""From deliveries to outcomes in joined mode: what may run together, what waits for a rival, what runs alone.

`run` decides a *prefix* of the given deliveries (G8): a delivery that fails, or whose key a rival (another worker)
holds, ends the prefix; the lane presents the rest again. That keeps the order inside a lane by construction.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import takewhile

from idemconsumer.engine.blame import Telling
from idemconsumer.engine.company import Company
from idemconsumer.engine.delivery_log import DeliveryLog
from idemconsumer.engine.endings import Endings
from idemconsumer.engine.evidence import LostConnections, Suspects
from idemconsumer.engine.failing import Failing, Subject
from idemconsumer.engine.group_sizes import GroupSizes
from idemconsumer.engine.groups import Groups
from idemconsumer.engine.work import Work, traced
from idemconsumer.errors import Contention, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.observe.counts import Counts
from idemconsumer.ports.observer import NullObserver, Observer
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.rules.breaker import HandlerHealth
from idemconsumer.rules.values import Mark, Outcome, OutcomeKind, Record
from idemconsumer.rules.verdicts import Settlement, Verdict, settle
from idemconsumer.stores.decided import decided
from idemconsumer.stores.joined import PostgresStore


class Engine:
    """Decides about every delivery of a joined handler. Raises StoreUnavailable if nothing could be decided."""

    def __init__(
        self,
        store: PostgresStore,
        observer: Observer | None = None,
        *,
        lanes: int = 1,
        chance: Callable[[], float] = random.random,
        watched: bool = False,
        counts: Counts | None = None,
        tell_all: bool = False,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`watched`: the engine belongs to a worker, which slows down a handler that is probed (D17) and runs stored
        messages when they are due (D18). `counts` collects the figures of the groups. `tell_all`: each failure is
        logged on a line of its own."""
        self._store = store
        self.tracing = tracing
        self._at = (observer or NullObserver()).at
        self._sizes = GroupSizes(lanes=lanes, most_locks=store.most_locks, counts=counts or Counts())
        self.company = Company()
        failing, telling = Failing(watched=watched), Telling(every=tell_all, failed=tracing.failed)
        self.endings = Endings(store, self._at, chance, failing, telling, in_worker=watched)
        self._suspects = Suspects(store, self._at)
        self.lost_connections = LostConnections(store.server_started, store.cut_within)
        self.deliveries = DeliveryLog(store)
        self._groups = Groups(
            store, self._at, self._sizes, self.endings, self.lost_connections, self.deliveries, tracing
        )

    def group_size(self, handler: BoundHandler) -> int:
        """How many messages the next group of this handler may hold."""
        return self._sizes.of(handler).size

    def max_group_size(self, handler: BoundHandler) -> int:
        """How many messages a group of this handler may ever hold."""
        return self._sizes.of(handler).most

    def health(self, handler: BoundHandler) -> HandlerHealth:
        """Whether the messages of this handler all fail (D17)."""
        return self.endings.failing.of(Subject.handler(handler))

    def collides(self, handler: str) -> bool:
        """Whether a group or a message of this handler has collided lately, and none has been committed since."""
        return self._sizes.collides(handler) or self.endings.contended.lasts(handler)

    def has_failed(self, work: Work) -> bool:
        """Whether the message is known to have failed before."""
        return work.attempts > 0 or self.endings.failing.has_failed(Subject.handler(work.handler), work.identity)

    def failed_beside(self, work: Work) -> int:
        """How many messages of its tenant have failed since one succeeded; 0 without a tenant."""
        return self.endings.failing.failed_beside(Subject.handler(work.handler), work.tenant)

    def seconds(self, handler: BoundHandler) -> float | None:
        """The handler's time for a message in seconds, as measured lately; None if that is unknown."""
        return self._sizes.of(handler).seconds

    async def read(self, work: Work) -> None:
        """Decode a message, also again. Shares the process with other messages, but not with one that runs alone
        (B16)."""
        async with self.company.shared():
            await work.read()

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        """The committed records of these keys; None for a key without one."""
        return await self._store.peek(keys)

    async def process(self, work: Work) -> Outcome:
        """Process one message to the end of one attempt."""
        return (await self.run([work]))[0]

    async def run(self, group: Sequence[Work], *, defer: bool = False) -> list[Outcome]:
        """Outcomes of at least the first of `group`, all of one handler; those without an outcome were not decided.

        If a rival holds the first one's key, it is waited for up to the handler's `wait`; with `defer` such messages
        are reported as busy and the others run. A first one that was begun before and never ended runs alone in this
        process (B16). Empty if the first one was abandoned before it could begin.
        """
        with traced(self.tracing, group) as processing:
            outcomes = await self._decide(group, defer=defer)
            processing.decided(outcomes)
            self.deliveries.add(group, outcomes)
            return outcomes

    async def _decide(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        head, outcomes = group[0], list[Outcome]()
        if not head.alone:
            async with self.company.shared():
                if head.abandoned() or (outcomes := await self._run(group, defer=defer)):
                    return outcomes
        if await self._busy(head):
            return [Outcome(OutcomeKind.BUSY, attempt=head.attempt)]
        async with self.company.alone():
            return [] if head.abandoned() else await self._on_record([head], self._run_alone(head))

    async def _run(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """Empty if the first one turns out to have been begun before, so that it has to run alone."""
        head = group[0]
        defer = defer or not head.handler.options.wait
        if head.refusal is not None:
            return [await self.endings.refuse(head, head.refusal)]
        together = _together(group)
        if any(work.suspected for work in together):
            return await self._on_record(together, self._suspected(together, defer=defer))
        if (size := self._sizes.of(head.handler)).reads_first:
            if replayed := await self._repeated(together):
                return replayed
            together = together[: size.to_claim]
        outcomes = await self._groups.run(together, defer=defer)
        if outcomes[0].kind is OutcomeKind.BUSY and not defer:
            return [await self._wait(head)]
        return outcomes

    async def replay_committed(self, group: Sequence[Work]) -> list[Outcome | None]:
        """The outcomes of the messages that a committed record decides; None for the others. One statement reads all
        records."""
        outcomes: list[Outcome | None] = []
        for work, record in zip(group, await self._store.peek([work.key for work in group]), strict=True):
            undecided = record is None or not _is_decided(work, record)
            outcome = None if record is None or undecided else await self.endings.replay(work, record)
            if outcome is not None:
                self.deliveries.add([work], [outcome])
            outcomes.append(outcome)
        return outcomes

    async def _repeated(self, group: Sequence[Work]) -> list[Outcome]:
        """The outcomes of the duplicates at the start of the group, by one read."""
        outcomes = list[Outcome]()
        likely = list(takewhile(lambda work: not work.attempts, group))  # a failed one has a row that a claim clears
        for work, record in zip(likely, await self._store.peek([work.key for work in likely]), strict=True):
            if record is None or not _is_decided(work, record):
                break
            outcomes.append(await self.endings.replay(work, record))
        self._sizes.repeated(group[0].handler, len(outcomes) if len(outcomes) == len(group) else 0)
        return outcomes

    async def _wait(self, head: Work) -> Outcome:
        """Claim the key repeatedly until the rival ends or `wait` is over; no connection is held in between (J5)."""
        busy = Outcome(OutcomeKind.BUSY, attempt=head.attempt)

        async def again() -> Outcome:
            rerun = self._begin if head.suspected else self._groups.run
            outcomes = await rerun([head], defer=True)
            return outcomes[0] if outcomes else busy  # none: the rival began it, and perhaps died of it

        def rival(met: object) -> bool:
            # A delivery that the broker has taken back does not wait.
            return isinstance(met, Outcome) and met.kind is OutcomeKind.BUSY and not head.abandoned()  # D10

        return await decided(again, wait=head.handler.options.wait, busy=rival)

    async def _on_record(self, group: Sequence[Work], run: Awaitable[list[Outcome]]) -> list[Outcome]:
        """Await a run of suspects, then remove the marks and counts of those that did not run."""
        head = group[0]
        try:
            outcomes = await run
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
        if outcomes and outcomes[0].kind is OutcomeKind.BUSY:  # it did not run, and may be given back before it does
            await self._suspects.uncount(head)
        return outcomes

    async def _suspected(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        outcomes = await self._begin(group, defer=defer)
        if outcomes and outcomes[0].kind is OutcomeKind.BUSY and not defer:
            return [await self._wait(group[0])]
        return outcomes

    async def _begin(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """Run a group with suspects in it. Those with a final record are replayed together. The others run after a mark
        of each suspect is committed. Empty if the first one was begun before, since it has to run alone."""
        final = await self._finished([work for work in group if work.suspected])
        if replayed := [await self.endings.replay(work, final[work]) for work in takewhile(final.__contains__, group)]:
            await self._suspects.unmark(group[: len(replayed)])
            return replayed
        together = list(takewhile(lambda work: not work.alone, group))
        if together and (together := await self._suspects.mark(together, final)):
            return await self._groups.run(together, defer=defer)
        return []

    async def _run_alone(self, work: Work) -> list[Outcome]:
        """Run a message that was begun before: count it first, and bury it if it was counted too often (B8)."""
        for finished, record in (await self._finished([work])).items():
            return [await self.endings.replay(finished, record)]
        await self._suspects.count(work)
        if work.attempts > work.handler.options.max_attempts:
            error = f"{work.attempts - 1} attempts began and none of them ended"
            outcome = await self.endings.bury(work, "killed_worker", error)
            if outcome.kind is OutcomeKind.RETRYING:  # a rival runs it right now, and may undo its own count
                await self._suspects.uncount(work)
            return [outcome]
        return await self._groups.run([work], defer=True)

    async def _finished(self, suspects: Sequence[Work]) -> dict[Work, Record]:
        """The suspects that a committed record decides."""
        self._suspects.take_over(suspects)
        records = zip(suspects, await self._store.peek([work.key for work in suspects]), strict=True)
        known = {work: record for work, record in records if record is not None}
        for work, record in known.items():
            if work.may_be_awaited(record):  # else a copy of a message that waits for a retry would cost it one (H46)
                await self._busy(work)
        return {work: record for work, record in known.items() if _is_decided(work, record)}

    async def _busy(self, work: Work) -> bool:
        """Whether a rival runs it right now. Then it need not run alone here, and no other message has to wait."""
        try:
            async with self._store.transaction(group=1) as claims:
                (found,) = await claims.claim([work.claim])
        except Contention:
            return True
        work.claimed(found)
        return found is Mark.BUSY


def _is_decided(work: Work, record: Record) -> bool:
    return work.judge(record) is not Verdict.BUSY


def _together(group: Sequence[Work]) -> list[Work]:
    """The messages that may share the next transaction. Messages of a batch handler that failed before run one by one:
    a larger batch would fail with such a one again, and the search for it would begin anew."""
    if group[0].handler.batch:
        group = list(takewhile(lambda work: not work.attempts, group)) or group[:1]
    return list(takewhile(lambda work: work.refusal is None, group))
