"""What goes on in the background: something that is done again and again, and whose failures end nothing; and how the
end of a thread is waited for."""

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
    """Does `act` until nothing is left to do, or it is stopped, closed or cancelled.

    `act` returns in how many seconds it is due again. Where it returns None that is after `every`; without `every`
    nothing is left. It is due `first` seconds after the start, and as soon as it is woken.

    With `failed` an error ends nothing. It is tried `again` after so many failures in a row, else after `every`, and a
    `wake` is no reason to try sooner. `failed` is told of the first one in a row, and `works` once it is over. Of
    `quiet` ones nothing is told, since others say them, and what works again is found within two seconds (D27). What
    returns has worked, unless a return does not `prove` that: then `act` calls `worked`. `spread`: pauses are up to a
    quarter shorter, so that many processes do not come at the same time.

    A cancellation that `act` swallows ends it. So `act` has no TaskGroup of its own: before Python 3.13 one that fails
    leaves its task as if it were being cancelled.
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
    _failures: int = field(default=0, init=False)  # in a row, as those that are quiet
    _quiet_failures: int = field(default=0, init=False)
    stopped: bool = field(default=False, init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()

    def stop(self) -> None:
        """`run` returns after one more time, or at once while it fails in a way that is not `quiet`."""
        self.stopped = True
        self._woken.set()

    def worked(self) -> None:
        """It does, though it goes on."""
        failed, self._failures, self._quiet_failures = self._failures > 0, 0, 0
        if failed:
            self.works()

    def start(self, context: Context | None = None) -> None:
        """Run in a task of its own, unless it does."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.run(), context=context)

    async def finish(self) -> None:
        """Stop it, and wait for its end."""
        self.stop()
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Cut it off. It may be started again."""
        if self._task is not None:
            await end(self._task)

    async def run(self) -> None:
        pause: float | None = self.first
        while pause is not None and not being_cancelled():  # what it does may swallow a cancellation
            await self._rest(pause)
            last = self.stopped
            if last and self._failures:
                return
            self._woken.clear()  # before: what comes from now on may not be seen by it
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
    """Wait for so long at most. Whether it was set by then."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def joined(thread: threading.Thread, seconds: float) -> None:
    """Wait for its end, for so long at most. Not in a thread of its own: a process that is about to end, as one whose
    loop is beside its main thread does, gets none any more (H50)."""
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        await asyncio.sleep(_GLANCE)
