"""Lanes and the waiting room: serial streams of deliveries inside one worker.

A delivery is decoded and keyed before it has a lane. If its key is in flight in this process, it follows that
delivery; otherwise its lane is a hash of its order key. So two deliveries of one key never meet as rivals here, and
what belongs to one order key runs in order.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.broker import Delivery, Session
from idemconsumer.ports.observer import Observer, Point
from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.sagas.engine import LeasedEngine
from idemconsumer.user_code.cancellation import ended
from idemconsumer.worker.turns import Turns

log = structlog.get_logger("idemconsumer")

_ROOM_FIRST, _ROOM_LAST = 0.05, 1.0  # seconds between two claims of the waiting room
_LOOK_UP: Final = 1.0  # seconds after which a lane that holds a delivery looks whether it still owns it


@dataclass(slots=True, eq=False)
class Held:
    """A delivery that this process has in hand.

    `due` is when it may run, on the loop's clock. `settled`: the broker has been told, the message being stored.
    """

    work: Work
    delivery: Delivery
    session: Session
    due: float = 0.0
    settled: bool = False

    @property
    def abandoned(self) -> bool:
        """The broker has taken it back. What is stored is ours, whatever becomes of the session."""
        return self.delivery.epoch.retiring and not self.settled


class Outage:
    """The database is away: said once, waited for with backoff by everyone who needs it."""

    def __init__(self) -> None:
        self._failures = 0

    async def wait(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.error("store unreachable, waiting", error=str(error))
        await asyncio.sleep(min(3.0, 0.1 * 2 ** min(self._failures, 6)) * random.uniform(0.75, 1.0))

    def over(self) -> None:
        if self._failures:
            self._failures = 0
            log.info("store reachable again")


class Lanes:
    """All lanes of a worker, the room, and who holds which key."""

    def __init__(
        self, engine: Engine, observer: Observer, *, count: int, room: int, sagas: LeasedEngine | None = None
    ) -> None:
        self.engine = engine
        self._sagas = sagas
        self.outage = Outage()
        self.counts: Counter[OutcomeKind] = Counter()
        self.draining = False
        self.in_flight = 0
        self.turns = Turns(count)
        self._at = observer.at
        self._lanes = [Lane(self, index) for index in range(count)]
        self.room = Room(self, room)
        self._places: list[Lane | Room] = [*self._lanes, self.room]
        self._settled: set[Session] = set()
        self._holders: dict[bytes, tuple[Lane | Room, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.finished = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------ dispatch
    def dispatch(self, work: Work, delivery: Delivery, session: Session) -> None:
        held = Held(work, delivery, session)
        work.abandoned = lambda: held.abandoned or self.draining
        place: Lane | Room = self._lane_of(
            work.message.source, work.message.position if work.call is None else work.call.order
        )
        if key := work.key:  # also of a saga whose message cannot be read any more
            place, count = self._holders.get(key, (place, 0))
            self._holders[key] = (place, count + 1)
            if work.holding is not None:
                # Ours already, and out of its order: what waits for its end here, or has its lane, must not delay it.
                place = min(self._lanes, key=lambda lane: lane.load)
        self.in_flight += 1
        place.add(held)

    def _lane_of(self, source: str, order: str | bytes) -> Lane:
        order = order.encode("utf-8", "surrogatepass") if isinstance(order, str) else order
        return self._lanes[zlib.crc32(order, zlib.crc32(source.encode())) % len(self._lanes)]

    def moved(self, held: Held, place: Room) -> None:
        """The room has it now, and later deliveries of its key go there too."""
        _, count = self._holders[held.work.key]
        self._holders[held.work.key] = (place, count)

    def forget(self, helds: Iterable[Held]) -> None:
        """These are settled, given back, or no longer ours."""
        for held in helds:
            self.in_flight -= 1
            if not held.work.key:
                continue
            place, count = self._holders[held.work.key]
            if count == 1:
                del self._holders[held.work.key]
            else:
                self._holders[held.work.key] = (place, count - 1)

    # ---------------------------------------------------------------------------------------------------------- acting
    async def run(self, helds: Sequence[Held], *, defer: bool = False) -> list[Outcome]:
        """Run a group through the engine; empty, after a pause, when the database is away."""
        for held in helds:
            held.delivery.epoch.start(1)
        try:
            outcomes = await self._outcomes(helds, defer=defer)
            self.outage.over()
            ends = [settle(outcome) for outcome in outcomes]
            await self.finish([held for held, end in zip(helds, ends, strict=False) if end is Settlement.FINISH])
            self.forget(held for held, end in zip(helds, ends, strict=False) if end is Settlement.DROP)
            self.counts.update(outcome.kind for outcome in outcomes)
            return outcomes
        except StoreUnavailable as error:
            unavailable = error
        finally:
            for held in helds:
                held.delivery.epoch.finish(1)
        await self.outage.wait(unavailable)
        return []

    async def _outcomes(self, helds: Sequence[Held], *, defer: bool) -> list[Outcome]:
        head = helds[0]
        unreadable = head.work.call is None and head.work.holding is None
        if self._sagas is None or not head.work.handler.leased or unreadable:
            return await self.engine.run([held.work for held in helds], defer=defer)
        return [await self._sagas.run(head.work, lambda: self._settle([head]), defer=defer)]

    @property
    def idle(self) -> int:
        """How many lanes have nothing to do."""
        return sum(lane.load == 0 for lane in self._lanes)

    @property
    def held_up(self) -> int:
        """How many deliveries wait behind one that is retried later: what is fetched for other lanes must not stop."""
        return sum(lane.held_up for lane in self._lanes)

    @property
    def keys(self) -> list[bytes]:
        """What this process has in hand. Not what only waits in the room for whoever has it: that may be ourselves,
        since an answer was lost, and nobody would go on with it."""
        waiting = self.room.waiting
        return [key for key, (_, count) in self._holders.items() if count > waiting[key]]

    async def finish(self, helds: Sequence[Held]) -> None:
        """Settle, and let go."""
        if helds:
            await self._settle([held for held in helds if not held.settled])
            self.forget(helds)

    async def _settle(self, helds: Sequence[Held]) -> None:
        """Tell the broker, a call a session. Comes after the commit is known (R5)."""
        helds = [held for held in helds if not held.settled]
        if not helds:
            return
        by_session: defaultdict[Session, list[Held]] = defaultdict(list)
        for held in helds:
            by_session[held.session].append(held)
        name, keys = helds[0].work.handler.name, [held.work.key for held in helds]
        self._at(Point.SETTLING, name, keys)
        for session, theirs in by_session.items():
            await session.settle([held.delivery for held in theirs])
            self._settled.add(session)
            for held in theirs:
                held.settled = True
        self._at(Point.SETTLED, name, keys)

    def settled(self, session: Session) -> bool:
        """Whether anything of a session that is over was settled; asked once."""
        progress = session in self._settled
        self._settled.discard(session)
        return progress

    # ---------------------------------------------------------------------------------------------------------- living
    async def work(self) -> None:
        """Until drained. A bug in one lane ends them all: better a restart than a lane that silently stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = [group.create_task(self._live(place)) for place in self._places]
        finally:
            self.finished.set()

    async def _live(self, place: Lane | Room) -> None:
        """A TaskGroup forgets a task that was cancelled, and the other lanes would go on without this one."""
        _, error = await ended(lane := asyncio.create_task(place.work()))
        if lane.cancelled():
            raise RuntimeError("a lane was cancelled by what it ran, and the worker cannot go on without it") from error
        if error is not None:
            raise error

    def cancel(self) -> None:
        """What still runs is rolled back, costs no attempt and is not settled."""
        for task in self._tasks:
            task.cancel()

    def drain(self) -> None:
        """Start nothing new; `work` returns when what runs has been settled. Sagas are let go at once."""
        self.draining = True
        if self._sagas is not None:
            self._sagas.drain()
        for lane in self._lanes:
            lane.wake.set()
        self.room.drain()

    async def release(self) -> None:
        """Give back what never started."""
        helds = [held for place in self._places for held in place.clear()]
        by_session: defaultdict[Session, list[Delivery]] = defaultdict(list)
        for held in helds:
            by_session[held.session].append(held.delivery)
        for session, deliveries in by_session.items():
            await session.release(deliveries)
        self.forget(helds)


