"""What one message of a Postgres queue costs, and how soon it is taken, by how many workers wait for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks._measure import Figure, Result, Spread, Table
from benchmarks._stage import Stage
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds
from idemconsumer.settings import Settings
from idemconsumer.user_code.cancellation import end
from tests.support.inside import told_how_many

GOAL = 3.5  # transactions, besides those that publish it and that handle it: three, and now and then a low water
_WORKERS = (1, 5, 20)
_LANES = 8
_PACE = 0.03  # seconds between two messages


async def waking(stage: Stage) -> Result:
    """One message after the other; what the same time costs without any is subtracted."""
    messages = 20 if stage.quick else 100
    costs, times = list[Figure](), list[Figure]()
    for workers in _WORKERS:
        title = f"{workers} worker{'s' * (workers > 1)}"
        with stage.database() as dsn:
            before = await _commits(dsn)
            await _through(dsn, workers, messages, publish=False)
            idle = await _commits(dsn) - before
            seen = await _through(dsn, workers, messages, publish=True)
            cost = (await _commits(dsn) - before - 2 * idle) / messages - 1
        costs.append(Figure(title, "transactions", Spread.of([cost]), None if stage.quick else GOAL))
        times.append(Figure(f"{title}, p50", "ms", Spread.of([seen[len(seen) // 2]])))
        times.append(Figure(f"{title}, p99", "ms", Spread.of([seen[len(seen) * 99 // 100]])))
        stage.say(f"Waking: {title}: {cost:.1f} transactions, {times[-2].values.median:.1f} ms")
    facts = {"lanes of a worker": _LANES, "messages": messages, "ms between two": round(1e3 * _PACE)}
    return Result(
        "waking",
        [Table("Transactions a message, by workers", costs, facts=facts), Table("Until it is taken", times)],
    )


async def _through(dsn: str, workers: int, messages: int, *, publish: bool) -> list[float]:
    """Milliseconds from its publishing until it was taken, of each of them, in ascending order."""
    broker, taken = PostgresBroker(Settings(dsn=dsn)), asyncio.Event()
    bounds = Bounds(lanes=_LANES, group=1, room=10, share=lambda _: 2 * _LANES)
    seen = list[float]()

    async def work(session: PostgresSession) -> None:
        while True:
            if deliveries := await session.fetch():
                taken.set()
                await session.settle(deliveries)

    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))
        sessions = []
        for _ in range(workers):
            session = await broker.open([Subscription("postgres:payments", "pay", "bench")], bounds)
            stack.push_async_callback(session.close)
            stack.push_async_callback(end, asyncio.create_task(work(session)))
            sessions.append(session)
        for session in sessions:
            await told_how_many(session)
        beat = time.perf_counter()
        for _ in range(messages):
            if publish:
                taken.clear()
                began = time.perf_counter()
                await publisher.execute("select idemconsumer.publish_bytes('payments', 'x')")
                await taken.wait()
                seen.append(1e3 * (time.perf_counter() - began))
            beat += _PACE
            await asyncio.sleep(max(0.0, beat - time.perf_counter()))
    return sorted(seen)


async def _commits(dsn: str) -> int:
    """Once nobody is connected: a session tells its own when it ends. Asked from another database."""
    name = conninfo_to_dict(dsn)["dbname"]
    there = "select 1 from pg_stat_activity where datname = %s and backend_type = 'client backend'"
    async with await psycopg.AsyncConnection.connect(dsn, dbname="postgres", autocommit=True) as judge:
        while await (await judge.execute(there, (name,))).fetchone():
            await asyncio.sleep(0.02)
        row = await (
            await judge.execute("select xact_commit from pg_stat_database where datname = %s", (name,))
        ).fetchone()
    assert row is not None
    return int(row[0])
