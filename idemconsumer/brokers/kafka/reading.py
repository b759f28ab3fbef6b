"""The partitions of a session while they are assigned: where they begin, how much is taken, what was delivered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition

from idemconsumer.brokers.kafka.kafka_client import end_offsets, name_of, position_of
from idemconsumer.brokers.kafka.low_water import Leaders, Tracker
from idemconsumer.brokers.kafka.placing import Placing
from idemconsumer.brokers.kafka.topics import Topics
from idemconsumer.brokers.outstanding import Backlog, Outstanding
from idemconsumer.errors import BadMessage
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Lag

PLACE_AGAIN = 1.0  # seconds until Kafka is asked again where a partition begins

NOTHING: Final[Mapping[int, BadMessage]] = {}


@dataclass(slots=True, eq=False)
class Partition:
    """An assigned partition. Nothing of it is read or committed until its reader has been placed (K11).

    - `halted`: the client has met a record that it cannot read (K13), or a topic that it may not read, `forbidden`
      (K22).
    - `doubted`: the position from which the records may belong to another log (K21).
    - `inherited_below`: the last owner may have started the messages below it, the first `inherited` of them (K10).
    """

    source: str
    epoch: Epoch
    tracker: Tracker
    outstanding: Outstanding
    inherited: int
    inherited_below: int = 0
    placed: bool = False
    halted: bool = False
    forbidden: bool = False
    doubted: int | None = None
    leaders: Leaders = field(default_factory=Leaders)
    capped: bool = False
    backlog: Backlog = field(default_factory=Backlog)

    def inherits(self, offset: int) -> bool:
        """Whether the next delivered message, at `offset`, may have been started by the last owner."""
        if offset >= self.inherited_below:
            return False
        self.inherited -= 1
        if not self.inherited:
            self.inherited_below = offset + 1
        return True

    def can_be_left(self, low_water: int) -> bool:
        """Once none of its messages is started any more: whether none runs, and all inherited are finished (K10)."""
        return self.epoch.at_rest and not self.epoch.ended and low_water >= self.inherited_below

    def end(self) -> None:
        self.epoch.end()
        self.outstanding.left([(self, offset) for offset in self.tracker.unfinished])
        self.tracker.end()


class Reading:
    """All partitions, from an assignment to its end. Once `over`, nothing is delivered; while `draining`, nothing is
    read."""

    def __init__(self, consumer: AIOKafkaConsumer, topics: Topics, bounds: Bounds, placing: Placing, log: Any) -> None:
        self._consumer = consumer
        self._topics = topics
        self._bounds = bounds
        self._placing = placing
        self._log = log
        self.partitions: dict[TopicPartition, Partition] = {}
        self.draining = False
        self.over = False
        self._outstanding = {source: Outstanding(bounds, source) for source in topics.sources}
        self._unplaced = asyncio.Event()

    def begin(self, at: TopicPartition) -> None:
        """Start a new epoch of the partition, whose reader is still to be placed."""
        self._new(at)
        self._unplaced.set()

    def _set_back(self, at: TopicPartition, former: Partition) -> Partition:
        """Start a new epoch whose reader is placed already. Earlier deliveries may still run here."""
        partition = self._new(at)
        partition.placed = True
        partition.leaders = former.leaders
        partition.inherited_below = max(former.inherited_below, former.tracker.highest + 1)
        return partition

    def _new(self, at: TopicPartition) -> Partition:
        if (former := self.partitions.get(at)) is not None:
            former.end()
        bounds, source = self._bounds, self._topics.source_of(at.topic)
        assert source is not None, f"{at} is not ours"
        uncommitted = bounds.max_uncommitted + bounds.in_flight  # as many as the last owner can have had
        epoch, outstanding = Epoch(probation=bounds.group), self._outstanding[source]
        self.partitions[at] = partition = Partition(source, epoch, Tracker(), outstanding, uncommitted)
        return partition

    def end(self) -> None:
        for partition in self.partitions.values():
            partition.end()

    def register(
        self, fetched: Mapping[TopicPartition, Sequence[Any]], refused: Mapping[int, BadMessage] = NOTHING
    ) -> list[Delivery]:
        """Deliveries of these records, in order. Contains no await: see the docstring of `kafka_session`."""
        deliveries: list[Delivery] = []
        if self.over:
            return deliveries
        for at, records in fetched.items():
            partition = self.partitions.get(at)
            if partition is None or not partition.placed:
                continue  # its reader will be placed, and records that came too early are read then
            # An offset at or below an earlier one means that the reader was set back: these are not the deliveries that
            # the tracker knows.
            if records[0].offset <= partition.tracker.highest:
                partition = self._set_back(at, partition)
            partition.tracker.deliver(record.offset for record in records)
            source = f"kafka:{at.topic}"
            for record in records:
                message, handle = message_of(source, record), (partition, record.offset)
                partition.backlog.newest = message.timestamp
                partition.outstanding.arrived(handle, message)
                deliveries.append(
                    Delivery(
                        message,
                        partition.epoch,
                        handle,
                        inherited=partition.inherits(record.offset),
                        refusal=refused.get(record.offset),
                        source=partition.source,
                    )
                )
        return deliveries

    async def place(self) -> None:
        """Ask where new partitions begin, and let them be read from there."""
        await self._unplaced.wait()
        await self._settle_doubts()
        waiting = {at: each for at, each in self.partitions.items() if not each.placed}
        starts = await self._placing.place(list(waiting)) if waiting else {}
        for at, start in starts.items():
            partition = self.partitions.get(at)
            if partition is None or partition is not waiting[at] or at not in self._consumer.assignment():
                continue  # there was a rebalance meanwhile
            self._consumer.seek(at, start.offset)
            partition.inherited_below = start.inherited_below
            partition.leaders = Leaders(start.leader)
            partition.placed = True
        self.pause()
        if all(partition.placed and partition.doubted is None for partition in self.partitions.values()):
            self._unplaced.clear()
        else:
            await asyncio.sleep(PLACE_AGAIN)

    def follows(self, at: TopicPartition, position: int, fetched: Sequence[tuple[int, int]]) -> bool:
        """Whether what was fetched belongs to the log that has been read so far. If not, nothing more is read until
        Kafka has answered whether it does; messages already delivered continue, since it may well do."""
        partition = self.partitions.get(at)
        if partition is None or not partition.placed or partition.leaders.follow(position, fetched):
            return True
        partition.doubted = position
        self._unplaced.set()
        self.pause()
        return False

    async def _settle_doubts(self) -> None:
        """Continue where the log contains everything that was read of it, and place the other partitions anew."""
        doubted = {at: (each, each.doubted) for at, each in self.partitions.items() if each.doubted is not None}
        reached = {at: (position, each.leaders.of(position)) for at, (each, position) in doubted.items()}
        for at, same in (await self._placing.same_logs(reached)).items():
            partition, position = doubted[at]
            if self.partitions.get(at) is not partition:
                continue
            if same:
                partition.leaders.proven(position)
                partition.doubted = None
            else:
                self.begin(at)

    def place_anew(self) -> bool:
        """Forget all deliveries and ask again where to begin; returns whether any partition had been placed. A
        partition that is being placed is left alone: its placing notices by itself which server answers (K12)."""
        placed = [at for at, partition in self.partitions.items() if partition.placed]
        for at in placed:
            self.begin(at)
        self.pause()
        return bool(placed)

    async def look_for_other_topics(self) -> None:
        """Place a partition anew if its topic was recreated: its reader is in the middle of another log (K18)."""
        placed = {at: each for at, each in self.partitions.items() if each.placed}
        for at in await self._placing.recreated(placed):
            if self.partitions.get(at) is placed[at]:
                self.begin(at)
        self.pause()

    @property
    def open(self) -> int:
        """How many sources are not paused."""
        return sum(not held.paused for held in self._outstanding.values())

    def room(self) -> dict[str, int]:
        """The sources of which more may be taken now, and how many records."""
        waiting = Counter[str]()
        for partition in self.partitions.values():
            waiting[partition.source] += partition.epoch.waiting
        room = {source: held.may_take(waiting[source]) for source, held in self._outstanding.items()}
        return {source: most for source, most in room.items() if most}

    def bytes_left(self, sources: Iterable[str]) -> int:
        """How many more bytes of messages may be taken from these sources together."""
        return min((self._outstanding[source].bytes_left for source in sources), default=0)

    async def lag(self) -> dict[str, Lag]:
        """The unread offsets of each source, transaction markers included. Raises TimeoutError or KafkaError. Kafka is
        asked for the ends of the partitions, since the client learns nothing about a paused one."""
        placed = {at: each for at, each in self.partitions.items() if each.placed}
        ends = await end_offsets(self._consumer, placed) if placed else {}
        found: dict[str, Lag] = {}
        for at, partition in placed.items():
            position = await position_of(self._consumer, at) if self.partitions.get(at) is partition else None
            if position is not None and at in ends:
                lag = partition.backlog.lag(max(0, ends[at] - position), part=True)
                found[partition.source] = lag.beside(found[partition.source]) if partition.source in found else lag
        return found

    def regulate(self) -> None:
        """Pause a partition with too many offsets above its low-water mark, and resume it when there are few again
        (D8)."""
        bound = self._bounds.max_uncommitted
        for at, partition in self.partitions.items():
            span = partition.tracker.span
            if span > bound // 2 if partition.capped else span >= bound:
                if not partition.capped:
                    partition.capped = True
                    self._log.info("kafka paused", reason="uncommitted", partition=name_of(at), bound=bound)
            elif partition.capped:
                partition.capped = False
                self._log.info("kafka resumed", reason="uncommitted", partition=name_of(at), bound=bound)
        self.pause()

    def pause(self) -> None:
        """Bring the client's pauses to the wanted state. Compared each time, since a rebalance forgets them (K6)."""
        ours = self._consumer.assignment()
        if self.draining:
            wanted = set(ours)
        else:
            wanted = {at for at in ours if not self._readable(at)}
        paused = self._consumer.paused()
        self._consumer.pause(*(wanted - paused))
        self._consumer.resume(*(paused - wanted))

    def _readable(self, at: TopicPartition) -> bool:
        partition = self.partitions.get(at)
        if partition is None or partition.outstanding.paused:
            return False
        return partition.placed and not (partition.halted or partition.capped or partition.doubted is not None)


def message_of(source: str, record: Any) -> Message:
    """Translate one aiokafka record. Without a value it is a tombstone; headers without one are left out (R41)."""
    pairs = tuple((name, _text(value)) for name, value in record.headers if value is not None)
    headers = dict(pairs)
    return Message(
        source=source,
        body=record.value or b"",
        headers=headers,
        order_hint=record.key,
        position=f"{record.topic}-{record.partition}-{record.offset}",
        timestamp=_time(record.timestamp),
        partition=record.partition,
        offset=record.offset,
        record_key=record.key,
        repeated_headers=pairs if len(headers) < len(pairs) else (),
        tombstone=record.value is None,
    )


def _time(milliseconds: int | None) -> datetime | None:
    if milliseconds is None or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # microseconds, a common mistake, give a year beyond 9999
        return None


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
