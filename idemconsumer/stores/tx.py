"""Tx over one psycopg connection."""

from __future__ import annotations

from asyncio import get_running_loop, sleep
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import class_row, dict_row, scalar_row, tuple_row

from idemconsumer.errors import ConfigurationError, HandlerFault, RunEagerly
from idemconsumer.handlers.arguments import Params, Tx
from idemconsumer.rules.habits import Habits
from idemconsumer.stores.ahead import Sent
from idemconsumer.stores.checkout import Lending
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.lent import OVER, LentConnection, check_loop
from idemconsumer.stores.prepared import PreparedStatements
from idemconsumer.stores.statements import Effect, is_plain, special, text_of, writes


class PostgresRows:
    """The answer to a handler's statement: rows that the client already holds, or none and how many were `written`.
    Each read is noted: the answers of a statement that are never read are not waited for the next time (J26)."""

    __slots__ = ("_cursor", "_habits", "_query", "_written")

    def __init__(
        self, query: str, habits: Habits | None, cursor: psycopg.AsyncCursor[Any] | None = None, *, written: int = -1
    ) -> None:
        self._query = query
        self._habits = habits
        self._cursor = cursor
        self._written = written

    def _look(self) -> None:
        if self._habits is not None:
            self._habits.looked(self._query)

    @property
    def rowcount(self) -> int:
        self._look()
        return self._written if self._cursor is None else self._cursor.rowcount

    async def first(self) -> Any:
        self._look()
        return await self._cursor.fetchone() if self._cursor is not None and self._cursor.description else None

    async def one(self) -> Any:
        rows = await self.all()
        if len(rows) != 1:
            raise LookupError(f"one row expected, {len(rows)} found")
        return rows[0]

    async def all(self) -> list[Any]:
        self._look()
        return await self._cursor.fetchall() if self._cursor is not None and self._cursor.description else []


class SentRows(PostgresRows):
    """The rows of a pipelined statement. The first read waits for them, except `rowcount`, which cannot wait and so
    ends the run."""

    __slots__ = ("_into", "_sent", "_tx")

    def __init__(self, query: str, habits: Habits, tx: PostgresTx, sent: Sent, into: Any) -> None:
        super().__init__(query, habits)
        self._tx = tx
        self._sent: Sent | None = sent  # None: its answer was read
        self._into = into

    def _look(self) -> None:
        super()._look()
        if self._sent is not None:
            if self._sent.result is None:
                raise self._tx._unanswered()
            self._cursor, self._written = self._tx._read(self._sent.result, self._into)
            self._sent = None

    async def first(self) -> Any:
        await self._waited_for()
        return await super().first()

    async def all(self) -> list[Any]:
        await self._waited_for()
        return await super().all()

    async def _waited_for(self) -> None:
        super()._look()
        if self._sent is not None and self._sent.result is None:
            await self._tx._answered()


@lru_cache(maxsize=256)
def _factory(into: Any) -> Callable[[Any], Any]:
    if into in (tuple, None):
        return tuple_row
    if into is dict:
        return dict_row
    if hasattr(into, "__struct_fields__") or hasattr(into, "__dataclass_fields__") or hasattr(into, "model_fields"):
        return class_row(into)
    return scalar_row


