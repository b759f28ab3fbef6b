"""Many messages with duplicates, workers and servers killed in between: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aio_pika
import psycopg
import pytest
from aiobotocore.session import get_session
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from idemconsumer.stores.migrations import migrate
from tests.kill.harness import STORM_PATIENCE, Event, Mill
from tests.support.away import away
from tests.support.kafka import create_topic
from tests.support.servers.made import PrivateElasticMQ, PrivateKafka, PrivatePostgres, PrivateRabbitMQ
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

PARTITIONS = 4
GROUPS = 20  # of the FIFO queue


class Storm(NamedTuple):
    """How many payments, and how often a worker and a launcher are killed while they are applied."""

    unique: int
    workers: int
    launchers: int

    def kills(self, running: Mill) -> list[Event]:
        return [running.kill_child] * self.workers + [running.kill_launcher] * self.launchers

    @property
    def expected(self) -> set[str]:
        return {f"p{number}" for number in range(self.unique)}


SHORT = Storm(500, workers=1, launchers=1)
LONG = Storm(5_000, workers=7, launchers=3)
SHORT_IN_SQS = Storm(300, workers=1, launchers=1)  # what a dead worker held comes again after ten seconds
LONG_IN_SQS = Storm(2_000, workers=3, launchers=2)
long = pytest.mark.long


def messages(seed: int, unique: int) -> list[bytes]:
    """Each payment once, 30 % of them a second time somewhere later."""
    chance = random.Random(seed)
    ids = [f"p{number}" for number in range(unique)]
    arrivals = [(float(place), name) for place, name in enumerate(ids)]
    arrivals += [
        (chance.uniform(place, unique), ids[place]) for place in chance.sample(range(unique), unique * 3 // 10)
    ]
    return [json.dumps({"id": name}).encode() for _, name in sorted(arrivals)]


@asynccontextmanager
async def mill(dsn: str, environment: dict[str, str], seed: int) -> AsyncIterator[Mill]:
    await asyncio.to_thread(migrate, dsn, "idemconsumer")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("create table witness (id text not null, place bigint generated always as identity)")
    async with away(dsn) as far:
        running = Mill(dsn, far, environment, workers=2, seed=seed)
        running.start()
        try:
            yield running
        finally:
            running.stop()


def crash(kill: Callable[[], None], start: Callable[[], object]) -> Event:
    """SIGKILL a server and start it again."""

    async def both() -> None:
        await asyncio.to_thread(kill)
        await asyncio.to_thread(start)

    return both


@pytest.mark.parametrize("storm", [SHORT, pytest.param(LONG, marks=long)], ids=["short", "long"])
async def test_kafka_loses_nothing_and_applies_nothing_twice(
    storm: Storm, private_kafka: PrivateKafka, private_postgres: PrivatePostgres
) -> None:
    kafka, postgres = private_kafka(), private_postgres()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, "payments", partitions=PARTITIONS)
    await admin.close()
    await produce(kafka.address, messages(1, storm.unique))

    environment = {"KILL_SOURCE": "kafka:payments", "IDEMCONSUMER_KAFKA": kafka.address}
    environment["IDEMCONSUMER_KAFKA_SESSION_TIMEOUT"] = "6"  # the least that Kafka allows
    async with mill(postgres.dsn, environment, seed=1) as running:
        servers = [crash(kafka.kill, kafka.start), crash(postgres.kill, postgres.start)]
        await running.through([*storm.kills(running), *servers], storm.unique)
        await until(lambda: no_lag(kafka.address), "Kafka has no lag", STORM_PATIENCE)
        assert await running.drain() == 0
        assert await running.verdict(storm.expected) == (0, 0)
        assert await no_lag(kafka.address)


async def produce(address: str, bodies: Sequence[bytes]) -> None:
    """Round robin over the partitions, so that a message's second copy mostly lies on another one."""
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all")
    await producer.start()
    sent: list[Awaitable[object]] = [
        await producer.send("payments", body, partition=number % PARTITIONS) for number, body in enumerate(bodies)
    ]
    await asyncio.gather(*sent)
    await producer.stop()


async def no_lag(address: str) -> bool:
    """Whether the group has committed every partition's end."""
    partitions = [TopicPartition("payments", number) for number in range(PARTITIONS)]
    consumer = AIOKafkaConsumer(bootstrap_servers=address, group_id=None)
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await asyncio.gather(consumer.start(), admin.start())
    try:
        ends = await consumer.end_offsets(partitions)
        committed = await admin.list_consumer_group_offsets("killed")
    finally:
        await asyncio.gather(consumer.stop(), admin.close())
    return all(p in committed and committed[p].offset == ends[p] for p in partitions)


