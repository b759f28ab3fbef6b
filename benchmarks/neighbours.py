"""What one message costs another: a fast handler beside a slow one, and messages of a worker that was killed."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import psycopg

from benchmarks._brokers import Filling, opened
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, side_by_side
from benchmarks._stage import Stage
from benchmarks.end_to_end import Consumer, process, row
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import load
from tests.support.pids import children

BESIDE, ALONE = "beside a slow one", "alone"
_SLOW = 400  # messages that take a second each
_RATE = 50  # messages a second for the fast one
_PATIENCE = 120.0
# What is wanted, in seconds. SQS and the Postgres queue keep what the dead one held for their visibility timeout.
_TAKE_OVER: dict[str, float | None] = {"kafka": 2.0, "rabbitmq": 2.0, "postgres_queue": None, "sqs": None}


async def fairness(stage: Stage) -> Result:
    """The p99 of a fast handler, from before its message is published to its insert."""
    rounds, seconds = (1, 3.0) if stage.quick else (3, 10.0)
    tables = []
    facts = {"slow messages": f"{_SLOW}, a second each", "fast messages": f"{_RATE} a second"}
    targets = [Target(BESIDE, ALONE, 3.0, "at most")]
    for part in ["postgres_queue"] if stage.quick else ["kafka", "rabbitmq", "postgres_queue", "sqs"]:
        async with opened(stage, part) as broker:
            subjects = {name: _fast(stage, broker, slow, seconds) for name, slow in ((ALONE, 0), (BESIDE, _SLOW))}
            title = f"A fast handler: {part}"
            tables.append(
                await side_by_side(title, subjects, targets, rounds=rounds, say=stage.say, unit="ms, p99", facts=facts)
            )
    return Result("fairness", tables)


def _fast(stage: Stage, broker: Filling, slow: int, seconds: float) -> Subject:
    async def measured(number: int) -> float:
        with stage.database() as dsn:
            mark = secrets.token_hex(4)
            behind = await broker.fill(dsn, slow or 1, name=f"slow-{mark}")
            environment = await broker.fill(dsn, 1, name=f"fast-{mark}")
            environment |= {"BENCH_SLOW": behind["BENCH_SOURCE"], "BENCH_DSN": dsn, "IDEMCONSUMER_DSN": dsn}
            command = ["-m", "idemconsumer", "run", "benchmarks.rivals.two_handlers:app", "--log-level", "error"]
            async with _connected(dsn) as connection, process(environment, command):
                await _until(connection, "select count(*) >= 1 from payment")
                await asyncio.sleep(2.0)  # the slow one has all of its lanes busy by now
                count = await _publish(environment, seconds)
                await _until(connection, "select count(*) > %(n)s from payment", {"n": count})
                (p99,) = await row(
                    connection,
                    "select percentile_cont(0.99) within group (order by extract(epoch from at) - id::float)"
                    " from payment where id not like 'p%%'",
                )
                return float(p99) * 1e3

    return measured


async def _publish(environment: Mapping[str, str], seconds: float) -> int:
    scheme, _, name = environment["BENCH_SOURCE"].partition(":")
    sender = connect(scheme, load({k: v for k, v in environment.items() if k.startswith("IDEMCONSUMER_")}))
    count = int(seconds * _RATE)
    try:
        began = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / _RATE - time.monotonic()))
            await sender.publish(name, [Outgoing(b'{"id": "%.6f", "amount": 1}' % time.time())])
    finally:
        await sender.close()
    return count


async def take_over(stage: Stage) -> Result:
    """Seconds from the SIGKILL of a worker until the first message that it had in hand is run again: by the worker that
    its launcher starts in its place."""
    rounds = 1 if stage.quick else 3
    figures = []
    for part in ["rabbitmq"] if stage.quick else _TAKE_OVER:
        seen = []
        async with opened(stage, part) as broker:
            for _ in range(rounds):
                seen.append(await _taken_over(stage, broker))
                stage.say(f"Take-over: {part}: {seen[-1]:.3g} s")
        figures.append(Figure(part, "s until its messages run again", Spread.of(seen), _TAKE_OVER[part]))
    return Result("take_over", [Table("Take-over after a SIGKILL", figures, facts={"workers": 1})])


async def _taken_over(stage: Stage, broker: Filling) -> float:
    consumer = Consumer.ours(pause=3.0)
    with stage.database() as dsn:
        environment = {
            **await broker.fill(dsn, 4, name=secrets.token_hex(4)),
            "BENCH_DSN": dsn,
            "IDEMCONSUMER_DSN": dsn,
        }
        async with (
            _connected(dsn) as connection,
            process({**environment, **consumer.environment}, consumer.command) as it,
        ):
            running = "select count(*) > 0 from pg_stat_activity where state = 'idle in transaction'"
            await _until(connection, f"{running} and datname = current_database()")
            (killed,) = await row(connection, "select clock_timestamp()")
            os.kill(children(it.pid)[0], signal.SIGKILL)
            await _until(connection, "select count(*) > 0 from payment")
            (seconds,) = await row(connection, "select extract(epoch from min(at) - %(k)s) from payment", {"k": killed})
            return float(seconds)


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield connection


async def _until(
    connection: psycopg.AsyncConnection[Any], question: LiteralString, params: Mapping[str, Any] | None = None
) -> None:
    async with asyncio.timeout(_PATIENCE):
        while not (await row(connection, question, params))[0]:
            await asyncio.sleep(0.05)
