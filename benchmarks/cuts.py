"""How long a worker stands still after its connections to Postgres were cut, while the server itself went on.

A failover that is seen through a service, or a pooler that restarts again and again: all connections are reset at once,
and a new one works. With `at a standby` every other new one leads to a hot standby, until the cuts are over.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from typing import Any, LiteralString, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks._brokers import opened
from benchmarks._measure import Figure, Result, Spread, Table
from benchmarks._stage import JOB, PAYMENT, SCHEMA, Stage, url
from benchmarks.end_to_end import process, row
from idemconsumer.brokers.adapters import connect
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import load
from idemconsumer.stores.migrations import migrate
from tests.support.servers.proxy import Proxy
from tests.support.servers.standby import Standby

SUBJECTS = {
    "Postgres queue": "postgres_queue",
    "Kafka": "kafka",
    "RabbitMQ": "rabbitmq",
    "SQS": "sqs",
    "sagas": "postgres_queue",
}
_COMMAND = ["-m", "idemconsumer", "run", "benchmarks.rivals.cut_off:app", "--log-level", "error"]
_EVERY = 2.0  # seconds between two cuts
_PAUSE = 0.1  # seconds between two messages of a subject
_PATIENCE = 180.0
_Own: TypeAlias = psycopg.AsyncConnection[Any]
_COUNT: LiteralString = "select count(distinct id) from payment where starts_with(id, %(prefix)s)"
_STANDING: LiteralString = """
select count(*), extract(epoch from max(at - greatest(before, %(cut)s)) filter (where at > %(cut)s))
from (select at, lag(at) over (order by at) as before from payment where starts_with(id, %(prefix)s)) as applied
"""


async def cuts(stage: Stage) -> Result:
    """Seconds after the last cut in which nothing was applied, at the longest, until all was that had been published,
    which goes on for two seconds after it. Never less than the 0.1 s between two messages.

    The workers are the same in all rounds.
    """
    tables, rounds = [], 1 if stage.quick else 10
    settings = {"max_connections": "200"}
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(settings=settings))
        migrate(server.dsn, SCHEMA)
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(PAYMENT)
            connection.execute(JOB)
        for title, number, goal, beside in (
            ("One cut", 1, 2.0, False),
            ("Cuts for 20 s", 11, 5.0, False),
            ("Cuts for 20 s, at a standby", 11, 5.0, True),
        ):
            standby = stack.enter_context(closing(Standby(server))).port if beside else None
            seen: dict[str, list[float]] = {name: [] for name in SUBJECTS}
            loads = []
            async with _workers(stage, server.dsn) as (own, proxy, publishers):
                for round_ in range(rounds):
                    loads.append(os.getloadavg()[0])
                    for publisher in publishers:
                        publisher.begin(f"{title} {round_}")
                    for name, seconds in (await _round(own, proxy, publishers, number, standby)).items():
                        seen[name].append(seconds)
                    stage.say(f"{title}: " + ", ".join(f"{name} {each[-1]:.1f} s" for name, each in seen.items()))
            figures = [Figure(name, "s of standing still", Spread.of(each), goal) for name, each in seen.items()]
            load = f"{min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores"
            tables.append(Table(title, figures, facts={"rounds": rounds, "messages/s each": 1 / _PAUSE, "load": load}))
    return Result("cuts", tables)


@asynccontextmanager
async def _workers(stage: Stage, dsn: str) -> AsyncIterator[tuple[_Own, Proxy, list[_Publisher]]]:
    """One for each subject, which reach the database through the proxy."""
    port = int(str(conninfo_to_dict(dsn)["port"]))
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(await psycopg.AsyncConnection.connect(dsn, autocommit=True))
        proxy = await stack.enter_async_context(Proxy(port))
        publishers: list[_Publisher] = []
        through = {"IDEMCONSUMER_DSN": url(dsn, host="127.0.0.1", port=proxy.port)}
        for name, part in SUBJECTS.items():
            mark = secrets.token_hex(4)
            broker = await stack.enter_async_context(opened(stage, part))
            given = await broker.fill(dsn, 1, name=f"{part}-{mark}")
            given |= {"BENCH_GROUP": mark, "BENCH_SAGA": "1" * (name == "sagas")}
            publishers.append(_Publisher(name, given | {"IDEMCONSUMER_DSN": dsn}))
            await stack.enter_async_context(process(given | through, _COMMAND))
        yield own, proxy, publishers


async def _round(
    own: _Own, proxy: Proxy, publishers: Sequence[_Publisher], number: int, standby: int | None
) -> dict[str, float]:
    """So many cuts, one each two seconds, of all connections."""
    port = own.info.port
    async with asyncio.TaskGroup() as group:
        publishing = [group.create_task(each.run()) for each in publishers]
        for each in publishers:
            await _applied(own, each.prefix, 20)
        if standby is not None:
            proxy.lead_to(port, standby)
        for left in reversed(range(number)):
            if not left:
                proxy.lead_to(port)
                (cut,) = await row(own, "select clock_timestamp()")
            proxy.cut()
            await proxy.restore()
            await asyncio.sleep(_EVERY)
        for each in publishers:
            each.over = True
        await asyncio.gather(*publishing)
    return {each.name: await _standing(own, each, cut) for each in publishers}


class _Publisher:
    """Publishes to one subject until it is told that it is over."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._scheme, _, self._queue = environment["BENCH_SOURCE"].partition(":")
        self._settings = load({k: v for k, v in environment.items() if k.startswith("IDEMCONSUMER_")})

    def begin(self, what: str) -> None:
        self.over, self.count, self.prefix = False, 0, f"{what} {self.name} "

    async def run(self) -> None:
        sender = connect(self._scheme, self._settings)
        try:
            while not self.over:
                body = json.dumps({"id": f"{self.prefix}{self.count}", "amount": 1}).encode()
                with suppress(BrokerUnavailable):  # on a busy machine; then it is published again, under the same key
                    await sender.publish(self._queue, [Outgoing(body)])
                    self.count += 1
                await asyncio.sleep(_PAUSE)
        finally:
            await sender.close()


async def _standing(own: _Own, publisher: _Publisher, cut: object) -> float:
    await _applied(own, publisher.prefix, publisher.count)
    total, seconds = await row(own, _STANDING, {"cut": cut, "prefix": publisher.prefix})
    if total > publisher.count:
        raise RuntimeError(f"{publisher.name}: {total - publisher.count} of {total} were applied twice")
    return float(seconds or 0.0)


async def _applied(own: _Own, prefix: str, count: int) -> None:
    async with asyncio.timeout(_PATIENCE):
        while (await row(own, _COUNT, {"prefix": prefix}))[0] < count:
            await asyncio.sleep(0.1)
