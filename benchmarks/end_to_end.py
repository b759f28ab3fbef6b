"""From a filled broker to the business table, each consumer in a process of its own on the same machine.

A rate is read from the rows: how many after the first tenth, over the time between that row and the last. Where a run
goes on after the last row, its end counts instead: when the broker learns of it later, or when the time is over before
all messages are applied, so that who stalls is slow.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import msgspec
import psycopg

from benchmarks._brokers import (
    Filling,
    KafkaTopic,
    PgQueuerJobs,
    PostgresQueue,
    ProcrastinateJobs,
    RabbitQueue,
    SqsQueue,
)
from benchmarks._child import ROOT, busy, ended, resident
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, side_by_side
from benchmarks._sizes import SIZE
from benchmarks._stage import Stage
from tests.support.pids import children

OURS = "idemconsumer"
Reach = Callable[[str], str]  # the address of a database -> where it is reached
_WARM = 0.1  # the share of a run before its rate is read
_COUNTS = {"kafka": (10_000, 60_000), "sqs": (1_500, 10_000)}
_POLL_SECONDS = 0.25
_LEAVE_SECONDS = 20.0
_START_SECONDS = 120.0  # until its first message


class Consumer(msgspec.Struct, frozen=True):
    """How one of them is started. A `slow` one gets a twentieth of the messages; a `whole` one has to apply all."""

    command: list[str]
    environment: dict[str, str] = {}
    slow: bool = False
    whole: bool = False
    queue: Filling | None = None  # its own, if it cannot read that of the others

    @classmethod
    def ours(cls, *, workers: int = 1, size: str = SIZE, pause: float = 0.0) -> Consumer:
        command = ["-m", "idemconsumer", "run", "benchmarks.rivals.worker:app", "--log-level", "error"]
        environment = {"BENCH_SIZE": size, "BENCH_PAUSE": str(pause)}
        return cls([*command, "--workers", str(workers)], environment, whole=True)

    @classmethod
    def module(cls, name: str, *arguments: str, slow: bool = False, queue: Filling | None = None) -> Consumer:
        return cls(["-m", f"benchmarks.rivals.{name}", *arguments], slow=slow, queue=queue)


class Run(msgspec.Struct, frozen=True):
    """What was seen of one consumer: messages a second, seconds from its start to the first one, bytes of memory, how
    many messages it had applied when its time was over, and its seconds of CPU a message, without those of its start.
    """

    rate: float
    first: float
    memory: int
    applied: int
    busy: float


# What is seen of a run beside its rate, and what it should be of ours at most.
_ASIDE: list[tuple[str, Callable[[Run], float], float]] = [
    ("s to the first message", lambda run: run.first, 1.0),
    ("MB resident", lambda run: run.memory / 1e6, 150.0),
]

BEST = "best by hand"
_BY_HAND = {
    "best by hand": Consumer.module("hand", "best"),
    "plain by hand": Consumer.module("hand", "plain"),
    "dedup by hand": Consumer.module("hand", "dedup"),
    "textbook": Consumer.module("hand", "textbook", slow=True),
}
_FASTSTREAM = {"FastStream, dedup by hand": Consumer.module("faststream_app")}
_GOALS = {"best by hand": 1.5, "plain by hand": 4.0, "dedup by hand": 2.5, "FastStream, dedup by hand": 2.0}


async def kafka(stage: Stage) -> Result:
    rivals = {**_BY_HAND, **_FASTSTREAM, "DBOS": Consumer.module("dbos_kafka", slow=True)}
    return await _compare(stage, "kafka", KafkaTopic(stage), rivals, {**_GOALS, "DBOS": 40.0})


async def rabbitmq(stage: Stage) -> Result:
    return await _compare(stage, "rabbitmq", RabbitQueue(stage), {**_BY_HAND, **_FASTSTREAM}, _GOALS)


async def postgres_queue(stage: Stage) -> Result:
    rivals = {
        **_BY_HAND,
        "PgQueuer": Consumer.module("pgqueuer_app", queue=PgQueuerJobs()),
        "procrastinate": Consumer.module("procrastinate_app", slow=True, queue=ProcrastinateJobs()),
    }
    return await _compare(stage, "postgres_queue", PostgresQueue(), rivals, {})


async def sqs(stage: Stage) -> Result:
    async with SqsQueue.open(stage) as queue:
        return await _compare(stage, "sqs", queue, _BY_HAND, {"best by hand": 1.0})


async def _compare(
    stage: Stage, part: str, broker: Filling, rivals: Mapping[str, Consumer], goals: Mapping[str, float]
) -> Result:
    small, large = _COUNTS.get(part, (5_000, 60_000))
    count = small if stage.quick else large
    rounds, most = (1, 5.0) if stage.quick else (3, 30.0)
    seen: dict[str, list[Run]] = {}
    consumers = {OURS: Consumer.ours(), **rivals}
    counts = {name: count // 20 if consumer.slow else count for name, consumer in consumers.items()}

    def subject(name: str) -> Subject:
        async def measured(number: int) -> float:
            run = await consume(stage, broker, consumers[name], counts[name], most=most)
            seen.setdefault(name, []).append(run)
            return run.rate

        return measured

    table = await side_by_side(
        f"End to end: {part}",
        {name: subject(name) for name in consumers},
        [Target(OURS, name, goals.get(name)) for name in rivals],
        rounds=rounds,
        say=stage.say,
        plot=True,
        facts={"messages": f"{count:,}, {count // 20:,} for {' and '.join(n for n in rivals if rivals[n].slow)}"},
    )
    for name, runs in seen.items():
        if (share := min(run.applied for run in runs) / counts[name]) < 1:
            table.facts[f"{name} applied"] = f"{share:.0%} in {most:g} s"
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
            return (await consume(stage, broker, consumer, 20_000, most=60.0)).rate

        return measured

    subjects = {"1 worker": subject(1), "2 workers": subject(2)}
    targets = [Target("2 workers", "1 worker", 1.6)]
    facts = {"handler": "one insert, then 5 ms of waiting"}
    return await side_by_side(f"Two workers: {part}", subjects, targets, rounds=2, say=stage.say, facts=facts)


async def consume(
    stage: Stage, broker: Filling, consumer: Consumer, count: int, *, most: float, reach: Reach = lambda dsn: dsn
) -> Run:
    """One run of one consumer, of at most so many seconds after its first message. `reach` makes the address where it
    finds the database.

    Raises RuntimeError when it ends by itself, applies a message twice, or fewer than it has to.
    """
    what = " ".join(consumer.command)
    with stage.database() as dsn:
        broker = consumer.queue or broker
        environment = {**await broker.fill(dsn, count), "BENCH_DSN": reach(dsn), "IDEMCONSUMER_DSN": reach(dsn)}
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            (began,) = await row(connection, "select clock_timestamp()")
            async with process({**environment, **consumer.environment}, consumer.command) as running:
                whole, warm, start = await _all_applied(connection, running, what, count, most)
                until_now = not whole or await _late(broker, what, most)
                params = {"began": began, "warm": _WARM, "until_now": until_now}
                applied, first, rate = await row(connection, _RATE, params)
                pids = [running.pid, *children(running.pid)]
                memory, used = max(map(resident, pids)), sum(map(busy, pids)) - start
            total, distinct = await row(connection, "select count(*), count(distinct id) from payment")
    if total > distinct:
        raise RuntimeError(f"{what} applied {total - distinct} of {total} messages twice")
    if rate is None or (consumer.whole and applied < count):
        raise RuntimeError(f"{what} applied {applied} of {count} messages in {most:g} s")
    return Run(float(rate), float(first), memory, applied, used / max(1, applied - warm))


_RATE: LiteralString = """
with ordered as (select at, row_number() over (order by at) as n, count(*) over () as total from payment)
select count(*), extract(epoch from min(at) - %(began)s),
    (max(total) - max(n) filter (where n <= total * %(warm)s))
        / extract(epoch from case when %(until_now)s then statement_timestamp() else max(at) end
                             - max(at) filter (where n <= total * %(warm)s))
