"""Kafka through aiokafka: connecting, publishing and checking. Consuming is in `kafka_session`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from aiokafka import AIOKafkaConsumer

from idemconsumer.addresses import is_local, kafka_hosts
from idemconsumer.brokers.kafka import decompression
from idemconsumer.brokers.kafka.checking import (
    contested_findings,
    missing_text,
    partitions_of,
    retention_of,
    subscription_findings,
    topics_of,
)
from idemconsumer.brokers.kafka.diagnosis import unavailable
from idemconsumer.brokers.kafka.kafka_client import LOSS, admin_client, stop
from idemconsumer.brokers.kafka.kafka_options import connection_options
from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.brokers.kafka.membership import Seat
from idemconsumer.brokers.kafka.placing import Placing
from idemconsumer.brokers.kafka.publishing import Publisher
from idemconsumer.brokers.kafka.topics import Topics
from idemconsumer.brokers.reaching import silence
from idemconsumer.brokers.sendable import largest_record
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.logs import log
from idemconsumer.message.message import Subscription
from idemconsumer.message.sources import is_pattern
from idemconsumer.ports.broker import Bounds, Finding, Outgoing, Reply, Unsent
from idemconsumer.settings import Settings
from idemconsumer.stores.kafka_positions import PostgresPositions

OPEN_TIMEOUT = 15.0
CHECK_TIMEOUT = 10.0
FETCH_MAX_BYTES = 50 * 1024 * 1024
HEARTBEAT_MS = 1_000  # a member notices a rebalance by its heartbeat, and the rebalance waits for the slowest member
METADATA_MAX_AGE_MS = 4_000  # longest delay until a new topic or partition is consumed


class KafkaBroker:
    """See `ports.Broker`. One session is one membership in a consumer group, for all topics of that group.

    The constructor raises ConfigurationError for settings that cannot work. It also silences aiokafka's
    loggers, which write hundreds of lines while a broker is down; set a level on the logger "aiokafka" to
    see them.
    """

    hands_over = False

    def __init__(self, settings: Settings) -> None:
        if settings.kafka is None:
            raise ConfigurationError("kafka: no address; set IDEMCONSUMER_KAFKA=host:9092[,host:9092]")
        self._servers = settings.kafka
        self._settings = settings
        decompression.limit(2 * settings.max_message_bytes)
        self._connection = connection_options(settings)
        plain = not self._connection["security_protocol"].endswith("SSL")
        self._exposed = plain and not all(map(is_local, kafka_hosts(settings.kafka)))
        self._publisher = Publisher(self._connection, largest_record(settings.max_message_bytes))
        self._positions: PostgresPositions | None = None
        self._seats: dict[str, Seat] = {}
        silence("aiokafka")

    def feed(self, subscription: Subscription) -> str:
        return f"kafka:{subscription.group}"

    def keep_positions_in(self, positions: PostgresPositions) -> None:
        self._positions = positions

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> KafkaSession:
        """Join the group for all topics. A missing topic is logged once. Raises BrokerUnavailable when there is no
        pattern and none of the named topics exists."""
        group = subscriptions[0].group
        topics = Topics(subscriptions)
        seat = self._seats.setdefault(group, Seat(group, _instance(self._settings.kafka_group_instance_id)))
        rebalance_ms = int((bounds.drain + 10) * 1000)
        consumer = AIOKafkaConsumer(
            **self._connection,
            group_id=group,
            group_instance_id=seat.instance,
            # By default the client commits messages that still run, skips those sent before it joined, and reads
            # aborted ones (K9).
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            session_timeout_ms=int(self._settings.kafka_session_timeout * 1000),
            heartbeat_interval_ms=HEARTBEAT_MS,
            rebalance_timeout_ms=rebalance_ms,
            request_timeout_ms=rebalance_ms + 10_000,  # a join is answered only when the slowest member has drained
            metadata_max_age_ms=METADATA_MAX_AGE_MS,
            # The client's own buffer comes on top of what is in flight. A larger record is still fetched, alone.
            fetch_max_bytes=max(1, min(FETCH_MAX_BYTES, bounds.memory.bound // 4)),
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                # With topics in the constructor, start() would hang while one of them is missing.
                await consumer.start()
                existing = await consumer.topics()
            if not topics.patterns and topics.names.isdisjoint(existing):
                raise BrokerUnavailable(missing_text(self._servers, sorted(topics.names)))
            await seat.refuse(consumer)
            reset, positions = self._settings.kafka_auto_offset_reset, self._positions
            placing = Placing(consumer, group, reset=reset, positions=positions, log=log.bind(group=group))
            session = KafkaSession(consumer, group, topics, bounds, placing, seat, self._connection)
            session.start(existing)
        except LOSS as error:
            await stop(consumer)
            raise await unavailable(self._connection, error) from error
        except BaseException:
            await stop(consumer)
            raise
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish all messages and wait until every in-sync replica has them.

        Raises BrokerUnavailable, and BadMessage for a message that is larger than Kafka accepts. When it raises, some
        messages may be on the topic and others may still be written: publish all again, with the same keys.
        """
        await self._publisher.publish(name, messages)

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`. Replies go to the topic and partition that the request's headers name."""
        return await self._publisher.reply(replies)

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """See `ports.Relaying`. Sent with acks=all, by an idempotent producer."""
        return await self._publisher.relay(name, messages)

    async def check_destination(self, name: str) -> None:
        """Check that the topic exists, else raise BrokerUnavailable; not whether this user may write to it."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), admin_client(self._connection) as admin:
                if not await partitions_of(admin, name):
                    raise BrokerUnavailable(missing_text(self._servers, [name]))
        except LOSS as error:
            raise await unavailable(self._connection, error) from error

    async def check(self, subscription: Subscription) -> list[Finding]:
        subject = subscription.source
        found = []
        if self._exposed:
            instead = "set IDEMCONSUMER_KAFKA_SECURITY_PROTOCOL=SSL or SASL_SSL"
            text = f"Kafka at {self._servers} is reached over a network without TLS; {instead}"
            found.append(Finding("warning", subject, text))
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), admin_client(self._connection) as admin:
                found += await subscription_findings(self._connection, admin, subscription, self._settings)
        except LOSS as error:
            return [*found, Finding("error", subject, str(await unavailable(self._connection, error)))]
        return found

    async def check_together(self, subscriptions: Sequence[Subscription]) -> list[Finding]:
        """Conflicts between these subscriptions. An unreachable Kafka is not reported here; `check` does that."""
        if all(not is_pattern(each.source) for each in subscriptions):
            return []
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), admin_client(self._connection) as admin:
                return await contested_findings(admin, subscriptions)
        except LOSS:
            return []

    async def retention_seconds(self, subscription: Subscription) -> float | None:
        """How long the topics keep a message, in seconds, and so can redeliver it; `inf`: for ever, None: unknown."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), admin_client(self._connection) as admin:
                kept = [await retention_of(admin, topic) for topic in await topics_of(admin, subscription)]
        except LOSS:
            return None
        return max((each for each in kept if each is not None), default=None)

    async def close(self) -> None:
        await self._publisher.close()


def _instance(name: str | None) -> str | None:
    """The static member's id; each worker process of one program needs an id of its own."""
    worker = os.environ.get("IDEMCONSUMER_WORKER")
    return f"{name}-{worker}" if name and worker else name
