"""Whose turn it is while all messages of a handler fail (D17): one's at a time, unless what runs hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from idemconsumer.rules import breaker as failing


class Probe:
    """Of one handler."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """Call what it gives when the message begins: if that hangs, the turn passes on meanwhile."""
        await self._lock.acquire()
        timer: asyncio.TimerHandle | None = None
        passed = False

        def begun() -> None:
            nonlocal timer
            timer = asyncio.get_running_loop().call_later(failing.HANGS, pass_on)

        def pass_on() -> None:
            nonlocal passed
            passed = True
            self._lock.release()

        try:
            yield begun
        finally:
            if timer is not None:
                timer.cancel()
            if not passed:
                self._lock.release()
