"""What many callers share, opened by the first that needs it, and closed once (O36)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from idemconsumer.errors import Unavailable


class Opening:
    """One at a time opens what is shared. What is opened behind `close`, or beside it, nobody would close."""

    def __init__(self, error: type[Unavailable]) -> None:
        self._error = error
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Timeout | None = None
        self._closed = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises `error` if it was closed before, or is closed meanwhile: the block is cancelled then."""
        async with self._lock:
            self._refuse()
            try:
                async with asyncio.timeout(None) as self._under_way:
                    yield
            except TimeoutError:
                self._refuse()
                raise
            finally:
                self._under_way = None
            self._refuse()  # a client may swallow a cancellation

    async def close(self) -> None:
        """Returns once nothing is being opened any more: what is there now is all there will be."""
        if self._under_way is not None and not self._closed:
            self._under_way.reschedule(asyncio.get_running_loop().time())
        self._closed = True
        async with self._lock:
            pass

    def _refuse(self) -> None:
        if self._closed:
            raise self._error(
                "`close` came before this call had begun, so nothing was done; call it before `close`, or again "
                "after it"
            )
