"""What a process hears from Postgres, on one connection for all that it waits for there (L62)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.user_code.cancellation import end

Connection = psycopg.AsyncConnection[Any]

PROBE: Final = 30.0  # seconds without a notice after which the connection has to answer
_CHANNEL: Final = "idemconsumer_queue"
_SOONEST: Final = 0.2  # seconds between two tries to replace a lost connection, doubling
_LATEST: Final = 5.0


class Listening:
    """`heard` is called with the payload of each notice, and `missed` when some may have been missed.

    A connection that was lost, or that says nothing, is replaced by what `connect` returns. Nothing depends on it but
    how soon something is noticed, so it ends no session.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], heard: Callable[[str], None], missed: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._heard = heard
        self._missed = missed
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises what the first connecting raises."""
        self._connection = await self._begin()
        self._task = asyncio.create_task(self._run(self._connection))

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        await self._leave()

    async def _begin(self) -> Connection:
        connection = self._connection = await self._connect()
        await connection.execute(f"listen {_CHANNEL}".encode())
        return connection

    async def _run(self, connection: Connection) -> None:
        pause = _SOONEST
        while True:
            try:
                while True:
                    async for notice in connection.notifies(timeout=PROBE):
                        self._heard(notice.payload)
                    await connection.execute(b"select 1")
            except psycopg.Error as error:
                log.info("postgres: no longer told of what arrives, looking for it instead", error=error_text(error))
            while True:
                await self._leave()
                await asyncio.sleep(pause)
                with contextlib.suppress(BrokerUnavailable, ConfigurationError, psycopg.Error):
                    connection = await self._begin()
                    break
                pause = min(2 * pause, _LATEST)
            pause = _SOONEST
            log.info("postgres: told of what arrives again")
            self._missed()

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(2):
                    await connection.close()
