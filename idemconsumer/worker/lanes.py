"""All lanes of a worker and the waiting rooms: which delivery goes where, and how they end.

Each handler has lanes of its own (D13). A delivery is decoded and keyed before it has one (D1). If its key is in flight
in this process, it follows that delivery; else its lane is a hash of its order key (D2), or whichever is free if it has
none (D14). So two deliveries of one key never become rivals here, and what belongs to one order key runs in order.
"""

from __future__ import annotations

import asyncio
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.observe.reports import HandlerState
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.settings import Settings
from idemconsumer.user_code.cancellation import run_on
from idemconsumer.worker import capacity
from idemconsumer.worker.in_flight import InFlight, InHand, Place
from idemconsumer.worker.lane import Lane
from idemconsumer.worker.probe import Probe
from idemconsumer.worker.spread import Spread
from idemconsumer.worker.turns import Turns
from idemconsumer.worker.waiting_room import WaitingRoom

_LOOK: Final = 0.02  # seconds, in a drain


class HandlerLanes:
    """The lanes of one handler, what is spread over them, and its waiting room.

    `first`: an epoch counts what ran under numbers from here on, one for each lane and one for what is spread.
    """

    def __init__(self, handler: BoundHandler, in_hand: InHand, turns: Turns, *, lanes: int, first: int) -> None:
        self._handler = handler
        self._in_hand = in_hand
        self.waiting_room = WaitingRoom(handler, in_hand, capacity.ROOM)
        self.spread = Spread(in_hand, capacity.ROOM, index=first + lanes, lanes=lanes)
        probe = Probe()
        self.lanes = [
            Lane(index, handler, in_hand, self.spread, self.waiting_room, turns, probe)
            for index in range(first, first + lanes)
        ]
        self.places: list[Place] = [*self.lanes, self.spread, self.waiting_room]
        self.at_work: list[Lane | WaitingRoom] = [*self.lanes, self.waiting_room]

    def lane_of(self, source: str, order: str | bytes) -> Lane:
        order = order.encode("utf-8", "surrogatepass") if isinstance(order, str) else order
        return self.lanes[zlib.crc32(order, zlib.crc32(source.encode())) % len(self.lanes)]

    @property
    def paused(self) -> bool:
        return self._handler.name in self._in_hand.paused

    def go_on(self) -> None:
        """It is no longer paused."""
        for lane in self.lanes:
            lane.wake()

    async def give_back(self) -> None:
        """What never started, as far as that costs nothing. The rest waits where it is (O14)."""
        deliveries = [held for lane in self.lanes for held in lane.give_back()] + self.spread.give_back()
        if deliveries:
            await self._in_hand.release(deliveries)

    @property
    def running(self) -> int:
        """How many lanes run something."""
        return self.spread.running

    @property
    def idle(self) -> int:
        """How many lanes have nothing to do; none of a handler that is paused."""
        return 0 if self.paused else self.spread.unused(sum(lane.free for lane in self.lanes))

    @property
    def state(self) -> HandlerState:
        """For a report."""
        room = self.waiting_room
        return HandlerState(len(self.lanes), self.spread.running, len(room), room.oldest)

    @property
    def to_begin(self) -> bool:
        """Whether something is about to begin whose broker counts what is given back as delivered. A saga would not end
        soon, and a handler all of whose messages fail gets nothing done."""
        in_hand, handler = self._in_hand, self._handler
        if handler.leased or self.paused or in_hand.outage.lasts or in_hand.engine.health(handler).probing:
            return False
        ready = chain(self.spread.ready, *(lane.ready for lane in self.lanes))
        return any(held.delivery.epoch.returns_count and not held.abandoned for held in ready)

    def beyond(self, each: int) -> int:
        """How many deliveries lie in lanes that have more than `each`, beyond that."""
        return sum(max(0, lane.load - each) for lane in self.lanes)


