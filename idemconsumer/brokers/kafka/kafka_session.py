"""One membership in a consumer group: fetching, limits, commits, rebalances, and detecting that Kafka is unreachable.

Behaviour of the client (aiokafka 0.14) that shapes this file:

- `getmany` blocks through a whole rebalance, and a cancelled one leaks its fetch count, after which `max_poll_interval`
  is never enforced again. So it runs in a task of its own that outlives a `fetch()`, is never cancelled while the
  consumer lives, and registers its result before any await (K1): a dropped result would look like a hole in the
  offsets, and would be committed over.
- Assignments are eager: each rebalance revokes everything. An epoch is one partition in one assignment (K4).
- The coordinator retries a commit across rebalances and then sends it with the *new* generation, which Kafka accepts,
  even backwards. So the revoke callback waits for the commit under way, makes the last one, and ends the epochs before
  it lets the group continue (K5).
- Whatever the revoke callback raises is swallowed; `stop()` does not call it; a rebalance forgets pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError, TopicAuthorizationFailedError

from idemconsumer.brokers.kafka.diagnosis import refusal
from idemconsumer.brokers.kafka.kafka_client import end_offsets, name_of, position_of, stop, words
from idemconsumer.brokers.kafka.kafka_health import KafkaHealth
from idemconsumer.brokers.kafka.membership import Seat, watch_membership
from idemconsumer.brokers.kafka.placing import Placing
from idemconsumer.brokers.kafka.reading import Partition, Reading
from idemconsumer.brokers.kafka.topics import Topics
from idemconsumer.brokers.kafka.unreadable import Fetched, Unreadable, watch
from idemconsumer.channel import CHANNEL
from idemconsumer.errors import Replaced, SessionEnded, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.ports.broker import Bounds, Delivery, Lag
from idemconsumer.user_code.cancellation import end

POLL = 1.0  # seconds that an empty fetch waits
SHORT_POLL = 0.1  # the same, while some source may not take more
COMMIT_EVERY = 1.0
COMMIT_TIMEOUT = 3.0  # two of these and the drain fit into the rebalance timeout (drain + 10 s)
PROBE_EVERY = 10.0
TOPICS_EVERY = 3.0  # a recreated topic is read from its start within five seconds
WORTH_LOGGING = 5  # commits failed in a row; one or two are normal in a rebalance

# A poll for the records of no partition: it keeps the membership and leaves the client's buffer alone, while a pause
# would discard what the client has fetched (K6).
NOWHERE = TopicPartition("", -1)


class KafkaSession(ConsumerRebalanceListener):  # type: ignore[misc]
    """See `ports.Session`. Settling marks in memory; offsets are committed each second, on revoke, and on close.

    The client calls it for rebalances. A crash repeats at most the messages above the last commit. Not guaranteed: that
    messages which finish after a drain longer than `bounds.drain` are committed; they are delivered again and
    recognised as duplicates.
    """

    losses_count = False

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        group: str,
        topics: Topics,
        bounds: Bounds,
        placing: Placing,
        seat: Seat,
        connection: Mapping[str, Any],
    ) -> None:
        self._consumer = consumer
        self._placing = placing
        self._seat = seat
        self._group = group
        self._topics = topics
        self._bounds = bounds
        self._log = log.bind(group=group)

        self._reading = Reading(consumer, topics, bounds, placing, self._log)
        self._unreadable = Unreadable(consumer, self._reading, placing, self._log)
        self._fetched: Fetched
        self._joined = False
        self._rebalancing = True
        self._over: str | None = None
        self._replaced: Replaced | None = None
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()

        self._poll: asyncio.Task[list[Delivery]] | None = None
        self._skipped = False

        self._committing = asyncio.Lock()
        self._failed_commits = 0
        self._health = KafkaHealth(consumer, topics, self._log, connection)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, existing: Iterable[str]) -> None:
        """Subscribe and begin. A topic that is missing now is consumed from the rebalance in which it appears."""
        self._health.existing(existing)
        self._fetched = watch(self._consumer, self._unreadable.halt, self._reading.follows)
        if self._seat.instance is None:  # a static member keeps its partitions while it restarts
            watch_membership(self._consumer, partial(CHANNEL.joined, self._group))
        if self._topics.patterns:  # does what `subscribe` does for a pattern
            self._consumer._subscription.subscribe_pattern(self._topics, listener=self)
            self._consumer._client.set_topics([])
        else:
            self._consumer.subscribe(list(self._topics.names), listener=self)
        self._tasks = [
            asyncio.create_task(self._every(COMMIT_EVERY, self._commit)),
            asyncio.create_task(self._every(PROBE_EVERY, self._probe)),
            asyncio.create_task(self._every(0, self._reading.place)),
            asyncio.create_task(self._every(0, self._unreadable.look)),
            asyncio.create_task(self._every(TOPICS_EVERY, self._reading.look_for_other_topics)),
        ]

    # ----------------------------------------------------------------------------------------------- the port
    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        self._reading.regulate()
        if self._poll is None:
            await self._until(lambda: self._reading.draining or bool(self._reading.room()))
            self._raise_if_over()
            self._poll = asyncio.create_task(self._next())
        await asyncio.wait({self._poll}, timeout=POLL + 0.25)
        self._raise_if_over()
        if not self._poll.done():
            return ()  # a rebalance: the poll goes on until the group has agreed
        poll, self._poll = self._poll, None
        try:
            deliveries = poll.result()
        except Exception as error:
            self._end(f"fetching failed: {refusal(error)}")
            raise self._ended() from error
        if self._reading.draining:
            await self._until(lambda: False)
        return () if self._reading.draining else deliveries

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            partition, offset = delivery.handle
            partition.tracker.finish(offset)
            partition.outstanding.left((delivery.handle,))
        self._changed.set()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: an unfinished message holds back the low-water mark, where the next owner starts."""

    async def idle(self) -> bool:
        if not self._member():
            return False
        assignment = self._consumer.assignment()
        if not all(at in self._reading.partitions and self._reading.partitions[at].placed for at in assignment):
            return False
        try:
            ends = await end_offsets(self._consumer, assignment)
        except (TimeoutError, KafkaError):
            return False
        for partition in assignment:
            # This is the end of committed transactions; messages after an open one are not delivered yet (K3).
            if not ends.get(partition) == await position_of(self._consumer, partition) == self._high_water(partition):
                return False
        undelivered = self._unreadable.late or (self._poll is not None and self._poll.done())
        return not undelivered and self._member() and self._consumer.assignment() is assignment

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """See `ports.KnowsLag`."""
        return await self._reading.lag() if self._member() else {}

    @property
    def silence(self) -> float | None:
        """See `ports.KnowsSilence`."""
        return self._health.silence

    def _high_water(self, at: TopicPartition) -> int | None:
        return self._consumer.highwater(at) if at in self._consumer.assignment() else None

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._reading.draining = True
        self._reading.pause()
        self._changed.set()
        return ()

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        drained, self._reading.draining = self._reading.draining, True
        await self._commit(leaving=drained)
        self._end("closed")
        await end(*self._tasks)
        await self._placing.close()
        await stop(self._consumer)
        CHANNEL.left(self._group)
        if self._poll is not None:  # it may still wait for an assignment that will never come
            await end(self._poll)

    # ----------------------------------------------------------------------------------------------- fetching
    async def _next(self) -> list[Delivery]:
        room = {} if self._reading.draining else self._reading.room()
        if len(room) > 1:  # each source up to its own limit: a slow handler must not use up what a fast one may take
            deliveries = [each for source in room for each in await self._poll_once({source: room[source]}, 0)]
            if deliveries:
                return deliveries
        return await self._poll_once(room, POLL if len(room) == self._reading.open else SHORT_POLL)

    async def _poll_once(self, room: Mapping[str, int], seconds: float) -> list[Delivery]:
        """Take at most these numbers of records from these sources."""
        if room and len(room) == self._reading.open:
            among = []  # all partitions, except those that the client has paused
        else:
            ours = self._consumer.assignment()
            among = [at for at in ours if self._topics.source_of(at.topic) in room] or [NOWHERE]
        self._fetched.bytes_left = max(1, self._reading.bytes_left(room))
        try:
            fetched = await self._consumer.getmany(
                *among,
                timeout_ms=int(seconds * 1000) if room else 0,
                max_records=min(room.values(), default=1),
            )
        except NoOffsetForPartitionError:
            return []  # it has not been placed yet
        except OffsetOutOfRangeError as error:
            for at in error.args[0]:  # retention has overtaken its reader, or its log was recreated
                self._reading.begin(at)
            self._reading.pause()
            return []
        except TopicAuthorizationFailedError as error:
            self._unreadable.forbid([error.args[0]])
            return []
        except BaseException:
            # The client may have stepped over records of one partition before it failed at another: from now on a
            # position does not prove what was delivered.
            self._skipped = True
            raise
        if not fetched and seconds:
            self._health.polled(room)
        late, self._unreadable.late = self._unreadable.late, []
        return [*late, *self._reading.register(fetched)]  # no await in between (K1): see the docstring of this file

    # ------------------------------------------------------------------------------------ commits, rebalances
    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """All partitions are revoked: let running messages finish (at most `bounds.drain`), commit, end the epochs.

        The client rejoins when this returns. Only a cancellation prevents the rejoin; `close()` copes with it.
        """
        self._rebalancing = True
        try:
            await self._seat.refuse(self._consumer)
        except Replaced as replaced:
            self._replaced = replaced
            self._end("replaced")
            raise asyncio.CancelledError from replaced
        leaving = list(self._reading.partitions.values())
        try:
            for partition in leaving:
                partition.epoch.retiring = True
            if leaving and not await self._quiet(leaving):
                self._log.info("kafka drain timed out", seconds=self._bounds.drain)
            await self._commit(leaving=True)
        finally:
            self._reading.end()
            self._reading.partitions.clear()
            self._changed.set()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        if self._over:
            return
        self._joined, self._rebalancing = True, False
        self._seat.taken(self._consumer._coordinator.member_id)
        for at in assigned:
            self._reading.begin(at)  # even if nothing is ever delivered, holes may be stepped over
        self._reading.pause()
        self._log.info("kafka assigned", partitions=sorted(map(name_of, assigned)))

    async def _quiet(self, partitions: Iterable[Partition]) -> bool:
        """Whether none of their messages runs any more. Cut short by `close()`, which has waited for them itself."""
        waiting = asyncio.gather(*(partition.epoch.quiet() for partition in partitions))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            either: set[asyncio.Future[Any]] = {waiting, closing}
            done, _ = await asyncio.wait(either, timeout=self._bounds.drain, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            closing.cancel()
        return bool(done)

    async def _commit(self, *, leaving: bool = False) -> None:
        """Commit every low-water mark that has moved. After a failure, the next call commits the same marks.

        With `leaving`, none of the messages will be started any more; partitions with nothing in flight are recorded as
        left in the database (K10: the next reader then need not suspect their messages).
        """
        async with self._committing:
            due: dict[TopicPartition, int] = {}
            left: set[TopicPartition] = set()
            partitions = dict(self._reading.partitions)
            for at, partition in partitions.items():
                if not partition.placed or partition.forbidden:
                    continue
                tracker = partition.tracker
                read_on = not tracker.outstanding and not self._skipped
                position = await position_of(self._consumer, at) if read_on else None
                if (offset := tracker.due(position)) is not None:
                    due[at] = offset
                low_water = tracker.low_water(position)
                if leaving and low_water is not None and partition.can_be_left(low_water):
                    due[at] = low_water
                    left.add(at)
            if not due or self._over:
                return
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT):  # with the broker down a commit never returns
                    leaders = {at: partitions[at].leaders.of(offset) for at, offset in due.items()}
                    commits = await self._placing.save(due, leaders, left)
                    if commits is None:
                        self._place_anew()
                        return
                    await self._commit_what_may_be(commits)
            except (TimeoutError, KafkaError, StoreUnavailable) as error:
                self._failed_commits += 1
                if self._failed_commits == WORTH_LOGGING:
                    self._log.warning("kafka commits fail, a restart would redeliver", error=words(error))
            else:
                if self._failed_commits >= WORTH_LOGGING:
                    self._log.info("kafka commits work again")
                self._failed_commits = 0
                for at, offset in due.items():
                    if not partitions[at].forbidden:
                        partitions[at].tracker.committed(offset)
                        partitions[at].leaders.finished(offset)

    async def _commit_what_may_be(self, commits: Mapping[TopicPartition, Any]) -> None:
        try:
            await self._consumer.commit(commits)
        except TopicAuthorizationFailedError as error:  # of these topics; the others are committed
            self._unreadable.forbid(error.args[0])

    def _place_anew(self) -> None:
        """The database may lack messages that were finished here: forget all deliveries and place all partitions anew
        (K12)."""
        if self._over or self._rebalancing:
            return
        if self._reading.place_anew():
            self._log.warning("the database was restarted or replaced, reading kafka positions again")
            self._changed.set()

    # --------------------------------------------------------------------------------------------- being over
    async def _probe(self) -> None:
        if (why := await self._health.probe()) is not None:
            self._end(why)
        elif await self._placing.replaced():
            self._place_anew()

    def _member(self) -> bool:
        return self._joined and not self._rebalancing and self._over is None

    def _end(self, why: str) -> None:
        """End the session: its deliveries are forgotten, and `fetch()` raises."""
        self._over = self._over or why
        self._reading.over = True
        self._reading.end()
        self._changed.set()

    def _raise_if_over(self) -> None:
        if self._over:
            raise self._ended()

    def _ended(self) -> SessionEnded | Replaced:
        return self._replaced or SessionEnded(f"kafka group {self._group!r}: {self._over}")

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` became true within a second. It is checked again after each settle and revoke."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL):
                while not condition() and not self._over:
                    self._changed.clear()
                    await self._changed.wait()
        return condition()

    async def _every(self, seconds: float, act: Callable[[], Any]) -> None:
        while not self._over:
            await asyncio.sleep(seconds)
            try:
                await act()
            except Exception as error:
                self._end(f"{act.__name__.strip('_')} failed: {words(error)}")
                raise