class Lane:
    """Serial: one group at a time, in order of arrival."""

    def __init__(self, lanes: Lanes, index: int) -> None:
        self._lanes = lanes
        self._index = index
        self._queue: deque[Held] = deque()
        self._running = 0
        self.wake = asyncio.Event()

    @property
    def load(self) -> int:
        """How many deliveries it has to do with."""
        return self._running + len(self._queue)

    @property
    def held_up(self) -> int:
        return len(self._queue) if self._queue and self._queue[0].due > asyncio.get_running_loop().time() else 0

    def add(self, held: Held) -> None:
        self._queue.append(held)
        self.wake.set()

    def clear(self) -> list[Held]:
        helds = list(self._queue)
        self._queue.clear()
        return helds

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._lanes.draining:
            self._drop_abandoned()
            if not self._queue:
                self.wake.clear()
                await self.wake.wait()
            elif (pause := self._queue[0].due - loop.time()) > 0:
                await self._pause(min(pause, _LOOK_UP))
            else:
                await self._conclude(*await self._run_group())

    async def _run_group(self) -> tuple[list[Held], list[Outcome]]:
        if self._lanes.engine.group_size(self._queue[0].work.handler) == 1:
            return await self._run_next()
        async with self._lanes.turns:
            self._drop_abandoned()
            return ([], []) if self._lanes.draining or not self._queue else await self._run_next()

    async def _run_next(self) -> tuple[list[Held], list[Outcome]]:
        group = self._take()
        self._running = len(group)
        try:
            return group, await self._lanes.run(group)
        except asyncio.CancelledError:
            self._queue.extendleft(reversed(group))  # rolled back, so given back like what never started
            raise
        finally:
            self._running = 0

    async def _pause(self, seconds: float) -> None:
        """Hold the head (order is kept); a drain ends the pause at once, an arrival does not."""
        self.wake.clear()
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while not self._lanes.draining:
                    await self.wake.wait()
                    self.wake.clear()
        except TimeoutError:
            return

    def _drop_abandoned(self) -> None:
        while self._queue and self._queue[0].abandoned:
            self._lanes.forget([self._queue.popleft()])

    def _take(self) -> list[Held]:
        """What is already waiting for one handler, up to its group size. Nothing waits for a group to fill."""
        handler = self._queue[0].work.handler
        size = self._lanes.engine.group_size(handler)
        group: list[Held] = []
        while self._queue and len(group) < size:
            held = self._queue[0]
            if held.work.handler is not handler or held.abandoned or (group and held.due):
                break
            if held.work.call is not None and held.delivery.epoch.on_probation(self._index):
                held.work.suspect = True
            group.append(self._queue.popleft())
        return group

    async def _conclude(self, group: Sequence[Held], outcomes: Sequence[Outcome]) -> None:
        back = list(group[len(outcomes) :])
        to_room: list[Held] = []
        for held, outcome in zip(group, outcomes, strict=False):
            match settle(outcome):
                case Settlement.HOLD:
                    held.due = asyncio.get_running_loop().time() + outcome.due
                    back.insert(0, held)
                case Settlement.WAITING_ROOM:
                    to_room.append(held)
                case _ if outcome.kind is not OutcomeKind.DUPLICATE:
                    held.delivery.epoch.passed(self._index)
        self._queue.extendleft(reversed(back))
        for held in to_room:
            await self._lanes.room.admit(held)


