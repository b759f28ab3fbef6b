"""The database of the golden outputs: a worker has run in it, processes were lost, and people have decided."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version

import psycopg
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.cli.main import main
from idemconsumer.ports.requests import Held
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import files, migrate, script
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.testing.request_contract import A, B
from tests.cli.golden.shop import app
from tests.support.kafka import world_of
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database, migrated
from tests.support.waiting import until

MESSAGES = {
    "orders": (
        {"id": "o-1"},
        {"id": "o-2", "fate": "failed"},
        {"id": "o-3", "fate": "failed"},
        {"id": "o-4", "fate": "rejected"},
        {"id": "o-5", "fate": "billed"},
        {"id": "o-1"},
        {"number": 6},
        {"id": "o-7", "fate": "failed"},
    ),
    "mails": ({"id": "m-1"},),
    "trips": (
        {"id": "t-1"},
        {"id": "t-2", "fate": "unknown"},
        {"id": "t-3", "fate": "approved by hand"},
        {"id": "t-4", "fate": "declined"},
        {"id": "t-5", "fate": "unknown"},
    ),
}
DECISIONS = (
    "dead redrive 3 --run morning --by ann",
    "pause send_mail --by ann --reason 'the gateway is away'",
    "pause take_order --by bob",
    "resume take_order --by bob",
)
# What only another broker could bring about.
REFUSED = """
insert into idemconsumer.outbox (destination, key, order_key, body, headers, tries, error, parked_at) values
    ('kafka:bills', 'o-8', 'o-8', '{"order": "o-8"}', '{"source": "till"}', 8, 'MessageSizeTooLarge', now()),
    ('kafka:bills', 'o-9', 'o-9', '\\xff', '{}', 8, 'MessageSizeTooLarge', now());
insert into idemconsumer.kafka_stop (cluster, group_name, topic, partition, first, next, error, since, seen_at) values
    ('c', 'shop', 'orders', 3, 4711, 4720, 'wrong checksum', now(), now()),
    ('c', 'audit', 'orders', 3, 4711, 4720, 'wrong checksum', now(), now()),
    ('c', 'shop', 'orders', 4, 12, 13, 'wrong checksum', now(), now());
"""
LIVING = """
insert into idemconsumer.process (app, host, pid, place, version, state, handlers, started_at, seen_at) values
    ('shop', 'box', 17, 0, %(version)s, 'running', %(handlers)s, now(), now()),
    ('shop', 'box', 18, 1, %(version)s, 'running', %(handlers)s, now(), now())
"""
SEEN = """
update idemconsumer.process as p set seen_at = now() - w.unseen, started_at = now() - w.unseen - interval '40 s'
    from (values (17, interval '0 s'), (18, interval '300 s')) as w (pid, unseen) where p.pid = w.pid
"""
HANDLERS = {
    "take_order": {
        "sources": ["postgres:orders"],
        "queues": ["postgres:~shop/take_order", "postgres:~~shop/take_order"],
        "lanes": 8,
        "running": 3,
        "outcomes": {"applied": 60, "failed": 20},
    },
    "send_mail": {
        "sources": ["postgres:mails", "kafka:mails"],
        "queues": ["postgres:~shop/send_mail", "postgres:~~shop/send_mail"],
        "lag": {"kafka:mails": {"messages": 40, "part": True}},
        "lanes": 8,
        "paused": True,
    },
}
_CALM = """
select (select count(*) from idemconsumer.queue)
    + (select count(*) from idemconsumer.saga where parked is null and worker is not null)
"""


def seed(dsn: str) -> None:
    """Also a schema `empty`, and one that is `behind` by a migration."""
    migrated(dsn, "idemconsumer")
    migrate(dsn, "empty")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(script(files()[:-1], "behind").encode())
    asyncio.run(_work(dsn, MESSAGES))
    asyncio.run(_lose_requests(dsn))
    with psycopg.connect(dsn) as connection:
        connection.execute(REFUSED)
        connection.execute(LIVING, {"handlers": json.dumps(HANDLERS), "version": version("idemconsumer")})
    for words in DECISIONS:
        result = CliRunner().invoke(main, words, env={"IDEMCONSUMER_DSN": dsn})
        assert result.exit_code == 0, result.output
    asyncio.run(_work(dsn, {}))
    with psycopg.connect(dsn) as connection:
        connection.execute("select idemconsumer.publish('returns', '{}')")  # which nobody reads


async def seed_kafka(address: str) -> None:
    """A topic with three records in each of two partitions, of which nobody has read anything."""
    async with world_of(Address(address)) as world:
        world.topic = "golden"
        if world.topic not in await world.admin.list_topics():
            await world.create(partitions=2)
            for partition in range(2):
                await world.produce(3, partition=partition)
        if await world.committed() is not None:
            await world.forget()


@dataclass(frozen=True)
class Address:
    address: str


def copied(server: PostgresServer, dsn: str) -> AbstractContextManager[str]:
    """Of a database that nobody uses."""
    return fresh_database(server.dsn, f"template {conninfo_to_dict(dsn)['dbname']}")


def begin(dsn: str) -> None:
    """One worker lives now, the other one has been lost for five minutes."""
    with psycopg.connect(dsn) as connection:
        connection.execute(SEEN)


async def _work(dsn: str, messages: Mapping[str, Sequence[Mapping[str, object]]]) -> None:
    """One message after the other, so that numbers are the same each time."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:

        async def calm() -> bool:
            return await (await connection.execute(_CALM)).fetchone() == (0,)

        worker = app.worker(Settings(dsn=dsn, concurrency=1, delivery_log="1d"))
        running = asyncio.create_task(worker.run())
        for queue, message in [(queue, message) for queue, its in messages.items() for message in its]:
            await connection.execute("select idemconsumer.publish(%s, %s::jsonb)", (queue, json.dumps(message)))
            await until(calm)
        await until(calm)
        worker.drain()
        await running


async def _lose_requests(dsn: str) -> None:
    """Two, whose process ends with them in hand."""
    store = await PostgresStore.open(dsn, "idemconsumer", connections=2, longest_run=30.0)
    requests = PostgresRequests.on(store.pool, dsn, "idemconsumer")
    for claim in (A, B):
        assert isinstance(await requests.claim(claim, lambda: None), Held)
    await requests.close()
    await store.close()
