"""A small pool of Postgres connections for publishing from code and for relays, shared by any number of callers (L57,
X6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

MOST: Final = 4  # connections of a process for one kind of call


class _Closable(Protocol):
    async def close(self) -> Any: ...


C = TypeVar("C", bound=_Closable)


class Publishers(Generic[C]):
    """At most `most` connections at a time; further callers wait in order.

    A connection passes from one caller to the next and is closed when no caller waits: no connection is ever idle, so
    the user has none to close and none is stale. With `idle`, a connection is kept for that many seconds, until
    `close_idle` is called.
    """

    def __init__(self, connect: Callable[[], Awaitable[C]], most: int = MOST, idle: float = 0.0) -> None:
        self._connect = connect
        self._most = most
        self._idle = idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(most)
        self._wanted = 0  # number of callers that wait for a connection or have one
        self._free: list[tuple[float, C]] = []  # each with the time since when it is free, oldest first

    @asynccontextmanager
    async def one(self) -> AsyncIterator[C]:
        """Check out a connection. It is closed if the block raises, since its state is unknown. Raises what connecting
        raises."""
        if (loop := asyncio.get_running_loop()) is not self._loop:  # each call may run in an event loop of its own
            self._loop, self._turns, self._wanted, self._free = loop, asyncio.Semaphore(self._most), 0, []
        self._wanted += 1
        try:
            async with self._turns:
                connection = self._free.pop()[1] if self._free else await self._connect()
                try:
                    yield connection
                except BaseException:
                    await connection.close()
                    raise
                self._free.append((loop.time(), connection))
        finally:
            self._wanted -= 1
            await self.close_idle()

    async def close_idle(self, idle: float | None = None) -> None:
        """Close the connections that no caller waits for and that have been unused for `idle` seconds."""
        until = asyncio.get_running_loop().time() - (self._idle if idle is None else idle)
        wanted = 0 if self._idle else self._wanted  # a kept connection may be stale: close it even if callers wait
        while len(self._free) > wanted and self._free[0][0] <= until:
            await self._free.pop(0)[1].close()
