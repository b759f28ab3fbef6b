"""What a worker takes from a real broker: what its lanes can begin soon, and no more (D12, Q11)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import aio_pika
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer import App, Tx
from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from tests.support.inside import in_flight
from tests.support.kafka import create_topic
from tests.support.logs import LogCapture, entries, times
from tests.support.servers.made import PrivateRabbitMQ, Server
from tests.support.servers.rabbitmq import RabbitMQ
from tests.support.workers import Bench, Item, body, note

LANES = 4
AHEAD = 2 * LANES  # of a handler whose time is not known, or long
MOST = 4 * AHEAD  # where lanes are chosen by key, and full ones are made up for


@asynccontextmanager
async def queued(server: Server | RabbitMQ, count: int, kind: str = "quorum", **more: object) -> AsyncIterator[str]:
    """A queue with messages in it."""
    name = f"fetching-{uuid4().hex}"
    async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": kind, **more})  # type: ignore[dict-item]
        for number in range(count):
            message = aio_pika.Message(body(Item(str(number))))
            await channel.default_exchange.publish(message, name)
        yield name
        await channel.queue_delete(name)


async def counted(server: Server | RabbitMQ, name: str) -> int:
    """How many messages no worker has."""
    async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
        return int((await channel.declare_queue(name, passive=True)).declaration_result.message_count or 0)


class Gate:
    """An app whose handlers say that they have begun, and wait."""

    def __init__(self, name: str, *sources: str) -> None:
        self.app = App(name)
        self.began: list[str] = []
        self.open = asyncio.Event()

        @self.app.idempotent_handler(*sources, key="id")
        async def handle(item: Item, tx: Tx) -> None:
            self.began.append(item.id)
            await self.open.wait()
            await note(tx, item)


async def test_a_second_worker_gets_its_share_of_a_backlog(bench: Bench, rabbitmq: Server) -> None:
    async with queued(rabbitmq, 800) as name:
        one, two = Gate("shop", f"rabbitmq:{name}"), Gate("shop", f"rabbitmq:{name}")
        settings = {"rabbitmq": rabbitmq.address, "concurrency": LANES}
        async with bench.running(one.app, **settings) as first:
            await first.until(lambda: len(one.began) == LANES)
            assert await counted(rabbitmq, name) >= 800 - MOST
            async with bench.running(two.app, **settings) as second:
                await second.until(lambda: len(two.began) == LANES)
                one.open.set()
                two.open.set()


async def test_an_urgent_message_is_soon_begun(bench: Bench, rabbitmq: Server) -> None:
    async with queued(rabbitmq, 400, "classic", **{"x-max-priority": 10}) as name:
        gate = Gate("shop", f"rabbitmq:{name}")
        async with bench.running(gate.app, rabbitmq=rabbitmq.address, concurrency=LANES) as running:
            await running.until(lambda: len(gate.began) == LANES)
            async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
                await channel.default_exchange.publish(aio_pika.Message(body(Item("urgent")), priority=10), name)
            gate.open.set()
            await running.until(lambda: "urgent" in gate.began)
            assert gate.began.index("urgent") <= LANES + MOST


@pytest.fixture(scope="module")
def strict(private_rabbitmq: PrivateRabbitMQ) -> RabbitMQ:
    """Looks each 0.3 s whether a delivery was held for longer than its `consumer_timeout`."""
    server = private_rabbitmq()
    server.ctl("eval", "application:set_env(rabbit, channel_tick_interval, 300).")
    return server


async def test_a_delivery_waits_for_little_else_before_its_handler(
    bench: Bench, strict: RabbitMQ, logged: LogCapture
) -> None:
    """The server takes deliveries back after 5 s. The last of 80 would wait for 10 s."""
    strict.ctl("eval", "application:set_env(rabbit, consumer_timeout, 5000).")
    gate = App("shop")
    async with queued(strict, 80) as name:

        @gate.idempotent_handler(f"rabbitmq:{name}", key="id")
        async def handle(item: Item, tx: Tx) -> None:
            await asyncio.sleep(0.5)
            await note(tx, item)

        async with bench.running(gate, rabbitmq=strict.address, concurrency=LANES) as running:
            await running.until_count(applied=80)
            assert running.worker.counts == {"applied": 80}
    assert times(logged, "broker session lost, reconnecting") == 0


async def test_a_handler_beyond_the_consumer_timeout_costs_a_duplicate(
    bench: Bench, strict: RabbitMQ, logged: LogCapture
) -> None:
    """The server closes the channel of a handler that takes longer, and delivers its message again."""
    strict.ctl("eval", "application:set_env(rabbit, consumer_timeout, 1500).")
    gate = App("shop")
    async with queued(strict, 1) as name:

        @gate.idempotent_handler(f"rabbitmq:{name}", key="id")
        async def handle(item: Item, tx: Tx) -> None:
            while times(logged, "broker session lost, reconnecting") == 0:
                await asyncio.sleep(0.05)
            await note(tx, item)

        async with bench.running(gate, rabbitmq=strict.address) as running:
            await running.until_count(applied=1, duplicate=1)
    assert bench.effects() == ["0"]
    assert "consumer" in entries(logged, "broker session lost, reconnecting")[0]["error"]


async def test_a_backlog_in_kafka_is_not_all_taken(bench: Bench, kafka: Server) -> None:
    topic = f"fetching-{uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic)
    await admin.close()
    broker = KafkaBroker(Settings(kafka=kafka.address))
    await broker.publish(topic, [Outgoing(body(Item(str(n))), key=str(n)) for n in range(800)])
    await broker.close()
    gate = Gate("shop", f"kafka:{topic}")
    async with bench.running(gate.app, kafka=kafka.address, concurrency=LANES) as running:
        await running.until(lambda: len(gate.began) == LANES)
        assert in_flight(running.worker) <= MOST
        gate.open.set()
