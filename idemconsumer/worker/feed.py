"""A feed: one session after another, and what happens to each of their deliveries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import structlog

from idemconsumer.brokers.due_sagas import SCHEME
from idemconsumer.engine.work import Work
from idemconsumer.errors import BrokerUnavailable, SessionEnded, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.headers import restored
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Broker, Delivery, Session
from idemconsumer.ports.leases import LeasedSaga
from idemconsumer.ports.observer import Observer, Point
from idemconsumer.ports.store import JoinedStore
from idemconsumer.worker.lanes import Lanes

log = structlog.get_logger("idemconsumer")


class Feed:
    """One session after another for the subscriptions that share it. `bounds` is called for each session."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        subscriptions: Sequence[Subscription],
        handlers: Sequence[BoundHandler],
        lanes: Lanes,
        store: JoinedStore,
        *,
        bounds: Callable[[], Bounds],
        draining: asyncio.Event,
        observer: Observer,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._name = name
        self._broker = broker
        self._subscriptions = subscriptions
        by_name = {handler.name: handler for handler in handlers}
        self._handlers = {sub.source: by_name[sub.handler] for sub in subscriptions}
        self._lanes = lanes
        self._in_hand = lanes.in_hand
        self._store = store
        self._bounds = bounds
        self._draining = draining
        self._at = observer.at
        self._session: Session | None = None

    async def run(self) -> None:
        failures = 0
        while not self._draining.is_set():
            try:
                session = self._session = await self._broker.open(self._subscriptions, self._bounds())
            except BrokerUnavailable as error:
                if failures == 0:
                    log.error("broker unavailable, waiting", feed=self._name, error=str(error))
                failures += 1
                await pause(self._draining, failures)
                continue
            if self._draining.is_set():  # the drain began while the session was being opened
                await session.close()
                return
            if failures == 0:
                log.info("consuming", feed=self._name, sources=[sub.source for sub in self._subscriptions])
            try:
                await self._consume(session)
            except SessionEnded as error:
                if self._draining.is_set():
                    continue
                # A session that ends before anything of it was settled is a failure like one that never began: each
                # costs every message in it a delivery, and a quorum queue deletes what was delivered too often.
                failures = 0 if self._in_hand.settled(session) else failures + 1
                if failures <= 1:
                    log.warning("broker session lost, reconnecting", feed=self._name, error=str(error))
                self._session = None  # a drain has nothing to close now, and must end the reconnecting instead
                await session.close()
                await pause(self._draining, max(1, failures), longest=60.0)

    async def _consume(self, session: Session) -> None:
        """Until SessionEnded. Never cancelled in a drain: some clients lose messages when a fetch is."""
        at = self._at
        while True:
            for number, delivery in enumerate(await session.fetch()):
                at(Point.FETCHED, self._name, ())
                if number % 64 == 63:
                    await asyncio.sleep(0)  # decoding a large batch must not stop the lanes
                await self._dispatch(delivery, session)
                at(Point.DISPATCHED, self._name, ())

    async def _dispatch(self, delivery: Delivery, session: Session) -> None:
        message, suspect = delivery.message, delivery.suspect
        if isinstance(delivery.handle, LeasedSaga):
            handler = self._handlers[f"{SCHEME}:{delivery.handle.handler}"]
            self._lanes.dispatch(Work.of(handler, message, leased=delivery.handle), delivery, session)
            return
        handler = self._handlers[message.source]
        if delivery.take_over:
            await self._take_over(delivery, session, handler)
            return
        if message.source == handler.own_source:
            message, suspect = restored(message) or message, True
        self._lanes.dispatch(Work.of(handler, message, suspect=suspect), delivery, session)

    async def _take_over(self, delivery: Delivery, session: Session, handler: BoundHandler) -> None:
        """Commit here first, then settle: a crash in between leaves a duplicate, which is recognised as one."""
        while not delivery.epoch.retiring:
            try:
                await self._store.take_over(handler.own_source.partition(":")[2], delivery.message)
            except StoreUnavailable as error:
                await self._in_hand.outage.wait(error)
            else:
                log.warning("delivered too often, moved to postgres", handler=handler.name, count=delivery.count)
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


async def pause(ended: asyncio.Event, failures: int, longest: float = 5.0) -> None:
    """Backoff of every reconnect: 0.2 s doubling to `longest`, with jitter; `ended` cuts it short."""
    try:
        async with asyncio.timeout(min(longest, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.75, 1.0)):
            await ended.wait()
    except TimeoutError:
        return
