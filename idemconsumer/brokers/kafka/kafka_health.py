"""Probes Kafka at intervals: to a consumer, a dead broker or a missing topic looks like an empty one (K7)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from idemconsumer.brokers.kafka import kafka_client as kafka_client
from idemconsumer.brokers.kafka.diagnosis import has_expired, unusable
from idemconsumer.brokers.kafka.kafka_client import ALLOW_READ, create_command, end_offsets, name_of, position_of, words
from idemconsumer.brokers.kafka.topics import Topics

T = TypeVar("T", str, TopicPartition)

GIVE_UP = 60.0  # seconds without an answer: longer than a group keeps a silent member


class KafkaHealth:
    """Broker down, topic missing, fetch stalled: each is logged once when it begins and once when it ends."""

    def __init__(self, consumer: AIOKafkaConsumer, topics: Topics, log: Any, connection: Mapping[str, Any]) -> None:
        self._consumer = consumer
        self._topics = topics
        self._servers = connection["bootstrap_servers"]
        self._log = log
        self._connection = connection
        self._down_since: float | None = None
        self._said: dict[str, Collection[Any]] = {}  # for each kind of problem, what has it now
        self._positions: Mapping[TopicPartition, int] = {}
        self._empty_polls: set[str] = set()

    @property
    def silence(self) -> float | None:
        """See `ports.KnowsSilence`."""
        return None if self._down_since is None else asyncio.get_running_loop().time() - self._down_since

    def polled(self, sources: Iterable[str]) -> None:
        """Record that the consumer polled these sources and got nothing."""
        self._empty_polls.update(sources)

    def existing(self, topics: Iterable[str]) -> None:
        """Record which topics exist now."""
        topics = frozenset(topics)
        begun, over = self._changed("missing", self._topics.names - topics)
        for topic in begun:
            instead = f"{create_command(self._servers, topic)}; if it is there, {ALLOW_READ}"
            self._log.warning("kafka topic missing", topic=topic, instead=instead)
        for topic in over:
            self._log.info("kafka topic found", topic=topic)
        begun, over = self._changed("unmatched", self._topics.unmatched(topics))
        for source in begun:
            self._log.warning("kafka pattern matches no topic", source=source)
        for source in over:
            self._log.info("kafka pattern matches a topic", source=source)
        contested = self._topics.contested(topics)
        begun, _ = self._changed("contested", contested)
        for topic in begun:
            self._log.error(
                "kafka topic matches two handlers, neither reads it",
                topic=topic,
                sources=contested[topic],
                instead='narrow one of the patterns, or give one handler a consumer_group="…" of its own',
            )

    def _changed(self, what: str, now: Collection[T]) -> tuple[list[T], list[T]]:
        """What has the problem `what` since the last call, and what no longer has it."""
        said, self._said[what] = self._said.get(what, ()), now
        return sorted(set(now) - set(said)), sorted(set(said) - set(now))

    async def probe(self) -> str | None:
        """The reason to end the session; None if it may go on."""
        known = self._existing()
        named = {TopicPartition(topic, 0) for topic in known & self._topics.names}
        ours = {at for at in self._consumer.assignment() if at.topic in known}
        ends: Mapping[TopicPartition, int] = {}
        try:
            if ours or named:
                ends = await end_offsets(self._consumer, ours or named)
            else:
                async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
                    await self._consumer.topics()
        except (TimeoutError, KafkaError) as error:
            if self._existing() == known:
                return await self._unreachable(error)
            # Otherwise a topic disappeared during the request.
        if self._down_since is not None:
            self._down_since = None
            self._log.info("kafka reachable", servers=self._servers)
        self.existing(self._existing())
        await self._look_for_stalls({at: ends[at] for at in ours if at in ends})
        return None

    def _existing(self) -> frozenset[str]:
        """The topics that the client knows: all topics for a membership with patterns, else those it named."""
        known = self._consumer._client.cluster.topics() | self._topics.names
        return frozenset(topic for topic in known if self._consumer.partitions_for_topic(topic))

    async def _unreachable(self, error: Exception) -> str | None:
        now = asyncio.get_running_loop().time()
        if self._down_since is None:
            self._down_since = now
            self._log.warning(
                "kafka unreachable",
                servers=self._servers,
                error=await unusable(self._connection) or words(error),
            )
        elif (expired := has_expired(self._connection)) is not None and expired in (
            why := await unusable(self._connection) or ""  # otherwise the servers may just be unreachable
        ):
            return f"Kafka at {self._servers} cannot be used: {why}"
        elif now - self._down_since >= GIVE_UP:
            return f"Kafka at {self._servers} has not answered for {now - self._down_since:.0f} s"
        return None

    async def _look_for_stalls(self, ends: Mapping[TopicPartition, int]) -> None:
        """Log stalls: a partition with more records that has not moved since the last probe, though it was polled."""
        paused = self._consumer.paused()
        positions = {at: found for at in ends if (found := await position_of(self._consumer, at)) is not None}
        stalled = frozenset(
            at
            for at, position in positions.items()
            if position < ends[at] and position == self._positions.get(at) and at not in paused
        )
        polled = {at for at in stalled if self._topics.source_of(at.topic) in self._empty_polls}
        begun, over = self._changed("stalled", stalled & (polled | set(self._said.get("stalled", ()))))
        self._empty_polls.clear()
        self._positions = positions
        for at in begun:
            self._log.warning(
                "kafka fetch stalled",
                partition=name_of(at),
                position=positions[at],
                end=ends[at],
                instead="look at the partition's leader and replicas, and at this client's read permission",
            )
        for at in over:
            self._log.info("kafka fetch resumed", partition=name_of(at))
