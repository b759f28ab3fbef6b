"""Probing Kafka at intervals: a dead broker or a missing topic is as silent as an empty one (K7)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from idemconsumer.brokers.kafka import client as kafka_client
from idemconsumer.brokers.kafka.client import create_command, end_offsets, name_of, position_of, words

GIVE_UP = 60.0  # seconds without an answer: longer than a group remembers a silent member


class Health:
    """Broker down, topic missing, fetch stalled: each is logged once when it begins and once when it is over."""

    def __init__(self, consumer: AIOKafkaConsumer, topics: frozenset[str], servers: str, log: Any) -> None:
        self._consumer = consumer
        self._topics = topics
        self._servers = servers
        self._log = log
        self._down_since: float | None = None
        self._missing: frozenset[str] = frozenset()
        self._stalled: frozenset[TopicPartition] = frozenset()
        self._positions: Mapping[TopicPartition, int] = {}
        self._empty_polls = 0

    def polled(self, brought: bool) -> None:
        """The consumer was asked for more."""
        self._empty_polls += not brought

    def missing(self, topics: Iterable[str]) -> None:
        """These topics do not exist now, the others do."""
        missing = frozenset(topics)
        for topic in sorted(missing - self._missing):
            self._log.warning("kafka topic missing", topic=topic, instead=create_command(self._servers, topic))
        for topic in sorted(self._missing - missing):
            self._log.info("kafka topic found", topic=topic)
        self._missing = missing

    async def probe(self) -> str | None:
        """Why the session should end; None as long as it may go on."""
        known = self._topics - self._absent()
        ours = {at for at in self._consumer.assignment() if at.topic in known}
        ends: Mapping[TopicPartition, int] = {}
        try:
            if known:
                ends = await end_offsets(self._consumer, ours or {TopicPartition(topic, 0) for topic in known})
            else:
                async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
                    await self._consumer.topics()
        except (TimeoutError, KafkaError) as error:
            if self._absent() == self._topics - known:
                return self._unreachable(error)
            # Otherwise a topic disappeared during the request.
        if self._down_since is not None:
            self._down_since = None
            self._log.info("kafka reachable", servers=self._servers)
        self.missing(self._absent())
        await self._look_for_stalls({at: ends[at] for at in ours if at in ends})
        return None

    def _absent(self) -> frozenset[str]:
        return frozenset(topic for topic in self._topics if not self._consumer.partitions_for_topic(topic))

    def _unreachable(self, error: Exception) -> str | None:
        now = asyncio.get_running_loop().time()
        if self._down_since is None:
            self._down_since = now
            self._log.warning(
                "kafka unreachable",
                servers=self._servers,
                error=words(error),
                instead="start the brokers, or set IDEMCONSUMER_KAFKA to where they are",
            )
        elif now - self._down_since >= GIVE_UP:
            return f"Kafka at {self._servers} has not answered for {now - self._down_since:.0f} s"
        return None

    async def _look_for_stalls(self, ends: Mapping[TopicPartition, int]) -> None:
        """A stall: a poll brought nothing since the last probe, and a partition with more records did not move."""
        paused = self._consumer.paused()
        positions = {at: found for at in ends if (found := await position_of(self._consumer, at)) is not None}
        stalled = frozenset(
            at
            for at, position in positions.items()
            if position < ends[at] and position == self._positions.get(at) and at not in paused
        )
        if not self._empty_polls:
            stalled &= self._stalled
        self._empty_polls, self._positions = 0, positions
        for at in sorted(stalled - self._stalled):
            self._log.warning(
                "kafka fetch stalled",
                partition=name_of(at),
                position=positions[at],
                end=ends[at],
                instead="look at the partition's leader and replicas, and at this client's read permission",
            )
        for at in sorted(self._stalled - stalled):
            self._log.info("kafka fetch resumed", partition=name_of(at))
        self._stalled = stalled
