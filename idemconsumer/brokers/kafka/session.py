"""One membership in a consumer group: fetching, bounds, commits, rebalances, and noticing that Kafka is gone.

What the client does that shapes this file (aiokafka 0.14):

* `getmany` blocks through a whole rebalance, and a cancelled one leaks its fetch count, after which
  `max_poll_interval` is never enforced again. So it runs in a task of its own that outlives a `fetch()`, is
  never cancelled while the consumer lives, and registers what it got before any await (K1): a dropped result would
  look like a hole in the offsets, and be committed over.
* Assignments are eager: each rebalance revokes everything. An epoch is one partition in one assignment (K4).
* The coordinator retries a commit across rebalances and then sends it with the *new* generation, which Kafka
  accepts, backwards too. So the revoke callback waits for the commit under way, makes the last one, and ends
  the epochs before it lets the group go on (K5).
* Whatever the revoke callback raises is swallowed; `stop()` does not call it; pauses are forgotten by a
  rebalance.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError

from idemconsumer.brokers.kafka.client import end_offsets, name_of, position_of, stop, words
from idemconsumer.brokers.kafka.health import Health
from idemconsumer.brokers.kafka.low_water import Tracker
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Bounds, Delivery, Epoch

POLL = 1.0  # seconds that an empty fetch waits
PATIENCE = 3.0  # seconds without room before pausing: a pause throws the client's buffer away
COMMIT_EVERY = 1.0
COMMIT_TIMEOUT = 3.0  # two of them and the drain fit into the rebalance time-out (drain + 10 s)
PROBE_EVERY = 10.0
WORTH_LOGGING = 5  # commits that failed in a row; one or two are a rebalance

log = structlog.get_logger("idemconsumer")


@dataclass(slots=True, eq=False)
class _Partition:
    """A partition while it is ours."""

    epoch: Epoch
    tracker: Tracker
    capped: bool = False

    def end(self) -> None:
        self.epoch.end()
        self.tracker.end()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, session: KafkaSession) -> None:
        self._session = session

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._session.revoked()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._session.assigned(assigned)


class KafkaSession:
    """See `ports.Session`. Settling marks in memory; offsets are committed each second, on revoke, on close.

    A crash repeats at most what lies above the last commit. Not guaranteed: that a drain longer than
    `bounds.drain` commits what it finished afterwards; the message is delivered again and found to be a
    duplicate.
    """

    def __init__(
        self, consumer: AIOKafkaConsumer, group: str, topics: Sequence[str], bounds: Bounds, servers: str
    ) -> None:
        self._consumer = consumer
        self._group = group
        self._topics = frozenset(topics)
        self._bounds = bounds
        self._log = log.bind(group=group)

        self._partitions: dict[TopicPartition, _Partition] = {}
        self._joined = False
        self._rebalancing = True
        self._over: str | None = None
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._draining = False

        self._poll: asyncio.Task[list[Delivery]] | None = None
        self._skipped = False
        self._full_since: float | None = None
        self._held = False

        self._committing = asyncio.Lock()
        self._failed_commits = 0
        self._health = Health(consumer, self._topics, servers, self._log)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, missing: Iterable[str]) -> None:
        """Subscribe and begin. A missing topic is consumed from the rebalance on in which it appears."""
        self._health.missing(missing)
        self._consumer.subscribe(list(self._topics), listener=_Listener(self))
        self._tasks = [
            asyncio.create_task(self._every(COMMIT_EVERY, self._commit)),
            asyncio.create_task(self._every(PROBE_EVERY, self._probe)),
        ]

    # ----------------------------------------------------------------------------------------------- the port
    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        self._regulate()
        if self._poll is None:
            if not self._held and not await self._has_room():
                return ()
            self._poll = asyncio.create_task(self._next())
        await asyncio.wait({self._poll}, timeout=POLL + 0.25)
        self._raise_if_over()
        if not self._poll.done():
            return ()  # a rebalance: it goes on until the group has agreed
        poll, self._poll = self._poll, None
        try:
            deliveries = poll.result()
        except Exception as error:
            self._end(f"fetching failed: {words(error)}")
            raise self._ended() from error
        if not deliveries and (self._held or self._draining):
            await self._until(lambda: not self._draining and self._outstanding <= self._bounds.in_flight // 2)
        return () if self._draining else deliveries

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            partition, offset = delivery.handle
            partition.tracker.finish(offset)
        self._changed.set()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: what is not finished holds back the low-water mark, where the next owner starts."""

    async def idle(self) -> bool:
        if not self._member():
            return False
        assignment = self._consumer.assignment()
        try:
            ends = await end_offsets(self._consumer, assignment)
        except (TimeoutError, KafkaError):
            return False
        for partition in assignment:
            if await position_of(self._consumer, partition) != ends.get(partition):
                return False
        undelivered = self._poll is not None and self._poll.done()
        return not undelivered and self._member() and self._consumer.assignment() is assignment

    async def stop_fetching(self) -> None:
        self._draining = True
        self._pause()
        self._changed.set()

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._draining = True
        await self._commit()
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await stop(self._consumer)
        if self._poll is not None:  # it may still wait for an assignment that will never come
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------- fetching
    async def _next(self) -> list[Delivery]:
        paused = self._held or self._draining
        try:
            fetched = await self._consumer.getmany(
                timeout_ms=0 if paused else int(POLL * 1000),
                max_records=max(1, self._bounds.in_flight - self._outstanding),
            )
        except BaseException:
            # The client may have stepped over records of one partition before it failed at another: from now on
            # a position says nothing about what was delivered.
            self._skipped = True
            raise
        return self._register(fetched)  # no await in between: see the head of this file

    def _register(self, fetched: Mapping[TopicPartition, Sequence[Any]]) -> list[Delivery]:
        deliveries: list[Delivery] = []
        if self._over:
            return deliveries
        for at, records in fetched.items():
            partition = self._partitions.get(at)
            # The assigned callback may come after the first records. An offset at or below a former one means
            # that the reader was reset (truncated or recreated topic): what it brings is not what the tracker
            # knows.
            if partition is None or records[0].offset <= partition.tracker.highest:
                partition = self._begin(at)
            partition.tracker.deliver(record.offset for record in records)
            source = f"kafka:{at.topic}"
            for record in records:
                message = Message(
                    source=source,
                    body=record.value or b"",
                    headers={name: _text(value) for name, value in record.headers},
                    order_hint=record.key,
                    position=f"{at.topic}-{at.partition}-{record.offset}",
                )
                deliveries.append(Delivery(message, partition.epoch, (partition, record.offset)))
        self._health.polled(bool(deliveries))
        return deliveries

    def _begin(self, at: TopicPartition) -> _Partition:
        if (former := self._partitions.get(at)) is not None:
            former.end()
        self._partitions[at] = partition = _Partition(Epoch(probation=self._bounds.group), Tracker())
        return partition

    # ------------------------------------------------------------------------------------------------- bounds
    @property
    def _outstanding(self) -> int:
        return sum(partition.tracker.outstanding for partition in self._partitions.values())

    async def _has_room(self) -> bool:
        """Wait for settlements before pausing: a shortage mostly ends sooner than a refetch would."""
        if self._outstanding < self._bounds.in_flight:
            self._full_since = None
            return True
        now = asyncio.get_running_loop().time()
        self._full_since = self._full_since or now
        if await self._until(lambda: self._outstanding < self._bounds.in_flight):
            self._full_since = None
            return True
        if now - self._full_since >= PATIENCE:
            self._full_since, self._held = None, True
            self._pause()
            self._log.info("kafka paused", reason="in flight", bound=self._bounds.in_flight)
        return self._held

    def _regulate(self) -> None:
        if self._held and self._outstanding <= self._bounds.in_flight // 2:
            self._held = False
            self._log.info("kafka resumed", reason="in flight", bound=self._bounds.in_flight)
        bound = self._bounds.max_uncommitted
        for at, partition in self._partitions.items():
            span = partition.tracker.span
            if span > bound // 2 if partition.capped else span >= bound:
                if not partition.capped:
                    partition.capped = True
                    self._log.info("kafka paused", reason="uncommitted", partition=name_of(at), bound=bound)
            elif partition.capped:
                partition.capped = False
                self._log.info("kafka resumed", reason="uncommitted", partition=name_of(at), bound=bound)
        self._pause()

    def _pause(self) -> None:
        """Bring the client's pauses to what they should be; compared anew, since a rebalance forgets them (K6)."""
        ours = self._consumer.assignment()
        if self._held or self._draining:
            wanted = set(ours)
        else:
            wanted = {at for at in ours if at in self._partitions and self._partitions[at].capped}
        paused = self._consumer.paused()
        self._consumer.pause(*(wanted - paused))
        self._consumer.resume(*(paused - wanted))

    # ------------------------------------------------------------------------------------ commits, rebalances
    async def revoked(self) -> None:
        """All partitions are taken away: let what runs finish (at most `bounds.drain`), commit, end."""
        self._rebalancing = True
        leaving = list(self._partitions.values())
        try:
            for partition in leaving:
                partition.epoch.retiring = True
            if leaving and not await self._quiet(leaving):
                self._log.info("kafka drain timed out", seconds=self._bounds.drain)
            await self._commit()
        finally:
            for partition in self._partitions.values():
                partition.end()
            self._partitions.clear()
            self._changed.set()

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        if self._over:
            return
        self._joined, self._rebalancing = True, False
        for at in partitions:
            if at not in self._partitions:  # even if nothing is ever delivered, holes may be stepped over
                self._begin(at)
        self._pause()
        self._log.info("kafka assigned", partitions=sorted(map(name_of, partitions)))

    async def _quiet(self, partitions: Iterable[_Partition]) -> bool:
        """Whether nothing of them runs any more; cut short by `close()`, which has waited for that itself."""
        waiting = asyncio.gather(*(partition.epoch.quiet() for partition in partitions))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            either: set[asyncio.Future[Any]] = {waiting, closing}
            done, _ = await asyncio.wait(either, timeout=self._bounds.drain, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            closing.cancel()
        return bool(done)

    async def _commit(self) -> None:
        """Commit every low-water mark that has moved. A failure is made up for by the next one."""
        async with self._committing:
            due: dict[TopicPartition, int] = {}
            trackers: dict[TopicPartition, Tracker] = {}
            for at, partition in list(self._partitions.items()):
                tracker = trackers[at] = partition.tracker
                read_on = not tracker.outstanding and not self._skipped
                position = await position_of(self._consumer, at) if read_on else None
                if (offset := tracker.due(position)) is not None:
                    due[at] = offset
            if not due or self._over:
                return
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT):  # with the broker down a commit never returns
                    await self._consumer.commit(due)
            except (TimeoutError, KafkaError) as error:
                self._failed_commits += 1
                if self._failed_commits == WORTH_LOGGING:
                    self._log.warning("kafka commits fail, a restart would redeliver", error=words(error))
            else:
                if self._failed_commits >= WORTH_LOGGING:
                    self._log.info("kafka commits work again")
                self._failed_commits = 0
                for at, offset in due.items():
                    trackers[at].committed(offset)

    # --------------------------------------------------------------------------------------------- being over
    async def _probe(self) -> None:
        if (why := await self._health.probe()) is not None:
            self._end(why)

    def _member(self) -> bool:
        return self._joined and not self._rebalancing and self._over is None

    def _end(self, why: str) -> None:
        """The session is over: whatever it delivered is forgotten, `fetch()` raises."""
        self._over = self._over or why
        for partition in self._partitions.values():
            partition.end()
        self._changed.set()

    def _raise_if_over(self) -> None:
        if self._over:
            raise self._ended()

    def _ended(self) -> SessionEnded:
        return SessionEnded(f"kafka group {self._group!r}: {self._over}")

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` came true within a second; settling and revoking check it again."""
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


def _text(value: bytes | None) -> str | bytes:
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
