"""Something that many callers share: the first caller that needs it opens it, and it is closed once (O36)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from idemconsumer.errors import Unavailable


class Opening:
    """Lets one caller at a time open the shared thing, and none after `close`: nothing would close it again."""

    def __init__(self, error: type[Unavailable]) -> None:
        self._error = error
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Timeout | None = None
        self._closed = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold the turn to open. Raises `error` if `close` came before. If `close` comes meanwhile, the block is
        cancelled and this raises `error`."""
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
        """Returns once no caller is opening anything; later ones are refused, so the set of opened things is final."""
        if self._under_way is not None and not self._closed:
            self._under_way.reschedule(asyncio.get_running_loop().time())
        self._closed = True
        async with self._lock:
            pass

    def _refuse(self) -> None:
        if self._closed:
            raise self._error(
                "`close` was called before this call had begun, so nothing was done; call it before `close`, or again "
                "after it"
            )
