"""Statements that handlers run repeatedly, with less overhead.

For each run, psycopg's cursor converts the statement again, chooses how rows are made and keeps the result. That is as
much work as the exchange with the server, and a third of a worker's cost per message. Here a statement that psycopg has
prepared, and that returns no rows, is sent by its name, with parameters converted as in its first run; and any one may
be sent ahead (J26). The name is looked up in psycopg each time, since psycopg drops all names after a rollback (J12).
For that, this file alone reads psycopg's private attributes.

What is kept is how to convert, and no message's parameters. It is good for UTF-8 only: psycopg's converters remember
the encoding that they were made for, and a handler may set another one for its transaction.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators
from psycopg._preparing import Prepare
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.pq.abc import PGresult

from idemconsumer.stores.ahead import Ahead, Sent

Params: TypeAlias = Sequence[Any] | Mapping[str, Any]

_MOST: Final = 100  # statements remembered per connection
_LONGEST: Final = 16_384  # characters of one that is remembered


class PreparedStatements:
    """The prepared statements of one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._converted: dict[str, Any] = {}  # the most recently used comes last
        self._ahead: dict[tuple[str, bool], PostgresQuery] = {}

    def _keeps(self, query: str) -> bool:
        """Whether its conversion is kept, and one that is may be used."""
        return len(query) <= _LONGEST and self._connection.pgconn.parameter_status(b"client_encoding") == b"UTF8"

    def dropped(self) -> None:
        """DEALLOCATE ALL was sent."""
        self._connection._prepared._names.clear()
        self._connection._prepared._counts.clear()

    def forget(self) -> bool:
        """As psycopg does before it sends DEALLOCATE ALL; whether there is anything to deallocate."""
        prepared = self._connection._prepared
        if not prepared.clear():
            return False
        prepared._to_flush.clear()  # it is to be sent by the caller
        return True

    async def run(self, query: object, params: Params | None) -> int | None:
        """The number of rows written; None if a cursor has to run it."""
        if type(query) is not str or query not in self._converted or not params:
            return None
        connection = self._connection
        async with connection.lock:
            converted = self._converted.pop(query, None) if self._keeps(query) else None
            if converted is None or connection.pgconn.pipeline_status != PipelineStatus.OFF:
                return None
            self._converted[query] = converted
            try:
                converted.dump(params)
                ready, name = connection._prepared.get(converted)
                if ready is not Prepare.YES:
                    return None
                connection._prepared.maybe_add_to_cache(converted, ready, name)  # keeps it from being evicted next
                result = await connection.wait(self._sent(name, converted))
            finally:
                converted.params = None
        return -1 if result.command_tuples is None else result.command_tuples

    def send(self, ahead: Ahead, sent: Sent, query: str, params: Params | None) -> None:
        """Send it ahead. Nobody else may be at work on the connection. Raises what psycopg does for wrong `params`."""
        known, keeps = (query, params is None), self._keeps(query)
        if (converted := self._ahead.get(known) if keeps else None) is None:
            converted = PostgresQuery(Transformer(self._connection))
            converted.convert(query, params)
            if keeps:
                if len(self._ahead) >= _MOST:
                    del self._ahead[next(iter(self._ahead))]
                self._ahead[known] = converted
        else:
            converted.dump(params)
        names = self._connection._prepared
        while names._to_flush:  # psycopg's cursors see to it, and there may be none
            ahead.send(Sent(), b"DEALLOCATE " + (names._to_flush.popleft() or b"ALL"))
        ready, name = names.get(converted)
        if names.maybe_add_to_cache(converted, ready, name) is not None:
            names._rotate()
        ahead.send(sent, converted.query, converted, prepare=ready is Prepare.SHOULD, name=name)
        converted.params = None

    def rows(self, result: PGresult, row_factory: Any) -> psycopg.AsyncCursor[Any]:
        """A cursor that has read this answer."""
        cursor = self._connection.cursor(row_factory=row_factory)
        cursor._tx = Transformer(cursor)
        cursor._set_results([result])
        return cursor

    def learn(self, cursor: psycopg.AsyncCursor[Any], query: object, params: Params | None) -> None:
        """Remember a statement that a cursor has run, so that `run` can send it the next time."""
        result, converted = cursor.pgresult, cursor._query
        if type(query) is not str or not params or converted is None or not self._keeps(query):
            return
        if result is None or result.status != ExecStatus.COMMAND_OK:  # None: in a pipeline it is not known yet
            return
        if len(self._converted) >= _MOST:
            del self._converted[next(iter(self._converted))]
        converted.params = None
        self._converted[query] = converted

    def _sent(self, name: bytes, converted: Any) -> Generator[Any, Any, PGresult]:
        pgconn = self._connection.pgconn
        pgconn.send_query_prepared(name, converted.params, param_formats=converted.formats)
        result: PGresult
        *_, result = yield from generators.execute(pgconn)
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result
