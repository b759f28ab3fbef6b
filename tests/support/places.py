"""A source on each broker, new and empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import aio_pika
from aiobotocore.session import get_session
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from tests.support.kafka import create_topic
from tests.support.servers.made import Server

Send = Callable[[], Awaitable[object]]


@dataclass
class Place:
    """A source, and how to send one message to it that nothing distinguishes from the others."""

    source: str
    send: Send
    settings: dict[str, Any]


@asynccontextmanager
async def kafka_place(server: Server) -> AsyncIterator[Place]:
    topic = f"letters.{uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=server.address)
    await admin.start()
    await create_topic(admin, topic)
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=server.address, acks="all") as producer:
        yield Place(
            f"kafka:{topic}", lambda: producer.send_and_wait(topic, b"{", timestamp_ms=1), {"kafka": server.address}
        )


@asynccontextmanager
async def rabbitmq_place(server: Server) -> AsyncIterator[Place]:
    name = f"letters-{uuid4().hex[:8]}"
    async with await aio_pika.connect(server.address) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        message = aio_pika.Message(b"{", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        yield Place(
            f"rabbitmq:{name}",
            lambda: channel.default_exchange.publish(message, name),
            {"rabbitmq": server.address},
        )


@asynccontextmanager
async def sqs_place(server: Server) -> AsyncIterator[Place]:
    name = f"letters-{uuid4().hex[:8]}"
    async with get_session().create_client("sqs", endpoint_url=server.address) as client:
        url = (await client.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "3"}))["QueueUrl"]
        yield Place(f"sqs:{name}", lambda: client.send_message(QueueUrl=url, MessageBody="{"), {"sqs": server.address})
