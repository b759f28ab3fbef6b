"""Sagas on a real database, by two or more stations that each stand for a process with a lease of its own.

The witness table and the remote have no unique constraint, so that nothing hides a double effect.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, LiteralString, Protocol, Unpack
from uuid import UUID

import psycopg

from idemconsumer import Message, Outcome, OutcomeKind, Tx, idempotent_handler
from idemconsumer.brokers.due_sagas import DueSagas, DueSagasSession
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.arguments import Saga, Step
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.handlers.options import Options
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds
from idemconsumer.ports.observer import Observer
from idemconsumer.rules.values import State
from idemconsumer.sagas.saga_engine import LeasedEngine
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from tests.support.servers.postgres import emptied, migrated
from tests.support.waiting import until

SCHEMA = "idemconsumer"


# ------------------------------------------------------------------------------------------------- steps of all tests
async def put(tx: Tx, name: str) -> str:
    await tx.execute("insert into effect (name) values (%s)", (name,))
    return f"out:{name}"


async def take_back(tx: Tx, output: str, name: str) -> None:
    await tx.execute("insert into effect (name) values (%s)", (f"undo:{name}:{output}",))


class Remote:
    """Remembers under each key what it was asked, and how often."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, UUID]] = []

    async def charge(self, step: Step, name: str) -> str:
        self.calls.append((name, step.key))
        return f"charged:{name}"

    async def refund(self, step: Step, output: str, name: str) -> None:
        self.calls.append((f"refund:{name}:{output}", step.key))

    @property
    def effects(self) -> list[str]:
        """As a remote that honours keys has them: one for each key."""
        return [name for name, _ in dict.fromkeys(self.calls)]

    def keys(self, name: str) -> set[UUID]:
        return {key for called, key in self.calls if called == name}


# --------------------------------------------------------------------------------------------------------- the stations
class Lease:
    def __init__(self, worker: int) -> None:
        self.worker = worker

    async def good(self, timeout: float) -> None:
        return


SagaFn = Callable[[dict[str, Any], Saga], Awaitable[object]]


def saga(fn: SagaFn, **options: Unpack[Options]) -> BoundHandler:
    """`fn` as the handler `book` of one app; retries wait for a millisecond."""
    given: Options = {"name": "book", "backoff": "1ms, 1ms", **options}
    return idempotent_handler("memory:orders", key="id", **given)(fn).plan.bind("shop")


def order(key: str = "k") -> Message:
    return Message("memory:orders", json.dumps({"id": key}).encode(), position="here")


class Station:
    """One process: engines, a store and a lease, without the threads that keep the lease."""

    def __init__(self, store: PostgresStore, worker: int, observer: Observer | None) -> None:
        self.store = store
        self.lease = Lease(worker)
        self.leases = PostgresLeases(store.pool, self.lease)
        self.engine = LeasedEngine(Engine(store, observer), self.leases, observer, chance=lambda: 0.0)

    def register(self, bench: Bench) -> None:
        """Under a new id, as after a lost lease."""
        self.lease.worker = bench.register()

    async def run(self, work: Work) -> Outcome:
        async def claimed() -> None:
            return

        return await self.engine.run(work, claimed)

    async def deliver(self, handler: BoundHandler, message: Message | None = None) -> Outcome:
        return await self.run(Work.of(handler, message or order()))

    async def take(self, handler: BoundHandler) -> LeasedSaga | None:
        taken = await self.leases.take(handler.app, [handler.name], 1)
        return taken[0] if taken else None

    async def resume(self, handler: BoundHandler) -> Outcome:
        """Take the saga over as soon as it is free, and run it once."""
        holding: LeasedSaga | None = None

        async def taken() -> bool:
            nonlocal holding
            holding = await self.take(handler)
            return holding is not None

        await until(taken, "the saga becomes free")
        assert holding is not None
        return await self.run(Work.of(handler, holding.message, leased=holding))

    async def to_the_end(self, handler: BoundHandler, outcome: Outcome) -> list[Outcome]:
        """Resume the saga until it has ended. Returns all outcomes, of which `outcome` is the first."""
        outcomes = [outcome]
        while outcomes[-1].kind is OutcomeKind.RETRYING:
            assert len(outcomes) < 10, "it is tried for ever"
            outcomes.append(await self.resume(handler))
        return outcomes


