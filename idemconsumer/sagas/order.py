"""In which order the branches of a run get what has finished: by position, in the first run as in every replay (L72).

What a branch does next may depend on what others have done before it. So a step that has finished is given to its
branch only after all that finished before it, and what each of them leads to comes first, by a few turns of the loop.
A write whose answer is still out may have an earlier position, and is waited for.
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

TURNS: Final = 10  # from the end of a step to who waits for the first of several tasks, two levels up
_LOOK: Final = 0.005  # seconds, while a step is being cancelled


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
    """Of the finished steps of one run that its branches have not got yet. What had no other step beside it waits for
    those that had: the rest of its task has been given out before."""

    def __init__(self, rows: Iterable[StepRow], timeout: float) -> None:
        """`rows`: those recorded before this run, each of which the handler is to ask for. `timeout`: how long one of
        them is waited for, in seconds. `ending`: whether steps that were cancelled have not ended. `replayed` is called
        once all of `rows` have been given out."""
        self.ending: Callable[[], bool] = lambda: False
        self.replayed: Callable[[], None] = lambda: None
        self._timeout = timeout
        self._left = {row.name: (row.position, row.overlapped) for row in rows if row.position is not None}
        self.given = 0  # steps that were given out
        self._recorded = set(self._left)
        self.replaying = bool(self._recorded)  # something of `rows` has not been given out, with what it leads to
        self._heaps: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for name, (position, overlapped) in self._left.items():
            self._heaps[overlapped].append((position, name))
        for heap in self._heaps.values():
            heapify(heap)
        self._sent: dict[str, int] = {}  # writes without an answer
        self._numbers = count(1)
        self._behind: dict[str, int] = {}  # the last of the writes that may have an earlier position
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._queue: list[tuple[int, str]] = []  # of these, with some that wait no more
        self._pausing = self._closed = False
        self._resting: asyncio.Handle | None = None
        self._turns = 0  # to go in this pause
        self._loop = asyncio.get_running_loop()
        # What asyncio's loop runs next. If it is empty, what was given out has led as far as it goes without waiting.
        # Other loops do not tell, and make all the turns.
        self._ready: Sized = getattr(self._loop, "_ready", (None,))

    def finished(self, name: str) -> bool:
        """Whether it waits for its turn."""
        return name in self._left

    def unanswered(self, name: str) -> bool:
        """Whether a write that may have finished it was cut off."""
        return name in self._sent

    def sending(self, spec: StepSpec) -> Sending:
        """Around a write that may finish this step. Inside, `position` is set to that of the step, if it has. If the
        write is cancelled, it is to be asked for, by `found`."""
        self._sent[spec.name] = next(self._numbers)
        return Sending(self, spec)

    def found(self, spec: StepSpec, position: int | None) -> None:
        """The position of this step, or None, if it has not finished."""
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
        """Give out this step, if it is its turn or it has been given out already."""
        if name in self._left:
            if not self._closed and (self._pausing or self._missing(name) is not None):
                return False
            self._given(name)
        return True

    async def turn(self, name: str, last: Callable[[], Awaitable[None]] | None = None) -> str | None:
        """Return when all that finished before this step has been given out. The name of a recorded one that has not
        been in time, if there is one; the step is given out all the same. `last` is awaited when its turn has come:
        what finishes meanwhile comes after it. If it is cancelled, the step has not been given out."""
        if name not in self._left or ((last is None or self._closed) and self.gives(name)):
            return None
        waiting = self._waiting[name] = self._loop.create_future()
        heappush(self._queue, (self._left[name][0], name))
        self._give()
        timer = self._loop.call_later(self._timeout, _wake, waiting)
        try:
            await waiting
            while (missing := self._missing(name)) in self._sent and not self._closed:  # each write is answered
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
        """The run is interrupted: nobody waits any longer."""
        self._closed = True
        for waiting in self._waiting.values():
            _wake(waiting)

    def _missing(self, name: str) -> str | None:
        """What has to be given out before this step."""
        if not self._sent and len(self._left) == 1:  # as in a handler without branches
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
        if (heap := self._heaps[overlapped])[0][1] == name:  # else it is passed over later
            heappop(heap)
        if self._pausing:
            return
        if overlapped:
            self._pausing, self._turns = True, TURNS
            self._loop.call_soon(self._pause)
        elif self._queue or self.replaying:
            self._go_on()

    def ended(self) -> None:
        """A step that was cancelled has: what waited for it, such as a TaskGroup, goes on now."""
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
            self._resting = self._loop.call_later(_LOOK, self._pause)  # a wait's own timeout withdraws it
        else:
            self._pausing = False
            self._go_on()

    def _go_on(self) -> None:
        self._give()
        if self.replaying and not self._recorded:
            self.replaying = False
            self.replayed()

    def _give(self) -> None:
        """Give out the first of those that are waited for, if it is its turn."""
        while self._queue and self._queue[0][1] not in self._waiting:
            heappop(self._queue)
        if self._queue and not self._pausing:
            first = self._queue[0][1]
            if not self._waiting[first].done() and self._missing(first) is None:
                self._waiting[first].set_result(None)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
