"""A feed: one session after another, and the way of each of their deliveries to a lane."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import groupby, islice
from typing import Final

from idemconsumer.brokers.due_sagas import SCHEME
from idemconsumer.duty import within
from idemconsumer.engine.work import Work, named
from idemconsumer.errors import BadMessage, BrokerUnavailable, SessionEnded, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.message.message import Subscription
from idemconsumer.message.origin import letter_of, pending_of, restored
from idemconsumer.ports.broker import Bounds, Broker, Delivery, KnowsLag, KnowsSilence, Lag, Session
from idemconsumer.ports.observer import Observer, Point
from idemconsumer.rules.session_pause import LONGEST, session_pause
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.user_code.cancellation import end, uninterrupted
from idemconsumer.worker.intake import Intake
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.readings import Readings
from idemconsumer.worker.source_findings import warn_of_sources

_TOGETHER: Final = 64  # new deliveries that are decoded before the lanes get a turn
_LONGEST_POLL: Final = 60.0  # seconds: longer than the timeout of any server request in a poll (O12)


class _Kind(Enum):
    NEW = "new"
    SUSPECT = "suspect"  # it may have killed a worker, perhaps while that decoded it
    TAKE_OVER = "take over"


def _kind(delivery: Delivery) -> _Kind:
    if delivery.message.whole is not None:  # nobody reads it, and our own queue would have its beginning for all of it
        return _Kind.NEW
    if delivery.take_over:
        return _Kind.TAKE_OVER
    return _Kind.SUSPECT if delivery.suspect or delivery.inherited else _Kind.NEW


class Feed:
    """One session after another for the subscriptions that share it. `bounds` is called for each session."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        subscriptions: Sequence[Subscription],
        handlers: Sequence[BoundHandler],
        lanes: Lanes,
        store: PostgresStore,
        *,
        bounds: Callable[[], Bounds],
        draining: asyncio.Event,
        observer: Observer,
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self.opened = asyncio.Event()
        self.name = name
        self._broker = broker
        self._subscriptions = subscriptions
        by_name = {handler.name: handler for handler in handlers}
        self._handlers = {sub.source: by_name[sub.handler] for sub in subscriptions}
        self._lanes = lanes
        self._in_hand = lanes.in_hand
        self._company = lanes.in_hand.engine.company
        self._store = store
        self._bounds = bounds
        self._draining = draining
        self._observer = observer
        self._at = observer.at
        self._session: Session | None = None
        self._closed_at = time.monotonic()
        self._polls_since: float | None = None
        for source, handler in self._handlers.items():
            self._in_hand.counts.of(handler.name).deliveries[source] += 0
        self._dispatching = asyncio.Lock()
        self._intake: Intake | None = None  # of the current session
        self._readings: Readings | None = None  # of the current session
        self._counted = 0  # of the deliveries being read, how many would count as delivered if they were returned
        self._late: asyncio.Task[None] | None = None
        # By queue: the task that reads its suspects. Everything else of that queue waits for it, and no other queue
        # does (D13). With other brokers few sources share a session, and Kafka rebalances within a fetch, which has to
        # come after the reading.
        self._apart = all(each.scheme == "postgres" for each in subscriptions)
        self._lines: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        failures = 0
        # How to announce the next session that opens. The app's own queues are not announced.
        news = "consuming" if self._given else None
        while not self._draining.is_set():
            try:
                session = await self._open()
            except BrokerUnavailable as error:
                if failures == 0:
                    news = news or "consuming again"
                    log.error("broker unavailable, waiting", feed=self.name, error=str(error))
                failures += 1
                await self._pause(failures, counted=False)
                continue
            self._session, opened = session, time.monotonic()
            if self._draining.is_set():  # the drain began while the session was being opened
                await self._close_session()
                return
            self.opened.set()
            if news is not None:
                log.info(news, feed=self.name, sources=[each.source for each in self._given])
                news = None
            try:
                await self._consume(session)
            except SessionEnded as error:
                if self._draining.is_set():
                    continue
                # A session that ends soon, before it settled anything, counts as a failure, like one that did not open.
                lasted = time.monotonic() - opened > LONGEST
                failures = 0 if self._in_hand.settled(session) or lasted else failures + 1
                if failures <= 1:
                    news = "consuming again"
                    log.warning("broker session lost, reconnecting", feed=self.name, error=str(error))
                # Before the pause: a drain meanwhile then has no session to close, and ends the reconnecting instead.
                await self._close_session()
                await self._pause(failures, counted=session.losses_count)

    async def _pause(self, failures: int, *, counted: bool) -> None:
        await within(session_pause(failures, counted=counted, jitter=random.random()), self._draining)

    async def _open(self) -> Session:
        """Open a session. If this is cancelled, the opening gets time to undo what it began, and a session that opens
        all the same is closed (D24)."""
        opening = asyncio.create_task(self._broker.open(self._subscriptions, self._bounds()))
        try:
            await asyncio.wait([opening])
        except asyncio.CancelledError:
            opening.cancel()
            await uninterrupted(_not_opened(opening))
            raise
        return opening.result()

    async def _close_session(self) -> None:
        """Close the session completely, whatever is cancelled meanwhile (D24)."""
        session, self._session, self._closed_at = self._session, None, time.monotonic()
        if session is not None:
            await uninterrupted(session.close())

    async def _consume(self, session: Session) -> None:
        """Consume until SessionEnded. Never cancelled in a drain: some clients lose messages if a fetch is."""
        readings = self._readings = Readings(
            session,
            self._lanes,
            given_up=self._given_up,
            dispatched=lambda: self._at(Point.DISPATCHED, self.name, ()),
        )
        intake = self._intake = Intake(
            self._store,
            self._company,
            self._in_hand.outage,
            self._handler_of,
            partial(self._read_on_record, readings),
            draining=self._draining,
            given_up=self._given_up,
            observer=self._observer,
        )
        try:
            while True:
                self._polls_since = time.monotonic()
                fetched = await session.fetch()
                self._polls_since = None
                await readings.drop_retired()
                await self._dispatch_fetched(fetched, readings, intake)
                await self._lanes.give_back()
                for line in [each for each in self._lines.values() if each.done()]:
                    line.result()  # a bug in such a task is a bug of this feed
                readings.check()
        except SessionEnded:
            self._polls_since = None
            await readings.end()
            await asyncio.gather(*self._lines.values())  # they give up the deliveries of this session
            raise
        finally:
            await end(*self._lines.values())
            await readings.end()

    async def _dispatch_fetched(self, fetched: Sequence[Delivery], readings: Readings, intake: Intake) -> None:
        for _ in fetched:
            self._at(Point.FETCHED, self.name, ())
        counted = sum(delivery.epoch.returns_count for delivery in fetched)
        self._counted += counted
        try:
            async with self._dispatching:
                for kind, deliveries in groupby(fetched, key=_kind):
                    await self._dispatch_in_line(kind, list(deliveries), readings, intake)
        finally:
            self._counted -= counted

    async def _dispatch_in_line(
        self, kind: _Kind, deliveries: Sequence[Delivery], readings: Readings, intake: Intake
    ) -> None:
        """Reading suspects may have to wait for another process, which then holds up only their own queue (D13)."""
        sources: dict[str, list[Delivery]] = {}
        for delivery in deliveries:
            sources.setdefault(delivery.source or delivery.message.source, []).append(delivery)
        for source, theirs in sources.items():
            self._count(source, theirs)
            before = self._lines.get(source)
            if before is None and not (self._apart and kind is _Kind.SUSPECT):
                await self._dispatch_all(kind, theirs, readings, intake)
                continue
            dispatch = partial(self._dispatch_all, kind, theirs, readings, intake)
            line = self._lines[source] = asyncio.create_task(_behind(before, dispatch))
            line.add_done_callback(partial(self._end_line, source))

    def _count(self, source: str, deliveries: Sequence[Delivery]) -> None:
        of = self._in_hand.counts.of
        if (handler := self._handlers.get(source)) is not None:
            of(handler.name).deliveries[source] += len(deliveries)
            return
        for name in (self._handler_of(each).name for each in deliveries):  # sagas: their messages came from elsewhere
            of(name).deliveries[f"{SCHEME}:{name}"] += 1

    def _end_line(self, source: str, line: asyncio.Task[None]) -> None:
        if self._lines.get(source) is line and not line.cancelled() and line.exception() is None:
            del self._lines[source]

    async def _dispatch_all(
        self, kind: _Kind, deliveries: Sequence[Delivery], readings: Readings, intake: Intake
    ) -> None:
        match kind:
            case _Kind.SUSPECT:
                if given_up := await intake.admit(deliveries):
                    await readings.session.release(given_up)
            case _Kind.TAKE_OVER:
                for delivery in deliveries:
                    await self._take_over(delivery, readings.session, self._handler_of(delivery))
            case _Kind.NEW:
                left = iter(deliveries)
                while part := list(islice(left, _TOGETHER)):
                    async with self._company.shared():
                        for delivery in part:
                            if not delivery.epoch.retiring:  # nothing of a retiring epoch is decoded (K10)
                                readings.add(self._work(delivery, None), delivery)
                    await asyncio.sleep(0)  # decoding a large batch must not block the lanes

    def _handler_of(self, delivery: Delivery) -> BoundHandler:
        if isinstance(saga := delivery.handle, LeasedSaga):
            return self._handlers[f"{SCHEME}:{saga.handler}"]
        return self._handlers[delivery.source or delivery.message.source]

    async def _read_on_record(
        self, readings: Readings, deliveries: Sequence[Delivery], refusal: BadMessage | None
    ) -> None:
        """Decode these deliveries, unless they are refused, and give them to their lanes."""
        works = [self._work(delivery, refusal) for delivery in deliveries]
        await readings.first(works)
        for work, delivery in zip(works, deliveries, strict=True):
            readings.add(work, delivery)

    def _work(self, delivery: Delivery, refusal: BadMessage | None) -> Work:
        handler, message, suspect = self._handler_of(delivery), delivery.message, delivery.suspect
        refusal = refusal or delivery.refusal
        leased = delivery.handle if isinstance(delivery.handle, LeasedSaga) else None
        pending, row, letter, own_id = None, None, None, delivery.own_id
        if leased is None:
            if handler.is_own(message.source):
                suspect = suspect or message.source == handler.own_source
                message, pending, letter = restored(message) or message, pending_of(message), letter_of(message)
            if pending is not None:
                row, own_id = delivery.handle, pending.own_id
        elif leased.suspect and leased.attempt > handler.options.max_attempts:  # not decoded: that may kill the worker
            refusal = BadMessage("killed_worker", "no attempt is left")
        return Work.of(
            handler,
            message,
            suspect=suspect,
            leased=leased,
            refusal=refusal,
            own_id=own_id,
            first=not delivery.suspect,
            pending=pending,
            row=row,
            letter=letter,
        )

    async def _take_over(self, delivery: Delivery, session: Session, handler: BoundHandler) -> None:
        """Commit the message here first, then settle it: a crash in between leaves a duplicate, which is recognised as
        one."""
        while not self._given_up(delivery):
            try:
                await self._store.take_over(handler.own_source.partition(":")[2], delivery.message)
            except StoreUnavailable as error:
                await self._in_hand.outage.wait(error)
            else:
                its = named(handler, delivery.message)
                log.warning("delivered too often, moved to postgres", **its, count=delivery.count)
                await session.settle([delivery])
                return

    async def warn(self) -> None:
        """Log what its sources would lose, once it has a session (D16)."""
        await self.opened.wait()
        if self._apart:  # opening the session has checked in Postgres all that `check` does
            return
        handlers = {each.name: each for each in self._handlers.values()}
        await warn_of_sources(handlers, self._given, self._broker)

    @property
    def _given(self) -> list[Subscription]:
        """The subscriptions that handlers name, without the app's own queues."""
        return [each for each in self._subscriptions if not self._is_own(each)]

    def _is_own(self, subscription: Subscription) -> bool:
        return self._handlers[subscription.source].is_own(subscription.source)

    @property
    def stalled(self) -> float | None:
        """For how many seconds a poll has not returned, if that is longer than it may take; else None."""
        seconds = 0.0 if self._polls_since is None else time.monotonic() - self._polls_since
        return seconds if seconds > _LONGEST_POLL else None

    @property
    def sources(self) -> Collection[str]:
        """All sources that its sessions are for."""
        return self._handlers.keys()

    @property
    def away(self) -> float | None:
        """For how many seconds it has had no session whose server answers; None while it has one."""
        session: object = self._session
        if session is None:
            return time.monotonic() - self._closed_at
        return session.silence if isinstance(session, KnowsSilence) else None

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """The lag that its session reports; empty without a session."""
        session: object = self._session
        return await session.lag(whole=whole) if isinstance(session, KnowsLag) else {}

    async def idle(self) -> bool:
        try:
            # A delivery that waits to be read is in no lane yet, and no longer in its queue.
            idle = self._session is not None and await self._session.idle()
            reading = self._dispatching.locked() or self._lines or (self._readings is not None and self._readings.busy)
            return idle and not reading
        except (SessionEnded, BrokerUnavailable):
            return False

    async def stop_fetching(self) -> None:
        session, intake, readings = self._session, self._intake, self._readings
        if session is None:
            return
        late = await session.stop_fetching()
        if intake is None or readings is None:
            return
        if late:
            self._late = asyncio.create_task(self._dispatch_fetched(late, readings, intake))
        await readings.give_up(counted=False)

    def _given_up(self, delivery: Delivery) -> bool:
        """Whether a delivery is not to be read any more. In a drain, one whose return would count as a delivery has
        longer (D11)."""
        epoch = delivery.epoch
        draining = self._in_hand.draining if epoch.returns_count else self._draining.is_set()
        return draining or epoch.retiring

    @property
    def reading(self) -> bool:
        """Whether a delivery without a lane yet would count as delivered if it was returned (D11)."""
        late = self._late is not None and not self._late.done()
        return self._counted > 0 or late or (self._readings is not None and self._readings.counted)

    async def quiet(self) -> None:
        """Wait until every fetched delivery has a lane or was returned. In a drain, call this once the lanes have
        finished."""
        if self._late is not None:
            await self._late
        async with self._dispatching:
            await asyncio.gather(*self._lines.values())
        if self._readings is not None:
            await self._readings.give_up()

    async def close(self) -> None:
        """Close for good, whether it has a session, is opening or closing one, or waits before it reconnects."""
        try:
            if self._late is not None:
                await end(self._late)
        finally:
            if self._session is not None:
                await self._close_session()
            elif self.task is not None:
                self.task.cancel()


async def _not_opened(opening: asyncio.Task[Session]) -> None:
    await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().close()


async def _behind(before: asyncio.Task[None] | None, dispatch: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await dispatch()
