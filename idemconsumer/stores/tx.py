"""Tx and Rows over one psycopg connection."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.rows import class_row, dict_row, scalar_row, tuple_row

from idemconsumer.errors import ConfigurationError, HandlerFault
from idemconsumer.ports.handler import Params, Tx
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.lending import Lending
from idemconsumer.stores.lent import OVER, LentConnection, check_loop
from idemconsumer.stores.prepared import PreparedStatements
from idemconsumer.stores.statements import Effect, special, text_of


@lru_cache(maxsize=256)
def _factory(into: Any) -> Callable[[Any], Any]:
    if into in (tuple, None):
        return tuple_row
    if into is dict:
        return dict_row
    if hasattr(into, "__struct_fields__") or hasattr(into, "__dataclass_fields__") or hasattr(into, "model_fields"):
        return class_row(into)
    return scalar_row


class PostgresRows:
    """Rows that the client already holds."""

    __slots__ = ("_cursor",)

    def __init__(self, cursor: psycopg.AsyncCursor[Any]) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    async def first(self) -> Any:
        return await self._cursor.fetchone() if self._cursor.description else None

    async def one(self) -> Any:
        rows = await self.all()
        if len(rows) != 1:
            raise LookupError(f"one row expected, {len(rows)} found")
        return rows[0]

    async def all(self) -> list[Any]:
        return await self._cursor.fetchall() if self._cursor.description else []


class NoRows:
    """The result of a statement that returns no rows."""

    __slots__ = ("rowcount",)

    def __init__(self, rowcount: int) -> None:
        self.rowcount = rowcount

    async def first(self) -> None:
        return None

    async def one(self) -> Any:
        raise LookupError("one row expected, 0 found")

    async def all(self) -> list[Any]:
        return []


class PostgresTx:
    """The claim's transaction for one handler; refuses use once that handler has returned."""

    __slots__ = ("__weakref__", "_connection", "_lending", "_lent", "_loop", "_over", "_statements", "sending")

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._connection: Connection | LentConnection = lending.connection
        self._statements = lending.connection.statements
        self._lent: LentConnection | None = None
        self._loop = lending.loop
        self._over = False
        self.sending = 0  # statements under way

    def end(self) -> None:
        self._over = True

    @property
    def connection(self) -> LentConnection:
        self.check()
        if self._lent is None:
            self._lending.changed = True  # it is not known what will be done to it
            self._connection = self._lent = self._lending.lend()
            self._statements = PreparedStatements(self._lent)  # its types may be other than the session's
        return self._lent

    def borrow(self) -> psycopg.AsyncConnection[Any]:
        """The connection, for a statement of the engine's own in this transaction."""
        self.check()
        return self._connection

    def check(self) -> None:
        """Raise HandlerFault unless it may be used, here and now."""
        if self._over:
            raise HandlerFault(OVER.format("tx"))
        check_loop(self._loop)

    def spoil(self, reason: str) -> None:
        """Whatever the handler does now, nothing is committed."""
        if not self._over:
            self._lending.spoil(reason)

    async def execute(self, query: Any, params: Params | None = None, *, into: Any = None) -> PostgresRows | NoRows:
        if self._over or get_running_loop() is not self._loop:
            self.check()
        if (known := special(query if type(query) is str else text_of(query, self._connection))) is not None:
            if known.effect is Effect.REFUSED:
                raise HandlerFault(known.reason)
            self._lending.changed |= known.effect is Effect.UNSEEN
            self._lending.passing |= known.effect is Effect.PASSING
            if (sent := self._lending.rewritten(query)) is not query:
                query, params = sent, params or None
        connection, statements = self._connection, self._statements
        self.sending += 1
        try:
            if into is not None:
                cursor = connection.cursor(row_factory=_factory(into))
                return PostgresRows(await cursor.execute(query, params))
            if (written := await statements.run(query, params)) is not None:
                return NoRows(written)
            cursor = connection.cursor()
            await cursor.execute(query, params)
            statements.learn(cursor, query, params)
            return PostgresRows(cursor) if cursor.description is not None else NoRows(cursor.rowcount)
        except psycopg.Error as error:
            if self._over:
                raise HandlerFault(OVER.format("tx")) from error
            raise
        finally:
            self.sending -= 1


def connection_of(tx: Tx | psycopg.AsyncConnection[Any]) -> psycopg.AsyncConnection[Any]:
    """That of a handler's or step's `tx`, or one that is given itself. Raises ConfigurationError for anything else."""
    connection = tx.borrow() if isinstance(tx, PostgresTx) else getattr(tx, "connection", tx)
    if not isinstance(connection, psycopg.AsyncConnection):
        raise ConfigurationError(
            f"tx= is of type {type(tx).__name__}; pass the Tx of a handler or of a step, or a "
            "psycopg.AsyncConnection that is in a transaction"
        )
    return connection
