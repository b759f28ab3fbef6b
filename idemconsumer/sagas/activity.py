"""The activity of one run: its steps in flight, its waits, and the handler's own code between them.

A run ends here if only waits are left of it (L41), if the handler takes too long between its steps (L35), if it does
not end after its cancellation (L34), or if it keeps requesting operations that are refused (L36).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

from idemconsumer.errors import OfTheEngine, SagaMisused
from idemconsumer.rules import saga as rules
from idemconsumer.sagas.order import TURNS
from idemconsumer.sagas.steps import GRACE, left_behind
from idemconsumer.user_code.cancellation import leave_behind

MOST_REFUSED: Final = 100  # refused operations per task; a handler that requests more does not stop by itself
_LOOK: Final = 1.0  # seconds between two checks of a wait, while steps of other branches run


class OnlyWaits(OfTheEngine):
    """Only these waits are left of the run."""

    def __init__(self, waits: tuple[str, ...]) -> None:
        super().__init__(", ".join(waits))
        self.waits = waits


class Activity:
    """Watches the handler's task from its first moment until `close`, and the branches beside it (L13).

    `unfinished`: the requested steps, begun or not, that have not ended; `in_flight`: the steps whose function runs.
    `waits`: all waits that are not over, including those that are being checked right now; `resting`: the task of each
    wait that will be checked later. `wake` is set when a step is requested, or when none will be any more. `left` is
    done once the handler's task is no longer awaited.
    """

    def __init__(self, handler: str, timeout: float, interrupt: Callable[[BaseException], None]) -> None:
        """`timeout`: the handler's, in seconds; it also limits how long one branch waits for others. `interrupt` is
        called with the error if the handler must end."""
        self._handler = handler
        self._timeout = timeout
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self.left: asyncio.Future[None] = self._loop.create_future()
        self.unfinished: list[str] = []
        self.in_flight: dict[str, asyncio.Task[Any]] = {}
        self.waits: set[str] = set()
        self.resting: dict[str, asyncio.Task[Any] | None] = {}
        self.wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._main: asyncio.Task[Any] | None = None
        self._branches: set[asyncio.Task[Any]] = set()
        self._ends: dict[str, asyncio.Future[None]] = {}  # for each step in flight: done when it ends
        self._steps = 0
        self._moved = self._stepped = self._loop.time()  # times of the last activity, and of the last end of a step
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None
        self._refused: Counter[asyncio.Task[Any]] = Counter()

    # ----------------------------------------------------------------------------------------------------------- steps
    @property
    def in_branch(self) -> bool:
        """Whether the current task is a branch: its requests could have come at another time."""
        return asyncio.current_task() is not self._main

    def step_begins(self) -> None:
        """The current task has requested a step. From now on the step's own timeout applies."""
        self._steps += 1
        if (task := asyncio.current_task()) is not None and task is not self._main:
            self._branches.add(task)

    def step_ends(self) -> None:
        self._steps -= 1
        self._stepped = self._loop.time()
        self._moves()

    def mark(self, name: str, begun: bool) -> None:
        """List a requested step in `unfinished` only once it is `begun`: before that, the handler may drop it."""
        if begun and name not in self.unfinished:
            self.unfinished.append(name)
        elif not begun and name in self.unfinished:
            self.unfinished.remove(name)

    def takes_off(self, name: str) -> None:
        """The function of a step is about to be called."""
        task = asyncio.current_task()
        assert task is not None
        self.in_flight[name], self._ends[name] = task, self._loop.create_future()

    def lands(self, name: str) -> None:
        del self.in_flight[name]
        self._ends.pop(name).set_result(None)

    async def end_of_flight(self, names: Collection[str] | None = None) -> None:
        """Wait for the end of the steps in flight, or of those in `names`. This does not wait for their tasks, which
        may never end."""
        if ends := [end for name, end in self._ends.items() if names is None or name in names]:
            await asyncio.wait(ends)

    # ----------------------------------------------------------------------------------------------------------- waits
    def look_again(self) -> None:
        """Let every branch that waits for another one, and every resting wait, check whether it can go on."""
        self.wake.set()
        self._moves()

    def _moves(self) -> None:
        self._moved = self._loop.time()
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds that depends on other branches, `timeout` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not condition():
                    self.wake.clear()
                    await self.wake.wait()

    async def rest(self, name: str, seconds: float, stopped: Callable[[], bool]) -> None:
        """Return when the wait must be checked again: after `seconds` at the latest, or when it is `stopped`. Raises
        OnlyWaits if the run must end here."""
        again = self._loop.time() + min(seconds, _LOOK)
        self.resting[name] = asyncio.current_task()
        self._changed.set()
        try:
            while (left := again - self._loop.time()) > 0 and not stopped():
                if not (stay := self._stays()):
                    for _ in range(TURNS):  # after a stall, tasks may not have seen yet what is over
                        await asyncio.sleep(0)
                    if not self._stays() and not stopped():
                        raise OnlyWaits(tuple(self.waits))
                    continue
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, stay)):
                        await self._changed.wait()
        finally:
            del self.resting[name]

    def _stays(self) -> float:
        """For how many seconds this run goes on although some of its waits are not over."""
        self._branches = {task for task in self._branches if not task.done()}
        resting = set(self.resting.values())
        return rules.stays(
            steps=bool(self.in_flight),
            branches=len(self.unfinished) > len(self.resting) or not self._branches <= resting,
            main=self._main not in resting,
            quiet=self._loop.time() - self._moved,
            patience=self._timeout,
        )

    # ------------------------------------------------------------------------------------------------ the handler's end
    def begin(self) -> None:
        """Must be called in the handler's task."""
        self._main = asyncio.current_task()
        self._look()

    def end_in(self, seconds: float, error: BaseException) -> None:
        """End the run after so many seconds, whatever the handler does then, even within a step."""
        self._last = self._loop.call_later(seconds, self.end, error)

    def _look(self) -> None:
        """The timer of L35. If a step has ended meanwhile it restarts itself, so a step needs no timer of its own."""
        if self._steps:
            self._stepped = self._loop.time()
        over = self._stepped + self._timeout
        if over > self._loop.time():
            self._timer = self._loop.call_at(over, self._look)
            return
        self._timer = None
        self.end(
            TimeoutError(
                f"the handler did not reach its next step or its end within {self._timeout:g} s; move slow work into "
                "a step, or raise `timeout`"
            )
        )

    def end(self, error: BaseException) -> None:
        """Interrupt the run, cancel the handler, and wait for it no longer than GRACE."""
        self._interrupt(error)
        if self._grace is None and self._main is not None:
            self._main.cancel()
        self.cancelled()

    def cancelled(self) -> None:
        """The handler's task, and with it its run, was cancelled: no step waits for its turn any more."""
        self._interrupt(asyncio.CancelledError("the run was cancelled"))
        if self._grace is None and not self.left.done():
            self._grace = self._loop.call_later(GRACE, self._leave)

    def _leave(self) -> None:
        if self._main is not None and not self._main.done() and not self.left.done():
            leave_behind(self._main)
            left_behind(self._handler)
            self.left.set_result(None)

    async def refuse(self, why: BaseException) -> None:
        """Refuse an operation: let other tasks run first. A task that keeps requesting is suspended here for good,
        since it would block the event loop, and the run ends without it."""
        task = asyncio.current_task()
        assert task is not None
        self._refused[task] += 1
        await asyncio.sleep(0)
        if self._refused[task] <= MOST_REFUSED:
            return
        if task is self._main:
            self._leave()
        else:
            self.end(why)
            leave_behind(task)
        await self._loop.create_future()

    def check_loop(self) -> None:
        """Refuse an operation from another thread or event loop: it would never get an answer there."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise SagaMisused(
                "saga was used outside its handler's thread or event loop; use it in the handler, and pass a thread "
                "plain values, or have it call asyncio.run_coroutine_threadsafe with the handler's loop"
            )

    def close(self) -> None:
        for timer in (self._timer, self._grace, self._last):
            if timer is not None:
                timer.cancel()
