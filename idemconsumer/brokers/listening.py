"""What a process hears from Postgres, on one connection for all that it waits for there (L62)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final

import psycopg

from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.session_pause import session_pause
from idemconsumer.user_code.cancellation import end

Connection = psycopg.AsyncConnection[Any]

PROBE: Final = 30.0  # seconds without a notice after which the connection has to answer
_CHANNEL: Final = "idemconsumer_queue"


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
        """Raises ConfigurationError. An outage is no reason not to begin: what arrives is looked for meanwhile."""
        with contextlib.suppress(BrokerUnavailable, psycopg.Error):
            await self._begin()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            await end(self._task)
        await self._leave()

    async def _begin(self) -> None:
        connection = await self._connect()
        try:
            await connection.execute(f"listen {_CHANNEL}".encode())
        except BaseException:
            await _closed(connection)
            raise
        self._connection = connection

    async def _run(self) -> None:
        while True:
            try:
                if self._connection is None:
                    raise psycopg.OperationalError("no connection to listen on")
                while True:
                    async for notice in self._connection.notifies(timeout=PROBE):
                        self._heard(notice.payload)
                    await self._connection.execute(b"select 1")
            except psycopg.Error as error:
                log.info("postgres: notifications lost, polling instead", error=error_text(error))
            await self._leave()
            for failures in count(1):
                await asyncio.sleep(session_pause(failures, counted=False, jitter=random.random()))
                with contextlib.suppress(BrokerUnavailable, ConfigurationError, psycopg.Error):
                    await self._begin()
                    break
            log.info("postgres: notifications received again")
            self._missed()

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _closed(connection)


async def _closed(connection: Connection) -> None:
    with contextlib.suppress(psycopg.Error, TimeoutError):
        async with asyncio.timeout(2):
            await connection.close()