class PostgresTx:
    """The claim's transaction for one handler; refuses use once that handler has returned. With `habits` it pipelines
    the statements whose answers the handler does not read (J26)."""

    __slots__ = (
        *("__weakref__", "_connection", "_habits", "_lending", "_lent", "_loop", "_over", "_run", "_statements"),
        "sending",
    )

    def __init__(self, lending: Lending, habits: Habits | None = None) -> None:
        self._lending = lending
        self._connection: Connection | LentConnection = lending.connection
        self._statements = lending.connection.statements
        self._lent: LentConnection | None = None
        self._loop = lending.loop
        self._over = False
        self._habits = habits
        self._run = lending.runs
        self.sending = 0  # statements in progress

    def end(self) -> None:
        self._over = True

    @property
    def connection(self) -> LentConnection:
        self.check()
        if self._lent is None:
            self._lending.changed = True  # it is not known what will be done to it
            self._connection = self._lent = self._lending.lend()
            self._statements = PreparedStatements(self._lent)  # its type adapters may differ from the session's
            self._habits = None
        return self._lent

    def borrow(self) -> psycopg.AsyncConnection[Any]:
        """The connection, for a statement of the engine in this transaction."""
        self.check()
        return self._connection

    async def send_along(self, query: str, params: Params) -> bool:
        """Pipeline a statement of the engine. False: this run waits for each answer; use `borrow` instead."""
        self.check()
        if self._habits is None or self._connection.lock.locked():
            return False
        self.sending += 1
        try:
            await self._send(query, params, None, self._habits, sends=True)
        finally:
            self.sending -= 1
        return True

    def check(self) -> None:
        """Raise HandlerFault if `tx` may not be used any more, or not in this event loop."""
        if self._over:
            raise HandlerFault(OVER.format("tx"))
        check_loop(self._loop)

    def spoil(self, reason: str) -> None:
        """Nothing is committed, whatever the handler does now."""
        if not self._over:
            self._lending.spoil(reason)

    async def execute(self, query: Any, params: Params | None = None, *, into: Any = None) -> PostgresRows:
        return await self._execute(query, params, into)

    async def send(self, query: Any, params: Params | None = None) -> None:
        await self._execute(query, params, None, explicit=True)

    async def _execute(self, query: Any, params: Params | None, into: Any, *, explicit: bool = False) -> PostgresRows:
        if self._over or get_running_loop() is not self._loop:
            self.check()
        habits = self._habits if type(query) is str and is_plain(query) else None
        if (known := special(query if type(query) is str else text_of(query, self._connection))) is not None:
            if known.effect is Effect.REFUSED:
                raise HandlerFault(known.reason)
            self._lending.connection.statements.prepare(by_itself=False)  # it may change the search_path
            self._lending.changed |= known.effect is Effect.UNSEEN
            self._lending.passing |= known.effect is Effect.PASSING
            if (sent := self._lending.rewritten(query)) is not query:
                query, params = sent, params or None
            habits = None
        connection, statements = self._connection, self._statements
        self.sending += 1
        try:
            if habits is not None:
                ahead = self._lending.connection.ahead
                sends = explicit or (habits.sends(query) and writes(query))
                if (sends or ahead.on) and not connection.lock.locked():
                    return await self._send(query, params, into, habits, sends=sends)
            if into is not None:
                cursor = connection.cursor(row_factory=_factory(into))
                rows = PostgresRows(query, habits, await cursor.execute(query, params))
            elif (written := await statements.run(query, params)) is not None:
                rows = PostgresRows(query, habits, written=written)
            else:
                cursor = connection.cursor()
                await cursor.execute(query, params)
                statements.learn(cursor, query, params)
                given = None if cursor.description is None else cursor
                rows = PostgresRows(query, habits, given, written=cursor.rowcount)
            if habits is not None:
                habits.ran(query)
            return rows
        except psycopg.Error as error:
            if self._over:
                raise HandlerFault(OVER.format("tx")) from error
            if (blamed := self._lending.blamed(error)) is not error:
                raise blamed from error
            raise
        finally:
            self.sending -= 1

    async def _send(self, query: str, params: Params | None, into: Any, habits: Habits, *, sends: bool) -> PostgresRows:
        """Send a statement behind those in flight. Waits for the answer unless it `sends` (pipelines) it."""
        connection = self._lending.connection
        ahead = connection.ahead
        if ahead.full:
            await connection.answered()
            self.check()
        sent = Sent(self._run, query, habits)
        connection.statements.send(ahead, sent, query, params)
        if not sends:
            await connection.answered(own=sent)
            assert sent.result is not None
            habits.ran(query)
            cursor, written = self._read(sent.result, into)
            return PostgresRows(query, habits, cursor, written=written)
        if ahead.full:  # else the server may be left with a part of it, and counts no idle time then (J11)
            await connection.answered()
            self.check()
        elif ahead.pushed:
            await sleep(0)  # else a large group would block the loop
        else:
            self._loop.call_soon(ahead.push)  # runs when the handler waits for something else
        return SentRows(query, habits, self, sent, into)

    def _read(self, result: PGresult, into: Any) -> tuple[psycopg.AsyncCursor[Any] | None, int]:
        """The rows of an answer, or None and how many were written."""
        if into is None and result.status == ExecStatus.COMMAND_OK:
            return None, -1 if result.command_tuples is None else result.command_tuples
        return self._lending.connection.statements.rows(result, _factory(into)), -1

    async def _answered(self) -> None:
        self.check()
        self.sending += 1
        try:
            await self._lending.connection.answered()
        finally:
            self.sending -= 1

    def _unanswered(self) -> BaseException:
        return HandlerFault(OVER.format("tx")) if self._over else self._lending.connection.ahead.end_run(RunEagerly())


def connection_of(tx: Tx | psycopg.AsyncConnection[Any]) -> psycopg.AsyncConnection[Any]:
    """The connection of a handler's or step's `tx`, or a connection given itself. Raises ConfigurationError for
    anything else."""
    connection = tx.borrow() if isinstance(tx, PostgresTx) else getattr(tx, "connection", tx)
    if not isinstance(connection, psycopg.AsyncConnection):
        raise ConfigurationError(
            f"tx= is of type {type(tx).__name__}; pass the Tx of a handler or of a step, or a "
            "psycopg.AsyncConnection that is in a transaction"
        )
    return connection
