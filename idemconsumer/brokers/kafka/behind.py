"""For metrics: what the partitions of a session have that nobody has read yet."""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer

from idemconsumer.brokers.kafka.client import end_offsets, position_of
from idemconsumer.brokers.kafka.reading import Reading
from idemconsumer.ports.broker import Lag


async def behind(consumer: AIOKafkaConsumer, reading: Reading) -> dict[str, Lag]:
    """By source; offsets, transaction markers among them. Kafka is asked where they end, since the client learns
    nothing of a partition that is paused. TimeoutError or KafkaError."""
    placed = {at: each for at, each in reading.partitions.items() if each.placed}
    ends = await end_offsets(consumer, placed) if placed else {}
    found: dict[str, Lag] = {}
    for at, partition in placed.items():
        position = await position_of(consumer, at) if reading.partitions.get(at) is partition else None
        if position is not None and at in ends:
            lag = partition.backlog.lag(max(0, ends[at] - position), part=True)
            found[partition.source] = lag.beside(found[partition.source]) if partition.source in found else lag
    return found
