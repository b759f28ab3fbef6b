"""One worker process: feeds bring deliveries, lanes run them, a drain ends it in order."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from idemconsumer import forks
from idemconsumer.admin.orphans import Sagas
from idemconsumer.brokers.adapters import connect
from idemconsumer.brokers.due_sagas import SCHEME, DueSagas
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.duty import within
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import BesideSagas, Bounds, Broker, BytesInHand
from idemconsumer.ports.observer import NullObserver, Observer
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.process.child import DEV, WORKER, leave_as_killed
from idemconsumer.process.pulse import PULSE
from idemconsumer.redaction import SHOWN
from idemconsumer.rules.fetching import in_lanes, per_lane
from idemconsumer.rules.schedules import Schedule
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.kafka_positions import KeepsPositions, PostgresPositions
from idemconsumer.stores.leased_saga import Runs
from idemconsumer.stores.lock_waits import LockWaits
from idemconsumer.user_code.cancellation import end, run_on
from idemconsumer.user_code.resources import Resources
from idemconsumer.worker import capacity
from idemconsumer.worker.conditions import Conditions
from idemconsumer.worker.deadlines import Deadlines
from idemconsumer.worker.feed import Feed
from idemconsumer.worker.in_flight import InHand
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.outage import Outage
from idemconsumer.worker.relay import Relay, reachable
from idemconsumer.worker.reply_sender import Replies
from idemconsumer.worker.reporting import Reporting
from idemconsumer.worker.retention import Retention
from idemconsumer.worker.schedule_starter import Schedules
from idemconsumer.worker.source_findings import warn_of_orphans
from idemconsumer.worker.standing import WorkerStanding, standing
from idemconsumer.worker.steering import Steering

if TYPE_CHECKING:
    from idemconsumer.worker.saga_lease import SagaLease

T = TypeVar("T")
_LAST_LOOK: Final = 5.0  # seconds for the relay's last round
_SPARE: Final = 60.0  # seconds beyond the longest `timeout` for which a worker without sagas may block
Planned = tuple[str, Broker, list[Subscription]]  # name, broker and subscriptions of one feed


def longest_run(handlers: Sequence[BoundHandler]) -> float:
    """The longest `timeout` of these handlers, which limits the sessions that they run in."""
    return max((handler.options.timeout for handler in handlers), default=30.0)


def shortest_lease(leased: Sequence[BoundHandler]) -> float:
    """The lease of a worker with these saga handlers, of which there is at least one."""
    return min(handler.options.lease for handler in leased)


def _connect(scheme: str, settings: Settings) -> Broker:
    return connect(scheme, settings)


def _leave(place: str) -> None:
    """Exit as if killed: only that counts the messages that ran, and lets the launcher start another worker (L37)."""
    leave_as_killed("event loop blocked, exiting as if killed", where=place)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process provides to its workers and apps.

    - `connect` creates the client of a scheme.
    - `stuck` is called, in a thread, with the place at which the event loop has been blocked for too long.
    - `settings` replace those of the environment.
    - `locks`: how many keys all groups together may lock, if the database was checked before (R7) and is not again.
    """

    connect: Callable[[str, Settings], Broker] = _connect
    stuck: Callable[[str], None] = _leave
    settings: Settings | None = None
    locks: int | None = None


