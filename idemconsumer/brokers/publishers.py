"""Connections to Postgres for what callers from code send, or a relay: a few for any number of them (L57, X6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

MOST: Final = 4  # of a process, for one kind of calls


class _Closable(Protocol):
    async def close(self) -> Any: ...


C = TypeVar("C", bound=_Closable)


class Publishers(Generic[C]):
    """At most so many at a time, and callers beyond that wait, each for its turn. A connection goes from one caller to
    the next, and is closed when nobody waits for it: none is idle, so none has to be closed by the user, or is stale.
    With `idle` it is kept for so many seconds, until `close_idle` is called."""

    def __init__(self, connect: Callable[[], Awaitable[C]], most: int = MOST, idle: float = 0.0) -> None:
        self._connect = connect
        self._most = most
        self._idle = idle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(most)
        self._wanted = 0  # by callers that wait, or have one
        self._free: list[tuple[float, C]] = []  # since when, oldest first

    @asynccontextmanager
    async def one(self) -> AsyncIterator[C]:
        """Closed if the block raises: nobody knows what state it is in. Raises what connecting raises."""
        if (loop := asyncio.get_running_loop()) is not self._loop:  # each call may have a loop of its own
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
        """Close those for which nobody waits, and that nobody has used for that time."""
        until = asyncio.get_running_loop().time() - (self._idle if idle is None else idle)
        wanted = 0 if self._idle else self._wanted  # what was kept may be stale, whoever comes
        while len(self._free) > wanted and self._free[0][0] <= until:
            await self._free.pop(0)[1].close()
