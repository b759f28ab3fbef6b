"""A broker that is stopped for a while, its connections open, loses nothing; the worker says so, and goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import aio_pika
import pytest
from aiobotocore.session import get_session
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer import App, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from tests.support.kafka import create_topic
from tests.support.logs import LogCapture, times
from tests.support.servers.made import PrivateElasticMQ, PrivateKafka, PrivateRabbitMQ
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, body, note

pytestmark = [pytest.mark.kill, pytest.mark.long]

EACH = 8
LOST = "broker session lost, reconnecting"


class Server(Protocol):
    @property
    def address(self) -> str: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


async def goes_on(
    bench: Bench, logged: LogCapture, server: Server, scheme: str, create: Callable[[], Awaitable[object]], *said: str
) -> None:
    """`said`: what is in the log once it is stopped, and once it goes on."""
    await create()
    app, settings = App("stopped"), {scheme: server.address}

    @app.idempotent_handler(f"{scheme}:stopped", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    broker = connect(scheme, bench.settings(**settings))
    items = [Item(f"{number:02}") for number in range(2 * EACH)]
    try:
        async with bench.running(app, **settings) as running:
            await broker.publish("stopped", [Outgoing(body(item)) for item in items[:EACH]])
            await running.until(lambda: len(bench.effects()) >= 2)
            server.freeze()
            try:
                await running.until(lambda: running.worker._reporting.report().lacking != [])
                assert times(logged, LOST) == 0, "before it is given up (O33)"
                await running.until(lambda: times(logged, said[0]) > 0)
            finally:
                server.thaw()
            await running.until(lambda: times(logged, said[1]) > 0)
            await broker.publish("stopped", [Outgoing(body(item)) for item in items[EACH:]])
            await running.until(lambda: len(bench.effects()) >= len(items))
    finally:
        await broker.close()
    assert sorted(bench.effects()) == [item.id for item in items]
    assert times(logged, said[0]) == 1


async def test_kafka(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, private_kafka: PrivateKafka
) -> None:
    tuned(monkeypatch, kafka_probe_pause=0.2, kafka_probe_patience=1.0)
    server = private_kafka()

    async def create() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=server.address)
        await admin.start()
        await create_topic(admin, "stopped", partitions=2)
        await admin.close()

    await goes_on(bench, logged, server, "kafka", create, "kafka unreachable", "kafka reachable")


async def test_rabbitmq(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, private_rabbitmq: PrivateRabbitMQ
) -> None:
    tuned(monkeypatch, rabbitmq_heartbeat=1)
    server = private_rabbitmq()

    async def create() -> None:
        async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
            await channel.declare_queue("stopped", durable=True, arguments={"x-queue-type": "quorum"})

    await goes_on(bench, logged, server, "rabbitmq", create, LOST, "consuming again")


async def test_sqs(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, private_elasticmq: PrivateElasticMQ
) -> None:
    tuned(monkeypatch, sqs_read_patience=15.0, sqs_silent_after=1.0, sqs_calls=1)
    server = private_elasticmq()

    async def create() -> None:
        async with get_session().create_client("sqs", endpoint_url=server.address) as client:
            await client.create_queue(QueueName="stopped", Attributes={"VisibilityTimeout": "3"})

    await goes_on(bench, logged, server, "sqs", create, LOST, "consuming again")