class Worker:
    """Runs the handlers of one app in this process until drained. Not restartable."""

    def __init__(
        self,
        handlers: Sequence[BoundHandler],
        settings: Settings,
        observer: Observer | None = None,
        resources: Resources | None = None,
        *,
        sagas: Sagas | None = None,
        schedules: Sequence[Schedule] = (),
        tracing: Tracing = NO_TRACING,
        publishes: Sequence[str] = (),
        around: Surroundings | None = None,
    ) -> None:
        """`sagas`: as in `find_orphans`, also of handlers not run here. `publishes`: destinations of the app."""
        self.handlers = handlers
        self._sagas = sagas
        self._schedules = schedules
        self._tracing = tracing
        self._publishes = publishes
        self._around = around or Surroundings()
        self._joined, self._leased = capacity.by_mode(handlers)
        self._resources = resources or Resources(())
        self._settings = settings
        SHOWN.text = settings.log_error_text
        self._observer = observer or NullObserver()
        self._brokers: dict[str, Broker] = {}
        self._drain = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._lanes: Lanes | None = None
        self._feeds: Sequence[Feed] = ()
        self._leave_when_asked: Callable[[], None] = self.drain
        self._reporting = Reporting(handlers, self._drain)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many deliveries have had each outcome so far."""
        return self._reporting.counts.outcomes

    async def standing(self) -> WorkerStanding:
        """What it has to do now."""
        return await standing(self._lanes, self._feeds)

    def drain(self) -> None:
        """Stop fetching, finish, commit and settle what runs, then leave (D11). Call it in the loop's thread."""
        self._drain.set()

    def when_asked(self, leave: Callable[[], None]) -> None:
        """Set the function to call when a person wants this worker to leave (O15). By default the worker drains."""
        self._leave_when_asked = leave

    def abort(self) -> None:
        """Leave now: what runs is rolled back and not settled."""
        if self._main is not None:
            self._main.cancel()

    async def run(self) -> None:
        """Run until drained or, with `until_empty`, until every source is empty.

        Raises ConfigurationError for a database, a source or a resource that cannot be used as configured. Waits, with
        backoff, for servers that cannot be reached.
        """
        self._main = asyncio.current_task()
        forks.use_loop()
        if self._settings.dsn is None:
            raise ConfigurationError("no database is given; set IDEMCONSUMER_DSN, e.g. postgresql://user@host/db")
        planned = self._planned_feeds()  # before anything is opened: it raises for a missing driver or address
        async with self._reporting.going_on():
            await self._resources.open()
            try:
                await self._run(self._settings.dsn, planned)
            finally:
                await self._resources.close()

    def _planned_feeds(self) -> list[Planned]:
        feeds: defaultdict[tuple[str, str], list[Subscription]] = defaultdict(list)
        for handler in self.handlers:
            if (destination := handler.options.dead_letter_to) is not None:
                self._broker(_scheme(destination))
            brokers = [self._broker(subscription.scheme) for subscription in handler.subscriptions]
            subscriptions = list(handler.subscriptions)
            own = handler.leased or any(broker.hands_over for broker in brokers)
            queues = [handler.own_source, handler.retry_source] if own else [handler.retry_source]
            subscriptions += [Subscription(queue, handler.name, handler.app) for queue in queues]
            for subscription in subscriptions:
                scheme = subscription.scheme
                feeds[scheme, self._broker(scheme).feed(subscription)].append(subscription)
        return [(name, self._brokers[scheme], subs) for (scheme, name), subs in feeds.items()]

    def _broker(self, scheme: str) -> Broker:
        if scheme not in self._brokers:
            self._brokers[scheme] = self._around.connect(scheme, self._settings)
        return self._brokers[scheme]

    async def _run(self, dsn: str, planned: Sequence[Planned]) -> None:
        async with AsyncExitStack() as stack:
            if (store := await self._reached(lambda: self._open_store(dsn))) is None:
                return
            stack.push_async_callback(store.close)
            place, lag = int(os.environ.get(WORKER, "0")), lambda: self._reporting.lag
            schemes = reachable(
                self._settings,
                {*self._brokers, *map(_scheme, self._publishes)},
                [_scheme(to) for each in self.handlers if (to := each.options.dead_letter_to) is not None],
            )
            steering = Steering(self.handlers, place, lambda: self._leave_when_asked(), lag, relays=schemes)
            if await self._reached(lambda: steering.begin(store.pool.alone)) is None:
                return
            stack.push_async_callback(steering.end, store.pool.alone)
            at_once = capacity.most_at_once(self._joined, self._settings) * self._settings.workers
            self._reporting.pools["handlers"] = store.pool
            counts, all_told = self._reporting.counts, DEV in os.environ
            engine = Engine(
                store,
                self._observer,
                lanes=at_once,
                watched=True,
                counts=counts,
                tell_all=all_told,
                tracing=self._tracing,
            )
            saga_lease = None
            if self._leased:
                if (saga_lease := await self._reached(lambda: self._open_saga_lease(dsn, engine))) is None:
                    return
                stack.push_async_callback(saga_lease.close)
                self._reporting.pools["sagas"] = saga_lease.pool
            relay = None
            if schemes:
                relay = Relay(store.pool, dsn, self._settings.schema, schemes, self._broker, counts, self._observer.at)
            await self._consume(dsn, planned, store, engine, saga_lease, steering, relay)

    async def _reached(self, opening: Callable[[], Awaitable[T]]) -> T | None:
        """Open something in the database once it can be reached. Returns None if a drain came first."""
        outage = Outage()
        while not self._drain.is_set():
            try:
                return await opening()
            except StoreUnavailable as error:
                await outage.wait(error, self._drain)
        return None

    async def _open_store(self, dsn: str) -> PostgresStore:
        return await PostgresStore.open(
            dsn,
            self._settings.schema,
            connections=capacity.pool_size(self._joined, self._settings),
            longest_run=longest_run(self.handlers),
            beside=shortest_lease(self._leased) if self._leased else None,
            require_standby=self._settings.require_synchronous_standby,
            parties=[handler.name for handler in self._joined],
            most_locks=self._around.locks,
        )

    async def _open_saga_lease(self, dsn: str, engine: Engine) -> SagaLease:
        from idemconsumer.worker.saga_lease import SagaLease  # imports all that runs sagas, so only if there are some

        settings, leased = self._settings, self._leased
        return await SagaLease.open(
            dsn,
            settings.schema,
            engine,
            self._observer,
            connections=capacity.pool_size(leased, settings),
            lease=shortest_lease(leased),
            longest_run=longest_run(leased),
            require_standby=settings.require_synchronous_standby,
            runs=[Runs(*handler.identity, handler.options.version) for handler in leased],
            build=settings.build or "",
            parties=[handler.name for handler in leased],
            stuck=self._around.stuck,
        )

    async def _consume(
        self,
        dsn: str,
        planned: Sequence[Planned],
        store: PostgresStore,
        engine: Engine,
        saga_lease: SagaLease | None,
        steering: Steering,
        relay: Relay | None,
    ) -> None:
        settings = self._settings
        for broker in self._brokers.values():
            if isinstance(broker, KeepsPositions):
                broker.keep_positions_in(PostgresPositions(store.pool))
        sagas = None if saga_lease is None else saga_lease.engine
        in_hand = InHand(
            engine,
            self._observer,
            sagas=sagas,
            replies=Replies(self._brokers),
            counts=self._reporting.counts,
        )
        lanes = self._lanes = Lanes(in_hand, self.handlers, settings)
        steering.steer(lanes)
        if saga_lease is not None:
            beside = [broker for broker in self._brokers.values() if isinstance(broker, BesideSagas)]
            planned = [*planned, self._due_sagas(saga_lease, lanes, beside)]
            for each in beside:
                each.wake_sagas_by(lanes.freed.set)
        memory = BytesInHand(settings.max_bytes_in_hand)
        feeds = self._feeds = [
            Feed(
                name,
                broker,
                subscriptions,
                self.handlers,
                lanes,
                store,
                bounds=partial(self._bounds, lanes, subscriptions, memory),
                draining=self._drain,
                observer=self._observer,
            )
            for name, broker, subscriptions in planned
        ]
        pools = [store.pool, *([] if saga_lease is None else [saga_lease.pool])]
        lock_waits = LockWaits(pools, engine.collides, steering.told)
        conditions = Conditions(feeds, lanes, lock_waits)
        steering.watch(conditions)
        relaying = None if relay is None else asyncio.create_task(relay.run())
        retention = Retention(dsn, settings.schema, settings.prune_every, self.handlers)
        deadlines = Deadlines(store.pool, self.handlers)
        upkeep = [asyncio.create_task(retention.run()), asyncio.create_task(deadlines.run())]
        upkeep += map(asyncio.create_task, self._reporting.begin(feeds, lanes, memory, retention, conditions))
        for broker in self._brokers.values():
            if isinstance(broker, PostgresBroker):
                broker.tell(steering.told)
                if relay is not None:
                    broker.relay_by(relay.wake)
                upkeep.append(asyncio.create_task(steering.run(broker.ask)))
                upkeep.append(asyncio.create_task(lock_waits.run(broker.ask)))
        if os.environ.get(WORKER, "0") == "0":  # only one process of a program logs these findings
            upkeep += [asyncio.create_task(feed.warn()) for feed in feeds]
            app = self.handlers[0].app
            if self._schedules:
                queues = {handler.name: handler.own_source for handler in self.handlers}
                schedules = Schedules(dsn, settings.schema, app, self._schedules, queues)
                upkeep.append(asyncio.create_task(schedules.run()))
            if self._sagas is not None:
                upkeep.append(asyncio.create_task(warn_of_orphans(dsn, settings.schema, app, self._sagas)))
        # With sagas, the thread of their lease ends this process, as it knows of steps that may take longer (L37).
        PULSE.begin(self._most_silence(), (lambda _: None) if self._leased else self._around.stuck)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lanes.work())
                for feed in feeds:
                    feed.task = group.create_task(run_on(feed.run(), "feed"))
                watch = None
                if settings.until_empty:
                    watch = group.create_task(run_on(self._watch_empty(feeds, in_hand), "watch"))
                await self._drain.wait()
                if watch is not None:
                    watch.cancel()
                steering.leaving()
                await self._leave(feeds, lanes)
                if relay is not None and relaying is not None:  # other workers, or the next, relay what takes longer
                    relay.stop()
                    await asyncio.wait([relaying], timeout=_LAST_LOOK)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            PULSE.end()
            async with AsyncExitStack() as closing:  # in reverse order, each of them whatever another one raises
                closing.callback(lambda: log.info("worker stopped", **self.counts))
                closing.push_async_callback(engine.deliveries.close)
                closing.callback(engine.endings.telling.close)
                for broker in self._brokers.values():
                    closing.push_async_callback(broker.close)
                for feed in feeds:  # for an abort: a Kafka member that does not leave would hold up its whole group
                    closing.push_async_callback(feed.close)
                await end(*upkeep, *([] if relaying is None else [relaying]))

    def _most_silence(self) -> float:
        """For how many seconds this process may run no Python code: longer than an event loop may be blocked (L37)."""
        longest = longest_run(self.handlers)
        return longest + (1.5 * shortest_lease(self._leased) + 1.0 if self._leased else _SPARE)

    def _due_sagas(self, saga_lease: SagaLease, lanes: Lanes, beside: Sequence[BesideSagas]) -> Planned:
        resuming = [Subscription(f"{SCHEME}:{handler.name}", handler.name, handler.app) for handler in self._leased]
        return SCHEME, DueSagas(saga_lease.leases, lanes, saga_lease.engine.cancel, beside), resuming

    def _bounds(self, lanes: Lanes, subscriptions: Sequence[Subscription], memory: BytesInHand) -> Bounds:
        """What one session may have outstanding, as of now: enough for all lanes of its handlers."""
        settings, engine = self._settings, lanes.in_hand.engine
        by_name = {handler.name: handler for handler in self.handlers}
        handlers = {subscription.source: by_name[subscription.handler] for subscription in subscriptions}
        distinct = {handler.name: handler for handler in handlers.values()}.values()

        def share(source: str) -> int:
            handler = handlers[source]
            its = lanes.of(handler.name)
            each = per_lane(engine.group_size(handler), engine.seconds(handler))
            return in_lanes(its.count * each, its.strands.beyond(each))

        return Bounds(
            lanes=sum(capacity.lanes_of(handler, settings) for handler in distinct),
            group=max(map(engine.max_group_size, distinct)),
            room=capacity.ROOM,
            drain=settings.drain_timeout,
            max_message_bytes=settings.max_message_bytes,
            share=share,
            memory=memory,
            paused=lambda source: lanes.paused(handlers[source].name),
        )

    async def _watch_empty(self, feeds: Sequence[Feed], in_hand: InHand) -> None:
        calm = 0
        while calm < 2:
            await asyncio.sleep(0.1)
            empty = in_hand.in_flight == 0 and all([await feed.idle() for feed in feeds])
            calm = calm + 1 if empty and in_hand.in_flight == 0 else 0
        self.drain()

    async def _leave(self, feeds: Sequence[Feed], lanes: Lanes) -> None:
        log.info("draining", in_flight=lanes.in_hand.in_flight)
        await asyncio.gather(*(feed.stop_fetching() for feed in feeds))
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.drain_timeout
        # A message that starts later may not finish in time.
        await lanes.run_out(self._settings.drain_timeout / 2, lambda: any(feed.reading for feed in feeds))
        lanes.drain()
        if not await within(deadline - clock(), lanes.finished):
            log.warning("drain timed out, rolling back what still runs", seconds=self._settings.drain_timeout)
            lanes.cancel()
            await lanes.finished.wait()
        await asyncio.gather(*(feed.quiet() for feed in feeds))
        await lanes.release()
        for feed in feeds:
            await feed.close()


def _scheme(destination: str) -> str:
    return destination.partition(":")[0]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a group: the one that a person needs to read."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
