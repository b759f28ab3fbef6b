"""From a filled broker to the business table, each consumer in a process of its own on the same machine.

A rate is read from the rows: how many after the first tenth, over the time between that row and the last. A run ends
when all messages are applied or its time is over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psycopg

from benchmarks._brokers import Filling, KafkaTopic, PostgresQueue, RabbitQueue, SqsQueue
from benchmarks._child import ROOT
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, side_by_side
from benchmarks._sizes import SIZE
from benchmarks._stage import Stage

OURS = "idemconsumer"
# The share of a run before its rate is read. On Kafka our lanes put the first messages after an assignment on record, a
# thousand of them together, in case the partition's last owner was killed by one.
_WARM = 0.1
_COUNTS = {"kafka": (10_000, 60_000), "sqs": (1_500, 10_000)}
_POLL_SECONDS = 0.25
_LEAVE_SECONDS = 20.0


class Consumer(msgspec.Struct, frozen=True):
    """How one of them is started."""

    command: list[str]
    environment: dict[str, str] = {}

    @classmethod
    def ours(cls, *, workers: int = 1, size: str = SIZE, pause: float = 0.0) -> Consumer:
        command = ["-m", "idemconsumer", "run", "benchmarks.rivals.worker:app", "--log-level", "error"]
        environment = {"BENCH_SIZE": size, "BENCH_PAUSE": str(pause)}
        return cls([*command, "--workers", str(workers)], environment)

    @classmethod
    def module(cls, name: str, *arguments: str) -> Consumer:
        return cls(["-m", f"benchmarks.rivals.{name}", *arguments])


class Run(msgspec.Struct, frozen=True):
    """What was seen of one consumer: messages a second, seconds from its start to the first one, bytes of memory."""

    rate: float
    first: float
    memory: int


# What is seen of a run beside its rate, and what it should be of ours at most.
_ASIDE: list[tuple[str, Callable[[Run], float], float]] = [
    ("s to the first message", lambda run: run.first, 1.0),
    ("MB resident", lambda run: run.memory / 1e6, 150.0),
]


async def kafka(stage: Stage) -> Result:
    rivals = {
        "best by hand": Consumer.module("hand", "best"),
        "plain by hand": Consumer.module("hand", "plain"),
        "dedup by hand": Consumer.module("hand", "dedup"),
        "FastStream, dedup by hand": Consumer.module("faststream_app"),
        "DBOS": Consumer.module("dbos_kafka"),
    }
    goals = {
        "best by hand": 1.5,
        "plain by hand": 4.0,
        "dedup by hand": 2.5,
        "FastStream, dedup by hand": 2.0,
        "DBOS": 40.0,
    }
    return await _compare(stage, "kafka", KafkaTopic(stage), rivals, goals)


async def rabbitmq(stage: Stage) -> Result:
    rivals = {
        "best by hand": Consumer.module("hand", "best"),
        "plain by hand": Consumer.module("hand", "plain"),
        "dedup by hand": Consumer.module("hand", "dedup"),
        "FastStream, dedup by hand": Consumer.module("faststream_app"),
    }
    goals = {"best by hand": 1.5, "plain by hand": 4.0, "dedup by hand": 2.5, "FastStream, dedup by hand": 2.0}
    return await _compare(stage, "rabbitmq", RabbitQueue(stage), rivals, goals)


async def postgres_queue(stage: Stage) -> Result:
    rivals = {name: Consumer.module("hand", name.partition(" ")[0]) for name in ("best by hand", "plain by hand")}
    return await _compare(stage, "postgres_queue", PostgresQueue(), rivals, dict.fromkeys(rivals))


async def sqs(stage: Stage) -> Result:
    rivals = {
        name: Consumer.module("hand", name.partition(" ")[0])
        for name in ("best by hand", "plain by hand", "dedup by hand")
    }
    return await _compare(stage, "sqs", SqsQueue(stage), rivals, {**dict.fromkeys(rivals), "best by hand": 1.0})


async def _compare(
    stage: Stage, part: str, broker: Filling, rivals: Mapping[str, Consumer], goals: Mapping[str, float | None]
) -> Result:
    small, large = _COUNTS.get(part, (5_000, 60_000))
    count = small if stage.quick else large
    rounds, most = (1, 5.0) if stage.quick else (3, 30.0)
    seen: dict[str, list[Run]] = {}
    consumers = {OURS: Consumer.ours(), **rivals}

    def subject(name: str) -> Subject:
        async def measured(number: int) -> float:
            run = await _run(stage, broker, consumers[name], count, most=most)
            seen.setdefault(name, []).append(run)
            return run.rate

        return measured

    table = await side_by_side(
        f"End to end: {part}",
        {name: subject(name) for name in consumers},
        [Target(OURS, name, goals[name]) for name in rivals],
        rounds=rounds,
        say=stage.say,
        plot=True,
        facts={"messages": count, "connections": 8},
    )
    figures = [
        Figure(name, unit, Spread.of(map(value, runs)), goal if name == OURS else None)
        for unit, value, goal in _ASIDE
        for name, runs in seen.items()
    ]
    tables = [table, Table(f"Start and memory: {part}", figures)]
    if not stage.quick and part in ("kafka", "rabbitmq"):
        tables.append(await _two_workers(stage, part, broker))
    return Result(part, tables)


async def _two_workers(stage: Stage, part: str, broker: Filling) -> Table:
    """With a handler that waits for 5 ms of something else, so that lanes and not the database are the limit."""

    def subject(workers: int) -> Subject:
        async def measured(number: int) -> float:
            consumer = Consumer.ours(workers=workers, pause=0.005)
            return (await _run(stage, broker, consumer, 20_000, most=60.0)).rate

        return measured

    subjects = {"1 worker": subject(1), "2 workers": subject(2)}
    targets = [Target("2 workers", "1 worker", 1.6)]
    facts = {"handler": "one insert, then 5 ms of waiting"}
    return await side_by_side(f"Two workers: {part}", subjects, targets, rounds=2, say=stage.say, facts=facts)


async def _run(stage: Stage, broker: Filling, consumer: Consumer, count: int, *, most: float) -> Run:
    with stage.database() as dsn:
        environment = {**await broker.fill(dsn, count), "BENCH_DSN": dsn, "IDEMCONSUMER_DSN": dsn}
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute("select clock_timestamp()")
            began = (await cursor.fetchone() or [None])[0]
            async with _process({**environment, **consumer.environment}, consumer.command) as pid:
                await _applied(connection, count, most)
                memory = max(map(_resident, _family(pid)))
            cursor = await connection.execute(
                """
                with ordered as (
                    select at, row_number() over (order by at) as n, count(*) over () as total from payment
                )
                select extract(epoch from min(at) - %(began)s), max(total),
                    (max(total) - max(n) filter (where n <= total * %(warm)s))
                        / extract(epoch from max(at) - max(at) filter (where n <= total * %(warm)s))
                from ordered
                """,
                {"began": began, "warm": _WARM},
            )
            row = await cursor.fetchone()
    assert row is not None
    if row[2] is None:
        raise RuntimeError(f"{' '.join(consumer.command)} applied {row[1] or 0} messages in {most:g} s")
    if row[1] > count:
        raise RuntimeError(f"{' '.join(consumer.command)} applied {row[1]} of {count} messages: some twice")
    return Run(float(row[2]), float(row[0]), memory)


async def _applied(connection: psycopg.AsyncConnection[tuple[object, ...]], count: int, most: float) -> None:
    """Wait for all of them, or until the time after the first one is over."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + 3 * most
    started = False
    while clock() < deadline:
        row = await (await connection.execute("select count(*) from payment")).fetchone()
        assert row is not None
        if row[0] == count:
            return
        if row[0] and not started:
            started, deadline = True, clock() + most
        await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def _process(environment: Mapping[str, str], command: Sequence[str]) -> AsyncIterator[int]:
    """A consumer, ended when the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env={**os.environ, **environment}
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _family(pid: int) -> list[int]:
    """A process and its children."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for task in tasks for child in task.read_text().split())]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (FileNotFoundError, ProcessLookupError):
        return 0
