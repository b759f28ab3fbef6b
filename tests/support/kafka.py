"""A Kafka as tests use it: a fresh topic, sessions of one group on it, and a look at what was committed."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.errors import GroupCoordinatorNotAvailableError, KafkaError
from aiokafka.protocol.admin import DeleteGroupsRequest
from aiokafka.structs import OffsetAndMetadata

from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery
from idemconsumer.settings import Settings
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import Server
from tests.support.waiting import PATIENCE, until

BOUNDS = Bounds(lanes=4, group=8)


async def create_topic(
    admin: AIOKafkaAdminClient, topic: str, partitions: int = 1, configs: Mapping[str, str] | None = None
) -> None:
    """Ends once the broker says it has it: of one that is made just now it says for a moment that there is none."""
    answer = await admin.create_topics([NewTopic(topic, partitions, 1, topic_configs=configs)])
    assert answer.topic_errors[0][1] == 0, answer
    await until(lambda: has_leaders(admin, topic, partitions))


async def has_leaders(admin: AIOKafkaAdminClient, topic: str, partitions: int) -> bool:
    [found] = await admin.describe_topics([topic])
    return len(found["partitions"]) == partitions and all(p["leader"] >= 0 for p in found["partitions"])


@dataclass
class World:
    """A Kafka, one fresh topic, and sessions of one group on it; all are closed at the end of the test."""

    server: Server
    admin: AIOKafkaAdminClient
    topic: str = field(default_factory=lambda: f"orders.{uuid.uuid4().hex[:8]}")
    brokers: list[KafkaBroker] = field(default_factory=list)
    sessions: list[KafkaSession] = field(default_factory=list)
    suffix: str = ""

    @property
    def group(self) -> str:
        return f"group.{self.topic}{self.suffix}"

    @property
    def broker(self) -> KafkaBroker:
        if not self.brokers:
            self.brokers.append(KafkaBroker(Settings(kafka=self.server.address)))
        return self.brokers[0]

    def subscription(self, topic: str | None = None) -> Subscription:
        return Subscription(f"kafka:{topic or self.topic}", "handler", self.group)

    async def create(
        self, topic: str | None = None, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> None:
        await create_topic(self.admin, topic or self.topic, partitions, configs)

    async def delete(self, topic: str) -> None:
        await self.admin.delete_topics([topic])

    async def produce(self, count: int, *, start: int = 0, partition: int | None = None) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.server.address) as producer:
            sent = [
                await producer.send(self.topic, b"%d" % number, partition=partition)
                for number in range(start, start + count)
            ]
            await asyncio.gather(*sent)

    async def produce_and_abort(self, count: int) -> None:
        """In one transaction, which comes to nothing."""
        async with AIOKafkaProducer(bootstrap_servers=self.server.address, transactional_id=self.topic) as producer:
            await producer.begin_transaction()
            for number in range(count):
                await producer.send_and_wait(self.topic, b"aborted %d" % number)
            await producer.abort_transaction()

    async def open(self, bounds: Bounds = BOUNDS, *topics: str) -> KafkaSession:
        subscriptions = [self.subscription(topic) for topic in topics] or [self.subscription()]
        session = await self.broker.open(subscriptions, bounds)
        self.sessions.append(session)
        return session

    async def committed(self, partition: int = 0) -> int | None:
        found: dict[TopicPartition, OffsetAndMetadata] = {}

        async def answered() -> bool:
            # A new broker makes the topic of offsets first.
            with contextlib.suppress(GroupCoordinatorNotAvailableError):
                found.update(await self.admin.list_consumer_group_offsets(self.group))
                return True
            return False

        await until(answered)
        at = TopicPartition(self.topic, partition)
        return found[at].offset if at in found else None

    async def commits(self, offset: int, partition: int = 0) -> None:
        """Wait until the group's offset is `offset`; fails with what it is instead."""
        await until(lambda: self._is(offset, partition))

    async def _is(self, offset: int, partition: int) -> bool:
        return await self.committed(partition) == offset

    async def set_offset(self, offset: int, partition: int = 0) -> None:
        """Set the group's offset, as a person would while no worker runs."""
        at = TopicPartition(self.topic, partition)
        options = {"bootstrap_servers": self.server.address, "group_id": self.group, "enable_auto_commit": False}
        async with AIOKafkaConsumer(**options) as consumer:
            consumer.assign([at])
            await consumer.commit({at: offset})

    async def forget(self) -> None:
        """What Kafka does seven days after the last member has left."""
        coordinator = await self.admin.find_coordinator(self.group)
        answer = await self.admin._send_request(DeleteGroupsRequest([self.group]), coordinator)
        assert answer.results[0][1] == 0, answer

    async def delete_below(self, offset: int, partition: int = 0) -> None:
        """What retention does."""
        await self.admin.delete_records({TopicPartition(self.topic, partition): RecordsToDelete(before_offset=offset)})

    async def close(self) -> None:
        for session in self.sessions:
            await session.close()
        for broker in self.brokers:
            await broker.close()
        with contextlib.suppress(KafkaError):
            await self.admin.close()


@contextlib.asynccontextmanager
async def world_of(server: Server) -> AsyncIterator[World]:
    admin = AIOKafkaAdminClient(bootstrap_servers=server.address)
    await admin.start()
    world = World(server, admin)
    try:
        yield world
    finally:
        await world.close()


@contextlib.contextmanager
def killing(server: Kafka) -> Iterator[Kafka]:
    """Free its memory after the last test that needs it, not after the module."""
    try:
        yield server
    finally:
        server.kill()


@dataclass
class MortalWorld(World):
    """A world whose Kafka may be killed."""

    own: Kafka = field(kw_only=True)


async def take(session: KafkaSession, count: int) -> list[Delivery]:
    """Fetch until `count` deliveries have come, and no more than that."""
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            taken += await session.fetch()
    assert len(taken) == count, positions(taken)
    return taken


async def joined(session: KafkaSession) -> None:
    """Fetch nothing until the group has assigned."""
    async with asyncio.timeout(PATIENCE):
        while not await session.idle():
            assert not await session.fetch()


def positions(deliveries: Sequence[Delivery]) -> list[str]:
    return sorted(delivery.message.position.split("-", 1)[1] for delivery in deliveries)


def offset_of(delivery: Delivery) -> int:
    return int(delivery.message.position.rsplit("-", 1)[1])


def partition_of(delivery: Delivery) -> int:
    return int(delivery.message.position.rsplit("-", 2)[1])


async def take_any(session: KafkaSession) -> None:
    while True:
        await session.fetch()
