"""What the client cannot read stops its partition alone, until a person skips it or it can be read after all (K13), and
what it may not read, until it may (K22)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from idemconsumer.brokers.kafka.batches import Piece, refused
from idemconsumer.brokers.kafka.client import ALLOW_READ, position_of
from idemconsumer.brokers.kafka.faults import read_batch
from idemconsumer.brokers.kafka.placing import Placing
from idemconsumer.brokers.kafka.reading import Partition, Reading
from idemconsumer.ports.broker import Delivery

LOOK_AGAIN = 3.0  # seconds before it is looked whether what cannot be read is to be skipped
SAY_AGAIN = 60.0  # seconds before it is said again that a partition stands still
_PAUSE = 1.0


@dataclass(slots=True)
class _Halt:
    """`due` is when to look at it again, `said` when it was said."""

    partition: Partition
    due: float = 0.0
    said: float = -math.inf


class Unreadable:
    """Where the partitions of one session stand still."""

    def __init__(self, consumer: AIOKafkaConsumer, reading: Reading, placing: Placing, log: Any) -> None:
        self._consumer = consumer
        self._reading = reading
        self._placing = placing
        self._log = log
        self._halts: dict[TopicPartition, _Halt] = {}
        self._halted = asyncio.Event()
        self._forbidden: dict[str, float] = {}  # topics, and when it was said of them
        self.late: list[Delivery] = []  # what was read here, to be handed over by the next fetch

    def halt(self, at: TopicPartition) -> None:
        """The client has met something that it cannot read."""
        if (partition := self._reading.partitions.get(at)) is not None and not partition.halted:
            partition.halted = True
            self._halts[at] = _Halt(partition)
            self._halted.set()
            self._reading.pause()

    def forbid(self, topics: Iterable[str]) -> None:
        """This user may not read these."""
        for at, partition in self._reading.partitions.items():
            if at.topic in topics:
                partition.forbidden = True
                self.halt(at)

    async def look(self) -> None:
        """Take apart what the client could not read, and go on behind it as far as that can be read or is skipped."""
        await self._halted.wait()
        now = asyncio.get_running_loop().time()
        for at, halt in list(self._halts.items()):
            if self._reading.partitions.get(at) is not halt.partition:
                del self._halts[at]  # its epoch is over
            elif halt.due <= now:
                halt.due = now + LOOK_AGAIN
                await self._look_at(at, halt, now)
        if self._halts:
            await asyncio.sleep(_PAUSE)
        else:
            self._halted.clear()

    async def _look_at(self, at: TopicPartition, halt: _Halt, now: float) -> None:
        if (position := await position_of(self._consumer, at)) is None:
            return
        try:
            batch = await read_batch(self._consumer, at, position)
        except TopicAuthorizationFailedError:
            halt.partition.forbidden = True
            self._say_forbidden(at.topic, now)
            return
        except (TimeoutError, KafkaError):
            return
        halt.partition.forbidden = False
        if self._forbidden.pop(at.topic, None) is not None:
            self._log.info("kafka topic readable again", topic=at.topic)
        if batch is not None and not self._reading.follows(at, position, batch.leaders):
            return
        read: list[Piece] = []
        unreadable = None
        for piece in [] if batch is None else batch.pieces:
            if piece.fault is not None and not piece.whole and not await self._placing.stop(at, piece):
                unreadable = piece
                break
            read.append(piece)
        reading = self._reading
        if reading.partitions.get(at) is not halt.partition or reading.draining or reading.over:
            return
        self.late += reading.register({at: [piece.record for piece in read]} if read else {}, refused(read))
        if unreadable is None:
            self._consumer.seek(at, position if batch is None else batch.next)
            halt.partition.halted = False
            del self._halts[at]
            reading.pause()
            await self._placing.leave(at)
            return
        self._consumer.seek(at, unreadable.offset)
        if now - halt.said >= SAY_AGAIN:
            halt.said = now
            self._log.error(
                "kafka record unreadable, partition blocked",
                topic=at.topic,
                partition=at.partition,
                offset=unreadable.offset,
                records=unreadable.next - unreadable.offset,
                error=unreadable.fault,
                instead=f"idemconsumer skip kafka:{at.topic}/{at.partition}@{unreadable.offset}",
            )

    def _say_forbidden(self, topic: str, now: float) -> None:
        if now - self._forbidden.get(topic, -math.inf) >= SAY_AGAIN:
            self._forbidden[topic] = now
            self._log.error("kafka topic not readable, no permission", topic=topic, instead=ALLOW_READ)
