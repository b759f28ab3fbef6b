"""Sets the reader of each newly assigned partition to its first offset, before anything is read (K10, K11, K12).

The client is told never to reset by itself: it would step silently over records that retention has deleted, or start
over in a recreated log.

With a database (`PostgresPositions`), each offset is written there before it is committed to Kafka, and the commit
carries the name of that row. So after a failover to an asynchronous standby, or a restore, the commit shows that Kafka
is ahead of the database. Messages that were finished since the last such write are covered by the server's start time:
on another server nothing is written, and every partition is placed anew. The row also says that a partition is being
read, until its reader leaves with nothing in flight. A reader that finds the row in that state must expect a message
that killed the previous reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from idemconsumer.brokers.kafka import kafka_client as kafka_client
from idemconsumer.brokers.kafka.batches import Piece
from idemconsumer.brokers.kafka.kafka_client import cluster_of, name_of
from idemconsumer.brokers.kafka.questions import ends_of, present_leaders, topic_ids
from idemconsumer.brokers.kafka.start import (
    OffsetMark,
    PartitionLog,
    PartitionStart,
    Resume,
    history_of,
    left_quiet,
    next_counter,
    resume,
    start_at,
    topic_of,
)
from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.stores.kafka_positions import Kept, Place, PostgresPositions, Reached
from idemconsumer.user_code.cancellation import end, retrieve

_DELETED: Final = "Kafka deleted them before the group read them: keep messages longer (retention.ms), or add workers"
_CUT: Final = (
    "this is a different log from the one that the group has read: a replica without the latest records became the "
    "leader (unclean election), the log was restored, or the topic was recreated; reading continues at begins_at"
)


@dataclass(frozen=True, slots=True)
class _Found:
    committed: int | None
    mark: OffsetMark | None
    resume: Resume
    start: PartitionStart
    end: int
    quiet: bool
    leader: int | None


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a reader begins. The last owner may have started messages below `inherited_below`, and died of one (K10).
    The records before `offset` were written in the epoch of this `leader` or an earlier one; None if unknown."""

    offset: int
    inherited_below: int
    leader: int | None


