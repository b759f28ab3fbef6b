"""Background work: an action that is repeated, and whose failures do not end the repetition. Also: waiting for the end
of a thread."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from idemconsumer.rules.session_pause import SOON
from idemconsumer.user_code.cancellation import being_cancelled, end, ends_this_task

_GLANCE: Final = 0.005  # seconds


@dataclass(eq=False)
class Duty:
    """Repeats `act` until no work is left, or until it is stopped, closed or cancelled.

    `act` returns the seconds until it is due again. If it returns None, it is due after `every`; without `every`, no
    work is left. It is first due `first` seconds after the start, and at once whenever it is woken.

    With `failed`, an exception of `act` does not end the duty. The pause is then `again(failures in a row)`, or
    `every`, and `wake` does not shorten it. `failed` is called with the first error of a row, and `works` when `act`
    works again. Errors that are `quiet` are not reported, since another place reports them, and after them the pause is
    two seconds at most, so that recovery is noticed soon (D27). An `act` that returns counts as working. With
    `proves=False` it does not: then `act` calls `worked` itself. `spread`: pauses are up to a quarter shorter, so that
    many processes do not act at the same time.

    A cancellation that `act` swallows ends the duty as well. So `act` must not use a TaskGroup of its own: before
    Python 3.13, a TaskGroup that fails leaves its task looking as if it were being cancelled.
    """

    act: Callable[[], Awaitable[float | None]]
    every: float | None = None
    _: KW_ONLY
    first: float = 0.0
    spread: bool = False
    again: Callable[[int], float] | None = None
    failed: Callable[[BaseException], object] | None = None
    works: Callable[[], object] = lambda: None
    quiet: Callable[[BaseException], bool] = lambda _: False
    proves: bool = True
    _failures: int = field(default=0, init=False)  # in a row, as are the quiet ones
    _quiet_failures: int = field(default=0, init=False)
    stopped: bool = field(default=False, init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def wake(self) -> None:
        """Make it due at once: there is work."""
        self._woken.set()

    def stop(self) -> None:
        """Let `run` return after one more `act`; at once if `act` is failing with errors that are not `quiet`."""
        self.stopped = True
        self._woken.set()

    def worked(self) -> None:
        """Report success from inside `act`, which goes on."""
        failed, self._failures, self._quiet_failures = self._failures > 0, 0, 0
        if failed:
            self.works()

    def start(self, context: Context | None = None) -> None:
        """Run in a task of its own, unless it runs already."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.run(), context=context)

    async def finish(self) -> None:
        """Stop it, and wait for its end."""
        self.stop()
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Cancel it, and wait for its end. It can be started again."""
        if self._task is not None:
            await end(self._task)

    async def run(self) -> None:
        pause: float | None = self.first
        while pause is not None and not being_cancelled():  # `act` may swallow a cancellation
            await self._rest(pause)
            last = self.stopped
            if last and self._failures:
                return
            self._woken.clear()  # cleared before `act`, which may miss work that arrives from now on
            pause = await self._do()
            if last:
                return

    async def _do(self) -> float | None:
        try:
            pause = await self.act()
        except BaseException as error:
            if self.failed is None or ends_this_task(error):
                raise
            if self.quiet(error):
                self._quiet_failures += 1
                return self._after(self._quiet_failures, SOON)
            self._failures += 1
            if self._failures == 1:
                self.failed(error)
            return self._after(self._failures)
        self._quiet_failures = 0
        if self.proves:
            self.worked()
        if pause is None and self.every is not None:
            return self._after(self._failures) if self._failures else self.every
        return pause

    def _after(self, failures: int, most: float = float("inf")) -> float | None:
        return self.every if self.again is None else min(most, self.again(failures))

    @property
    def _fails(self) -> bool:
        return self._failures + self._quiet_failures > 0

    async def _rest(self, seconds: float) -> None:
        if self.spread:
            seconds *= 1 - random.random() / 4
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.stopped:
                    await self._woken.wait()
                    if not self._fails:
                        return
                    self._woken.clear()


async def within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for the event, `seconds` at most. Returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def joined(thread: threading.Thread, seconds: float) -> None:
    """Wait for the end of a thread, `seconds` at most. This polls instead of joining in another thread: a process that
    is about to end, such as one whose loop runs beside its main thread, cannot start threads any more (H50)."""
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        await asyncio.sleep(_GLANCE)
