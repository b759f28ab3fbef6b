"""All four brokers at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import aio_pika
from aiobotocore.session import get_session
from aiokafka.admin import AIOKafkaAdminClient
from msgspec.structs import replace

from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from tests.support.kafka import create_topic
from tests.support.servers.made import Server

SCHEMES = ("kafka", "rabbitmq", "sqs", "postgres")


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
        await create_topic(admin, self.name)
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

    async def delete(self) -> None:
        async with await aio_pika.connect(self.rabbitmq.address) as connection, connection.channel() as channel:
            await channel.queue_delete(self.name)
