"""Faults that meet a worker of all four brokers at once: one handler, four sources, nothing lost and nothing twice."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from aiobotocore.session import get_session
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from msgspec.structs import replace
from structlog.testing import LogCapture

from idemconsumer import App, Message, Tx
from idemconsumer.brokers.connecting import connect
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.observer import Point
from idemconsumer.settings import Settings
from tests.support.logs import times
from tests.support.servers.made import PrivatePostgres, Server
from tests.support.workers import Bench, Item, Running, body, note, prepare
from tests.worker.crashes import payment, work

SCHEMES = ("kafka", "rabbitmq", "sqs", "postgres")
EACH = 6


@dataclass
class Brokers:
    """A queue of one name at each, in the handler's own database too."""

    kafka: Server
    rabbitmq: Server
    sqs: Server
    name: str = field(default_factory=lambda: f"all-{uuid4().hex}")

    @property
    def addresses(self) -> dict[str, str]:
        return {"kafka": self.kafka.address, "rabbitmq": self.rabbitmq.address, "sqs": self.sqs.address}

    @property
    def sources(self) -> list[str]:
        return [f"{scheme}:{self.name}" for scheme in SCHEMES]

    async def create(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.kafka.address)
        await admin.start()
        await admin.create_topics([NewTopic(self.name, 1, 1)])
        await admin.close()
        quorum: Any = {"x-queue-type": "quorum"}
        async with await aio_pika.connect(self.rabbitmq.address) as connection, connection.channel() as channel:
            await channel.declare_queue(self.name, durable=True, arguments=quorum)
        async with get_session().create_client("sqs", endpoint_url=self.sqs.address) as client:
            await client.create_queue(QueueName=self.name, Attributes={"VisibilityTimeout": "10"})

    async def publish(self, dsn: str, scheme: str, *bodies: bytes) -> None:
        broker = connect(scheme, replace(Settings(dsn=dsn), **self.addresses))
        await broker.publish(self.name, [Outgoing(each) for each in bodies])
        await broker.close()


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[Brokers]:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        await channel.queue_delete(made.name)


def ids(scheme: str) -> list[str]:
    return [f"{scheme}-{n}" for n in range(EACH)]


ALL = sorted(each for scheme in SCHEMES for each in ids(scheme))


async def until_applied(running: Running, bench: Bench) -> None:
    await running.until(lambda: len(bench.effects()) >= len(ALL))


@pytest.mark.kill
async def test_a_database_that_goes_and_comes_back_costs_no_message(
    brokers: Brokers, private_postgres: PrivatePostgres, logged: LogCapture
) -> None:
    server = private_postgres()
    prepare(server.dsn)
    bench, app, inside, go = Bench(server.dsn), App("all"), set[str](), asyncio.Event()

    @app.idempotent_handler(*brokers.sources, key="id", group_size=4)
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        if message.source not in inside:
            inside.add(message.source)
            await go.wait()

    for scheme in SCHEMES:
        await brokers.publish(server.dsn, scheme, *(body(Item(each)) for each in ids(scheme) * 2))
    async with bench.running(app, concurrency=8, **brokers.addresses) as running:
        await running.until(lambda: inside >= set(brokers.sources))
        await asyncio.to_thread(server.kill)
        go.set()
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        await asyncio.to_thread(server.start)
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL
    assert bench.attempts() == 0
    server.stop()


async def test_what_cannot_be_read_is_a_letter_and_stops_nothing(brokers: Brokers, bench: Bench) -> None:
    app = App("all")

    @app.idempotent_handler(*brokers.sources, key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    for scheme in SCHEMES:
        bad = [b"{", b'{"id": "' + b"x" * 2_000 + b'"}']
        await brokers.publish(bench.dsn, scheme, *bad, *(body(Item(each)) for each in ids(scheme)))
    async with bench.running(app, max_message_bytes=1_000, **brokers.addresses) as running:
        await until_applied(running, bench)
        letters = "select split_part(source, ':', 1), reason from idemconsumer.dead_letter"
        await running.until(lambda: len(bench.do(letters)) >= 8)
        assert Counter(bench.do(letters)) == Counter(
            (scheme, reason) for scheme in SCHEMES for reason in ("undecodable", "oversized")
        )
    assert sorted(bench.effects()) == ALL


async def test_a_message_that_ends_its_connection_each_time_takes_no_other_along(
    brokers: Brokers, bench: Bench
) -> None:
    app = App("all")

    @app.idempotent_handler(*brokers.sources, key="id", max_attempts=1, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        if item.id.endswith("bad"):
            await tx.execute("select pg_terminate_backend(pg_backend_pid())")
        await note(tx, item)

    for scheme in SCHEMES:
        await brokers.publish(bench.dsn, scheme, *(body(Item(each)) for each in [f"{scheme}-bad", *ids(scheme)]))
    async with bench.running(app, **brokers.addresses) as running:
        letters = "select split_part(source, ':', 1), reason from idemconsumer.dead_letter"
        await running.until(lambda: len(bench.do(letters)) >= 4)
        assert Counter(bench.do(letters)) == Counter((scheme, "lost_connection") for scheme in SCHEMES)
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL


async def test_while_all_messages_fail_none_becomes_a_letter(
    brokers: Brokers, bench: Bench, logged: LogCapture
) -> None:
    """Those of each broker wait for the service that their handler needs."""
    app, up = App("all"), asyncio.Event()

    @app.idempotent_handler(*brokers.sources, key="id", max_attempts=5, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        if not up.is_set():
            raise ConnectionError
        await note(tx, item)

    for scheme in SCHEMES:
        await brokers.publish(bench.dsn, scheme, *(body(Item(each)) for each in ids(scheme)))
    async with bench.running(app, concurrency=8, **brokers.addresses) as running:
        await running.until(lambda: times(logged, "all messages of a handler fail, trying one at a time") == 1)
        up.set()
        await until_applied(running, bench)
    assert sorted(bench.effects()) == ALL
    assert bench.do("select reason from idemconsumer.dead_letter") == []


@pytest.mark.kill
@pytest.mark.slow
# Those with sqs: and postgres: are in test_…_crash_points.py.
@pytest.mark.parametrize("scheme", ["kafka", pytest.param("rabbitmq", marks=pytest.mark.long)])
@pytest.mark.parametrize("point", [Point.SEALING, Point.COMMITTED])
async def test_a_crash_before_and_after_the_commit(brokers: Brokers, bench: Bench, scheme: str, point: Point) -> None:
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int, place bigint generated always as identity)")
    await brokers.publish(bench.dsn, scheme, *(payment(each) for each in ids(scheme) * 2))
    source = {"CRASH_SOURCE": f"{scheme}:{brokers.name}", "IDEMCONSUMER_HANDLERS": "pay"}
    source |= {f"IDEMCONSUMER_{broker.upper()}": address for broker, address in brokers.addresses.items()}
    source["IDEMCONSUMER_KAFKA_SESSION_TIMEOUT"] = "6"
    assert work(bench.dsn, f"{point}:2", **source) == -signal.SIGKILL, "it never came to this point"
    assert work(bench.dsn, **source) == 0
    assert sorted(bench.effects()) == ids(scheme)
