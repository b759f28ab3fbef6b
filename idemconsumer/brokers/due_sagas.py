"""The source that delivers sagas which are due or stale: resuming one needs no redelivery.

Each delivery already holds the saga's lease, under a new token. Settling a delivery changes nothing in the database:
when its outcome is known, the saga's row has been deleted, released or put aside for a person.

A saga is taken only for a lane that is free now (L33), so that an idle process gets the sagas that a busy one cannot
begin. One statement takes sagas for all free lanes (L63). A query runs before each take: it returns which sagas can be
taken and when to query again (L32).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from idemconsumer.errors import BrokerUnavailable, SessionEnded, StoreUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import BesideSagas, Bounds, Delivery, Epoch, Finding, Outgoing
from idemconsumer.stores.leased_saga import DueLook, LeasedSaga

if TYPE_CHECKING:
    from idemconsumer.stores.leases import PostgresLeases

SCHEME: Final = "saga"
# Seconds between two queries.
_LONGEST: Final = 1.25  # a saga that becomes due earlier than the last query saw is resumed within this time (L61)
_AGAIN: Final = 0.5  # while a saga is due that cannot be taken
_SHORTEST: Final = 0.2
_SOONEST: Final = 0.02
_PATIENCE: Final = 1.0  # seconds until a due saga that no idle process has taken gets the next free lane of a busy one
_MOST_KEPT_OUT: Final = 60  # queries in a row that are skipped because the lanes are closed
_HELD_UP: Final = 2.0  # seconds after which a query of sagas and queues is replaced by one of the sagas alone (L67)


class LanesOfSagas(Protocol):
    """The state of the lanes of this process. `freed` is set whenever a lane becomes idle."""

    freed: asyncio.Event

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys of the messages and sagas that are in flight in this process, from any source."""
        ...

    @property
    def closed(self) -> bool:
        """Whether no saga may start now."""
        ...

    def idle(self, handler: str) -> int:
        """How many lanes of a handler are idle; 0 while the handler is paused."""
        ...

    def paused(self, handler: str) -> bool:
        """Whether the handler is paused, so that none of its sagas may be taken (O14)."""
        ...

    def keep(self, handler: str, kept: bool) -> None:
        """Set whether the next free lane of the handler is reserved for a saga and takes no new message."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DueSagas:
    """See `ports.Broker`.

    A subscription's name is its handler; its group is the app, the same for all of them. `cancel` is called with the
    keys of the sagas of this process that are to be cancelled. `beside` are brokers whose queues the same query checks.
    """

    leases: PostgresLeases
    lanes: LanesOfSagas
    cancel: Callable[[Collection[bytes]], None] = lambda keys: None
    beside: Sequence[BesideSagas] = ()
    hands_over = False

    def feed(self, subscription: Subscription) -> str:
        return SCHEME

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> DueSagasSession:
        handlers = [subscription.handler for subscription in subscriptions]
        return DueSagasSession(self, subscriptions[0].group, handlers)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        raise BrokerUnavailable("saga: is not a destination; start a saga with app.start")

    async def check_destination(self, name: str) -> None:
        raise BrokerUnavailable("saga: is not a destination")

    async def check(self, subscription: Subscription) -> list[Finding]:
        return []

    async def close(self) -> None:
        return


class DueSagasSession:
    """See `ports.Session`. Takes at most as many sagas of a handler as it has free lanes.

    Another worker may take the others at once. A saga that has been due for a second without being taken gets the next
    lane that becomes free here: otherwise a stream of new messages could keep it waiting for ever. While the lanes are
    closed because of a message that may kill this worker, the session takes no sagas, so that other workers can (L23);
    a stream of such messages prevents it from taking any for at most half a minute.
    """

    losses_count = False

    def __init__(self, source: DueSagas, app: str, handlers: Sequence[str]) -> None:
        self._leases, self._lanes, self._cancel = source.leases, source.lanes, source.cancel
        self._beside = source.beside
        self._app = app
        self._handlers = handlers
        self._kept_out = 0
        self._kept: set[str] = set()
        self._left: list[str] = []  # handlers with sagas that could be taken but had no free lane, or too few
        self._looked = self._next = asyncio.get_running_loop().time()  # times of the last query and of the next
        self._outstanding: Counter[str] = Counter()
        self._epoch = Epoch(takes_back=True)
        self._stopped = False

    async def fetch(self) -> Sequence[Delivery]:
        if self._epoch.ended:
            raise SessionEnded("sagas: closed")
        await self._wait()
        if self._stopped:
            return []
        try:
            taken = await self._look_and_take()
        except StoreUnavailable as error:
            self._end()
            raise SessionEnded(f"sagas: {error}") from error
        self._outstanding.update(saga.handler for saga in taken)
        return [Delivery(holding.message, self._epoch, handle=holding) for holding in taken]

    async def _wait(self) -> None:
        """Wait until the next query is due, or until a lane is free for a saga that was left."""
        clock = asyncio.get_running_loop().time
        while not self._stopped and not any(map(self._lanes.idle, self._left)) and clock() < self._next:
            self._lanes.freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next):
                    await self._lanes.freed.wait()
                    # A lane was freed: the saga that ended there may have to be retried soon.
                    self._next = min(self._next, self._looked + _SHORTEST)
        if self._stopped and not self._epoch.ended:
            await asyncio.sleep(_SHORTEST)

    async def _look_and_take(self) -> list[LeasedSaga]:
        self._kept_out = self._kept_out + 1 if self._lanes.closed and self._kept_out < _MOST_KEPT_OUT else 0
        now = asyncio.get_running_loop().time()
        if self._kept_out:
            self._left, self._next = [], now + _AGAIN
            return []
        if free := [name for name in self._left if self._lanes.idle(name)]:
            return await self._take(free, ())
        self._looked = now
        look = await self._look()
        if look.cancelled:
            self._cancel(look.cancelled)
        # Query first, then read the keys: a saga that started in between is not among those the query returned (L12),
        # and the lanes already know the sagas of the last fetch.
        held = set(self._lanes.keys)
        unheld = [(key, token) for key, token in look.own if key not in held]
        due = [name for name, seconds in look.due.items() if seconds <= 0]
        self._next = now + (_AGAIN if due else max(_SOONEST, min([_LONGEST, *look.due.values()])))
        self._keep({name for name in due if look.due[name] < -_PATIENCE and not self._lanes.idle(name)})
        return await self._take(self._running if unheld else due, unheld)

    @property
    def _running(self) -> list[str]:
        """The handlers that are not paused."""
        return [handler for handler in self._handlers if not self._lanes.paused(handler)]

    async def _look(self) -> DueLook:
        """Query the sagas and, while they can be read, the queues."""
        if queues := [name for each in self._beside for name in each.queues]:
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(_HELD_UP):
                    look = await self._leases.look(self._app, self._running, queues)
                    for each in self._beside:
                        each.looked(look.queues)
                    return look
            for each in self._beside:
                each.held_up()
        return await self._leases.look(self._app, self._running)

    async def _take(self, handlers: Sequence[str], unheld: Sequence[tuple[bytes, int]]) -> list[LeasedSaga]:
        """Take sagas for the free lanes. Handlers with the same number of free lanes share one statement."""
        rooms: dict[int, list[str]] = {}
        for handler in handlers:
            rooms.setdefault(self._lanes.idle(handler), []).append(handler)
        left = set(self._left).difference(handlers).union(rooms.pop(0, ()))
        taken: list[LeasedSaga] = []
        for room, theirs in rooms.items():
            sagas = await self._leases.take(self._app, theirs, room, unheld=unheld)
            counts = Counter(saga.handler for saga in sagas)
            left |= {handler for handler in theirs if counts[handler] >= room}
            self._keep(self._kept.difference(theirs))
            taken += sagas
        self._left = [handler for handler in self._handlers if handler in left]
        return taken

    def _keep(self, handlers: set[str]) -> None:
        """Reserve the next free lane of each of these handlers for a due saga, and of no other handler."""
        for handler in handlers ^ self._kept:
            self._lanes.keep(handler, handler in handlers)
        self._kept = handlers

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._outstanding.subtract(delivery.handle.handler for delivery in deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Release sagas that were taken and never started: any worker may take them at once, and nothing is counted."""
        self._outstanding.subtract(delivery.handle.handler for delivery in deliveries)
        for delivery in deliveries:
            try:
                await self._leases.release(delivery.handle, 0.0, None, count=False)
            except Exception:  # noqa: BLE001 - the lease runs out instead
                return

    async def idle(self) -> bool:
        return not self._outstanding.total()

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        self._keep(set())
        self._lanes.freed.set()
        return ()

    async def close(self) -> None:
        self._end()
        self._stopped = True
        self._lanes.freed.set()

    def _end(self) -> None:
        self._epoch.end()
        self._keep(set())