class Placing:
    """The placing of one session. `reset` says where a new group begins: earliest or latest. Without `positions`, only
    the offsets in Kafka decide."""

    def __init__(
        self, consumer: AIOKafkaConsumer, group: str, *, reset: str, positions: PostgresPositions | None, log: Any
    ) -> None:
        self._consumer = consumer
        self._group = group
        self._latest = reset == "latest"
        self._positions = positions
        self._log = log
        self._cluster: str | None = None
        self._server: datetime | None = None
        self._kept: dict[TopicPartition, Kept] = {}
        self._topics: dict[TopicPartition, str] = {}
        self._saving: asyncio.Task[Mapping[Place, int]] | None = None
        self._waiting = False

    async def place(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Begin]:
        """Where these partitions begin. A partition without an answer yet is missing from the result. Lost messages,
        and messages that are read again, are logged as errors each time."""
        try:
            ids = await topic_ids(self._consumer._client, {at.topic for at in partitions})
            if self._positions is None:
                found = await self._find(partitions, {}, ids)
                self._say(found)
            else:
                server, known = await self._read(self._positions, partitions)
                found = await self._find(partitions, known, ids)
                self._say(found)
                begun = await self._begin(self._positions, found, known, ids, server)
                if begun is None:
                    return {}
                found = begun
        except (StoreUnavailable, TimeoutError, KafkaError) as error:
            if not self._waiting:
                self._log.warning("kafka position unknown, waiting", error=error_text(error))
            self._waiting = True
            return {}
        self._waiting = False
        self._topics |= {at: ids[at.topic] for at in found if at.topic in ids}
        return {at: _begin_of(each) for at, each in found.items()}

    async def recreated(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """The partitions among these whose topic has been recreated since they were placed (K18)."""
        placed = {at: self._topics[at] for at in partitions if at in self._topics}
        if not placed:
            return []
        try:
            ids = await topic_ids(self._consumer._client, {at.topic for at in placed})
        except (TimeoutError, KafkaError):
            return []
        return [at for at, its in placed.items() if ids.get(at.topic, its) != its]

    async def same_logs(
        self, reached: Mapping[TopicPartition, tuple[int, int | None]]
    ) -> Mapping[TopicPartition, bool]:
        """Whether each log contains everything that was read up to this position, whose last record was written in this
        leader's epoch. A partition without an answer yet is missing from the result."""
        leaders = {at: leader for at, (_, leader) in reached.items() if leader is not None}
        try:
            ends = await ends_of(self._consumer._client, leaders)
        except (TimeoutError, KafkaError):
            return {}
        return {at: ends.get(at, position) >= position for at, (position, _) in reached.items()}

    async def save(
        self,
        offsets: Mapping[TopicPartition, int],
        leaders: Mapping[TopicPartition, int | None],
        left: Collection[TopicPartition] = (),
    ) -> Mapping[TopicPartition, Any] | None:
        """Write the offsets to the database; returns what to commit to Kafka then. Raises StoreUnavailable.

        Returns None if nothing may be committed, since the database is another one now or another process reads there:
        then all partitions are to be placed anew. `leaders`: the epoch in which the record before each offset was
        written. The partitions in `left` have nothing in flight, and none of their messages will be started.

        When this is cancelled, a slow write goes on: it does no harm, and the next one waits for it.
        """
        if self._positions is None:
            return offsets
        if self._saving is not None:
            await asyncio.wait({self._saving})
            self._saving = None
        if self._server is None or not offsets.keys() <= self._kept.keys():
            return None
        rows = {
            (at.topic, at.partition): Reached(
                kept.history, offset, leaders[at], left=kept.counter if at in left else None
            )
            for at, offset in offsets.items()
            for kept in (self._kept[at],)
        }
        saving = self._positions.save(self._cluster or "", self._group, rows, self._server)
        self._saving = task = asyncio.ensure_future(saving)
        task.add_done_callback(retrieve)
        await asyncio.wait({task})
        self._saving = None
        counters = task.result()
        if len(counters) < len(offsets):
            return None
        commits = {}
        for at, offset in offsets.items():
            kept, counter = self._kept[at], counters[at.topic, at.partition]
            if counter == kept.counter + 1:  # else another reader writes too: neither may record the partition as left
                self._kept[at] = replace(kept, counter=counter)
            commits[at] = (offset, str(OffsetMark(kept.history, counter, kept.base)))
        return commits

    async def stop(self, at: TopicPartition, piece: Piece) -> bool:
        """Record that the reader is blocked at this piece. Returns whether a person has asked for a dead letter in its
        place."""
        if self._positions is None:
            return False
        place, error = (at.topic, at.partition), piece.fault or ""
        try:
            return await self._positions.stop(self._cluster or "", self._group, place, piece.offset, piece.next, error)
        except StoreUnavailable:
            return False

    async def leave(self, at: TopicPartition) -> None:
        """Record that the reader is no longer blocked there."""
        if self._positions is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._positions.leave(self._cluster or "", self._group, (at.topic, at.partition))

    async def replaced(self) -> bool:
        """Whether the database is another server than at the last query, or was restarted."""
        if self._positions is None or self._server is None:
            return False
        try:
            return await self._positions.server_started() != self._server
        except StoreUnavailable:
            return False

    async def close(self) -> None:
        """Cancel a write under way."""
        if self._saving is not None:
            await end(self._saving)

    # ------------------------------------------------------------------------------------------------------ asking
    async def _read(
        self, positions: PostgresPositions, partitions: Sequence[TopicPartition]
    ) -> tuple[datetime, Mapping[Place, Kept]]:
        if self._cluster is None:
            self._cluster = await cluster_of(self._consumer._client)
        return await positions.read(self._cluster, self._group, sorted({at.topic for at in partitions}))

    async def _find(
        self, partitions: Sequence[TopicPartition], known: Mapping[Place, Kept], ids: Mapping[str, str]
    ) -> dict[TopicPartition, _Found]:
        """Ask about these partitions. One that gets no answer costs the others only the time of a probe."""
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
        # First: an epoch that is outdated when the log is queried costs one more request; one newer than the log would
        # cost messages.
        present = await present_leaders(self._consumer._client, partitions)
        async with asyncio.timeout(kafka_client.PROBE_TIMEOUT):
            commits = await self._consumer._coordinator.fetch_committed_offsets(partitions)
            starts = await self._consumer.beginning_offsets(partitions)
            ends = await self._consumer.end_offsets(partitions)
        resumes: dict[TopicPartition, tuple[int | None, OffsetMark | None, Resume]] = {}
        for at in partitions:
            commit, row = commits.get(at), known.get((at.topic, at.partition))
            committed = None if commit is None else commit.offset
            mark = None if commit is None or self._positions is None else OffsetMark.of(commit.metadata or "")
            resumes[at] = committed, mark, resume(committed, mark, row, ids.get(at.topic))
        leaders = {at: each.leader for at, (*_, each) in resumes.items() if each.leader is not None}
        shared = await ends_of(self._consumer._client, leaders)
        found = {}
        for at in partitions:
            committed, mark, to_resume = resumes[at]
            log = PartitionLog(starts[at], ends[at], shared.get(at))
            start = start_at(to_resume.offset, log, latest=self._latest and to_resume.new)
            row = known.get((at.topic, at.partition))
            quiet = self._positions is not None and left_quiet(committed, row, to_resume)
            leader = present.get(at) if start.beyond or at not in leaders else leaders[at]
            found[at] = _Found(committed, mark, to_resume, start, log.end, quiet, leader)
        return found

    async def _begin(
        self,
        positions: PostgresPositions,
        found: Mapping[TopicPartition, _Found],
        known: Mapping[Place, Kept],
        ids: Mapping[str, str],
        server: datetime,
    ) -> dict[TopicPartition, _Found] | None:
        """Record that these partitions are being read, in their history or in a new one. Returns None if the database
        has been replaced again."""
        histories: dict[Place, Kept] = {}
        for at, each in found.items():
            kept, topic, place = each.resume.kept, ids.get(at.topic), (at.topic, at.partition)
            if kept is None or each.start.beyond or (topic is not None and topic_of(kept.history) is None):
                history, offset = history_of(topic, uuid.uuid4().hex[:16]), each.start.offset
                counter = next_counter(each.mark, known.get(place))
                histories[place] = Kept(history, offset, counter, position=offset, leader=each.leader)
            else:
                histories[place] = replace(kept, counter=kept.counter + 1, leader=each.leader)
        counters = await positions.begin(self._cluster or "", self._group, histories, server) if histories else {}
        if len(counters) < len(histories):
            return None
        if server != self._server:
            self._kept.clear()  # partitions that were placed with another server are not written by this one
            self._server = server
        begun = {}
        for at, each in found.items():
            kept, counter = histories[at.topic, at.partition], counters[at.topic, at.partition]
            self._kept[at] = replace(kept, counter=counter)
            begun[at] = replace(each, quiet=each.quiet and counter == kept.counter)  # else another reader began first
        return begun

    # ------------------------------------------------------------------------------------------------------ saying
    def _say(self, found: Mapping[TopicPartition, _Found]) -> None:
        for at, each in found.items():
            start = each.start
            if each.resume.set_back:
                self._log.error(
                    "the database has lost commits, reading kafka messages again",
                    partition=name_of(at),
                    committed=each.committed,
                    begins_at=start.offset,
                    instead="set require_synchronous_standby if no failover may lose acknowledged messages",
                )
            if each.resume.anew:
                self._log.warning(
                    "kafka topic was recreated, reading it from its start",
                    partition=name_of(at),
                    begins_at=start.offset,
                )
            if each.resume.forgotten:
                self._log.warning(
                    "kafka has lost the group's offset, using the stored position",
                    partition=name_of(at),
                    begins_at=start.offset,
                    instead="to read from elsewhere, run `idemconsumer kafka reset`",
                )
            if each.resume.older:
                self._log.warning(
                    "kafka has an older offset than the database, using the stored position",
                    partition=name_of(at),
                    committed=each.committed,
                    begins_at=start.offset,
                    instead="to read from elsewhere, run `idemconsumer kafka reset`",
                )
            if start.lost or start.beyond:
                self._log.error(
                    "kafka messages lost",
                    partition=name_of(at),
                    lost=start.lost,
                    beyond_end=start.beyond,
                    begins_at=start.offset,
                    instead=_DELETED if start.lost else _CUT,
                )


def _begin_of(found: _Found) -> Begin:
    return Begin(found.start.offset, found.start.offset if found.quiet else found.end, found.leader)
