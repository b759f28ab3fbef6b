"""What a take from a Postgres queue costs while an old snapshot keeps what is gone: a backup, or a forgotten BEGIN."""

from __future__ import annotations

import time

import psycopg

from benchmarks._measure import Figure, Result, Spread, Table
from benchmarks._stage import SCHEMA, Stage
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds
from idemconsumer.settings import Settings
from idemconsumer.sql.queries import load

GOAL = 2.0  # times what it costs with nothing gone
AT_ONCE = 2_000
MARKS = [0, 100_000, 500_000, 2_000_000]  # messages that are gone
_TIMES = 30
_GIVEN = {
    "take": {
        "names": ["payments"],
        "limits": [10],
        "bytes": 1_000_000,
        "most": 1_000_000,
        "visibility": 10.0,
        "taker": 0,
    },
    "look_for_messages": {"queues": ["payments", "outbox:"], "ahead": 5.0},
}


async def old_snapshot(stage: Stage) -> Result:
    """The messages go through a session, as a worker's do; a take is then timed alone."""
    figures: list[Figure] = []
    with stage.database() as dsn:
        async with (
            await psycopg.AsyncConnection.connect(dsn) as old,
            await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
        ):
            await old.execute("set transaction isolation level repeatable read")
            await old.execute("select 1")
            await connection.execute("set enable_seqscan = off")
            broker = PostgresBroker(Settings(dsn=dsn))
            bounds = Bounds(lanes=1, group=AT_ONCE, room=AT_ONCE)
            session = await broker.open([Subscription("postgres:payments", "pay", "bench")], bounds)
            gone, fresh = 0, 0.0
            for most in MARKS:
                while gone < (most / 100 if stage.quick else most):
                    gone += await _through(connection, session)
                await session.fetch()
                await session.fetch()
                for name in _GIVEN:
                    cost = await _cost(connection, name)
                    title = f"{'take one' if name == 'take' else 'look'}, {gone:,} gone"
                    fresh = fresh or cost.median
                    figures.append(Figure(title, "ms", cost, GOAL * fresh if name == "take" and gone else None))
                    stage.say(f"Old snapshot: {title}: {cost.median:.2f} ms, {cost.least:.2f} at least")
            await session.close()
    facts = {"goal": f"take one: at most {GOAL:g} times what it costs with none gone"}
    return Result("old_snapshot", [Table("With an old snapshot open", figures, facts=facts)])


async def _through(connection: psycopg.AsyncConnection[tuple[int]], session: PostgresSession) -> int:
    await connection.execute(
        "insert into idemconsumer.queue (name, body) select 'payments', 'x' from generate_series(1, %s)", (AT_ONCE,)
    )
    session.looked({"payments": 0.0})
    left = AT_ONCE
    while left > 0:
        deliveries = await session.fetch()
        await session.settle(deliveries)
        left -= len(deliveries)
    return AT_ONCE


async def _cost(connection: psycopg.AsyncConnection[tuple[int]], name: str) -> Spread:
    """Of a statement that finds one message, in milliseconds."""
    seen = []
    for _ in range(_TIMES):
        cursor = await connection.execute(
            "insert into idemconsumer.queue (name, body) values ('payments', 'x') returning id"
        )
        row = await cursor.fetchone()
        began = time.perf_counter()
        await connection.execute(load(SCHEMA)[name], _GIVEN[name])
        seen.append(1e3 * (time.perf_counter() - began))
        await connection.execute("delete from idemconsumer.queue where id = %s", row)
    return Spread.of(seen)
