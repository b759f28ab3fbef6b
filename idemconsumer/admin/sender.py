"""Sends the named statements of one schema for people: chooses the connection, and translates database errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg.rows import kwargs_row

from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import Queries, load, misconfigured, takes_no_writes

_CONNECT_SECONDS = 10
PATIENCE: Final = 600.0  # seconds; a statement that reads all dead letters may have to read a million


class NamedRow(dict[str, Any]):
    """A row of a statement's result: its columns by name, as items and as attributes. Encodes as a JSON object.

    The columns are documented at the statement, in `sql`.
    """

    def __getattr__(self, column: str) -> Any:
        try:
            return self[column]
        except KeyError:
            raise AttributeError(f"{column!r} is no column of this row; it has {', '.join(self)}") from None


Connection: TypeAlias = AnsweringConnection[NamedRow]
T = TypeVar("T")
Readers: TypeAlias = Publishers[Connection]


class Sender:
    """Sends statements by name, on one connection."""

    def __init__(self, connection: Connection, queries: Queries) -> None:
        self.connection = connection
        self._queries = queries

    async def __call__(self, statement: str, /, **given: Any) -> list[NamedRow]:
        cursor = await self.execute(statement, **given)
        return await cursor.fetchall() if cursor.description else []

    async def execute(self, statement: str, /, **given: Any) -> psycopg.AsyncCursor[NamedRow]:
        """Like a call, but returns the cursor, for callers that need the number of changed rows."""
        return await self.connection.execute(self._queries[statement], given)


class Statements:
    """The statements of one schema, with a new connection for each call, or with one of the `shared` connections.
    `patience`: seconds per statement on a new connection. Raises like `Admin`."""

    def __init__(self, dsn: str, schema: str, *, patience: float | None = None, shared: Readers | None = None) -> None:
        self.dsn = dsn
        self.schema = schema
        self._queries = load(schema)
        self._patience = patience
        self._shared = shared

    async def rows(self, statement: str, /, **given: Any) -> list[NamedRow]:
        """Run one statement without a transaction, since a standby cannot begin one that may write."""
        async with self.sending() as send:
            return await send(statement, **given)

    async def values(self, kind: Callable[..., T], statement: str, /, **given: Any) -> list[T]:
        """Like `rows`, with each row as a value of `kind`."""
        return [kind(**row) for row in await self.rows(statement, **given)]

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[Sender]:
        """Several statements on one connection, each committed by itself."""
        try:
            async with (self._shared or readers(self.dsn, self._patience)).one() as connection:
                if self._patience is not None:
                    connection.patience = self._patience
                yield Sender(connection, self._queries)
        except psycopg.Error as error:
            if (cause := misconfigured(error, self.schema) or takes_no_writes(error)) is not None:
                raise cause from error
            if not isinstance(error, psycopg.OperationalError):
                raise
            what = "cannot be reached" if error.sqlstate is None else "did not execute it"
            raise StoreUnavailable(f"the database {what}: {error_text(error)}") from error

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Sender]:
        """Several statements in one transaction."""
        async with self.sending() as send, send.connection.transaction():
            yield send


def readers(dsn: str, patience: float | None = None) -> Readers:
    """Connections for any number of callers (L57)."""
    # The role's own statement_timeout is meant for workers and their handlers, so this one replaces it.
    settings = {} if patience is None else {"statement_timeout": f"{patience:g}s"}
    rows = kwargs_row(NamedRow)
    return Publishers(lambda: connect_async(dsn, settings, row_factory=rows, connect_timeout=_CONNECT_SECONDS))
