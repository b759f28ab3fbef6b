"""What a store could not do when it was asked to, and still has to: it is tried again until it is done (H23)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from idemconsumer.errors import ConfigurationError, Interrupted, Unavailable
from idemconsumer.logs import log
from idemconsumer.user_code.cancellation import being_cancelled, end

PASSING: Final = (Unavailable, Interrupted, ConfigurationError)
"""What another attempt may not meet: somebody has the lock, or has to mend what the database says of itself (R22)."""
_PAUSE: Final = 0.5  # seconds
_LAST: Final = 2.0  # seconds, when the process ends


class Unfinished:
    """One act for each key, which can be repeated; a later one takes the place of an earlier one."""

    def __init__(self) -> None:
        self._acts: dict[bytes, Callable[[], Awaitable[Any]]] = {}
        self._trying: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not self._acts

    def add(self, key: bytes, act: Callable[[], Awaitable[Any]]) -> None:
        self._acts[key] = act
        if self._trying is None:
            self._trying = asyncio.create_task(self._run())

    def drop(self, key: bytes) -> None:
        """It is done, or is not to be done any more."""
        self._acts.pop(key, None)

    async def close(self) -> None:
        """Try each once more. What is left then ends with the lease."""
        if self._trying is not None:
            await end(self._trying)
        try:
            async with asyncio.timeout(_LAST):
                await self._try()
        except TimeoutError:
            pass
        if self._acts:
            log.warning("requests left behind, which are over with their lease", requests=len(self._acts))

    async def _run(self) -> None:
        try:
            while self._acts and not being_cancelled():  # an act may swallow the cancellation
                await asyncio.sleep(_PAUSE)
                await self._try()
        finally:
            self._trying = None

    async def _try(self) -> None:
        for key, act in list(self._acts.items()):
            if self._acts.get(key) is not act:  # dropped, or replaced, while others were tried
                continue
            try:
                await act()
            except PASSING:
                continue
            except Exception as error:  # noqa: BLE001 - it would fail each time, and keep the others waiting
                log.error("a request cannot be ended, and is over with its lease", error=type(error).__name__)
            if self._acts.get(key) is act:
                del self._acts[key]
