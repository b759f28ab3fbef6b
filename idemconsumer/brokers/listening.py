"""Receives the notifications that a process waits for, all on one connection to Postgres (L62)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import psycopg

from idemconsumer.duty import Duty
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.session_pause import session_pause

Connection = psycopg.AsyncConnection[Any]

PROBE: Final = 30.0  # seconds without a notification after which the connection is probed with a query
_CHANNEL: Final = "idemconsumer_queue"


class Listening:
    """Calls `heard` with the payload of each notification, and `missed` when some may have been lost.

    A connection that is lost or does not answer is replaced by a new one from `connect`. Only how soon a change is
    noticed depends on the connection, so losing it ends no session.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], heard: Callable[[str], None], missed: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._heard = heard
        self._missed = missed
        self._connection: Connection | None = None
        self._duty = Duty(self._listen, 0.0)

    async def start(self) -> None:
        """Raises ConfigurationError. Starts in an outage too: until it has a connection, the sessions poll."""
        with contextlib.suppress(BrokerUnavailable, psycopg.Error):
            await self._begin()
        self._duty.start()

    async def close(self) -> None:
        await self._duty.close()
        await self._leave()

    async def _begin(self) -> None:
        connection = await self._connect()
        try:
            await connection.execute(f"listen {_CHANNEL}".encode())
        except BaseException:
            await _closed(connection)
            raise
        self._connection = connection

    async def _listen(self) -> None:
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
        await Duty(self._begin, first=_pause(0), spread=True, again=_pause, failed=lambda _: None).run()
        if self._connection is None:  # the duty swallowed a cancellation while it connected
            return
        log.info("postgres: notifications received again")
        self._missed()

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _closed(connection)


def _pause(failures: int) -> float:
    return session_pause(failures + 1, counted=False, jitter=0.0)


async def _closed(connection: Connection) -> None:
    with contextlib.suppress(psycopg.Error, TimeoutError):
        async with asyncio.timeout(2):
            await connection.close()
