"""Connections to Postgres for what callers from code send: a few for any number of them (L57)."""

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
    """At most `MOST` at a time, and callers beyond that wait. A connection goes from one caller to the next, and is
    closed when nobody waits for it: none is idle, so none has to be closed by the user, or is stale."""

    def __init__(self, connect: Callable[[], Awaitable[C]]) -> None:
        self._connect = connect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(MOST)
        self._wanted = 0  # by callers that wait, or have one
        self._free: list[C] = []

    @asynccontextmanager
    async def one(self) -> AsyncIterator[C]:
        """Closed if the block raises: nobody knows what state it is in. Raises what connecting raises."""
        if (loop := asyncio.get_running_loop()) is not self._loop:  # each call may have a loop of its own
            self._loop, self._turns, self._wanted, self._free = loop, asyncio.Semaphore(MOST), 0, []
        self._wanted += 1
        try:
            async with self._turns:
                connection = self._free.pop() if self._free else await self._connect()
                try:
                    yield connection
                except BaseException:
                    await connection.close()
                    raise
                self._free.append(connection)
        finally:
            self._wanted -= 1
            while len(self._free) > self._wanted:
                await self._free.pop().close()
