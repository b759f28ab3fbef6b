"""Connections that the relays of a scheme share: a few, however many destinations it has (X6)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg

from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import misconfigured

MOST: Final = 8
_IDLE: Final = 5.0  # seconds for which an unused connection is kept
# enable_seqscan: a plan that was cached while the outbox was empty must not scan it when it is full (G5).
_SETTINGS: Final = {"enable_seqscan": "off", "statement_timeout": "20s", "lock_timeout": "5s"}
# SQLSTATEs that the lanes of handlers log: out of resources, ended or cancelled by the server, connection broken,
# waited for a lock.
_OUTAGES: Final = ("08", "25P03", "40", "53", "55P03", "57", "58")

Connection = AnsweringConnection[Any]


class Connections:
    """At most `MOST` connections, opened when needed. Callers that wait for one are served in order."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema
        self._few = Publishers(self._connect, MOST, _IDLE)
        self.close_idle = self._few.close_idle

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Connection]:
        """A connection for the caller alone. It is closed after an error.

        Raises StoreUnavailable for an outage. Any other error of the database is raised as it is, since the lanes of
        handlers may not meet it, and would not log it.
        """
        try:
            async with self._few.one() as connection:
                yield connection
        except psycopg.Error as error:
            if error.sqlstate is None or error.sqlstate.startswith(_OUTAGES):
                raise StoreUnavailable(error_text(error)) from error
            raise (misconfigured(error, self._schema) or error) from error.__cause__

    async def close(self) -> None:
        """Close the idle connections. Call this once none is in use."""
        await self._few.close_idle(0.0)

    async def _connect(self) -> Connection:
        try:
            return await connect_async(self._dsn, _SETTINGS, purpose="outbox", connect_timeout=5)
        except (psycopg.Error, OSError) as error:
            raise StoreUnavailable(error_text(error)) from error
