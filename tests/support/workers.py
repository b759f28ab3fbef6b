"""Workers inside the test's own loop, on a real Postgres; the brokers are in memory or the queue in Postgres."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import App, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.brokers.memory import MemoryBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.worker import Worker
from tests.support.points import Points
from tests.support.servers.postgres import migrated
from tests.support.waiting import PATIENCE

SCHEMA = "idemconsumer"


@dataclass
class Item:
    id: str
    entity: str = ""


class Lasting(MemoryBroker):
    """Keeps its messages when a worker closes it, as a broker elsewhere would."""

    async def close(self) -> None:
        return


@dataclass
class Running:
    """A worker at work."""

    worker: Worker
    task: asyncio.Task[None]
    points: Points

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll; fails when the worker ends first, or after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.task.done():
                await self.task
                assert condition(), "the worker left before it came true"
                return
            assert time.monotonic() < deadline, f"not true after {PATIENCE:g} s; counts {dict(self.worker.counts)}"
            await asyncio.sleep(0.01)

    async def until_count(self, **counts: int) -> None:
        """Until so many deliveries came to these outcomes."""
        await self.until(lambda: all(self.worker.counts.get(kind, 0) >= n for kind, n in counts.items()))

    async def leave(self) -> None:
        """Drain and wait for the end."""
        self.worker.drain()
        async with asyncio.timeout(PATIENCE):
            await self.task


@dataclass
class Bench:
    """A migrated database with a witness table, which would take any effect twice, and a broker in memory."""

    dsn: str
    broker: Lasting = field(default_factory=Lasting)

    def settings(self, **changed: Any) -> Settings:
        return replace(Settings(dsn=self.dsn, concurrency=4, prune_every=3600.0), **changed)

    async def opened_before(self) -> None:
        """What the first process says for a whole schema (R38) is said."""
        store = await PostgresStore.open(self.dsn, SCHEMA, connections=1, longest_run=1.0)
        await store.close()

    @asynccontextmanager
    async def running(self, app: App, **settings: Any) -> AsyncIterator[Running]:
        points = Points()
        made = app.worker(self.settings(**settings), points)
        task = asyncio.create_task(made.run())
        running = Running(made, task, points)
        try:
            yield running
            if not task.done():
                await running.leave()
        finally:
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await task

    async def until_empty(self, app: App, **settings: Any) -> Worker:
        """Run to the end of all sources."""
        made = app.worker(self.settings(until_empty=True, **settings), Points())
        async with asyncio.timeout(3 * PATIENCE):
            await made.run()
        return made

    async def publish(self, name: str, *items: Item | bytes) -> None:
        await self.broker.publish(name, [Outgoing(body(item)) for item in items])

    def enqueue(self, name: str, *items: Item | bytes) -> None:
        for item in items:
            self.do("select idemconsumer.publish_bytes(%s, %s)", name, body(item))

    def do(self, query: str, *params: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(query.encode(), params or None)
            return [] if cursor.description is None else cursor.fetchall()

    def effects(self) -> list[str]:
        """The ids that were applied, in order of their inserts."""
        return [name for (name,) in self.do("select id from effect order by place")]

    def attempts(self) -> int:
        return int(self.do("select coalesce(sum(count), 0) from idemconsumer.attempt")[0][0])

    @asynccontextmanager
    async def rival(self, key: bytes) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """A rival elsewhere that holds this key, uncommitted; call what it yields to release the key."""
        connection = await psycopg.AsyncConnection.connect(self.dsn)
        async with connection:
            lock = int.from_bytes(key[:8], "big", signed=True)
            await connection.execute("select pg_advisory_xact_lock(%s)", (lock,))
            yield connection.rollback


def body(item: Item | bytes) -> bytes:
    return item if isinstance(item, bytes) else json.dumps({"id": item.id, "entity": item.entity}).encode()


async def note(tx: Tx, item: Item) -> None:
    """The effect that tests count."""
    await tx.execute("insert into effect (id) values (%s)", (item.id,))


def prepare(dsn: str) -> None:
    migrated(dsn, SCHEMA)
    with psycopg.connect(dsn) as connection:
        connection.execute("create table effect (place bigint generated always as identity, id text)")


def connected(bench: Bench, monkeypatch: pytest.MonkeyPatch, **brokers: Any) -> Bench:
    """`memory:` is the bench's broker from now on; other schemes as given, or the real ones."""
    ours = {"memory": bench.broker} | brokers
    monkeypatch.setattr(
        "idemconsumer.worker.worker.connect",
        lambda scheme, settings: ours[scheme] if scheme in ours else connect(scheme, settings),
    )
    return bench