from ordered
"""


async def row(
    connection: psycopg.AsyncConnection[Any], query: LiteralString, params: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await connection.execute(query, params)).fetchone()
    assert row is not None
    return row


async def _all_applied(
    connection: psycopg.AsyncConnection[Any], process: Process, what: str, count: int, most: float
) -> tuple[bool, int, float]:
    """Wait for all of them, or until the time after the first one is over, which is False; and how many there were, and
    what CPU the process had taken, when it was warm."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + _START_SECONDS
    started = False
    warm, start = 0, 0.0
    while clock() < deadline:
        (seen,) = await row(connection, "select count(*) from payment")
        if seen >= count:
            return True, warm, start
        if process.returncode is not None:
            ending = f"ended with exit code {process.returncode} after {seen} of {count} messages"
            raise RuntimeError(f"{what} {ending}; its errors are above")
        if seen and not started:
            started, deadline = True, clock() + most
        if not warm and seen >= count * _WARM:
            warm, start = seen, sum(map(busy, [process.pid, *children(process.pid)]))
        await asyncio.sleep(_POLL_SECONDS)
    return False, warm, start


async def _late(broker: Filling, what: str, most: float) -> bool:
    """Wait until the broker knows too, and say whether it did not at once."""
    late = False
    try:
        async with asyncio.timeout(most):
            while not await broker.settled():
                late = True
                await asyncio.sleep(_POLL_SECONDS / 5)
    except TimeoutError:
        raise RuntimeError(f"{what} applied all, of which its broker did not know {most:g} s later") from None
    return late


@asynccontextmanager
async def process(environment: Mapping[str, str], command: Sequence[str]) -> AsyncIterator[Process]:
    """A consumer, ended when the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await ended(process, _LEAVE_SECONDS)
