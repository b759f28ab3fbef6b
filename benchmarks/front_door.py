"""What an idempotent request costs beside a plain FastAPI endpoint, and beside what others have published for it.

All services run at once, each a uvicorn process, and are asked in turn for a short while: what the machine does besides
changes from minute to minute, and a ratio compares neighbours.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psycopg

from benchmarks._child import Child, busy, child
from benchmarks._measure import Figure, Ratio, Result, Spread, Table, Target, ratio
from benchmarks._stage import Stage
from benchmarks.end_to_end import process
from idemconsumer.embedded.postgres import free_port

PLAIN = "plain"
OURS = ("joined", "leased")
IDEMKIT = ("idemkit, Postgres", "idemkit, Postgres, stored first")
RIVALS = ("asgi-idempotency-header, Redis", "idemkit, Redis", *IDEMKIT)
MANY = 16  # clients; with one, nobody waits for anybody
ADDED_MS, REPLAYED = 1.5, 3.0  # goals: at most, at least
BESIDE = 1.2  # and what leased mode adds, divided by what idemkit adds on the same Postgres: at most
_WARM = 200


class Slice(NamedTuple):
    """Requests that one service was asked one after another, or many at a time."""

    rate: float  # a second
    middle: float  # ms
    most: float  # ms, the 99th percentile
    cpu: float  # ms of the service for one


class Service(NamedTuple):
    name: str
    pid: int
    port: int
    dsn: str


Seen = dict[tuple[str, int, bool], list[Slice]]  # by service, clients, and whether they were replays


async def front_door(stage: Stage) -> Result:
    rounds, counts = (1, {1: 100, MANY: 200}) if stage.quick else (5, {1: 300, MANY: 600})
    seen: Seen = {}
    async with AsyncExitStack() as stack:
        callers = await stack.enter_async_context(child("benchmarks.rivals.callers"))
        starting = (stack.enter_async_context(service(stage, name)) for name in (PLAIN, *OURS, *RIVALS))
        services = await asyncio.gather(*starting)
        for each in services:
            await ask(callers, each, "warm", MANY, _WARM)
        for number in range(rounds):
            for each in services[:: 1 if number % 2 == 0 else -1]:
                for clients, count in counts.items():
                    prefix = f"{number}-{clients}"
                    for replayed in (False, True) if each.name != PLAIN else (False,):
                        slices = seen.setdefault((each.name, clients, replayed), [])
                        slices.append(await ask(callers, each, prefix, clients, count))
            stage.say(f"http: round {number + 1} of {rounds}")
        for each in services:
            await counted(each, _WARM + rounds * sum(counts.values()))
        limit = [await _limit(callers, clients, count) for clients, count in counts.items()]
    return _result(seen, limit, counts)


@asynccontextmanager
async def service(stage: Stage, name: str) -> AsyncIterator[Service]:
    """One that answers, with a database of its own."""
    with stage.database() as dsn:
        environment = {"BENCH_HOW": name, "BENCH_DSN": dsn, "IDEMCONSUMER_DSN": dsn}
        if name.endswith("Redis"):
            environment["BENCH_REDIS"] = stage.redis
        if name in IDEMKIT:
            from idemkit.backends.postgres import init_pg

            await init_pg(dsn)
        port = free_port()
        options = f"--port {port} --no-access-log --log-level warning".split()
        async with process(environment, ["-m", "uvicorn", "benchmarks.rivals.web:api", *options]) as running:
            async with asyncio.timeout(30.0):
                while not await _listens(port):
                    if running.returncode is not None:
                        raise RuntimeError(f"{name} has ended; its errors are above")
                    await asyncio.sleep(0.05)
            yield Service(name, running.pid, port, dsn)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def ask(callers: Child, asked: Service, prefix: str, clients: int, count: int) -> Slice:
    before = busy(asked.pid)
    seconds, middle, most = await callers.ask(
        port=asked.port, prefix=f"{asked.pid}-{prefix}", clients=clients, count=count
    )
    return Slice(count / seconds, middle * 1e3, most * 1e3, (busy(asked.pid) - before) / count * 1e3)


async def counted(asked: Service, payments: int) -> None:
    """Each payment is there once; else what was fast was also wrong."""
    async with await psycopg.AsyncConnection.connect(asked.dsn) as connection:
        cursor = await connection.execute("select count(*), count(distinct id) from payment")
        if (rows := await cursor.fetchone()) != (payments, payments):
            raise RuntimeError(f"{asked.name}: {payments} payments are {rows} rows, and different ones")


async def _limit(callers: Child, clients: int, count: int) -> float:
    """Requests a second of the clients, where each is answered at once."""
    async with child("benchmarks.rivals.callers") as answering:
        port = await answering.ask(serve=True)
        seconds, _, _ = await callers.ask(port=port, prefix=secrets.token_hex(3), clients=clients, count=count * 5)
    return float(count * 5 / seconds)


def _result(seen: Seen, limit: list[float], counts: dict[int, int]) -> Result:
    everybody = (*OURS, *RIVALS)

    def spread(what: Callable[[Slice], float], name: str, clients: int, replayed: bool = False) -> Spread:
        return Spread.of(map(what, seen[name, clients, replayed]))

    def added(what: Callable[[Slice], float], name: str, clients: int) -> list[float]:
        pairs = zip(seen[name, clients, False], seen[PLAIN, clients, False], strict=True)
        return [what(mine) - what(other) for mine, other in pairs]

    def latency(clients: int) -> Table:
        figures = []
        for label, what in (("p50", lambda s: s.middle), ("p99", lambda s: s.most)):
            figures.append(Figure(f"{PLAIN}, {label}", "ms", spread(what, PLAIN, clients)))
            for name in everybody:
                judged = label == "p50" and clients == 1 and name in OURS
                goal = ADDED_MS if judged else None
                figures.append(Figure(f"added by {name}, {label}", "ms", Spread.of(added(what, name, clients)), goal))
            figures += [Figure(f"{name}, a replay, {label}", "ms", spread(what, name, clients, True)) for name in OURS]
        middles = {f"added by {name}, p50": added(lambda s: s.middle, name, clients) for name in everybody}
        ratios = [
            ratio(middles, Target("added by leased, p50", f"added by {name}, p50", BESIDE, "at most"))
            for name in (IDEMKIT if clients == 1 else ())
        ]
        requests = f"{counts[clients]:,} a round"
        return Table(f"HTTP, clients: {clients}", figures, ratios, {"requests": requests})

    def of_rates(title: str, clients: int) -> Table:
        rates = {PLAIN: [s.rate for s in seen[PLAIN, clients, False]]}
        for name in everybody:
            rates[name] = [s.rate for s in seen[name, clients, False]]
            rates[f"{name}, replays"] = [s.rate for s in seen[name, clients, True]]
        ratios: list[Ratio] = [ratio(rates, Target(name, PLAIN)) for name in everybody]
        for name in everybody:
            goal = REPLAYED if name in OURS else None
            ratios.append(ratio(rates, Target(f"{name}, replays", name, goal)))
        figures = [Figure(name, "requests/s", Spread.of(values)) for name, values in rates.items()]
        facts = {"requests a second that the clients can send": f"{limit[list(counts).index(clients)]:,.0f}"}
        return Table(title, figures, ratios, facts)

    cpu: dict[str, Any] = {PLAIN: seen[PLAIN, MANY, False]}
    for name in everybody:
        cpu[name] = seen[name, MANY, False]
        cpu[f"{name}, replays"] = seen[name, MANY, True]
    used = [Figure(name, "ms of CPU a request", Spread.of(s.cpu for s in slices)) for name, slices in cpu.items()]
    return Result(
        "http",
        [
            latency(1),
            latency(MANY),
            of_rates(f"HTTP rates, clients: {MANY}", MANY),
            Table("The CPU of the web process", used),
        ],
    )