class Lanes:
    """Those of all handlers of a worker."""

    def __init__(self, in_hand: InHand, handlers: Sequence[BoundHandler], settings: Settings) -> None:
        self.in_hand = in_hand
        counts = [capacity.lanes_of(handler, settings) for handler in handlers]
        turns = Turns(sum(counts))
        self._of: dict[str, HandlerLanes] = {}
        first = 0
        for handler, count in zip(handlers, counts, strict=True):
            self._of[handler.name] = HandlerLanes(handler, in_hand, turns, lanes=count, first=first)
            first += count + 1
        self.freed = asyncio.Event()
        for lanes in self._of.values():
            lanes.spread.freed = self.freed
        self._places: list[Place] = [place for lanes in self._of.values() for place in lanes.places]
        self._tasks: list[asyncio.Task[None]] = []
        self.finished = asyncio.Event()

    def of(self, handler: str) -> HandlerLanes:
        """Those of the handler with this name."""
        return self._of[handler]

    @property
    def all(self) -> Collection[HandlerLanes]:
        """Those of each handler."""
        return self._of.values()

    def paused(self, handler: str) -> bool:
        """Whether nothing of this handler may be taken or begun."""
        return handler in self.in_hand.paused

    def pause(self, handlers: Collection[str]) -> None:
        """From now on nothing of these begins, and of all others it does; what runs is finished (O14)."""
        resumed = self.in_hand.paused - frozenset(handlers)
        self.in_hand.paused = frozenset(handlers)
        for handler in resumed & self._of.keys():
            self._of[handler].go_on()
        self.freed.set()

    async def give_back(self) -> None:
        """What was fetched for a handler that is paused. Called after each fetch: some began before the pause."""
        for handler in self.in_hand.paused & self._of.keys():
            await self._of[handler].give_back()

    def dispatch(self, work: Work, delivery: Delivery, session: Session) -> None:
        in_hand, lanes = self.in_hand, self._of[work.handler.name]
        order = None if work.call is None or work.leased is not None else work.call.order
        lane = None if order is None else lanes.lane_of(work.message.source, order)
        held = InFlight(work, delivery, session, home=lane)
        it = weakref.ref(held)  # which has the work: else only a garbage collection would free the two, and the message
        work.abandoned = lambda: (kept := it()) is None or kept.abandoned or in_hand.draining
        place = in_hand.add(held, lanes.spread if lane is None or lanes.spread.is_aside(held) else lane)
        if (
            work.leased is not None
        ):  # ours already, and outside the order: what waits here for its end must not delay it
            place = lanes.spread
        place.add(held)

    @property
    def states(self) -> dict[str, HandlerState]:
        """Of all handlers, by name."""
        return {name: lanes.state for name, lanes in self._of.items()}

    def idle(self, handler: str) -> int:
        """How many lanes of a handler have nothing to do."""
        return self._of[handler].idle

    def keep(self, handler: str, kept: bool) -> None:
        """Whether the next lane of a handler that is free is kept for a saga."""
        self._of[handler].spread.keep(kept)

    @property
    def closed(self) -> bool:
        """Whether one that may kill this worker is alone, or waits to be (L23)."""
        return self.in_hand.engine.company.closed

    @property
    def keys(self) -> list[bytes]:
        """The keys in hand, without those that only wait in the waiting room for the owner of their key: after a lost
        answer the owner may be this process, and then nothing here would go on with the saga."""
        return self.in_hand.keys(sum((lanes.waiting_room.waiting for lanes in self._of.values()), Counter()))

    # --------------------------------------------------------------------------------------------------------- working
    async def work(self) -> None:
        """Run until drained. A bug in one lane ends them all: better a restart than a lane that silently stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = [
                    group.create_task(run_on(each.work(), "lane")) for of in self._of.values() for each in of.at_work
                ]
        finally:
            self.finished.set()

    def cancel(self) -> None:
        """What still runs is rolled back, costs no attempt and is not settled."""
        for task in self._tasks:
            task.cancel()

    async def run_out(self, within: float, reading: Callable[[], bool]) -> None:
        """Wait until nothing is read, or about to begin, that would count as delivered if it was given back (D11)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._to_read(reading) or any(lanes.to_begin for lanes in self._of.values()):
                    await asyncio.sleep(_LOOK)

    def _to_read(self, reading: Callable[[], bool]) -> bool:
        return reading() and not self.in_hand.outage.lasts

    def drain(self) -> None:
        """Start nothing new; `work` returns when what runs has been settled. Sagas are released at once."""
        self.in_hand.drain()
        for place in self._places:
            place.drain()

    async def release(self) -> None:
        """Give back what never started."""
        await self.in_hand.release([held for place in self._places for held in place.clear()])
