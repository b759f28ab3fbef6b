"""Sagas that are due or stale, as a source: no redelivery is needed to resume one.

What it delivers is held already, under a new token. Settling changes nothing: by the time its outcome is known, the
saga's row is gone, released or put aside for a person.

A saga is taken only for a lane that is free now (L33), so that a process with nothing to do gets what a busy one cannot
begin; for all lanes that are free, in one statement (L63). Nothing is taken blindly: one statement says what there is,
and when to look again (L32).
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
# Seconds between two looks.
_LONGEST: Final = 1.25  # what becomes due sooner than was seen is resumed within that (L61)
_AGAIN: Final = 0.5  # while something is due that cannot be taken
_SHORTEST: Final = 0.2
_SOONEST: Final = 0.02
_PATIENCE: Final = 1.0  # seconds after which what no idle process has taken gets the next free lane of a busy one
_MOST_KEPT_OUT: Final = 60  # looks in a row
_HELD_UP: Final = 2.0  # seconds after which a look at sagas and queues goes on without the queues (L67)


class LanesOfSagas(Protocol):
    """What the lanes of this process say of themselves. `freed` is set whenever one has nothing to do any more."""

    freed: asyncio.Event

    @property
    def keys(self) -> Sequence[bytes]:
        """Those that are in hand, of any source."""
        ...

    @property
    def closed(self) -> bool:
        """Whether no saga may begin now."""
        ...

    def idle(self, handler: str) -> int:
        """How many lanes of a handler have nothing to do; none while it is paused."""
        ...

    def paused(self, handler: str) -> bool:
        """Whether no saga of the handler is to be taken now (O14)."""
        ...

    def keep(self, handler: str, kept: bool) -> None:
        """Whether the next lane of the handler that is free is kept for a saga, and takes no new message."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DueSagas:
    """See `ports.Broker`. A subscription's name is its handler, and its group the app, the same for all. `cancel` is
    told which sagas of this process are to be cancelled, and `beside` what its queues have."""

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
    """See `ports.Session`. Takes no more sagas of a handler than lanes are free; what it leaves, another worker may
    take at once.

    What nobody has taken for a second, although it could be, gets the next lane that is free here: otherwise a stream
    of new messages could keep it waiting for ever. While the lanes are closed, for what may kill this worker, it takes
    none, so that others can (L23); but a stream of those keeps it from taking any for half a minute only.
    """

    losses_count = False

    def __init__(self, source: DueSagas, app: str, handlers: Sequence[str]) -> None:
        self._leases, self._lanes, self._cancel = source.leases, source.lanes, source.cancel
        self._beside = source.beside
        self._app = app
        self._handlers = handlers
        self._kept_out = 0
        self._kept: set[str] = set()
        self._left: list[str] = []  # handlers with sagas that could be taken, and had no free lane, or not enough
        self._looked = self._next = asyncio.get_running_loop().time()  # when it did last, and is to look again
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
        """For the time of the next look, or for a lane that is free for what was left."""
        clock = asyncio.get_running_loop().time
        while not self._stopped and not any(map(self._lanes.idle, self._left)) and clock() < self._next:
            self._lanes.freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next):
                    await self._lanes.freed.wait()
                    # What ended here may have to be tried again soon.
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
        # Read in this order: a saga that was begun in between is not among those seen (L12), and what the last fetch
        # took has been handed over by now.
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
        """At the sagas, and at the queues while these can be read."""
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
        """For the lanes that are free. One statement serves handlers with as many."""
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
        """Keep the next free lane of these for what is due, and of no others."""
        for handler in handlers ^ self._kept:
            self._lanes.keep(handler, handler in handlers)
        self._kept = handlers

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._outstanding.subtract(delivery.handle.handler for delivery in deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Taken and never started: free for all workers at once, at no cost."""
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
