"""What it costs to be watched: a worker of the Postgres queue, with nothing and with each way of looking at it.

A way is the environment of the worker; one more is one more line in `WAYS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from urllib.request import urlopen

import msgspec

from benchmarks._brokers import PostgresQueue
from benchmarks._child import busy
from benchmarks._measure import Figure, Result, Spread, Subject, Table, Target, ratio, side_by_side
from benchmarks._stage import Stage
from benchmarks.end_to_end import Consumer, Run, consume, process
from idemconsumer.embedded.postgres import free_port

NOTHING = "nothing"
_PORT = "IDEMCONSUMER_OPS_PORT"
WAYS: dict[str, Mapping[str, str]] = {
    NOTHING: {},
    "/metrics, each second": {_PORT: "127.0.0.1:{port}"},  # a way with a port is scraped
    "the delivery log": {"IDEMCONSUMER_DELIVERY_LOG": "1d"},
    "traces, recorded": {"IDEMCONSUMER_TRACING": "1", "OTEL_PYTHON_TRACER_PROVIDER": "sdk_tracer_provider"},
}
_MAY_COST = {"the delivery log": 0.05}  # and the others 0.03
_EVERY = 1.0  # seconds


async def observing(stage: Stage) -> Result:
    """Rates, in more rounds than elsewhere, since what is looked for is small; and the CPU that the worker takes with
    its launcher, which others on the machine change less."""
    count, rounds, most = (10_000, 1, 15.0) if stage.quick else (150_000, 7, 60.0)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}

    def subject(name: str) -> Subject:
        async def measured(number: int) -> float:
            run = await _watched(stage, WAYS[name], count, most)
            taken[name].append(run.busy * 1e6)
            return run.rate

        return measured

    others = [name for name in WAYS if name != NOTHING]
    table = await side_by_side(
        "A worker that is watched",
        {name: subject(name) for name in WAYS},
        [Target(name, NOTHING, 1 - _MAY_COST.get(name, 0.03)) for name in others],
        rounds=rounds,
        say=stage.say,
        facts={"messages": count},
    )
    cpu = Table(
        "What being watched takes of the worker and its launcher",
        [Figure(name, "µs of CPU a message", Spread.of(seen)) for name, seen in taken.items()],
        [ratio(taken, Target(name, NOTHING, 1 + _MAY_COST.get(name, 0.03), "at most")) for name in others],
    )
    scrape = Figure("the launcher", "ms of CPU a scrape", Spread.of(await _scrapes(stage)))
    return Result("observing", [table, cpu, Table("A scrape of /metrics", [scrape])])


async def _watched(stage: Stage, way: Mapping[str, str], count: int, most: float) -> Run:
    port = free_port()
    consumer = Consumer.ours()
    environment = {key: value.format(port=port) for key, value in way.items()}
    consumer = msgspec.structs.replace(consumer, environment={**consumer.environment, **environment})
    if _PORT not in way:
        return await consume(stage, PostgresQueue(), consumer, count, most=most)
    async with _scraped(f"http://127.0.0.1:{port}/metrics"):
        return await consume(stage, PostgresQueue(), consumer, count, most=most)


async def _scrapes(stage: Stage) -> list[float]:
    """Of a worker with nothing to do, a hundred in a row, since one is too short for the clock of the CPU."""
    port, times = free_port(), 100
    url, consumer = f"http://127.0.0.1:{port}/metrics", Consumer.ours()
    seen = []
    with stage.database() as dsn:
        environment = {**await PostgresQueue().fill(dsn, 1), **consumer.environment, _PORT: f"127.0.0.1:{port}"}
        async with process(environment, consumer.command) as running:
            async with asyncio.timeout(30.0):
                while not await _answers(url):
                    await asyncio.sleep(0.05)
            for _ in range(3):
                before = busy(running.pid)
                for _ in range(times):
                    await _answers(url)
                seen.append((busy(running.pid) - before) / times * 1e3)
    return seen


@asynccontextmanager
async def _scraped(url: str) -> AsyncIterator[None]:
    """Meanwhile. Raises RuntimeError when it never answered."""
    answers = 0

    async def scrape() -> None:
        nonlocal answers
        while True:
            answers += await _answers(url)
            await asyncio.sleep(_EVERY if answers else 0.05)

    scraper = asyncio.create_task(scrape())
    try:
        yield
    finally:
        scraper.cancel()
        await asyncio.wait([scraper])
    if not answers:
        raise RuntimeError(f"{url} has never answered with metrics")


async def _answers(url: str) -> bool:
    """False for a launcher that does not listen yet, or no longer, or has no worker."""
    with suppress(OSError):
        return b"idemconsumer_deliveries_total" in await asyncio.to_thread(_get, url)
    return False


def _get(url: str) -> bytes:
    with urlopen(url, timeout=10.0) as answer:
        body: bytes = answer.read()
    return body
