"""The cost of messages: statements, round trips and commits of workers for them, as defined in docs/protocol.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from psycopg import AsyncCursor
from psycopg.pq.abc import PGconn, PGresult

from idemconsumer.engine.engine import Engine
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.sagas.saga_engine import LeasedEngine
from idemconsumer.stores.ahead import Ahead
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.lent import LentConnection
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.prepared import PreparedStatements

_FOR_MESSAGES: ContextVar[bool] = ContextVar("idem_for_messages", default=False)
_BESIDE: Final = (Point.RELAYING, Point.RELAYED)


def passing(point: Point | SagaPoint) -> None:
    """Count the statements of this task from now on as statements for messages. Other work of a worker, such as
    registering itself or pruning, passes no point."""
    if point not in _BESIDE:
        _FOR_MESSAGES.set(True)


@dataclass
class Cost:
    """`statements`: those that the server answered, COMMIT included. `round_trips`: how often it was waited for."""

    statements: int = 0
    round_trips: int = 0
    commits: int = 0


@contextmanager
def counting() -> Iterator[Cost]:
    """Count while the block runs, in this process, on the connections of handlers and sagas; always up to date."""
    cost = Cost()
    asked = set[PGconn]()  # those with an exchange for messages in progress; its end has no task's context

    def count(pgconn: PGconn, results: Sequence[PGresult | None]) -> None:
        if pgconn in asked:
            cost.statements += len(results)
            cost.commits += sum(each is not None and each.command_status == b"COMMIT" for each in results)

    def within(act: Any, for_messages: bool) -> Any:
        async def seen(self: Any, *given: Any, **more: Any) -> Any:
            token = _FOR_MESSAGES.set(for_messages)
            try:
                return await act(self, *given, **more)
            finally:
                _FOR_MESSAGES.reset(token)

        return seen

    exchange, simple, command = Connection._exchange, Connection._simple, Connection._exec_command
    sent, answers, checked = PreparedStatements._sent, Ahead.answers, AsyncCursor._check_results

    async def exchanged(self: Connection, *given: Any) -> Any:
        if not _FOR_MESSAGES.get():
            return await exchange(self, *given)
        asked.add(pgconn := self.pgconn)
        try:
            value = await exchange(self, *given)
        finally:
            asked.discard(pgconn)
        cost.round_trips += not self._at_once
        return value

    def simple_query(self: Connection, statements: bytes) -> Any:
        results = yield from simple(self, statements)
        count(self.pgconn, results)
        return results

    def of_psycopg(self: Any, *given: Any, **more: Any) -> Any:
        result = yield from command(self, *given, **more)
        count(self.pgconn, [result])
        return result

    def known(self: PreparedStatements, *given: Any) -> Any:
        result = yield from sent(self, *given)
        count(self._connection.pgconn, [result])
        return result

    def sent_ahead(self: Ahead, last: Sequence[tuple[Any, bytes]] = (), *given: Any) -> Any:
        expected = dict.fromkeys(each for each in self._expected if each is not None)  # a prepared one is there twice
        yield from answers(self, last, *given)
        count(self._pgconn, [each.result for each in (*expected, *(each for each, _ in last))])

    def of_cursor(self: Any, results: list[PGresult]) -> None:
        count(self._pgconn, results)
        checked(self, results)

    with ExitStack() as stack:
        for owner, name, seen in (
            (Engine, "run", within(Engine.run, True)),  # counted before the first point, so the claim counts too
            (LeasedEngine, "run", within(LeasedEngine.run, True)),
            (Pool, "scope_ids", within(Pool.scope_ids, False)),  # once per process or connection
            (Connection, "_exchange", exchanged),
            (Connection, "_simple", simple_query),
            (Connection, "_exec_command", of_psycopg),
            (LentConnection, "_exec_command", of_psycopg),
            (PreparedStatements, "_sent", known),
            (Ahead, "answers", sent_ahead),
            (AsyncCursor, "_check_results", of_cursor),
        ):
            stack.enter_context(patch.object(owner, name, seen))
        yield cost
