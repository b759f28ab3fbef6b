"""The answers to a handler's statements, as it gets them. Each look at one is noted: what nobody looks at is not waited
for the next time (J26)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
from psycopg.pq.abc import PGresult

from idemconsumer.rules.habits import Habits
from idemconsumer.stores.ahead import Sent


class _Answer:
    __slots__ = ("_habits", "_query")

    def __init__(self, query: str, habits: Habits | None) -> None:
        self._query = query
        self._habits = habits

    def _look(self) -> None:
        if self._habits is not None:
            self._habits.looked(self._query)


class NoRows(_Answer):
    """The result of a statement that returns no rows."""

    __slots__ = ("_rowcount",)

    def __init__(self, rowcount: int, query: str, habits: Habits | None) -> None:
        super().__init__(query, habits)
        self._rowcount = rowcount

    @property
    def rowcount(self) -> int:
        self._look()
        return self._rowcount

    async def first(self) -> None:
        self._look()

    async def one(self) -> Any:
        self._look()
        raise LookupError("one row expected, 0 found")

    async def all(self) -> list[Any]:
        self._look()
        return []


class PostgresRows(_Answer):
    """Rows that the client already holds."""

    __slots__ = ("_cursor",)

    def __init__(self, cursor: psycopg.AsyncCursor[Any], query: str, habits: Habits | None) -> None:
        super().__init__(query, habits)
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        self._look()
        return self._cursor.rowcount

    async def first(self) -> Any:
        self._look()
        return await self._cursor.fetchone() if self._cursor.description else None

    async def one(self) -> Any:
        rows = await self.all()
        if len(rows) != 1:
            raise LookupError(f"one row expected, {len(rows)} found")
        return rows[0]

    async def all(self) -> list[Any]:
        self._look()
        return await self._cursor.fetchall() if self._cursor.description else []


class SentRows:
    """Those of a statement that was sent ahead. The first look waits for them; `answered` does, and `rowcount`, which
    cannot wait, has `unanswered` raise. `read` makes rows of the answer."""

    __slots__ = ("_answered", "_habits", "_query", "_read", "_rows", "_sent", "_unanswered")

    def __init__(
        self,
        sent: Sent,
        query: str,
        habits: Habits,
        *,
        answered: Callable[[], Awaitable[None]],
        unanswered: Callable[[], BaseException],
        read: Callable[[PGresult], NoRows | PostgresRows],
    ) -> None:
        self._sent = sent
        self._query = query
        self._habits = habits
        self._answered = answered
        self._unanswered = unanswered
        self._read = read
        self._rows: NoRows | PostgresRows | None = None

    @property
    def rowcount(self) -> int:
        self._habits.looked(self._query)
        return self._known().rowcount

    async def first(self) -> Any:
        return await (await self._looked_at()).first()

    async def one(self) -> Any:
        return await (await self._looked_at()).one()

    async def all(self) -> list[Any]:
        return await (await self._looked_at()).all()

    async def _looked_at(self) -> NoRows | PostgresRows:
        self._habits.looked(self._query)
        if self._sent.result is None:
            await self._answered()
        return self._known()

    def _known(self) -> NoRows | PostgresRows:
        if self._rows is None:
            if self._sent.result is None:
                raise self._unanswered()
            self._rows = self._read(self._sent.result)
        return self._rows
