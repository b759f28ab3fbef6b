"""Lanes: how many strands of each handler run at a time, and when each begins.

Each handler has lanes of its own (D13). A delivery is decoded and keyed before it is dispatched (D1). Deliveries that
must run one after another form a strand (`strands`). A lane takes a group of strands that can run, or waits for one.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Final

from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.observe.reports import HandlerState
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.rules import breaker as failing
from idemconsumer.rules.breaker import HandlerHealth
from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.settings import Settings
from idemconsumer.stores.sharing import PARTY
from idemconsumer.user_code.cancellation import run_on
from idemconsumer.worker import capacity
from idemconsumer.worker.in_flight import InFlight, InHand, Strand
from idemconsumer.worker.strands import Strands
from idemconsumer.worker.turns import Turns

_LOOK: Final = 0.02  # seconds, in a drain
_LOOK_UP: Final = 1.0  # seconds between checks of whether this process still owns the deliveries that wait
_FULL: Final = 1.0  # seconds until a busy delivery for which there is no room is claimed again


class HandlerLanes:
    """The lanes of one handler, and its strands. `index`: the number under which an epoch counts the suspects of this
    handler (K10). `freed` is set when a lane has nothing to do."""

    def __init__(
        self, handler: BoundHandler, in_hand: InHand, turns: Turns, freed: asyncio.Event, *, lanes: int, index: int
    ) -> None:
        self.count = lanes
        self.running = 0  # lanes that run something
        self.strands = Strands(in_hand.engine, in_hand.forget, capacity.ROOM)
        self._handler = handler
        self._in_hand = in_hand
        self._engine = in_hand.engine
        self._turns = turns
        self._freed = freed
        self._index = index
        self._kept = False  # one lane is to stay free for a saga that is about to be taken (L33)
        self._idle: deque[asyncio.Future[None]] = deque()  # lanes that wait; the first one begins next
        self._asking = 0  # lanes that are to begin something, and have not taken it yet
        self._probe: InFlight | None = None  # which runs while all messages of the handler fail (D17)
        self._hangs_at = math.inf
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf  # what uvloop makes of the shortest pause has no `when`
        self._swept = 0.0
        self._round = asyncio.Event()  # it is time to look for rivals
        self._woken = asyncio.Event()  # there may be room for one that waits for its next attempt
        self._told = False  # that the waiting room is full, since it was empty last

    # ---------------------------------------------------------------------------------------------------- what is known
    @property
    def paused(self) -> bool:
        return self._handler.name in self._in_hand.paused

    @property
    def _health(self) -> HandlerHealth:
        return self._engine.health(self._handler)

    @property
    def idle(self) -> int:
        """How many lanes will have nothing to do; 0 while the handler is paused."""
        free = self.count - self.running
        return 0 if self.paused else max(min(free, int(self._kept)), free - self.strands.ready)

    @property
    def state(self) -> HandlerState:
        """For a report."""
        oldest = self.strands.oldest(asyncio.get_running_loop().time())
        return HandlerState(self.count, self.running, len(self.strands.rivals), oldest)

    @property
    def to_begin(self) -> bool:
        """Whether a delivery is about to begin whose broker would count a return as a delivery (D11). False for sagas,
        which would not end soon, and while all messages of the handler fail."""
        if self._handler.leased or self.paused or self._in_hand.outage.lasts or self._health.probing:
            return False
        return any(held.delivery.epoch.returns_count and not held.abandoned for held in self.strands.about_to_begin)

    # --------------------------------------------------------------------------------------------------- what may begin
    def add(self, held: InFlight, order: tuple[str, object] | None) -> None:
        if self.strands.add(held, order) and self._idle:  # else a lane looks when it has ended something
            self.look()

    def keep(self, kept: bool) -> None:
        """Set whether one lane stays free for a saga that is about to be taken (L33)."""
        self._kept = kept
        self.look()

    async def give_back(self) -> None:
        """Return deliveries that have not started, where that costs nothing. The others wait where they are (O14)."""
        if deliveries := self.strands.give_back():
            await self._in_hand.release(deliveries)

    def drain(self) -> None:
        """Wake all tasks that wait, because `InHand.draining` is set."""
        for waiter in self._idle:
            if not waiter.done():
                waiter.set_result(None)
        self._idle.clear()
        self._round.set()
        self._woken.set()
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Start all lanes that can run something. Call it whenever that may have changed; changes that come with time
        have a timer."""
        if self._in_hand.draining:
            return
        now, health, strands = asyncio.get_running_loop().time(), self._health, self.strands
        if now - self._swept >= _LOOK_UP:
            self._swept = now
            strands.sweep()
        strands.wake(now)
        if not strands.full:
            self._woken.set()
        strands.let_out(now, probing=health.probing)
        strands.next_ready(now, health.probing)
        if now >= strands.round_at and not self.paused:
            self._round.set()
        while self._idle and self._may_begin(now, health):
            if not (begin := self._idle.popleft()).done():  # else it was cancelled
                self._asking += 1
                begin.set_result(None)
        self._look_again(now, health)

    def _may_begin(self, now: float, health: HandlerHealth) -> bool:
        """Whether one more lane can begin."""
        if self.paused or len(self._idle) <= (self._kept and not self.strands.next_is_ours):
            return False
        if health.probing:
            return not self._asking and self._may_probe(now, health) and self.strands.takeable(probing=True) > 0
        return self.strands.takeable(probing=False) > self._asking

    def _may_probe(self, now: float, health: HandlerHealth) -> bool:
        """Whether a probe may begin: one message at a time, unless the message that runs hangs."""
        return now >= health.next_run and (self._probe is None or now >= self._hangs_at)

    def _look_again(self, now: float, health: HandlerHealth) -> None:
        strands = self.strands
        if not len(strands):
            return
        dues = [now + _LOOK_UP, strands.next_due, strands.round_at]
        if health.probing:
            dues += [strands.quarantine.next_out, health.next_run, self._hangs_at]
        at = min(due for due in dues if due > now)
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = asyncio.get_running_loop().call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.look()

    # ----------------------------------------------------------------------------------------------------------- a lane
    async def work(self) -> None:
        """Run one lane. Returns when drained."""
        PARTY.set(self._handler.name)
        while await self._may_go_on():
            await self._run_next()

    async def _may_go_on(self) -> bool:
        """Wait until there is something to run; False in a drain."""
        begin = asyncio.get_running_loop().create_future()
        self._idle.appendleft(begin)
        self.look()
        if not begin.done() and not self._in_hand.draining:
            self._idle.rotate(-1)
            self._freed.set()
            await begin
        return not self._in_hand.draining

    async def _run_next(self) -> None:
        async with self._turn():
            if not (group := self._take()):
                return
            outcomes = await self._run(group)
        await self._conclude(group, outcomes)

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """The right to open a group (G13). A message that runs alone needs none."""
        if self._health.probing or self._engine.group_size(self._handler) == 1:
            return nullcontext()
        return self._turns.of(self._handler.name)

    def _take(self) -> list[InFlight]:
        self._asking -= 1
        now, health = asyncio.get_running_loop().time(), self._health
        if self._in_hand.draining or self.paused:
            return []
        if not health.probing:
            beside = min(self._turns.free, self.count - 1 - self.running)
            return self.strands.take(self._engine.group_size(self._handler), now, beside=beside)
        if not self._may_probe(now, health) or not (group := self.strands.take(1, now, probing=True)):
            return []
        self._probe, self._hangs_at = group[0], now + failing.HANGS
        self._look_again(now, health)
        return group

    async def _run(self, group: Sequence[InFlight]) -> list[Outcome]:
        self.running += 1
        try:
            for held in group:
                if held.due and held.work.misread:
                    await self._engine.read(held.work)  # it may be readable by now
                    self.strands.learn(held)
                if self._on_probation(held):
                    held.work.suspect()
            return await self._in_hand.run(group, defer=group[0].strand.deferred)
        finally:
            self.running -= 1
            if self._probe is group[0]:
                self._probe, self._hangs_at = None, math.inf

    def _on_probation(self, held: InFlight) -> bool:
        delivery = held.delivery
        if not delivery.inherited or held.work.call is None:
            return False
        return delivery.epoch.on_probation(self._index, self.count, held.strand.order)

    async def _conclude(self, group: Sequence[InFlight], outcomes: Sequence[Outcome]) -> None:
        """Remove the deliveries of a group that are finished. One that must run again waits until it is due, with all
        behind it in its strand (D3, D15); a busy one waits for its rival (D5); an undecided one gets its place back."""
        now = asyncio.get_running_loop().time()
        strands, again = dict.fromkeys(held.strand for held in group), set[InFlight]()
        for held, outcome in zip(group, outcomes, strict=False):
            match settle(outcome):
                case Settlement.HOLD:
                    held.due = now + outcome.due
                    again.add(held)
                case Settlement.WAITING_ROOM:
                    if not self._await_rival(held, now):
                        held.due = now + _FULL
                        # With an order it is not deferred: the deliveries behind it would overtake it.
                        held.strand.deferred |= held.strand.order is None
                        again.add(held)
                case _:
                    ran = held.running and outcome.kind is not OutcomeKind.DUPLICATE
                    if ran and self._on_probation(held):
                        held.delivery.epoch.passed(self._index, held.strand.order)
                    self.strands.end(held)
        left = [strand for strand in strands if strand.taken]
        failed = [strand for strand in left if strand.line[0] in again]
        for strand in left:
            if strand.line[0] not in again:
                self.strands.put_back(strand)
        for strand in failed:  # this may wait, and another lane may take the strands put back above meanwhile
            await self._rest(strand)

    def _await_rival(self, held: InFlight, now: float) -> bool:
        """True if there is room for the delivery. Otherwise it keeps its place, and its order waits with it."""
        self._told = self._told and self.strands.round_at < math.inf
        if self.strands.await_rival(held, now):
            return True
        if not self._told:
            source = held.delivery.message.source
            log.warning("waiting room full, orders are held up", source=source, size=capacity.ROOM)
            self._told = True
        return False

    async def _rest(self, strand: Strand) -> None:
        logged = False
        while self.strands.full and strand.waits is None and not self._in_hand.draining:
            if not logged:
                handler, size = self._handler.name, self.strands.retries
                log.warning("too many retries wait, lane waits", handler=handler, size=size)
                logged = True
            self._woken.clear()
            self.look()  # starts other lanes
            await self._woken.wait()
        self.strands.rest(strand, asyncio.get_running_loop().time())

    async def look_for_rivals(self) -> None:
        """Run the rounds for rivals (D5): one read for the records of all waiting deliveries settles those that are
        decided; lanes claim the others again."""
        PARTY.set(self._handler.name)
        while not self._in_hand.draining:
            await self._round.wait()
            self._round.clear()
            now = asyncio.get_running_loop().time()
            if now < self.strands.round_at or self.paused or self._in_hand.draining:
                continue
            if asked := self.strands.round(now):
                decided = await self._in_hand.replay_committed(asked)
                await self._conclude([held for held, _ in decided], [outcome for _, outcome in decided])
                self.strands.claim_again(asked, probing=self._health.probing)
            self.look()


