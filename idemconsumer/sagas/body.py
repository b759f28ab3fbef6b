"""The handler's own code of one run, between its steps: how long it may take, and how it is ended (L34, L35, L36)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from idemconsumer.errors import SagaMisused
from idemconsumer.sagas.functions import GRACE, left_behind
from idemconsumer.user_code.cancellation import leave_behind

MOST_REFUSED: Final = 100  # operations; a handler that asks for more does not stop by itself


class Body:
    """Watches the handler's task from its first moment until `close`.

    `left` is done once the task is not to be waited for any longer. `interrupt` is called with the error when the body
    is to end.
    """

    def __init__(self, handler: str, timeout: float, interrupt: Callable[[BaseException], None]) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._interrupt = interrupt
        self._task: asyncio.Task[Any] | None = None
        self._steps = 0
        self._moved = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._last: asyncio.TimerHandle | None = None
        self._refused: Counter[asyncio.Task[Any]] = Counter()
        self.left: asyncio.Future[None] = self._loop.create_future()

    def begin(self) -> None:
        """Called in the handler's task."""
        self._task = asyncio.current_task()
        self._look()

    def end_in(self, seconds: float, error: BaseException) -> None:
        """Whatever the handler does then, a step included."""
        self._last = self._loop.call_later(seconds, self.end, error)

    def step_begins(self) -> None:
        """From now on the step's own time limit counts."""
        self._steps += 1

    def step_ends(self) -> None:
        self._steps -= 1
        self._moved = self._loop.time()

    def _look(self) -> None:
        """One timer, set again when it finds that something has moved: a step costs no timer of its own."""
        if self._steps:
            self._moved = self._loop.time()
        over = self._moved + self._timeout
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
        """Interrupt the run, cancel the handler, and wait for it no longer than the grace."""
        self._interrupt(error)
        if self._grace is None and self._task is not None:
            self._task.cancel()
        self.cancelled()

    def cancelled(self) -> None:
        """The handler's task was cancelled, and its run with it: no step waits for its turn."""
        self._interrupt(asyncio.CancelledError("the run was cancelled"))
        if self._grace is None and not self.left.done():
            self._grace = self._loop.call_later(GRACE, self._leave)

    def _leave(self) -> None:
        if self._task is not None and not self._task.done() and not self.left.done():
            leave_behind(self._task)
            left_behind(self._handler)
            self.left.set_result(None)

    async def refuse(self, why: BaseException) -> None:
        """An operation is refused: let others run first. A task that goes on asking is stopped here for good, since it
        would keep the event loop for itself, and the run ends without it."""
        task = asyncio.current_task()
        assert task is not None
        self._refused[task] += 1
        await asyncio.sleep(0)
        if self._refused[task] <= MOST_REFUSED:
            return
        if task is self._task:
            self._leave()
        else:
            self.end(why)
            leave_behind(task)
        await self._loop.create_future()

    def check_loop(self) -> None:
        """Refuse an operation from another thread or event loop, where it would never be answered."""
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
