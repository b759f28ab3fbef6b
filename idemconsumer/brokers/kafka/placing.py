"""Putting the reader of each new partition where it has to begin, before anything is read (K11, K12).

The client is told to reset nothing by itself: it would step over what retention has deleted, or begin anew in a log
that was made anew, and say nothing.

With a database (`Positions`), each offset is written there before it is committed to Kafka, together with the name of
that row. So after a failover to an asynchronous standby, or a restore, it shows that Kafka is ahead. What was finished
since the last such write shows by the time at which the server was started: on another server nothing is written, and
everything is placed anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from idemconsumer.brokers.kafka import client as kafka_client
from idemconsumer.brokers.kafka.batches import Piece
from idemconsumer.brokers.kafka.client import name_of
from idemconsumer.brokers.kafka.start import Log, Mark, Resume, Start, history_of, resume, start_at, topic_of
from idemconsumer.brokers.kafka.topic_ids import topic_ids
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.positions import Kept, Place, Positions
from idemconsumer.redaction import error_text


@dataclass(frozen=True, slots=True)
class _Found:
    committed: int | None
    resume: Resume
    start: Start


class Placing:
    """Of one session. `reset`: where a new group begins, earliest or latest. `stop`: a partition that has lost messages
    is not read. Without `positions` Kafka alone is believed."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        group: str,
        *,
        reset: str,
        stop: bool,
        positions: Positions | None,
        log: Any,
    ) -> None:
        self._consumer = consumer
        self._group = group
        self._latest = reset == "latest"
        self._stop = stop
        self._positions = positions
        self._log = log
        self._cluster: str | None = None
        self._server: datetime | None = None
        self._kept: dict[TopicPartition, Kept] = {}
        self._topics: dict[TopicPartition, str] = {}
        self._saving: asyncio.Task[Mapping[Place, int]] | None = None
        self._waiting = False

    async def place(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        """Where they begin; None: not to be read now. Those about which there is no answer yet are missing. What was
        lost, and what is read again, is an error in the log, each time it is met."""
        try:
            ids = await topic_ids(self._consumer._client, {at.topic for at in partitions})
            if self._positions is None:
                found = await self._find(partitions, {}, ids)
                admitted = {at: each for at, each in found.items() if self._admits(at, each)}
            else:
                server, known = await self._read(self._positions, partitions)
                found = await self._find(partitions, known, ids)
                admitted = {at: each for at, each in found.items() if self._admits(at, each)}
                if not await self._begin(self._positions, admitted, known, ids, server):
                    return {}
        except (StoreUnavailable, TimeoutError, KafkaError) as error:
            if not self._waiting:
                self._log.warning("kafka waits to learn where to begin", error=error_text(error))
            self._waiting = True
            return {}
        self._waiting = False
        self._topics |= {at: ids[at.topic] for at in found if at.topic in ids}
        return {at: each.start.offset if at in admitted else None for at, each in found.items()}

    async def recreated(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Of those that were placed, the ones whose topic is another one by now (K18)."""
        placed = {at: self._topics[at] for at in partitions if at in self._topics}
        if not placed:
            return []
        try:
            ids = await topic_ids(self._consumer._client, {at.topic for at in placed})
        except (TimeoutError, KafkaError):
            return []
        return [at for at, its in placed.items() if ids.get(at.topic, its) != its]

    async def save(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Any] | None:
        """What to commit to Kafka, once the database has it. None: it must not be committed, since the database is
        another one now, or somebody else reads there; everything is to be placed anew. Raises StoreUnavailable.

        A write that takes too long goes on when this is cancelled: it does no harm, and the next one waits for it.
        """
        if self._positions is None:
            return offsets
        if self._saving is not None:
            await asyncio.wait({self._saving})
            self._saving = None
        if self._server is None or not offsets.keys() <= self._kept.keys():
            return None
        rows = {(at.topic, at.partition): (self._kept[at].history, offset) for at, offset in offsets.items()}
        saving = self._positions.save(self._cluster or "", self._group, rows, self._server)
        self._saving = task = asyncio.ensure_future(saving)
        await asyncio.wait({task})
        self._saving = None
        counters = task.result()
        if len(counters) < len(offsets):
            return None
        return {
            at: (offset, str(Mark(self._kept[at].history, counters[at.topic, at.partition], self._kept[at].base)))
            for at, offset in offsets.items()
        }

    async def stop(self, at: TopicPartition, piece: Piece) -> bool:
        """Note that the reader stands before this. Whether a person wants a dead letter in its place."""
        if self._positions is None:
            return False
        place, error = (at.topic, at.partition), piece.fault or ""
        try:
            return await self._positions.stop(self._cluster or "", self._group, place, piece.offset, piece.next, error)
        except StoreUnavailable:
            return False

    async def leave(self, at: TopicPartition) -> None:
        """The reader stands there no longer."""
        if self._positions is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._positions.leave(self._cluster or "", self._group, (at.topic, at.partition))

    async def replaced(self) -> bool:
        """Whether the database is another server than the one that was asked last, or was restarted."""
        if self._positions is None or self._server is None:
            return False
        try:
            return await self._positions.server_started() != self._server
        except StoreUnavailable:
            return False

    async def close(self) -> None:
        """Leave no write behind."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------ asking
    async def _read(
        self, positions: Positions, partitions: Sequence[TopicPartition]
    ) -> tuple[datetime, Mapping[Place, Kept]]:
        if self._cluster is None:
            async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
                client = self._consumer._client
                answer = await client.send(client.get_random_node(), MetadataRequest([]))
                self._cluster = getattr(answer, "cluster_id", None) or ""
        return await positions.read(self._cluster, self._group, sorted({at.topic for at in partitions}))

    async def _find(
        self, partitions: Sequence[TopicPartition], known: Mapping[Place, Kept], ids: Mapping[str, str]
    ) -> dict[TopicPartition, _Found]:
        """One that has no answer costs the others only the time of a probe."""
        try:
            return await self._ask(partitions, known, ids)
        except (TimeoutError, KafkaError):
            if len(partitions) == 1:
                return {}
        answers = await asyncio.gather(*(self._find([at], known, ids) for at in partitions))
        return {at: found for answer in answers for at, found in answer.items()}

    async def _ask(
        self, partitions: Sequence[TopicPartition], known: Mapping[Place, Kept], ids: Mapping[str, str]
    ) -> dict[TopicPartition, _Found]:
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            commits = await self._consumer._coordinator.fetch_committed_offsets(partitions)
            starts = await self._consumer.beginning_offsets(partitions)
            ends = await self._consumer.end_offsets(partitions)
        found = {}
        for at in partitions:
            commit = commits.get(at)
            committed = None if commit is None else commit.offset
            mark = None if commit is None or self._positions is None else Mark.of(commit.metadata or "")
            to_resume = resume(committed, mark, known.get((at.topic, at.partition)), ids.get(at.topic))
            log = Log(starts[at], ends[at])
            new = not (to_resume.set_back or to_resume.anew)
            start = start_at(to_resume.offset, log, latest=self._latest and new)
            found[at] = _Found(committed, to_resume, start)
        return found

    async def _begin(
        self,
        positions: Positions,
        admitted: Mapping[TopicPartition, _Found],
        known: Mapping[Place, Kept],
        ids: Mapping[str, str],
        server: datetime,
    ) -> bool:
        """Begin the histories that do not go on. False: the database is another one again."""
        begun: dict[TopicPartition, Kept] = {}
        for at, found in admitted.items():
            kept, topic = found.resume.kept, ids.get(at.topic)
            if kept is None or found.start.beyond or (topic is not None and topic_of(kept.history) is None):
                before, offset = known.get((at.topic, at.partition)), found.start.offset
                former = None if before is None else before.history
                begun[at] = Kept(history_of(topic, uuid.uuid4().hex[:16]), former, base=offset, position=offset)
        histories = {(at.topic, at.partition): kept for at, kept in begun.items()}
        if histories and not await positions.begin(self._cluster or "", self._group, histories, server):
            return False
        if server != self._server:
            self._kept.clear()  # what was placed by another server is not written by this one
            self._server = server
        for at, found in admitted.items():
            kept = begun.get(at) or found.resume.kept
            assert kept is not None
            self._kept[at] = kept
        return True

    # ------------------------------------------------------------------------------------------------------ saying
    def _admits(self, at: TopicPartition, found: _Found) -> bool:
        start = found.start
        if found.resume.set_back:
            self._log.error(
                "the database was set back, kafka messages are read again",
                partition=name_of(at),
                committed=found.committed,
                begins_at=start.offset,
                instead="require_synchronous_standby, if no failover may lose what was acknowledged",
            )
        if found.resume.anew:
            self._log.warning(
                "kafka topic was made anew, it is read from its start", partition=name_of(at), begins_at=start.offset
            )
        if not (start.lost or start.beyond):
            return True
        self._log.error(
            "kafka messages lost",
            partition=name_of(at),
            lost=start.lost,
            beyond_end=start.beyond,
            begins_at=start.offset,
            instead=_remedy(start, self._group, stop=self._stop),
        )
        return not self._stop


def _remedy(start: Start, group: str, *, stop: bool) -> str:
    why = (
        "Kafka deleted them before the group read them: keep messages longer (retention.ms), or add workers"
        if start.lost
        else "the log is shorter than what the group has read: the topic was made anew, or a replica without its end "
        "became the leader; what the log still has is read from its start"
    )
    if not stop:
        return why
    return (
        f"{why}. The partition is not read: set IDEMCONSUMER_KAFKA_ON_LOST=continue, or stop all workers of the group "
        f"and set its offset with kafka-consumer-groups.sh --group {group} --reset-offsets"
    )
