"""For `kafka reset`: finds and sets where a group without members begins (K20)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError, GroupCoordinatorNotAvailableError

from idemconsumer.brokers.kafka.checking import missing_text, partitions_of
from idemconsumer.brokers.kafka.diagnosis import unavailable
from idemconsumer.brokers.kafka.kafka_client import LOSS, admin_client, cluster_of, name_of
from idemconsumer.brokers.kafka.kafka_options import connection_options
from idemconsumer.brokers.kafka.questions import described_group, present_leaders, topic_ids
from idemconsumer.brokers.kafka.start import OffsetMark
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.settings import Settings

_TIMEOUT: Final = 30.0


@dataclass(frozen=True, slots=True)
class Move:
    """The reset of one partition. `before` is the group's offset so far, None if it had none, with its `mark`; `offset`
    is the new one. `leader` is the epoch of the log that the offset is of, None if unknown (K21)."""

    partition: int
    before: int | None
    mark: OffsetMark | None
    offset: int
    leader: int | None


class GroupOffsets:
    """The offsets of one group. `cluster` is the id of the Kafka cluster."""

    def __init__(self, consumer: AIOKafkaConsumer, admin: AIOKafkaAdminClient, group: str, cluster: str) -> None:
        self._consumer = consumer
        self._admin = admin
        self._group = group
        self.cluster = cluster

    async def topic_id(self, topic: str) -> str | None:
        return (await topic_ids(self._consumer._client, [topic])).get(topic)

    async def moves(self, servers: str, topic: str, partition: int | None, to: str | int | datetime) -> list[Move]:
        """What a reset of these partitions would do. `to`: `earliest`, `latest`, an offset, or a time.

        Raises ConfigurationError for a group with live members, for a partition that does not exist, and for an offset
        that is not in the log; BrokerUnavailable for a topic that does not exist.
        """
        await self._refuse_members()
        if not (count := await partitions_of(self._admin, topic)):
            raise BrokerUnavailable(missing_text(servers, [topic]))
        if partition is not None and partition >= count:
            raise ConfigurationError(f"kafka:{topic}/{partition} does not exist: the last partition is {count - 1}")
        places = [TopicPartition(topic, each) for each in (range(count) if partition is None else [partition])]
        await self._consumer._client.add_topic(topic)
        leaders = await present_leaders(self._consumer._client, places)  # before the log is queried: see `Placing`
        starts, ends = await self._consumer.beginning_offsets(places), await self._consumer.end_offsets(places)
        self._consumer.assign(places)
        commits = await self._consumer._coordinator.fetch_committed_offsets(places)
        befores = {at: commit.offset for at, commit in commits.items()}
        marks = {at: OffsetMark.of(commit.metadata or "") for at, commit in commits.items()}
        offsets = await self._offsets(to, starts, ends)
        for at, offset in offsets.items():
            if not starts[at] <= offset <= ends[at]:
                raise ConfigurationError(
                    f"{name_of(at)} has no offset {offset}: its log goes from {starts[at]} to {ends[at]}; "
                    "write an offset in that range, `earliest`, `latest` or a time"
                )
        return [Move(at.partition, befores.get(at), marks.get(at), offsets[at], leaders.get(at)) for at in places]

    async def commit(self, topic: str, moves: Sequence[Move]) -> None:
        """Set the offsets, without a mark, so that they are obeyed whatever the database has (K12: without a mark means
        set by a person). Raises ConfigurationError if the group has members by now."""
        try:
            await self._consumer.commit({TopicPartition(topic, each.partition): each.offset for each in moves})
        except CommitFailedError as error:
            raise self._has_members() from error

    async def _offsets(
        self, to: str | int | datetime, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> Mapping[TopicPartition, int]:
        if isinstance(to, int):
            return dict.fromkeys(starts, to)
        if isinstance(to, datetime):
            found = await self._consumer.offsets_for_times(dict.fromkeys(starts, int(to.timestamp() * 1000)))
            return {at: ends[at] if found.get(at) is None else found[at].offset for at in starts}
        return starts if to == "earliest" else ends

    async def _refuse_members(self) -> None:
        try:
            members = (await described_group(self._admin, self._group))["members"]
        except GroupCoordinatorNotAvailableError:
            return  # a new cluster creates the topic of group offsets on the first request
        if members:
            who = sorted({f"{each['client_id']} at {each['client_host']}" for each in members})
            raise self._has_members(", ".join(who))

    def _has_members(self, who: str = "joined just now") -> ConfigurationError:
        return ConfigurationError(
            f"the group {self._group!r} has live members ({who}), which would keep their positions; "
            "stop its workers, and run this again"
        )


@asynccontextmanager
async def group_offsets(settings: Settings, group: str) -> AsyncIterator[GroupOffsets]:
    """Connect without becoming a member. Kafka's errors become BrokerUnavailable, here and in the body."""
    if settings.kafka is None:
        raise ConfigurationError("kafka: no address; set IDEMCONSUMER_KAFKA=host:9092[,host:9092]")
    connection = connection_options(settings)
    # The end of the committed messages: what an open transaction holds back is still to be read.
    consumer = AIOKafkaConsumer(
        **connection, group_id=group, enable_auto_commit=False, isolation_level="read_committed"
    )
    try:
        async with asyncio.timeout(_TIMEOUT), admin_client(connection) as admin:
            await consumer.start()
            yield GroupOffsets(consumer, admin, group, await cluster_of(consumer._client))
    except LOSS as error:
        raise await unavailable(connection, error) from error
    finally:
        await consumer.stop()