class Lanes:
    """The lanes of all handlers of a worker."""

    def __init__(self, in_hand: InHand, handlers: Sequence[BoundHandler], settings: Settings) -> None:
        self.in_hand = in_hand
        counts = [capacity.lanes_of(handler, settings) for handler in handlers]
        turns = Turns(sum(counts))
        self.freed = asyncio.Event()
        self._of = {
            handler.name: HandlerLanes(handler, in_hand, turns, self.freed, lanes=count, index=index)
            for index, (handler, count) in enumerate(zip(handlers, counts, strict=True))
        }
        self._tasks: list[asyncio.Task[None]] = []
        self.finished = asyncio.Event()

    def of(self, handler: str) -> HandlerLanes:
        """The lanes of the handler with this name."""
        return self._of[handler]

    @property
    def all(self) -> Collection[HandlerLanes]:
        """The lanes of each handler."""
        return self._of.values()

    def paused(self, handler: str) -> bool:
        """Whether no message of this handler may be taken or begun."""
        return handler in self.in_hand.paused

    def pause(self, handlers: Collection[str]) -> None:
        """Pause these handlers and resume all others; messages that run are finished (O14)."""
        resumed = self.in_hand.paused - frozenset(handlers)
        self.in_hand.paused = frozenset(handlers)
        for handler in resumed & self._of.keys():
            self._of[handler].look()
        self.freed.set()

    async def give_back(self) -> None:
        """Return what was fetched for paused handlers. Called after each fetch: some fetches began before the pause."""
        for handler in self.in_hand.paused & self._of.keys():
            await self._of[handler].give_back()

    def dispatch(self, work: Work, delivery: Delivery, session: Session) -> None:
        in_hand, held = self.in_hand, InFlight(work, delivery, session)
        it = weakref.ref(held)  # a strong reference would be a cycle: only a garbage collection would free the message
        work.abandoned = lambda: (kept := it()) is None or kept.abandoned or in_hand.draining
        in_hand.in_flight += 1
        order = None if work.call is None else work.call.order
        self._of[work.handler.name].add(held, None if order is None else (work.message.source, order))

    @property
    def states(self) -> dict[str, HandlerState]:
        """The states of all handlers, by name."""
        return {name: lanes.state for name, lanes in self._of.items()}

    def idle(self, handler: str) -> int:
        """How many lanes of a handler have nothing to do."""
        return self._of[handler].idle

    def keep(self, handler: str, kept: bool) -> None:
        """Set whether the next free lane of a handler is kept for a saga."""
        self._of[handler].keep(kept)

    @property
    def closed(self) -> bool:
        """Whether a message that may kill this worker runs alone, or waits to (L23)."""
        return self.in_hand.engine.company.closed

    @property
    def keys(self) -> list[bytes]:
        """The keys in flight, except those of deliveries that only wait for a rival: after a lost answer that rival may
        be this process, and then no delivery here would continue the saga."""
        return [key for lanes in self._of.values() for key in lanes.strands.keys]

    # --------------------------------------------------------------------------------------------------------- working
    async def work(self) -> None:
        """Run until drained. A bug in one lane ends them all: better a restart than a lane that silently stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                for of in self._of.values():
                    works = [of.look_for_rivals(), *(of.work() for _ in range(of.count))]
                    self._tasks += [group.create_task(run_on(work, "lane")) for work in works]
        finally:
            self.in_hand.draining = True  # whatever has ended it: nothing begins any more
            for lanes in self._of.values():
                lanes.drain()
            self.finished.set()

    def cancel(self) -> None:
        """Cancel what still runs: it is rolled back, costs no attempt and is not settled."""
        for task in self._tasks:
            task.cancel()

    async def run_out(self, within: float, reading: Callable[[], bool]) -> None:
        """Wait until no delivery is being read, or about to begin, whose return would count as a delivery (D11)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._to_read(reading) or any(lanes.to_begin for lanes in self._of.values()):
                    await asyncio.sleep(_LOOK)

    def _to_read(self, reading: Callable[[], bool]) -> bool:
        return reading() and not self.in_hand.outage.lasts

    def drain(self) -> None:
        """Start no message any more; `work` returns when those that run are settled. Sagas are released at once."""
        self.in_hand.drain()
        for lanes in self._of.values():
            lanes.drain()

    async def release(self) -> None:
        """Return all deliveries that have not started."""
        await self.in_hand.release([held for lanes in self._of.values() for held in lanes.strands.clear()])
