"""One worker process: feeds bring deliveries, lanes run them, a drain ends it in order."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import structlog

from idemconsumer.brokers.connecting import connect
from idemconsumer.brokers.due_sagas import SCHEME, DueSagas
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import BrokerUnavailable, ConfigurationError, SessionEnded, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.handlers.resources import Resources
from idemconsumer.message.headers import restored
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Broker, Delivery, Session
from idemconsumer.ports.leases import Holding
from idemconsumer.ports.observer import NullObserver, Observer, Point
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.retention import Retention
from idemconsumer.worker.saga_lease import SagaLease

log = structlog.get_logger("idemconsumer")

T = TypeVar("T")
Planned = tuple[str, Broker, list[Subscription]]  # of one feed

_SPARE_CONNECTIONS: Final = 2  # the room and the feeds, beside one connection a lane


class Worker:
    """Runs the handlers of one app in this process until drained. Not restartable."""

    def __init__(
        self,
        handlers: Sequence[BoundHandler],
        settings: Settings,
        observer: Observer | None = None,
        resources: Resources | None = None,
    ) -> None:
        self.handlers = handlers
        self._resources = resources or Resources(())
        self._settings = settings
        self._observer = observer or NullObserver()
        self._brokers: dict[str, Broker] = {}
        self._drain = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._lanes: Lanes | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """How many deliveries came to which outcome, so far."""
        return {} if self._lanes is None else {str(kind): n for kind, n in self._lanes.counts.items()}

    def drain(self) -> None:
        """Stop fetching, finish what runs, commit, settle, leave. Call it from the loop's thread."""
        self._drain.set()

    def abort(self) -> None:
        """Leave now: what runs is rolled back and not settled."""
        if self._main is not None:
            self._main.cancel()

    async def run(self) -> None:
        """Returns when drained, or when every source is empty under `until_empty`.

        Raises ConfigurationError for a database, a source or a resource that cannot be used as configured. Waits,
        with backoff, for servers that cannot be reached.
        """
        self._main = asyncio.current_task()
        if self._settings.dsn is None:
            raise ConfigurationError("no database is given; set IDEMCONSUMER_DSN, e.g. postgresql://user@host/db")
        planned = self._feeds()  # before anything is open: it raises for a missing driver or address
        await self._resources.open()
        try:
            await self._run(self._settings.dsn, planned)
        finally:
            await self._resources.close()

    async def _run(self, dsn: str, planned: Sequence[Planned]) -> None:
        async with AsyncExitStack() as stack:
            if (store := await self._reached(lambda: self._open_store(dsn))) is None:
                return
            stack.push_async_callback(store.close)
            engine = Engine(store, self._observer, lanes=self._settings.concurrency * self._settings.workers)
            saga_lease = None
            if any(handler.leased for handler in self.handlers):
                if (saga_lease := await self._reached(lambda: self._open_saga_lease(dsn, engine))) is None:
                    return
                stack.push_async_callback(saga_lease.close)
            await self._consume(dsn, planned, store, engine, saga_lease)

    async def _consume(
        self, dsn: str, planned: Sequence[Planned], store: PostgresStore, engine: Engine, saga_lease: SagaLease | None
    ) -> None:
        settings = self._settings
        lanes = self._lanes = Lanes(
            engine,
            self._observer,
            count=settings.concurrency,
            room=settings.room,
            sagas=None if saga_lease is None else saga_lease.engine,
        )
        feeds = [Feed(name, broker, subs, self, store, lanes) for name, broker, subs in planned]
        if saga_lease is not None:
            leased = [handler for handler in self.handlers if handler.leased]
            resuming = [Subscription(f"{SCHEME}:{handler.name}", handler.name, handler.app) for handler in leased]
            due = DueSagas(saga_lease.leases, lambda: lanes.keys, lambda: lanes.idle)
            feeds.append(Feed(SCHEME, due, resuming, self, store, lanes))
        retention = asyncio.create_task(Retention(dsn, settings.schema, settings.prune_every).run())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lanes.work())
                for feed in feeds:
                    feed.task = group.create_task(feed.run())
                watch = group.create_task(self._watch_empty(feeds)) if settings.until_empty else None
                await self._drain.wait()
                if watch is not None:
                    watch.cancel()
                await self._leave(feeds, lanes)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            retention.cancel()
            await asyncio.gather(retention, return_exceptions=True)
            for feed in feeds:  # for an abort: a member that does not leave would hold up its whole group
                await feed.close()
            for broker in self._brokers.values():
                await broker.close()
            log.info("worker left", **self.counts)

    async def _open_saga_lease(self, dsn: str, engine: Engine) -> SagaLease:
        settings, leased = self._settings, [handler.options for handler in self.handlers if handler.leased]
        return await SagaLease.open(
            dsn,
            settings.schema,
            engine,
            self._observer,
            connections=settings.concurrency + _SPARE_CONNECTIONS,
            lease=min(options.lease for options in leased),
            longest_run=max(options.timeout for options in leased),
        )

    async def _open_store(self, dsn: str) -> PostgresStore:
        return await PostgresStore.open(
            dsn,
            self._settings.schema,
            connections=self._settings.concurrency + _SPARE_CONNECTIONS,
            longest_run=max((handler.options.timeout for handler in self.handlers), default=30.0),
        )

    async def _reached(self, opening: Callable[[], Awaitable[T]]) -> T | None:
        """What is opened in the database. None when a drain came before the database did."""
        failures = 0
        while not self._drain.is_set():
            try:
                return await opening()
            except StoreUnavailable as error:
                if failures == 0:
                    log.error("store unreachable, waiting", error=str(error))
                failures += 1
                await pause(self._drain, failures)
        return None

    def _feeds(self) -> list[Planned]:
        feeds: defaultdict[tuple[str, str], list[Subscription]] = defaultdict(list)
        for handler in self.handlers:
            brokers = [self._broker(subscription.scheme) for subscription in handler.subscriptions]
            subscriptions = list(handler.subscriptions)
            if handler.leased or any(broker.hands_over for broker in brokers):
                subscriptions.append(Subscription(handler.own_source, handler.name, handler.app))
            for subscription in subscriptions:
                scheme = subscription.scheme
                feeds[scheme, self._broker(scheme).feed(subscription)].append(subscription)
        return [(name, self._brokers[scheme], subs) for (scheme, name), subs in feeds.items()]

    def _broker(self, scheme: str) -> Broker:
        if scheme not in self._brokers:
            self._brokers[scheme] = connect(scheme, self._settings)
        return self._brokers[scheme]

    async def _watch_empty(self, feeds: Sequence[Feed]) -> None:
        assert self._lanes is not None
        calm = 0
        while calm < 2:
            await asyncio.sleep(0.1)
            empty = self._lanes.in_flight == 0 and all([await feed.idle() for feed in feeds])
            calm = calm + 1 if empty and self._lanes.in_flight == 0 else 0
        self.drain()

    async def _leave(self, feeds: Sequence[Feed], lanes: Lanes) -> None:
        log.info("draining", in_flight=lanes.in_flight)
        await asyncio.gather(*(feed.stop_fetching() for feed in feeds))
        lanes.drain()
        try:
            async with asyncio.timeout(self._settings.drain_timeout):
                await lanes.finished.wait()
        except TimeoutError:
            log.warning("drain timed out, rolling back what still runs", seconds=self._settings.drain_timeout)
            lanes.cancel()
            await lanes.finished.wait()
        await lanes.release()
        for feed in feeds:
            await feed.close()

    @property
    def bounds(self) -> Bounds:
        """What one session may have outstanding."""
        settings, lanes = self._settings, self._lanes
        assert lanes is not None
        engine = lanes.engine

        def share() -> int:
            size = max(map(engine.group_size, self.handlers), default=1)
            return 4 * settings.concurrency * size + lanes.held_up

        return Bounds(
            lanes=settings.concurrency,
            group=max(map(engine.max_group_size, self.handlers), default=1),
            room=settings.room,
            max_uncommitted=settings.max_uncommitted,
            drain=settings.drain_timeout,
            share=share,
        )

    @property
    def draining(self) -> asyncio.Event:
        return self._drain

    @property
    def observer(self) -> Observer:
        return self._observer