class Room:
    """Deliveries whose key a rival holds, unsettled, so that their lanes can go on. Order is given up for them."""

    def __init__(self, lanes: Lanes, size: int) -> None:
        self._lanes = lanes
        self._size = size
        self._helds: dict[Held, None] = {}
        self._running: Sequence[Held] = ()
        self._left = asyncio.Event()
        self.wake = asyncio.Event()

    def add(self, held: Held) -> None:
        held.delivery.epoch.waiting += 1
        self._helds[held] = None
        self.wake.set()

    async def admit(self, held: Held) -> None:
        """Take a delivery over from its lane, which waits here while its source's room is full."""
        source, said = held.delivery.message.source, False
        while not self._lanes.draining and self._of(source) >= self._size:
            if not said:
                log.warning("waiting room full, lane waits", source=source, size=self._size)
                said = True
            self._left.clear()
            await self._left.wait()
        self._lanes.moved(held, self)
        self.add(held)

    @property
    def waiting(self) -> Counter[bytes]:
        """How many deliveries of each key are here and nothing else: not running, and without a saga."""
        idle = self._helds.keys() - self._running
        return Counter(held.work.key for held in idle if held.work.holding is None)

    def _of(self, source: str) -> int:
        return sum(held.delivery.message.source == source for held in self._helds)

    def drain(self) -> None:
        self.wake.set()
        self._left.set()

    def clear(self) -> list[Held]:
        helds, self._helds = list(self._helds), {}
        for held in helds:
            held.delivery.epoch.waiting -= 1
        return helds

    async def work(self) -> None:
        pause = _ROOM_FIRST
        while not self._lanes.draining:
            if not self._helds:
                pause = _ROOM_FIRST
                self.wake.clear()
                await self.wake.wait()
                continue
            try:
                async with asyncio.timeout(pause):
                    while not self._lanes.draining:
                        self.wake.clear()
                        await self.wake.wait()
            except TimeoutError:
                pass
            if not self._lanes.draining:
                pause = _ROOM_FIRST if await self._claim_again() else min(pause * 2, _ROOM_LAST)

    async def _claim_again(self) -> bool:
        """One round over everything in the room; whether anything left it."""
        self._dismiss([held for held in self._helds if held.abandoned])
        now = asyncio.get_running_loop().time()
        by_handler: defaultdict[str, list[Held]] = defaultdict(list)
        for held in self._helds:
            if held.due <= now:
                by_handler[held.work.handler.name].append(held)
        before = len(self._helds)
        for helds in by_handler.values():
            await self._answer(helds)
            waiting = [held for held in helds if held in self._helds and held.due <= now]
            size = self._lanes.engine.group_size(helds[0].work.handler)
            for start in range(0, len(waiting), size):
                if self._lanes.draining:
                    return True
                if group := [held for held in waiting[start : start + size] if not held.abandoned]:
                    self._running = group
                    outcomes = await self._lanes.run(group, defer=True)
                    self._running = ()
                    self._conclude(group, outcomes)
        return len(self._helds) < before

    async def _answer(self, helds: Sequence[Held]) -> None:
        """Settle in one go those whose rival has committed, by one read of all their records."""
        try:
            outcomes = await self._lanes.engine.replay_committed([held.work for held in helds])
        except StoreUnavailable as error:
            await self._lanes.outage.wait(error)
            return
        answered = [(held, outcome) for held, outcome in zip(helds, outcomes, strict=True) if outcome is not None]
        self._lanes.counts.update(outcome.kind for _, outcome in answered)
        await self._lanes.finish([held for held, outcome in answered if settle(outcome) is Settlement.FINISH])
        self._conclude([held for held, _ in answered], [outcome for _, outcome in answered])

    def _conclude(self, helds: Sequence[Held], outcomes: Sequence[Outcome]) -> None:
        for held, outcome in zip(helds, outcomes, strict=False):
            match settle(outcome):
                case Settlement.FINISH | Settlement.DROP:
                    self._leave(held)
                case Settlement.HOLD:
                    held.due = asyncio.get_running_loop().time() + outcome.due

    def _dismiss(self, helds: Sequence[Held]) -> None:
        for held in helds:
            self._leave(held)
        self._lanes.forget(helds)

    def _leave(self, held: Held) -> None:
        del self._helds[held]
        held.delivery.epoch.waiting -= 1
        self._left.set()