@pytest.mark.parametrize(
    ("kind", "storm"),
    [("quorum", SHORT), pytest.param("quorum", LONG, marks=long), pytest.param("classic", LONG, marks=long)],
    ids=["quorum-short", "quorum-long", "classic-long"],
)
async def test_rabbitmq_loses_nothing_and_applies_nothing_twice(
    kind: str, storm: Storm, private_rabbitmq: PrivateRabbitMQ, private_postgres: PrivatePostgres
) -> None:
    rabbitmq, postgres = private_rabbitmq(), private_postgres()
    async with await aio_pika.connect(rabbitmq.address) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue("payments", durable=True, arguments={"x-queue-type": kind})
        for start in range(0, len(bodies := messages(2, storm.unique)), 500):
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(
                        aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT), "payments"
                    )
                    for body in bodies[start : start + 500]
                )
            )

    environment = {"KILL_SOURCE": "rabbitmq:payments", "IDEMCONSUMER_RABBITMQ": rabbitmq.address}
    async with mill(postgres.dsn, environment, seed=2) as running:
        servers = [crash(rabbitmq.kill, rabbitmq.start), crash(postgres.kill, postgres.start)]
        await running.through([*storm.kills(running), *servers], storm.unique)
        await until(lambda: asyncio.to_thread(nothing_left, rabbitmq.ctl), "RabbitMQ has nothing left", STORM_PATIENCE)
        assert await running.drain() == 0
        assert await running.verdict(storm.expected) == (0, 0)
        assert nothing_left(rabbitmq.ctl)
    rabbitmq.close()


def nothing_left(ctl: Callable[..., str]) -> bool:
    """No message ready, none unacked."""
    listed = ctl("list_queues", "-q", "--no-table-headers", "name", "messages_ready", "messages_unacknowledged")
    return [line.split() for line in listed.splitlines() if line.strip()] == [["payments", "0", "0"]]


@pytest.mark.parametrize(
    ("name", "storm"),
    [
        ("payments.fifo", SHORT_IN_SQS),
        pytest.param("payments.fifo", LONG_IN_SQS, marks=long),
        pytest.param("payments", LONG_IN_SQS, marks=long),
    ],
    ids=["fifo-short", "fifo-long", "plain-long"],
)
async def test_sqs_loses_nothing_and_applies_nothing_twice(
    name: str, storm: Storm, private_elasticmq: PrivateElasticMQ, private_postgres: PrivatePostgres
) -> None:
    """ElasticMQ keeps everything in memory, so it is the one server that is left alive."""
    sqs, postgres = private_elasticmq(), private_postgres()
    fifo = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        await client.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "10", **fifo})
        broker = SqsBroker(Settings(sqs=sqs.address))
        bodies = messages(3, storm.unique)
        await broker.publish(
            name, [Outgoing(body, {"MessageGroupId": group_of(body)} if fifo else {}) for body in bodies]
        )
        await broker.close()

        environment = {"KILL_SOURCE": f"sqs:{name}", "IDEMCONSUMER_SQS": sqs.address}
        async with mill(postgres.dsn, environment, seed=3) as running:
            await running.through([*storm.kills(running), crash(postgres.kill, postgres.start)], storm.unique)
            await until(lambda: nothing_kept(client, name), "SQS has nothing left", STORM_PATIENCE)
            assert await running.drain() == 0
            assert await running.verdict(storm.expected) == (0, 0)
            if fifo:
                effects = await running.effects()
                for group in range(GROUPS):
                    numbers = [number for number in map(number_of, effects) if number % GROUPS == group]
                    assert numbers == sorted(numbers), f"group {group} is out of order"
            assert await nothing_kept(client, name)
    sqs.close()


def number_of(payment: str) -> int:
    return int(payment.removeprefix("p"))


def group_of(body: bytes) -> str:
    """Both copies of a payment are in one group, or nothing would say in which order the effects have to come."""
    return f"g{number_of(json.loads(body)['id']) % GROUPS}"


async def nothing_kept(client: Any, name: str) -> bool:
    """No message visible, none in flight."""
    url = (await client.get_queue_url(QueueName=name))["QueueUrl"]
    answer = await client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
    counts = [int(answer["Attributes"][f"ApproximateNumberOfMessages{kind}"]) for kind in ("", "NotVisible")]
    return counts == [0, 0]
