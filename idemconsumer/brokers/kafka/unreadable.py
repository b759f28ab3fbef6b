"""Records that the client cannot read, or may not read, stop only their own partition.

An unreadable record stops it until a person skips the record or it can be read after all (K13); a topic without
permission, until the user has it (K22).

The client raises a fault out of a fetch of many partitions, and loses the records that it had read before the fault.
Here each partition's part of a fetch ends before its fault, which is reported instead of raised. It also ends where
enough bytes were read: the client limits only the number of records, and a small batch may decompress to a lot (D8).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchResult
from aiokafka.errors import KafkaError, LeaderNotAvailableError, TopicAuthorizationFailedError, for_code
from aiokafka.protocol.fetch import FetchRequest

from idemconsumer.brokers.kafka import kafka_client as kafka_client
from idemconsumer.brokers.kafka.batches import Piece, RecordBatch, batch_at, leaders_of, refused
from idemconsumer.brokers.kafka.kafka_client import ALLOW_READ, position_of
from idemconsumer.brokers.kafka.placing import Placing
from idemconsumer.brokers.kafka.reading import Partition, Reading
from idemconsumer.ports.broker import Delivery

LOOK_AGAIN = 3.0  # seconds between two checks whether an unreadable record is to be skipped
SAY_AGAIN = 60.0  # seconds until a blocked partition is logged again
_PAUSE = 1.0
_WAIT_MS = 500
_BATCH_BYTES = 1024 * 1024  # a larger batch still comes whole

Report = Callable[[TopicPartition], None]
Follows = Callable[[TopicPartition, int, Sequence[tuple[int, int]]], bool]


def watch(consumer: AIOKafkaConsumer, report: Report, follows: Follows) -> Fetched:
    """From now on, call `report` with the partition of a fault, within `getmany` and instead of raising. What was
    fetched is dropped unless it `follows` what was read before (`Leaders.follow`). Call this after `start`."""
    consumer._fetcher._records = fetched = Fetched(report, follows)
    consumer._client.send = partial(fetched.send, consumer._client.send)
    return fetched


class Fetched(OrderedDict[TopicPartition, Any]):
    """What the client has fetched and not returned yet. `bytes_left` is set before each `getmany`, which returns only
    records that begin within that many bytes, and at least one."""

    def __init__(self, report: Report, follows: Follows) -> None:
        super().__init__()
        self._report = report
        self._follows = follows
        self._leaders: dict[TopicPartition, list[tuple[int, int]]] = {}
        self.bytes_left = 0

    async def send(self, send: Callable[..., Awaitable[Any]], node: int, request: Any, **how: Any) -> Any:
        """The client's `send`, with the leader epochs of what was fetched, which the client drops."""
        answer = await send(node, request, **how)
        if isinstance(request, FetchRequest):  # the client stores this result before anything else can be fetched
            for topic, partitions in answer.topics:
                for partition, *_, records in partitions:
                    self._leaders[TopicPartition(topic, partition)] = list(leaders_of(records or b""))
        return answer

    def __setitem__(self, at: TopicPartition, fetched: Any) -> None:
        if type(fetched) is FetchResult:
            fetched.getall = partial(self._getall, fetched)
            fetched.leaders = self._leaders.pop(at, None)
        super().__setitem__(at, fetched)

    def _getall(self, fetched: Any, max_records: int | None = None) -> list[Any]:
        """As FetchResult.getall, but returns the records that were read before a fault."""
        at = fetched._topic_partition
        if self.bytes_left <= 0 or not fetched.check_assignment(at) or not fetched.has_more():
            return []
        leaders, fetched.leaders = fetched.leaders, None
        if leaders and not self._follows(at, fetched._partition_records.next_fetch_offset, leaders):
            fetched._partition_records = None
            return []
        taken: list[Any] = []
        try:
            for record in fetched._partition_records:
                taken.append(record)
                self.bytes_left -= _size_of(record)
                if len(taken) == max_records or self.bytes_left <= 0:
                    fetched._update_position()
                    return taken
        except Exception:  # noqa: BLE001 - of a codec's library too
            self._report(at)
        fetched._update_position()
        fetched._partition_records = None
        return taken


def _size_of(record: Any) -> int:
    """Bytes of the record's value, key and headers."""
    size = len(record.value or b"") + len(record.key or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers) if record.headers else size


async def read_batch(consumer: AIOKafkaConsumer, at: TopicPartition, position: int) -> RecordBatch | None:
    """The batch at `position`, readable or not; None if there is none. Raises TimeoutError or KafkaError."""
    client = consumer._client
    leader = client.cluster.leader_for_partition(at)
    if leader is None or leader < 0:
        raise LeaderNotAvailableError(at)
    wanted = [(at.topic, [(at.partition, position, _BATCH_BYTES)])]
    async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
        answer = await client.send(leader, FetchRequest(_WAIT_MS, 1, _BATCH_BYTES, READ_COMMITTED, wanted))
    for _, partitions in answer.topics:
        for _, code, _, *rest in partitions:
            if code:
                raise for_code(code)(at)
            aborted = rest[-2 if answer.API_VERSION < 11 else -3]  # from version 11 on, the preferred replica follows
            return batch_at(at, bytes(rest[-1] or b""), position, aborted or ())
    return None


@dataclass(slots=True)
class _Halt:
    """A blocked partition. `due`: when to check it again; `said`: when it was last logged."""

    partition: Partition
    due: float = 0.0
    said: float = -math.inf


class Unreadable:
    """The partitions of one session that are blocked."""

    def __init__(self, consumer: AIOKafkaConsumer, reading: Reading, placing: Placing, log: Any) -> None:
        self._consumer = consumer
        self._reading = reading
        self._placing = placing
        self._log = log
        self._halts: dict[TopicPartition, _Halt] = {}
        self._halted = asyncio.Event()
        self._forbidden: dict[str, float] = {}  # topics, with the time when each was last logged
        self.late: list[Delivery] = []  # records that were read here, to be returned by the next fetch

    def halt(self, at: TopicPartition) -> None:
        """Block a partition at which the client has met something that it cannot read."""
        if (partition := self._reading.partitions.get(at)) is not None and not partition.halted:
            partition.halted = True
            self._halts[at] = _Halt(partition)
            self._halted.set()
            self._reading.pause()

    def forbid(self, topics: Iterable[str]) -> None:
        """Block the topics that this user may not read."""
        for at, partition in self._reading.partitions.items():
            if at.topic in topics:
                partition.forbidden = True
                self.halt(at)

    async def look(self) -> None:
        """Decode what the client could not read, and continue after it as far as it can be read or is skipped."""
        await self._halted.wait()
        now = asyncio.get_running_loop().time()
        for at, halt in list(self._halts.items()):
            if self._reading.partitions.get(at) is not halt.partition:
                del self._halts[at]  # its assignment is over
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
