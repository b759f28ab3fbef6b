"""What has no order (D14): any lane of its handler takes it. What failed waits here, with or without an order, and its
lane goes on (D15)."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, Protocol

from idemconsumer.logs import log
from idemconsumer.message.delivered import held_size
from idemconsumer.rules import breaker as failing
from idemconsumer.worker.in_flight import InFlight, InHand, Place

_MOST_BYTES: Final = 16 * 1024 * 1024  # of the messages that stepped aside
_LOOK: Final = 1.0  # seconds


class Taker(Place, Protocol):
    """A lane."""

    def wake(self) -> None: ...


class Spread:
    """Deliveries of a handler without order, in order of arrival, and up to `size` that stepped aside until they are
    due.

    A key is here once: its later deliveries stand in line behind the first one and go with it (D1). So do those of an
    order behind one that stepped aside, which goes back to its own lane.
    """

    def __init__(self, in_hand: InHand, size: int, *, index: int, lanes: int) -> None:
        """`index` is the number under which an epoch counts what these `lanes` ran of it."""
        self.index = index
        self.lanes = lanes
        self.running = 0  # of the lanes
        self.trying_again = 0  # of these, those that run what was let out of quarantine
        self.freed = asyncio.Event()  # a lane has nothing to do any more
        self.kept = False  # one lane is to stay free for a saga that is about to be taken (L33)
        self._in_hand = in_hand
        self._size = size
        self._ready: deque[InFlight] = deque()
        self._aside: dict[InFlight, asyncio.TimerHandle | None] = {}
        self._quarantine: dict[InFlight, None] = {}  # of them, those without a timer
        self._next_out = 0.0
        self._probed = False
        self._bytes = 0
        self._lines: dict[Hashable, list[InFlight]] = {}  # by what they wait for, with the first one
        self._idle: dict[Taker, None] = {}
        self._left = asyncio.Event()

    # --------------------------------------------------------------------------------------------------------- to lanes
    @property
    def ready(self) -> Sequence[InFlight]:
        """What can run now."""
        return self._ready

    def add(self, held: InFlight) -> None:
        line = self._line(held)
        if not line and self._in_hand.deliveries(held) > 1:  # one of its key is here, whose order is another
            line = next((line for line in self._lines.values() if _has_key(line, held)), line)
        line.append(held)
        if held.line and line[0] is held:
            self._lines[held.line] = line
        if held.work.leased is not None:
            self._ready.appendleft(held)  # ours already: it must not wait behind what is not
        elif line[0] is held:
            self._ready.append(held)
        elif line[0] in self._aside:
            held.delivery.epoch.waiting += 1
        self.call()

    def is_aside(self, held: InFlight) -> bool:
        """Whether one of its order has stepped aside, so that it has to wait here for that one."""
        return bool(self._line(held))

    def _line(self, held: InFlight) -> list[InFlight]:
        line = self._lines.get(held.line, [])
        if line and line[0].abandoned and line[0] in self._aside:  # nothing waits for what is not ours any more
            self._dismiss(line[0])
            line = self._lines.get(held.line, [])
        return line

    def take(self, lane: Taker, size: int, turns: int) -> list[InFlight]:
        """A group of at most `size` for a lane, and to the lane's own queue what is in line behind it: these keys
        belong to the lane now. Lanes with nothing to do, as far as they have `turns`, get as much."""
        group: list[InFlight] = []
        most = min(size, math.ceil(len(self._ready) / (1 + min(turns, self.lanes - 1 - self.running))))
        while self._ready and len(group) < most:
            if group and self._ready[0].due:  # it has failed before: not behind others, which would run again with it
                break
            held = self._ready.popleft()
            _, *behind = self._lines.pop(held.line, [held])
            if held.abandoned:
                self._in_hand.forget([held])
                for later in behind:
                    self.add(later)
                continue
            self._in_hand.moved(held, lane)
            group.append(held)
            for later in behind:
                if later is not held:
                    lane.add(later)
        return group

    @property
    def keeps(self) -> bool:
        """Whether the lane that asks, which is about to take something, is to stay free for a saga (L33)."""
        return self.kept and not self._idle and not self._next_is_held

    @property
    def _next_is_held(self) -> bool:
        return bool(self._ready) and self._ready[0].work.leased is not None

    def keep(self, kept: bool) -> None:
        """Whether one lane is to stay free for a saga that is about to be taken."""
        self.kept = kept
        if not kept:
            for lane in self._idle:
                lane.wake()

    def unused(self, lanes: int) -> int:
        """How many of so many lanes with nothing to do will have none of what waits here."""
        return max(min(lanes, int(self.kept)), lanes - len(self._ready))

    def call(self) -> None:
        """Wake a lane that has nothing to do, if there is something."""
        if (self._ready or self._quarantine) and len(self._idle) > (self.kept and not self._next_is_held):
            lane = next(iter(self._idle))
            del self._idle[lane]
            lane.wake()

    def idle(self, lane: Taker) -> None:
        """This lane waits for something to do."""
        self._idle[lane] = None
        self.freed.set()

    def busy(self, lane: Taker) -> None:
        self._idle.pop(lane, None)

    # ------------------------------------------------------------------------------------------------------------ aside
    async def step_aside(self, held: InFlight, behind: Callable[[InFlight], list[InFlight]]) -> None:
        """Take what is not due from its lane, with those `behind` it that wait for it; the lane waits here while there
        is no room."""
        logged = False
        while not self._in_hand.draining and self._full:
            if not logged:
                log.warning("too many retries wait, lane waits", handler=held.work.handler.name, size=len(self._aside))
                logged = True
            self._left.clear()
            await self._left.wait()
        self._bytes += held_size(held.work.message)
        self._put_aside(held, behind(held), asyncio.get_running_loop().call_at(held.due, self._due, held))

    def _put_aside(self, held: InFlight, behind: list[InFlight], timer: asyncio.TimerHandle | None) -> None:
        line = [held, *behind, *(later := self._lines.get(held.line, []))]
        if later and later[0] in self._aside:
            self._return(later[0])
        self._aside[held], held.permitted = timer, False
        for each in line:
            each.delivery.epoch.waiting += 1
            self._in_hand.moved(each, self)
        if held.line:
            self._lines[held.line] = line

    @property
    def _full(self) -> bool:
        return len(self._aside) - len(self._quarantine) >= self._size or self._bytes >= _MOST_BYTES

    def _due(self, held: InFlight) -> None:
        if held.abandoned:
            self._dismiss(held)
            return
        self._return(held)
        if held.home is None:
            self._ready.append(held)
            self.call()
            return
        line = self._lines.pop(held.line)
        for each in line:
            self._in_hand.moved(each, held.home)
        held.home.take_back(line)

    def _return(self, held: InFlight) -> None:
        if (timer := self._aside.pop(held)) is None:
            del self._quarantine[held]
        else:
            timer.cancel()
            self._bytes -= held_size(held.work.message)
        for each in self._lines.get(held.line) or [held]:
            each.delivery.epoch.waiting -= 1
        self._left.set()

    def _dismiss(self, held: InFlight) -> None:
        """Forget one that stepped aside; what is in line behind it comes in its place."""
        self._return(held)
        self._in_hand.forget([held])
        for later in self._lines.pop(held.line, [])[1:]:
            place = self if later.home is None else later.home
            self._in_hand.moved(later, place)
            place.add(later)

    # ------------------------------------------------------------------------------------------------- quarantine (D17)
    def quarantine(self, held: InFlight, behind: Callable[[InFlight], list[InFlight]]) -> None:
        """As `step_aside`, until `let_out`. There is always room: what its source may have in hand is the bound."""
        if not self._quarantine:
            self._next_out = asyncio.get_running_loop().time() + failing.AGAIN
        self._quarantine[held] = None
        self._put_aside(held, behind(held), None)

    def quarantine_ready(self, is_kept: Callable[[InFlight], bool]) -> None:
        """What would be taken next, as far as it is to be kept."""
        while self._ready and is_kept(self._ready[0]):
            held = self._ready.popleft()
            _, *behind = self._lines.pop(held.line, [held])
            self.quarantine(held, partial(_these, behind))

    @property
    def resting(self) -> tuple[int, float | None]:
        """How many wait here for a time, those in line behind them included, and when the first of them may run."""
        if not self._aside:
            return 0, None
        lines = [self._lines.get(held.line) or [held] for held in self._aside if held.line]
        resting = dict.fromkeys(self._aside) | dict.fromkeys(each for line in lines for each in line)
        dues = [self._next_out if timer is None else held.due for held, timer in self._aside.items()]
        return len(resting), min(dues)

    @property
    def until_let_out(self) -> float | None:
        """Seconds until a lane is to look whether something may leave quarantine."""
        if not self._quarantine:
            return None
        return min(_LOOK, max(0.0, self._next_out - asyncio.get_running_loop().time()))

    def let_out(self, *, probing: bool) -> None:
        """All that is in quarantine, once its handler works again; until then the first one that has failed, in its
        time."""
        now, before = asyncio.get_running_loop().time(), self._probed
        self._probed = probing
        if not self._quarantine or (now < self._next_out if probing else not before):
            return
        self._next_out = now + failing.AGAIN
        for held in [each for each in self._quarantine if each.abandoned]:
            self._dismiss(held)
        has_failed = self._in_hand.engine.has_failed
        out = (held for held in self._quarantine if not probing or has_failed(held.work))
        for held in list(islice(out, 1 if probing else None)):
            held.permitted = probing
            self._due(held)

    def _behind(self, lane: Place, *, probing: bool) -> Iterator[InFlight]:
        """What this lane may take of those that are here for their tenant: while they are probed, what has not failed
        itself."""
        for held in self._quarantine:
            skipped = held.abandoned or (probing and self._in_hand.engine.has_failed(held.work))
            if held.home in (None, lane) and not skipped:
                yield held

    def has_behind(self, lane: Place, *, probing: bool) -> bool:
        return next(self._behind(lane, probing=probing), None) is not None

    def let_out_fresh(self, lane: Place) -> None:
        """To this lane, which begins it now: one of the tenant of which the fewest have failed."""
        engine, fresh = self._in_hand.engine, self._behind(lane, probing=True)
        if held := min(fresh, key=lambda held: engine.failed_beside(held.work), default=None):
            self._due(held)

    def let_out_behind(self, lane: Place) -> None:
        """One, behind what is ready."""
        if held := next(self._behind(lane, probing=False), None):
            held.permitted = True
            self._due(held)

    # -------------------------------------------------------------------------------------------------------------- end
    def drain(self) -> None:
        self._left.set()

    def give_back(self) -> list[InFlight]:
        """Take out what can run now, each with what is in line behind it, as far as their brokers take that back."""
        back: list[InFlight] = []
        for held in list(self._ready):
            line = self._lines.get(held.line) or [held]
            if all(each.can_go_back for each in line):
                self._ready.remove(held)
                self._lines.pop(held.line, None)
                back += line
        return back

    def clear(self) -> list[InFlight]:
        deliveries = dict.fromkeys([*self._ready, *self._aside])
        for line in self._lines.values():
            deliveries |= dict.fromkeys(line)
        for held in list(self._aside):
            self._return(held)
        self._ready.clear()
        self._lines.clear()
        return list(deliveries)


def _these(behind: list[InFlight], _: InFlight) -> list[InFlight]:
    return behind


def _has_key(line: Sequence[InFlight], held: InFlight) -> bool:
    return any(each.work.key == held.work.key for each in line)
