"""Statements that handlers run again and again, with less work around each.

psycopg's cursor converts a statement anew for each run, chooses how rows are made and keeps the result: as much work as
the exchange with the server, and a third of what a message costs a worker. Here a statement that psycopg has prepared,
and that returns no rows, is sent by its name, with parameters as psycopg's conversion for its first run makes them.
psycopg is asked for the names each time, since a rollback of its own drops them all (J12). For that this file alone
reads psycopg's private attributes.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators
from psycopg._preparing import Prepare
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.pq.abc import PGresult

Params: TypeAlias = Sequence[Any] | Mapping[str, Any]

_MOST: Final = 100  # texts that a connection remembers


class PreparedStatements:
    """Those of one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._converted: dict[str, Any] = {}  # the last one used comes last

    def forget(self) -> None:
        """Types may be registered on the connection now, which a conversion made before does not know."""
        self._converted.clear()

    async def run(self, query: object, params: Params | None) -> int | None:
        """How many rows it wrote; None where a cursor has to run it."""
        if type(query) is not str or query not in self._converted or not params:
            return None
        connection = self._connection
        async with connection.lock:
            converted = self._converted.pop(query, None)
            if converted is None or connection.pgconn.pipeline_status != PipelineStatus.OFF:
                return None
            self._converted[query] = converted
            converted.dump(params)
            ready, name = connection._prepared.get(converted)
            if ready is not Prepare.YES:
                return None
            connection._prepared.maybe_add_to_cache(converted, ready, name)  # used now, so not the next to be dropped
            result = await connection.wait(self._sent(name, converted))
        return -1 if result.command_tuples is None else result.command_tuples

    def learn(self, cursor: psycopg.AsyncCursor[Any], query: object, params: Params | None) -> None:
        """A cursor has run it, so that `run` may do so the next time."""
        result, converted = cursor.pgresult, cursor._query
        if type(query) is not str or not params or converted is None:
            return
        if result is None or result.status != ExecStatus.COMMAND_OK:  # none: in a pipeline it is not known yet
            return
        if len(self._converted) >= _MOST:
            del self._converted[next(iter(self._converted))]
        self._converted[query] = converted

    def _sent(self, name: bytes, converted: Any) -> Generator[Any, Any, PGresult]:
        pgconn = self._connection.pgconn
        pgconn.send_query_prepared(name, converted.params, param_formats=converted.formats)
        result: PGresult
        *_, result = yield from generators.execute(pgconn)
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result