class FreeLanes:
    """What a source of due sagas knows of the lanes of its process. `kept`: what it has asked them to keep one for."""

    def __init__(self, free: int, held: Callable[[], Sequence[bytes]] = tuple, *, closed: bool = False) -> None:
        self.free = free
        self.closed = closed
        self.kept: set[str] = set()
        self.freed = asyncio.Event()
        self._held = held

    @property
    def keys(self) -> Sequence[bytes]:
        return self._held()

    def idle(self, handler: str) -> int:
        return self.free

    def paused(self, handler: str) -> bool:
        return False

    def keep(self, handler: str, kept: bool) -> None:
        (self.kept.add if kept else self.kept.discard)(handler)


async def due_sagas(
    station: Station, lanes: FreeLanes, cancel: Callable[[Collection[bytes]], None] = lambda _: None
) -> DueSagasSession:
    """The source of what may be resumed, as a process with these lanes has it."""
    source = DueSagas(station.leases, lanes, cancel)
    return await source.open([Subscription("saga:book", "book", "shop")], Bounds(4, 1))


class OpenStation(Protocol):
    async def __call__(
        self, observer: Observer | None = None, *, dsn: str | None = None, lease: float | None = None
    ) -> Station: ...


class Bench:
    """The database as seen from outside of everything under test."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        migrated(dsn, SCHEMA)
        self._connection = psycopg.connect(dsn, autocommit=True)
        self.run("create table effect (at bigint generated always as identity, name text)")

    def run(self, query: LiteralString, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query, params or None)
        return [] if cursor.description is None else cursor.fetchall()

    def script(self, text: str) -> list[tuple[Any, ...]]:
        """Statements that are put together, without parameters."""
        cursor = self._connection.execute(text.encode())
        return [] if cursor.description is None else cursor.fetchall()

    def clear(self) -> None:
        emptied(self._connection, "effect")

    def close(self) -> None:
        self._connection.close()

    def register(self) -> int:
        rows = self.run(
            "insert into idemconsumer.worker (name, lease, until, runs)"
            " values ('test', '1 hour', clock_timestamp() + interval '1 hour', '[]') returning id"
        )
        return int(rows[0][0])

    def expire(self, station: Station) -> None:
        """The lease of that station is over."""
        self.run(
            "update idemconsumer.worker set until = clock_timestamp() - interval '1 second' where id = %s",
            (station.lease.worker,),
        )

    @property
    def effects(self) -> list[str]:
        return [row[0] for row in self.run("select name from effect order by at")]

    @property
    def state(self) -> State:
        ((state,),) = self.run("select state from idemconsumer.record")
        return State(state)

    @property
    def token(self) -> int:
        ((token,),) = self.run("select token from idemconsumer.saga")
        return int(token)

    @property
    def held(self) -> bool:
        """Whether there is a saga that has not ended."""
        return bool(self.run("select 1 from idemconsumer.saga"))

    @property
    def letters(self) -> list[str]:
        return [row[0] for row in self.run("select reason from idemconsumer.dead_letter order by id")]

    @property
    def letter(self) -> str:
        """What the only dead letter says."""
        ((error,),) = self.run("select error from idemconsumer.dead_letter")
        return str(error)

    @property
    def steps(self) -> list[str]:
        return [row[0] for row in self.run("select name from idemconsumer.step order by position, name")]

    def waiting(self) -> int:
        """How many connections wait for a lock."""
        rows = self.run(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return int(rows[0][0])

    def kill_transactions(self) -> None:
        self.run(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and state = 'idle in transaction'"
        )


async def lost(bench: Bench, station: Station, handler: BoundHandler) -> LeasedSaga:
    """A saga that was claimed by a worker which is gone since."""
    call = Work.of(handler, order()).call
    assert call is not None
    holding = await station.leases.begin(call.claim, order(), handler.name, handler.options.version)
    assert isinstance(holding, LeasedSaga)
    bench.expire(station)
    return holding


@asynccontextmanager
async def locked(
    bench: Bench, query: LiteralString = "select 1 from idemconsumer.saga for update", *params: object
) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """Another connection holds the rows that the query locks."""
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(query, params)
        yield rival
        await rival.rollback()


def hog(seconds: float) -> None:
    """Computes, and lets neither the loop nor what waits for it go on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
