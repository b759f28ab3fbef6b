"""Every broker passes the one suite that ships with the library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol
from uuid import uuid4

import aio_pika
import pytest
from aiobotocore.session import get_session
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.memory import MemoryBroker
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.rabbitmq.rabbitmq_broker import RabbitmqBroker
from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Broker, Outgoing
from idemconsumer.settings import Settings
from tests.support.kafka import create_topic
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned

pytest.register_assert_rewrite("idemconsumer.testing.broker_contract")

from idemconsumer.testing.broker_contract import BrokerContract, BrokerHarness  # noqa: E402


class Server(Protocol):
    @property
    def address(self) -> str: ...


class _Harness:
    scheme = ""
    keeps_message_id = True
    names_are_free = True

    async def destination(self) -> str:
        return f"contract-{uuid4().hex}"

    def subscription(self, name: str) -> Subscription:
        return Subscription(f"{self.scheme}:{name}", "handler", f"group-of-{name}")


class MemoryHarness(_Harness):
    scheme = "memory"

    def broker(self) -> Broker:
        return MemoryBroker()


class PostgresHarness(_Harness):
    scheme = "postgres"

    def __init__(self, dsn: str) -> None:
        self._settings = Settings(dsn=dsn)
        migrated(dsn, self._settings.schema)

    def broker(self) -> Broker:
        return PostgresBroker(self._settings)


class KafkaHarness(_Harness):
    scheme = "kafka"
    keeps_message_id = False
    names_are_free = False

    def __init__(self, address: str) -> None:
        self._address = address

    def broker(self) -> Broker:
        return KafkaBroker(Settings(kafka=self._address))

    async def destination(self) -> str:
        name = await super().destination()
        admin = AIOKafkaAdminClient(bootstrap_servers=self._address)
        await admin.start()
        try:
            await create_topic(admin, name, partitions=2)
        finally:
            await admin.close()
        return name


class RabbitmqHarness(_Harness):
    scheme = "rabbitmq"
    names_are_free = False

    def __init__(self, address: str, queue_type: str, stack: AsyncExitStack) -> None:
        self._address = address
        self._queue_type = queue_type
        self._stack = stack

    def broker(self) -> Broker:
        return RabbitmqBroker(Settings(rabbitmq=self._address))

    async def destination(self) -> str:
        name = await super().destination()
        async with await aio_pika.connect(self._address) as connection, connection.channel() as channel:
            await channel.declare_queue(name, durable=True, arguments={"x-queue-type": self._queue_type})
        self._stack.push_async_callback(self._delete, name)
        return name

    async def _delete(self, name: str) -> None:
        async with await aio_pika.connect(self._address) as connection, connection.channel() as channel:
            await channel.queue_delete(name)


class Grouped(SqsBroker):
    """Gives each message a group of its own where a FIFO queue asks for one."""

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        if name.endswith(".fifo"):
            messages = [replace(each, headers={**each.headers, "MessageGroupId": uuid4().hex}) for each in messages]
        await super().publish(name, messages)


class SqsHarness(_Harness):
    scheme = "sqs"
    names_are_free = False

    def __init__(self, address: str, suffix: str) -> None:
        self._address = address
        self._suffix = suffix

    def broker(self) -> Broker:
        return Grouped(Settings(sqs=self._address))

    async def destination(self) -> str:
        name = await super().destination() + self._suffix
        async with get_session().create_client("sqs", endpoint_url=self._address) as client:
            await client.create_queue(QueueName=name, Attributes={"FifoQueue": "true"} if self._suffix else {})
        return name


class TestMemory(BrokerContract):
    @pytest.fixture
    def harness(self) -> BrokerHarness:
        return MemoryHarness()


class TestPostgres(BrokerContract):
    @pytest.fixture
    def harness(self, database: str, monkeypatch: pytest.MonkeyPatch) -> BrokerHarness:
        tuned(monkeypatch, queue_visibility=4.0)  # what a session took and did not return comes again sooner
        return PostgresHarness(database)


class TestKafka(BrokerContract):
    @pytest.fixture
    def harness(self, kafka: Server) -> BrokerHarness:
        return KafkaHarness(kafka.address)


class TestRabbitmq(BrokerContract):
    @pytest.fixture(params=["quorum", "classic"])
    async def harness(self, request: pytest.FixtureRequest, rabbitmq: Server) -> AsyncIterator[BrokerHarness]:
        async with AsyncExitStack() as stack:
            yield RabbitmqHarness(rabbitmq.address, request.param, stack)


class TestSqs(BrokerContract):
    @pytest.fixture(params=["", ".fifo"], ids=["standard", "fifo"])
    def harness(self, request: pytest.FixtureRequest, sqs: Server) -> BrokerHarness:
        return SqsHarness(sqs.address, request.param)
