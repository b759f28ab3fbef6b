"""One worker process: feeds bring deliveries, lanes run them, a drain ends it in order."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import structlog

from idemconsumer.brokers.connecting import connect
from idemconsumer.brokers.due_sagas import SCHEME, DueSagas
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Broker
from idemconsumer.ports.leases import LeaseStore
from idemconsumer.ports.observer import NullObserver, Observer
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.user_code.resources import Resources
from idemconsumer.worker.feed import Feed, pause
from idemconsumer.worker.in_hand import InHand
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.retention import Retention
from idemconsumer.worker.saga_lease import SagaLease

log = structlog.get_logger("idemconsumer")

T = TypeVar("T")
Planned = tuple[str, Broker, list[Subscription]]  # of one feed

_SPARE_CONNECTIONS: Final = 2  # for the waiting room and the feeds, beside one per lane


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
        """How many deliveries have had each outcome so far."""
        return {} if self._lanes is None else {str(kind): n for kind, n in self._lanes.in_hand.counts.items()}

    def drain(self) -> None:
        """Stop fetching, finish what runs, commit, settle, leave (D11). Call it from the loop's thread."""
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
        planned = self._planned_feeds()  # before anything is open: it raises for a missing driver or address
        await self._resources.open()
        try:
            await self._run(self._settings.dsn, planned)
        finally:
            await self._resources.close()

    def _planned_feeds(self) -> list[Planned]:
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

    async def _reached(self, opening: Callable[[], Awaitable[T]]) -> T | None:
        """Open something in the database once it can be reached. None when a drain came first."""
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

    async def _open_store(self, dsn: str) -> PostgresStore:
        return await PostgresStore.open(
            dsn,
            self._settings.schema,
            connections=self._settings.concurrency + _SPARE_CONNECTIONS,
            longest_run=max((handler.options.timeout for handler in self.handlers), default=30.0),
        )

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

    async def _consume(
        self, dsn: str, planned: Sequence[Planned], store: PostgresStore, engine: Engine, saga_lease: SagaLease | None
    ) -> None:
        settings = self._settings
        sagas = None if saga_lease is None else saga_lease.engine
        in_hand = InHand(engine, self._observer, sagas=sagas)
        lanes = self._lanes = Lanes(in_hand, count=settings.concurrency, room=settings.room)
        if saga_lease is not None:
            planned = [*planned, self._due_sagas(saga_lease.leases, lanes)]
        feeds = [
            Feed(
                name,
                broker,
                subscriptions,
                self.handlers,
                lanes,
                store,
                bounds=lambda: self._bounds(lanes),
                draining=self._drain,
                observer=self._observer,
            )
            for name, broker, subscriptions in planned
        ]
        retention = asyncio.create_task(Retention(dsn, settings.schema, settings.prune_every).run())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(lanes.work())
                for feed in feeds:
                    feed.task = group.create_task(feed.run())
                watch = group.create_task(self._watch_empty(feeds, in_hand)) if settings.until_empty else None
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
            log.info("worker stopped", **self.counts)

    def _due_sagas(self, leases: LeaseStore, lanes: Lanes) -> Planned:
        leased = [handler for handler in self.handlers if handler.leased]
        resuming = [Subscription(f"{SCHEME}:{handler.name}", handler.name, handler.app) for handler in leased]
        return SCHEME, DueSagas(leases, lambda: lanes.keys, lambda: lanes.idle), resuming

    def _bounds(self, lanes: Lanes) -> Bounds:
        """What one session may have outstanding, as of now."""
        settings, engine = self._settings, lanes.in_hand.engine

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


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real error of a group: what a person needs to read."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
