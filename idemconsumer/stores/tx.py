"""Tx and Rows over one psycopg connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg.rows import class_row, dict_row, scalar_row, tuple_row

from idemconsumer.errors import HandlerFault
from idemconsumer.ports.handler import Params
from idemconsumer.stores.connection import Connection

_LEADING: Final = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|;)*", re.DOTALL)
_CONTROL: Final = re.compile(
    r"(?:commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def controls_transaction(query: str) -> bool:
    """Whether the first keyword begins or ends a transaction (J10). Savepoints do not."""
    start = _LEADING.match(query)
    return _CONTROL.match(query, start.end() if start else 0) is not None


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

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    def end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.row_factory = tuple_row  # a handler's setting must not outlive it

    @property
    def connection(self) -> Connection:
        connection = self._open()
        connection.statements.forget()
        return connection

    def _open(self) -> Connection:
        if self._connection is None:
            raise HandlerFault(
                "tx was used after its handler returned, when its transaction may be over; "
                "await everything that uses tx before the handler returns"
            )
        return self._connection

    async def execute(self, query: Any, params: Params | None = None, *, into: Any = None) -> PostgresRows | NoRows:
        connection = self._open()
        if isinstance(query, str) and controls_transaction(query):
            raise HandlerFault(
                f"a handler must not run {query.split()[0].upper()}: the engine commits its writes together with the "
                "message's record; raise Reject or Retry to undo them, or use a SAVEPOINT for a part of them"
            )
        if into is not None:
            cursor = connection.cursor(row_factory=_factory(into))
            return PostgresRows(await cursor.execute(query, params))
        if (written := await connection.statements.run(query, params)) is not None:
            return NoRows(written)
        cursor = connection.cursor()
        await cursor.execute(query, params)
        connection.statements.learn(cursor, query, params)
        return PostgresRows(cursor) if cursor.description is not None else NoRows(cursor.rowcount)
