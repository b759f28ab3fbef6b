"""All lanes of a worker and the waiting room: which delivery goes where, and how they end.

A delivery is decoded and keyed before it has a lane (D1). If its key is in flight in this process, it follows that
delivery; else its lane is a hash of its order key (D2). So two deliveries of one key never become rivals here,
and what belongs to one order key runs in order.
"""

from __future__ import annotations

import asyncio
import zlib

from idemconsumer.engine.work import Work
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.user_code.cancellation import run_isolated
from idemconsumer.worker.in_hand import Held, InHand, Place
from idemconsumer.worker.lane import Lane
from idemconsumer.worker.turns import Turns
from idemconsumer.worker.waiting_room import WaitingRoom


class Lanes:
    """`count` lanes, and a waiting room for `room` deliveries of each source."""

    def __init__(self, in_hand: InHand, *, count: int, room: int) -> None:
        self.in_hand = in_hand
        self.waiting_room = WaitingRoom(in_hand, room)
        turns = Turns(count)
        self._lanes = [Lane(index, in_hand, self.waiting_room, turns) for index in range(count)]
        self._places: list[Place] = [*self._lanes, self.waiting_room]
        self._tasks: list[asyncio.Task[None]] = []
        self.finished = asyncio.Event()

    def dispatch(self, work: Work, delivery: Delivery, session: Session) -> None:
        held, in_hand = Held(work, delivery, session), self.in_hand
        work.abandoned = lambda: held.abandoned or in_hand.draining
        order = work.message.position if work.call is None else work.call.order
        place = in_hand.add(held, self._lane_of(work.message.source, order))
        if work.leased is not None:
            # Ours already, and outside the order: what waits here for its end, or shares its lane, must not delay it.
            place = min(self._lanes, key=lambda lane: lane.load)
        place.add(held)

    def _lane_of(self, source: str, order: str | bytes) -> Lane:
        order = order.encode("utf-8", "surrogatepass") if isinstance(order, str) else order
        return self._lanes[zlib.crc32(order, zlib.crc32(source.encode())) % len(self._lanes)]

    @property
    def idle(self) -> int:
        """How many lanes have nothing to do."""
        return sum(lane.load == 0 for lane in self._lanes)

    @property
    def held_up(self) -> int:
        """How many deliveries wait behind one that is retried later: they must not stop fetching for other lanes."""
        return sum(lane.held_up for lane in self._lanes)

    @property
    def keys(self) -> list[bytes]:
        """The keys in hand, without those that only wait in the waiting room for the owner of their key: after a lost
        answer the owner may be this process, and then nothing here would go on with the saga."""
        return self.in_hand.keys(self.waiting_room.waiting)

    # --------------------------------------------------------------------------------------------------------- working
    async def work(self) -> None:
        """Run until drained. A bug in one lane ends them all: better a restart than a lane that silently stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = [group.create_task(self._work_in(place)) for place in self._places]
        finally:
            self.finished.set()

    async def _work_in(self, place: Place) -> None:
        """A TaskGroup ignores a task that was cancelled, and the other lanes would go on without this one (D9)."""
        _, error = await run_isolated(lane := asyncio.create_task(place.work()))
        if lane.cancelled():
            raise RuntimeError("a lane was cancelled by what it ran, and the worker cannot go on without it") from error
        if error is not None:
            raise error

    def cancel(self) -> None:
        """What still runs is rolled back, costs no attempt and is not settled."""
        for task in self._tasks:
            task.cancel()

    def drain(self) -> None:
        """Start nothing new; `work` returns when what runs has been settled. Sagas are released at once."""
        self.in_hand.drain()
        for place in self._places:
            place.drain()

    async def release(self) -> None:
        """Give back what never started."""
        await self.in_hand.release([held for place in self._places for held in place.clear()])
