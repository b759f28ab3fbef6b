"""Statements that handlers run repeatedly, with less overhead.

For each run, psycopg's cursor converts the statement again, chooses how rows are made and keeps the result. That is as
much work as the exchange with the server, and a third of a worker's cost per message. Here a statement that returns no
rows is sent with parameters converted as in its first run, by its name if psycopg has prepared it. Any statement may be
pipelined (J26). The name is read from psycopg each time, since psycopg drops all names after a rollback (J12). This
file also decides what may be prepared (J28). For all that, it reads psycopg's private attributes.

What is kept is the conversion, never the parameters of a message. It is valid for UTF-8 only: psycopg's converters keep
the encoding that they were made for, and a handler may set another one for its transaction.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import generators
from psycopg._preparing import Prepare, PrepareManager
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.pq.abc import PGconn, PGresult

from idemconsumer.stores.ahead import Ahead, Sent

Params: TypeAlias = Sequence[Any] | Mapping[str, Any]

_MOST: Final = 100  # statements remembered per connection
_PASSING: Final = 50  # names that are of no use any more, before the server is told to drop them
_LONGEST: Final = 16_384  # characters of a statement that is remembered


class Names(PrepareManager):
    """The prepared statements of one session. `by_itself`: repeated statements may be prepared without a request.

    If a parameter has no type, as text has none, the server gives it the column's type, and the prepared statement
    keeps that type when the column's changes. So its name is valid for one transaction, whose locks keep the columns as
    they are; `epoch` distinguishes the transactions (J28).
    """

    def __init__(self, pgconn: PGconn) -> None:
        super().__init__()
        self.by_itself = True
        self.epoch = self._passing = 0
        self._pgconn = pgconn
        self._path: bytes | None = None
        self._often: set[Any] = set()  # statements that were prepared for one transaction, and will be for the next one

    def key(self, query: PostgresQuery) -> Any:  # type: ignore[override]
        types = query.types
        return query.query, types, self._path, self.epoch if 0 in types else 0

    def get(self, query: PostgresQuery, prepare: bool | None = None) -> tuple[Prepare, bytes]:
        self._path = self._pgconn.parameter_status(b"search_path")  # reported by Postgres 18 and newer
        ready, name = super().get(query, prepare if self.by_itself or prepare is not None else False)
        if ready is Prepare.SHOULD:
            self._passing += 0 in query.types
        return ready, name

    def ahead(self, query: PostgresQuery) -> tuple[bool, bytes]:
        """As `get` and psycopg's work after it, for a pipelined statement: whether to prepare it, and its name. One
        that an earlier transaction has prepared is prepared at once, which costs no round trip here."""
        if not self.by_itself or self.prepare_threshold is None:
            return False, b""
        self._path = self._pgconn.parameter_status(b"search_path")
        key = self.key(query)
        if name := self._names.get(key):
            self._names.move_to_end(key)
            return False, name
        passing = key[:-1] if key[-1] else None
        if (count := self._counts.get(key, 0)) < self.prepare_threshold and passing not in self._often:
            self._counts[key] = count + 1
            self._counts.move_to_end(key)
            self._rotate()
            return False, b""
        self._counts.pop(key, None)
        self._names[key] = name = b"_pg3_%d" % self._prepared_idx
        self._prepared_idx += 1
        if passing is not None:
            self._passing += 1
            self._often.add(passing)
        self._rotate()
        return True, name

    def next_epoch(self) -> None:
        self.epoch += 1
        if len(self._often) > _MOST:
            self._often.clear()
        if self._passing > _PASSING:  # one by one it would cost more than it saves
            self.clear()

    def clear(self) -> bool:
        self._passing = 0
        return super().clear()


class PreparedStatements:
    """The prepared statements of one connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        assert isinstance(connection._prepared, Names)
        self._connection, self._names = connection, connection._prepared
        self._converted: dict[str, Any] = {}  # the most recently used comes last
        self._ahead: dict[tuple[str, bool], PostgresQuery] = {}

    def begin(self) -> None:
        """A new transaction begins."""
        self._names.next_epoch()

    def prepare(self, *, by_itself: bool) -> None:
        """Set whether statements may be prepared from now on without a request."""
        self._names.by_itself = by_itself

    def _keeps(self, query: str) -> bool:
        """Whether the statement's conversion may be kept, and a kept one used."""
        return len(query) <= _LONGEST and self._connection.pgconn.parameter_status(b"client_encoding") == b"UTF8"

    def dropped(self) -> None:
        """DEALLOCATE ALL was sent."""
        self._names._names.clear()
        self._names._counts.clear()

    def forget(self) -> bool:
        """Forget all names, as psycopg does before it sends DEALLOCATE ALL; returns whether there were any."""
        if not self._names.clear():
            return False
        self._names._to_flush.clear()  # the caller sends it
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
                ready, name = self._names.get(converted)
                if ready is Prepare.SHOULD or self._names._to_flush:
                    return None
                if self._names.maybe_add_to_cache(converted, ready, name) is not None:  # used now, so not evicted next
                    self._names._rotate()
                result = await connection.wait(self._sent(name, converted))
            finally:
                converted.params = None
        return -1 if result.command_tuples is None else result.command_tuples

    def send(self, ahead: Ahead, sent: Sent, query: str, params: Params | None) -> None:
        """Pipeline a statement. No other exchange may be in progress. Raises psycopg's errors for wrong `params`."""
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
        names = self._names
        while names._to_flush:  # psycopg's cursors send these, but there may be none
            ahead.send(Sent(), b"DEALLOCATE " + (names._to_flush.popleft() or b"ALL"))
        prepare, name = names.ahead(converted)
        ahead.send(sent, converted.query, converted, prepare=prepare, name=name)
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
        if name:
            pgconn.send_query_prepared(name, converted.params, param_formats=converted.formats)
        else:
            pgconn.send_query_params(converted.query, converted.params, converted.types, converted.formats)
        result: PGresult
        *_, result = yield from generators.execute(pgconn)
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, encoding=self._connection.info.encoding)
        return result
