"""The order in which the branches of a run get the outputs of finished steps: by position, in the first run as in every
replay (L72).

The next request of a branch may depend on what other branches have done before. So a finished step is handed out to its
branch only after all steps that finished before it, and the consequences of each come first, by a few turns of the
event loop. A write whose answer is outstanding may have an earlier position, so its answer is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sized
from heapq import heapify, heappop, heappush
from itertools import count
from types import TracebackType
from typing import Final, Self

from idemconsumer.rules.values import StepRow
from idemconsumer.sagas.step import StepSpec

TURNS: Final = 10  # turns of the loop, from a step's end to code that awaits the first of several tasks, two levels up
_LOOK: Final = 0.005  # seconds between two checks, while a step is being cancelled


class Sending:
    """See `Order.sending`."""

    __slots__ = ("_order", "_spec", "position")

    def __init__(self, order: Order, spec: StepSpec) -> None:
        self._order = order
        self._spec = spec
        self.position: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is None:
            self._order.found(self._spec, self.position)
        elif not isinstance(error, asyncio.CancelledError):
            self._order.found(self._spec, None)


class Order:
    """The finished steps of one run that have not been handed out to its branches yet. A step that overlapped no
    other one waits only for earlier steps that did overlap: the other steps of its own task have been handed out
    before it."""

    def __init__(self, rows: Iterable[StepRow], timeout: float) -> None:
        """`rows`: the steps recorded before this run, all of which the handler is expected to request. `timeout`: how
        many seconds to wait for one of them. `ending`: whether a cancelled step has not ended yet. `replayed` is called
        once all of `rows` have been handed out."""
        self.ending: Callable[[], bool] = lambda: False
        self.replayed: Callable[[], None] = lambda: None
        self._timeout = timeout
        self._left = {row.name: (row.position, row.overlapped) for row in rows if row.position is not None}
        self.given = 0  # steps handed out so far
        self._recorded = set(self._left)
        self.replaying = bool(self._recorded)  # some of `rows`, with its consequences, has not been handed out
        self._heaps: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for name, (position, overlapped) in self._left.items():
            self._heaps[overlapped].append((position, name))
        for heap in self._heaps.values():
            heapify(heap)
        self._sent: dict[str, int] = {}  # writes whose answer is outstanding
        self._numbers = count(1)
        self._behind: dict[str, int] = {}  # the number of the last write that may have an earlier position
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._queue: list[tuple[int, str]] = []  # the waiting steps by position; some entries no longer wait
        self._pausing = self._closed = False
        self._resting: asyncio.Handle | None = None
        self._turns = 0  # turns left in this pause
        self._loop = asyncio.get_running_loop()
        # The callbacks that asyncio's loop runs next. If there are none, the consequences of the last step have gone as
        # far as they go without waiting. Other loops do not expose them, and take all the turns.
        self._ready: Sized = getattr(self._loop, "_ready", (None,))

    def finished(self, name: str) -> bool:
        """Whether this step has finished and waits for its turn."""
        return name in self._left

    def unanswered(self, name: str) -> bool:
        """Whether a write was cut off that may have finished this step."""
        return name in self._sent

    def sending(self, spec: StepSpec) -> Sending:
        """A context for a write that may finish this step. The block sets `position` if the step has finished. If the
        write is cancelled, its outcome must be queried and reported by `found`."""
        self._sent[spec.name] = next(self._numbers)
        return Sending(self, spec)

    def found(self, spec: StepSpec, position: int | None) -> None:
        """The position of this step; None if it has not finished."""
        name = spec.name
        del self._sent[name]
        if position is not None:
            self._left[name] = position, spec.overlapped
            heappush(self._heaps[spec.overlapped], (position, name))
            if self._sent:
                self._behind[name] = next(self._numbers)
        if self._queue:
            self._give()

    def gives(self, name: str) -> bool:
        """Hand out this step if it is its turn. Returns whether it has been handed out, now or before."""
        if name in self._left:
            if not self._closed and (self._pausing or self._missing(name) is not None):
                return False
            self._given(name)
        return True

    async def turn(self, name: str, last: Callable[[], Awaitable[None]] | None = None) -> str | None:
        """Return when all steps that finished before this one have been handed out. If a recorded step was not
        requested in time, its name is returned; this step is handed out all the same. `last` is awaited when the turn
        has come: steps that finish meanwhile come after this one. If `last` is cancelled, this step has not been handed
        out."""
        if name not in self._left or ((last is None or self._closed) and self.gives(name)):
            return None
        waiting = self._waiting[name] = self._loop.create_future()
        heappush(self._queue, (self._left[name][0], name))
        self._give()
        timer = self._loop.call_later(self._timeout, _wake, waiting)
        try:
            await waiting
            while (missing := self._missing(name)) in self._sent and not self._closed:  # every write gets an answer
                waiting = self._waiting[name] = self._loop.create_future()
                await waiting
            if last is not None:
                await last()
        finally:
            timer.cancel()
            del self._waiting[name]
        self._given(name)
        return None if missing in self._sent or self._closed else missing

    def close(self) -> None:
        """The run is interrupted: no step waits any longer."""
        self._closed = True
        for waiting in self._waiting.values():
            _wake(waiting)

    def _missing(self, name: str) -> str | None:
        """A step that must be handed out before this one, if any."""
        if not self._sent and len(self._left) == 1:  # the usual case of a handler without branches
            return None
        position, overlapped = self._left[name]
        oldest = next(iter(self._sent), None)
        if oldest is not None and self._sent[oldest] < self._behind.get(name, 0):
            return oldest
        firsts = [self._first(True), self._first(False) if overlapped else None]
        before = [first for first in firsts if first is not None and first[0] < position]
        return min(before)[1] if before else None

    def _first(self, overlapped: bool) -> tuple[int, str] | None:
        heap = self._heaps[overlapped]
        while heap and heap[0][1] not in self._left:
            heappop(heap)
        return heap[0] if heap else None

    def _given(self, name: str) -> None:
        self.given += 1
        _, overlapped = self._left.pop(name)
        self._behind.pop(name, None)
        self._recorded.discard(name)
        if (heap := self._heaps[overlapped])[0][1] == name:  # otherwise `_first` drops the entry later
            heappop(heap)
        if self._pausing:
            return
        if overlapped:
            self._pausing, self._turns = True, TURNS
            self._loop.call_soon(self._pause)
        elif self._queue or self.replaying:
            self._go_on()

    def ended(self) -> None:
        """A cancelled step has ended: code that waited for it, such as a TaskGroup, goes on now."""
        self._turns = TURNS
        if self._resting is not None:
            self._resting.cancel()
            self._resting = self._loop.call_soon(self._pause)

    def _pause(self) -> None:
        self._resting = None
        if self._turns and self._ready:
            self._turns -= 1
            self._loop.call_soon(self._pause)
        elif not self._closed and self.ending():
            self._resting = self._loop.call_later(_LOOK, self._pause)  # a wait's own timeout withdraws its cancellation
        else:
            self._pausing = False
            self._go_on()

    def _go_on(self) -> None:
        self._give()
        if self.replaying and not self._recorded:
            self.replaying = False
            self.replayed()

    def _give(self) -> None:
        """Let the first waiting step go on, if it is its turn."""
        while self._queue and self._queue[0][1] not in self._waiting:
            heappop(self._queue)
        if self._queue and not self._pausing:
            first = self._queue[0][1]
            if not self._waiting[first].done() and self._missing(first) is None:
                self._waiting[first].set_result(None)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
