"""Statements that handlers run again and again, with less work around each.

psycopg's cursor decides for each run anew how parameters become bytes, whether the statement is prepared by now, and
how rows would be made: as much work as the exchange with the server, and a third of what a message costs a worker. Here
a statement that has been run a few times on a connection, and returns no rows, is prepared, and then sent by its name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators
from psycopg.errors import InvalidSqlStatementName, error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

Params: TypeAlias = Sequence[Any] | Mapping[str, Any]

_OFTEN: Final = 3  # runs; psycopg prepares a statement at its fifth
_MOST: Final = 100  # texts that a connection remembers


class _Statement:
    """A text, as psycopg has converted it, and its names by the types of the parameters: the size of a number decides
    on its type."""

    __slots__ = ("converted", "names", "runs")

    def __init__(self, converted: Any) -> None:
        self.converted = converted
        self.runs: dict[tuple[int, ...], int] = {}
        self.names: dict[tuple[int, ...], bytes] = {}


class Repeated:
    """The statements of one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._statements: dict[str, _Statement] = {}
        self._made = 0
        self._off = False

    def off(self) -> None:
        """For good: somebody may have registered types on the connection, or dropped its prepared statements."""
        self._off = True
        self._statements.clear()

    async def run(self, query: object, params: Params | None) -> int | None:
        """How many rows it wrote; None where a cursor has to run it."""
        statement = self._statements.get(query) if type(query) is str and params else None
        if statement is None:
            return None
        async with self._connection.lock:
            statement.converted.dump(params)
            if (name := statement.names.get(statement.converted.types)) is None:
                return None
            try:
                result = await self._connection.wait(self._sent(name, statement))
            except InvalidSqlStatementName:
                self.off()
                raise
        return -1 if result.command_tuples is None else result.command_tuples

    async def learn(self, cursor: psycopg.AsyncCursor[Any], query: object, params: Params | None) -> None:
        """A cursor has run it: the next time may be ours."""
        if (cursor.statusmessage or "").startswith(("DEALLOCATE", "DISCARD")):
            self.off()
        if self._off or type(query) is not str or not params or cursor.description is not None:
            return
        if (statement := self._statements.get(query)) is None:
            if cursor._query is None or not self._room():
                return
            statement = self._statements[query] = _Statement(cursor._query)
        types = statement.converted.types
        runs = statement.runs[types] = statement.runs.get(types, 0) + 1
        if runs == _OFTEN:
            async with self._connection.lock:
                self._made += 1
                name = b"idemconsumer_%d" % self._made
                await self._connection.wait(self._prepared(name, statement.converted.query, types))
            statement.names[types] = name

    def _room(self) -> bool:
        if len(self._statements) >= _MOST:
            self._statements = {query: each for query, each in self._statements.items() if each.names}
        return len(self._statements) < _MOST

    def _sent(self, name: bytes, statement: _Statement) -> Generator[Any, Any, PGresult]:
        converted = statement.converted
        self._connection.pgconn.send_query_prepared(name, converted.params, param_formats=converted.formats)
        return self._answer()

    def _prepared(self, name: bytes, query: bytes, types: tuple[int, ...]) -> Generator[Any, Any, PGresult]:
        self._connection.pgconn.send_prepare(name, query, param_types=types)
        return self._answer()

    def _answer(self) -> Generator[Any, Any, PGresult]:
        result: PGresult
        *_, result = yield from generators.execute(self._connection.pgconn)
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result
