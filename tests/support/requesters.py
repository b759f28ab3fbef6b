"""Requesters: each sends requests to a queue of its broker, and reads the replies that come to a queue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import aio_pika
from aiobotocore.session import get_session
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.message.reply_address import KAFKA_CORRELATION, KAFKA_PARTITION, KAFKA_TOPIC, MESSAGE_ID, OUTCOME
from tests.support.kafka import create_topic
from tests.support.waiting import PATIENCE, until


@dataclass(frozen=True)
class Replied:
    correlation: str | bytes | None
    id: str | None
    outcome: str
    body: bytes


class Requester(Protocol):
    @property
    def source(self) -> str: ...
    @property
    def here(self) -> str:
        """The address of its own queue."""
        ...

    async def ask(self, body: bytes, correlation: str | None, *, to: str | None) -> None: ...
    async def replies(self, count: int) -> list[Replied]:
        """The next ones."""
        ...


@dataclass
class OfRabbitmq:
    channel: Any
    name: str
    here: str
    queue: Any
    source: str = field(init=False)

    def __post_init__(self) -> None:
        self.source = f"rabbitmq:{self.name}"

    async def ask(self, body: bytes, correlation: str | None, *, to: str | None, **properties: Any) -> None:
        message = aio_pika.Message(body, correlation_id=correlation, reply_to=to, **properties)
        await self.channel.default_exchange.publish(message, self.name)

    async def replies(self, count: int) -> list[Replied]:
        found: list[Replied] = []

        async def another() -> bool:
            if len(found) < count and (got := await self.queue.get(fail=False, no_ack=True)) is not None:
                assert got.content_type == "application/json"
                found.append(Replied(got.correlation_id, got.message_id, str(got.headers[OUTCOME]), got.body))
            return len(found) == count

        await until(another, "replies are missing")  # a get that was cancelled would close the channel
        return found


@asynccontextmanager
async def requester_of_rabbitmq(address: str) -> AsyncIterator[OfRabbitmq]:
    name = f"requests-{uuid4().hex}"
    async with await aio_pika.connect(address) as connection, connection.channel() as channel:
        quorum: Any = {"x-queue-type": "quorum"}
        await channel.declare_queue(name, durable=True, arguments=quorum)
        queue = await channel.declare_queue(f"replies.{uuid4().hex}")
        try:
            yield OfRabbitmq(channel, name, queue.name, queue)
        finally:
            await channel.queue_delete(name)
            await channel.queue_delete(queue.name)


@dataclass
class OfKafka:
    """As Spring asks: the correlation id and the number of the partition are bytes."""

    producer: AIOKafkaProducer
    consumer: AIOKafkaConsumer
    name: str
    here: str

    @property
    def source(self) -> str:
        return f"kafka:{self.name}"

    async def ask(self, body: bytes, correlation: str | None, *, to: str | None) -> None:
        headers = [] if to is None else [(KAFKA_TOPIC, to.encode()), (KAFKA_PARTITION, (1).to_bytes(4, "big"))]
        if correlation is not None:
            headers.append((KAFKA_CORRELATION, correlation.encode() + b"\xff"))
        await self.producer.send_and_wait(self.name, body, headers=headers)

    async def replies(self, count: int) -> list[Replied]:
        found: list[Replied] = []
        async with asyncio.timeout(PATIENCE):
            while len(found) < count:
                record = await self.consumer.getone()
                assert record.partition == 1
                headers = dict(record.headers)
                correlation = headers[KAFKA_CORRELATION].removesuffix(b"\xff").decode()
                found.append(
                    Replied(correlation, headers[MESSAGE_ID].decode(), headers[OUTCOME].decode(), record.value)
                )
        return found


@asynccontextmanager
async def requester_of_kafka(address: str) -> AsyncIterator[OfKafka]:
    name, here = f"requests.{uuid4().hex}", f"replies.{uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    await create_topic(admin, name)
    await create_topic(admin, here, partitions=2)
    await admin.close()
    async with (
        AIOKafkaProducer(bootstrap_servers=address) as producer,
        AIOKafkaConsumer(here, bootstrap_servers=address, auto_offset_reset="earliest") as consumer,
    ):
        yield OfKafka(producer, consumer, name, here)


@dataclass
class OfSqs:
    client: Any
    name: str
    here: str
    url: str
    own: str

    @property
    def source(self) -> str:
        return f"sqs:{self.name}"

    async def ask(self, body: bytes, correlation: str | None, *, to: str | None) -> None:
        given = {"ReplyTo": to, "CorrelationId": correlation}
        attributes = {name: {"DataType": "String", "StringValue": value} for name, value in given.items() if value}
        await self.client.send_message(QueueUrl=self.url, MessageBody=body.decode(), MessageAttributes=attributes)

    async def replies(self, count: int) -> list[Replied]:
        found: list[Replied] = []
        async with asyncio.timeout(PATIENCE):
            while len(found) < count:
                answer = await self.client.receive_message(
                    QueueUrl=self.own, MaxNumberOfMessages=10, WaitTimeSeconds=1, MessageAttributeNames=["All"]
                )
                for got in answer.get("Messages", ()):
                    its = {name: value["StringValue"] for name, value in got["MessageAttributes"].items()}
                    body = got["Body"].encode()
                    found.append(Replied(its.get("CorrelationId"), its.get(MESSAGE_ID), its[OUTCOME], body))
                    await self.client.delete_message(QueueUrl=self.own, ReceiptHandle=got["ReceiptHandle"])
        return found


@asynccontextmanager
async def requester_of_sqs(address: str) -> AsyncIterator[OfSqs]:
    name, here = f"requests-{uuid4().hex}", f"replies-{uuid4().hex}"
    async with get_session().create_client("sqs", endpoint_url=address) as client:
        url = (await client.create_queue(QueueName=name))["QueueUrl"]
        own = (await client.create_queue(QueueName=here))["QueueUrl"]
        yield OfSqs(client, name, here, url, own)
