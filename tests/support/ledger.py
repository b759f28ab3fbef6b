"""A database to judge by: a witness table without any constraint, so that nothing hides a double effect."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, LiteralString

import psycopg

from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.arguments import Tx
from idemconsumer.handlers.decorator import Handler, idempotent_handler
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import Message
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.servers.postgres import emptied, migrated

SCHEMA = "idemconsumer"
SOURCE = "memory:orders"

OpenStore = Callable[[str], Awaitable[PostgresStore]]


class Ledger:
    """A migrated database with a witness table, read from outside of everything under test."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self._connection: psycopg.Connection | None = None
        migrated(dsn, SCHEMA)
        self.run("create table witness (id text, note text)")

    def run(self, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = psycopg.connect(self.dsn, autocommit=True)
        cursor = self._connection.execute(query, params or None)
        return [] if cursor.description is None else cursor.fetchall()

    def clear(self) -> None:
        """As new, for the next test on the same database."""
        self.run("select 1")
        assert self._connection is not None
        emptied(self._connection, "witness")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def effects(self) -> list[str]:
        """The committed effects, one entry for each commit."""
        return [str(row[0]) for row in self.run("select id from witness order by id")]

    @property
    def states(self) -> list[State]:
        return [State(row[0]) for row in self.run("select state from idemconsumer.record order by state")]

    @property
    def letters(self) -> list[tuple[str, int]]:
        """Reason and arrivals of each dead letter."""
        return [
            (str(reason), int(arrivals))
            for reason, arrivals in self.run("select reason, arrivals from idemconsumer.dead_letter order by id")
        ]

    @property
    def attempts(self) -> list[int]:
        return [int(row[0]) for row in self.run("select count from idemconsumer.attempt order by count")]

    def sessions(self, *states: str) -> int:
        """How many connections of stores are in one of these states."""
        rows = self.run(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name = 'idemconsumer' and state = any(%s)",
            [list(states)],
        )
        return int(rows[0][0])


async def write(tx: Tx, id: object) -> None:
    """An effect of a handler."""
    await tx.execute("insert into witness (id) values (%s)", (str(id),))


def message(id: object, **more: object) -> Message:
    return Message(SOURCE, json.dumps({"id": id, **more}).encode(), position=f"orders-{id}")


def works(handler: Handler[..., Any], *ids: object, suspect: bool = False) -> list[Work]:
    """A group of deliveries for a handler of the app `shop`."""
    bound = handler.plan.bind("shop")
    return [work(bound, message(id), suspect=suspect) for id in ids]


def work(handler: BoundHandler, given: Message, *, suspect: bool = False) -> Work:
    return Work.of(handler, given, suspect=suspect)


def kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return [str(outcome.kind) for outcome in outcomes]


async def to_the_end(engine: Engine, group: Sequence[Work], *, rounds: int = 50) -> list[Outcome]:
    """Present what is not decided again and again, as a lane does, without its pauses. The last outcome of each."""
    left, done = list(group), list[Outcome]()
    for _ in range(rounds):
        outcomes = await engine.run(left)
        decided = [outcome for outcome in outcomes if outcome.kind is not OutcomeKind.RETRYING]
        done += decided
        left = left[len(decided) :]
        if not left:
            return done
    raise AssertionError(f"{len(left)} messages undecided after {rounds} rounds, so far {kinds(done)}")


async def run(engine: Engine, act: Callable[[Tx], Awaitable[object]], *ids: object, **options: Any) -> list[str]:
    """One run of a handler that does nothing but `act`."""

    @idempotent_handler(SOURCE, key="id", name="acts", **options)
    async def handler(order: dict[str, Any], tx: Tx) -> None:
        await act(tx)

    return kinds(await engine.run(works(handler, *(ids or (1,)))))
