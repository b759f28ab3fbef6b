"""What this process has in hand: deliveries in their strands, how groups are run, and how deliveries are settled."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.observe.counts import Counts
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.ports.observer import Observer, Point, SeesOutcomes
from idemconsumer.rules.replies import pause_after
from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.worker.outage import Outage
from idemconsumer.worker.reply_sender import Replies

if TYPE_CHECKING:
    from idemconsumer.sagas.saga_engine import LeasedEngine  # who has no sagas does not wait for what runs them


@dataclass(slots=True, eq=False, weakref_slot=True)
class InFlight:
    """A delivery that this process has in hand.

    `strand` is what it waits in, under this `number` of its arrival, and `key` what is known there of its key. `due` is
    when it may run, on the loop's clock; 0: it has not failed here. `running`: a lane has it. `settled`: the broker
    knows that the message is stored here. `unanswered`: how often its reply was not confirmed.
    """

    work: Work
    delivery: Delivery
    session: Session
    strand: Strand = field(init=False)
    number: int = 0
    key: bytes = b""
    due: float = 0.0
    running: bool = False
    settled: bool = False
    unanswered: int = 0

    @property
    def can_go_back(self) -> bool:
        """Whether it can be given back at no cost before it has begun (O14)."""
        return self.delivery.epoch.takes_back and not self.settled

    @property
    def abandoned(self) -> bool:
        """The broker has taken it back. What is stored stays ours, even when its session ends."""
        return self.delivery.epoch.retiring and not self.settled


class Wait(Enum):
    """What a strand waits for."""

    RETRY = "retry"  # its first delivery has failed, and is tried again when it is due
    QUARANTINE = "quarantine"  # its handler or its tenant fails, and others come first
    RIVAL = "rival"  # who holds the key of its first delivery is elsewhere; in each round it is claimed again


@dataclass(slots=True, eq=False)
class Strand:
    """`line`: its deliveries, the first one first. `taken`: a lane has it, or a round. `ready`: it is in the heap.

    `since` when it `waits`, and `due`: when it runs again, if that is for its next attempt. `permitted`: its first one
    may run once more although it has failed and its handler is probed (D17). `deferred`: its first one has met a rival,
    and from then on is claimed without waiting for it (D5).
    """

    order: Hashable | None
    line: list[InFlight] = field(default_factory=list)
    taken: bool = False
    ready: bool = False
    waits: Wait | None = None
    since: float = 0.0
    due: float = 0.0
    bytes: int = 0
    permitted: bool = False
    deferred: bool = False


class InHand:
    """Shared by all lanes. `sagas` runs the handlers that are leased; `replies` answers requests."""

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        *,
        sagas: LeasedEngine | None = None,
        replies: Replies | None = None,
        counts: Counts | None = None,
    ) -> None:
        self.engine = engine
        self.outage = Outage()
        self.counts = counts or Counts()
        self.draining = False
        self.paused: frozenset[str] = frozenset()  # handlers
        self.in_flight = 0
        self._sagas = sagas
        self._replies = replies
        self._at = observer.at
        self._watcher = observer if isinstance(observer, SeesOutcomes) else None
        self._settled: set[Session] = set()

    def drain(self) -> None:
        """Start nothing new from now on. Sagas are released at once."""
        self.draining = True
        if self._sagas is not None:
            self._sagas.drain()

    def forget(self, deliveries: Iterable[InFlight]) -> None:
        """These are settled, given back, or no longer ours."""
        for held in deliveries:
            self.outage.let_go(held)
            self.in_flight -= 1

    # --------------------------------------------------------------------------------------------------------- running
    async def run(self, deliveries: Sequence[InFlight], *, defer: bool = False) -> list[Outcome]:
        """Run a group through its engine; empty, after a pause, when the database is down.

        What has ended is settled and forgotten; its lane decides what follows for the others.
        """
        for held in deliveries:
            held.delivery.epoch.start(1)
        counts, began = self.counts.of(deliveries[0].work.handler.name), time.monotonic()
        try:
            outcomes = await self._outcomes(deliveries, defer=defer)
            counts.groups.observe(time.monotonic() - began)
            self.outage.over(*deliveries[: len(outcomes)])
            counted = _counted(deliveries, outcomes)
            outcomes = await self._answer(deliveries, outcomes)
            ends = [settle(outcome) for outcome in outcomes]
            await self._finish([held for held, end in zip(deliveries, ends, strict=False) if end is Settlement.FINISH])
            self.forget(held for held, end in zip(deliveries, ends, strict=False) if end is Settlement.DROP)
            counts.ended(counted)
            self._tell(zip(deliveries, outcomes, strict=False))
            return outcomes
        except StoreUnavailable as error:
            unavailable = error
        finally:
            for held in deliveries:
                held.delivery.epoch.finish(1)
        await self.outage.wait(unavailable, met_by=deliveries)
        return []

    async def _outcomes(self, deliveries: Sequence[InFlight], *, defer: bool) -> list[Outcome]:
        head = deliveries[0]
        unreadable = head.work.call is None and head.work.leased is None
        if self._sagas is None or not head.work.handler.leased or unreadable:
            return await self.engine.run([held.work for held in deliveries], defer=defer)
        return [await self._sagas.run(head.work, lambda: self._settle([head]), defer=defer)]

    async def replay_committed(self, deliveries: Sequence[InFlight]) -> list[tuple[InFlight, Outcome]]:
        """Those that a committed record decides, with one read and one settlement for all; settles as `run` does.

        Empty, after a pause, when the database is down.
        """
        try:
            outcomes = await self.engine.replay_committed([held.work for held in deliveries])
        except StoreUnavailable as error:
            await self.outage.wait(error)
            return []
        decided = [(held, outcome) for held, outcome in zip(deliveries, outcomes, strict=True) if outcome is not None]
        theirs = [held for held, _ in decided]
        if decided:
            counted = _counted(theirs, [outcome for _, outcome in decided])
            self.counts.of(deliveries[0].work.handler.name).ended(counted)
        answered = await self._answer(theirs, [outcome for _, outcome in decided])
        await self._finish(
            [held for held, end in zip(theirs, answered, strict=True) if settle(end) is Settlement.FINISH]
        )
        self._tell(zip(theirs, answered, strict=True))
        return list(zip(theirs, answered, strict=True))

    def _tell(self, ended: Iterable[tuple[InFlight, Outcome]]) -> None:
        if self._watcher is not None:
            for held, outcome in ended:
                self._watcher.ended(held.work.handler.name, held.delivery.message, outcome)

    async def _answer(self, deliveries: Sequence[InFlight], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Send the replies of what is decided. A delivery whose reply is not confirmed is not settled but held, and
        then judged again: so its stored result is replied again (D21)."""
        if self._replies is None or not deliveries or deliveries[0].work.handler.options.reply is None:
            return list(outcomes)
        its = list(zip(deliveries, outcomes, strict=False))  # the engine decides a prefix
        told = await self._replies.send([(held.work, outcome) for held, outcome in its])
        return [
            outcome if settled else self._unanswered(held, outcome)
            for (held, outcome), settled in zip(its, told, strict=True)
        ]

    def _unanswered(self, held: InFlight, outcome: Outcome) -> Outcome:
        held.unanswered += 1
        if held.work.saga is not None:
            held.work.saga.leased = None  # it has ended: next time its record answers
        due = pause_after(held.unanswered, random.random())
        return Outcome(OutcomeKind.RETRYING, due=due, attempt=outcome.attempt, reason="reply")

    # -------------------------------------------------------------------------------------------------------- settling
    async def _finish(self, deliveries: Sequence[InFlight]) -> None:
        if deliveries:
            await self._settle(deliveries)
            self.forget(deliveries)

    async def _settle(self, deliveries: Sequence[InFlight]) -> None:
        """Settle those that are not settled yet, one call per session. Only after the commit is known (R5)."""
        deliveries = [held for held in deliveries if not held.settled]
        if not deliveries:
            return
        by_session: defaultdict[Session, list[InFlight]] = defaultdict(list)
        for held in deliveries:
            by_session[held.session].append(held)
        name, keys = deliveries[0].work.handler.name, [held.work.key for held in deliveries]
        self._at(Point.SETTLING, name, keys)
        for session, theirs in by_session.items():
            await session.settle([held.delivery for held in theirs])
            self._settled.add(session)
            for held in theirs:
                held.settled = True
        self._at(Point.SETTLED, name, keys)

    def settled(self, session: Session) -> bool:
        """Whether anything of a session that is over was settled. Call it once: it forgets the session."""
        progress = session in self._settled
        self._settled.discard(session)
        return progress

    async def release(self, deliveries: Sequence[InFlight]) -> None:
        """Give back what never started."""
        by_session: defaultdict[Session, list[Delivery]] = defaultdict(list)
        for held in deliveries:
            by_session[held.session].append(held.delivery)
        for session, theirs in by_session.items():
            await session.release(theirs)
        self.forget(deliveries)


def _counted(deliveries: Sequence[InFlight], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """All but the duplicates that deliveries seem to be while only their replies are missing."""
    return [outcome for held, outcome in zip(deliveries, outcomes, strict=False) if not held.unanswered]