class Feed:
    """One session after another, for the subscriptions that share it."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        subscriptions: Sequence[Subscription],
        worker: Worker,
        store: PostgresStore,
        lanes: Lanes,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._name = name
        self._broker = broker
        self._subscriptions = subscriptions
        self._worker = worker
        self._store = store
        self._lanes = lanes
        self._session: Session | None = None
        handlers = {handler.name: handler for handler in worker.handlers}
        self._handlers = {sub.source: handlers[sub.handler] for sub in subscriptions}

    async def run(self) -> None:
        failures = 0
        while not self._worker.draining.is_set():
            try:
                session = self._session = await self._broker.open(self._subscriptions, self._worker.bounds)
            except BrokerUnavailable as error:
                if failures == 0:
                    log.error("broker unavailable, waiting", feed=self._name, error=str(error))
                failures += 1
                await pause(self._worker.draining, failures)
                continue
            if self._worker.draining.is_set():  # it came while the session was being opened
                await session.close()
                return
            if failures == 0:
                log.info("consuming", feed=self._name, sources=[sub.source for sub in self._subscriptions])
            try:
                await self._consume(session)
            except SessionEnded as error:
                if self._worker.draining.is_set():
                    continue
                # A session that ends before anything of it was settled is a failure like one that never began: each
                # costs every message in it a delivery, and a quorum queue deletes what was delivered too often.
                failures = 0 if self._lanes.settled(session) else failures + 1
                if failures <= 1:
                    log.warning("broker session lost, reconnecting", feed=self._name, error=str(error))
                self._session = None  # a drain has nothing to close now, and must end the reconnecting instead
                await session.close()
                await pause(self._worker.draining, max(1, failures), most=60.0)

    async def _consume(self, session: Session) -> None:
        """Until SessionEnded. Never cancelled in a drain: some clients lose messages when a fetch is."""
        at = self._worker.observer.at
        while True:
            for number, delivery in enumerate(await session.fetch()):
                at(Point.FETCHED, self._name, ())
                if number % 64 == 63:
                    await asyncio.sleep(0)  # decoding a large batch must not stop the lanes
                await self._dispatch(delivery, session)
                at(Point.DISPATCHED, self._name, ())

    async def _dispatch(self, delivery: Delivery, session: Session) -> None:
        message, suspect = delivery.message, delivery.suspect
        if isinstance(delivery.handle, Holding):
            handler = self._handlers[f"{SCHEME}:{delivery.handle.handler}"]
            self._lanes.dispatch(Work.of(handler, message, holding=delivery.handle), delivery, session)
            return
        handler = self._handlers[message.source]
        if delivery.take_over:
            await self._take_over(delivery, session, handler)
            return
        if message.source == handler.own_source:
            message, suspect = restored(message) or message, True
        self._lanes.dispatch(Work.of(handler, message, suspect=suspect), delivery, session)

    async def _take_over(self, delivery: Delivery, session: Session, handler: BoundHandler) -> None:
        """Ours first, then acknowledged: a crash in between leaves a duplicate, which runs once."""
        while not delivery.epoch.retiring:
            try:
                await self._store.take_over(handler.own_source.partition(":")[2], delivery.message)
            except StoreUnavailable as error:
                await self._lanes.outage.wait(error)
            else:
                log.warning("delivered too often, taken over", handler=handler.name, count=delivery.count)
                await session.settle([delivery])
                return

    async def idle(self) -> bool:
        try:
            return self._session is not None and await self._session.idle()
        except (SessionEnded, BrokerUnavailable):
            return False

    async def stop_fetching(self) -> None:
        if self._session is not None:
            await self._session.stop_fetching()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        elif self.task is not None:
            self.task.cancel()  # still trying to open a session


async def pause(ended: asyncio.Event, failures: int, most: float = 5.0) -> None:
    """Backoff of every reconnect: 0.2 s doubling to `most`, with jitter; `ended` cuts it short."""
    try:
        async with asyncio.timeout(min(most, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.75, 1.0)):
            await ended.wait()
    except TimeoutError:
        return


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a group: what a person needs to read."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
