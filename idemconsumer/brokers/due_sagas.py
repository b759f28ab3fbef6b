"""Sagas that are due or stale, as a source: no redelivery is needed to resume one.

What it delivers is held already, under a new token. Settling changes nothing: by the time its outcome is known, the
saga's row is gone, released or put aside for a person.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from idemconsumer.errors import BrokerUnavailable, SessionEnded, StoreUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Finding, Outgoing
from idemconsumer.ports.leases import LeaseStore

SCHEME: Final = "saga"
_EVERY: Final = 0.5  # seconds between two looks; a stale saga is resumed at most that long after its lease


class DueSagas:
    """See `ports.Broker`. `held`: the keys that this process has in hand, of any source; `free`: how many lanes have
    nothing to do. The group of its subscriptions is the app, which shares its schema with others."""

    hands_over = False

    def __init__(self, leases: LeaseStore, held: Callable[[], Sequence[bytes]], free: Callable[[], int]) -> None:
        self._leases = leases
        self._held = held
        self._free = free

    def feed(self, subscription: Subscription) -> str:
        return SCHEME

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> DueSagasSession:
        handlers = [subscription.handler for subscription in subscriptions]
        return DueSagasSession(self._leases, self._held, self._free, subscriptions[0].group, handlers)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        raise BrokerUnavailable("saga: is not a destination; start a saga with app.start")

    async def check(self, subscription: Subscription) -> list[Finding]:
        return []

    async def close(self) -> None:
        return


class DueSagasSession:
    """See `ports.Session`. Takes no more sagas than lanes are free; what it leaves, another worker may take at once.

    With all lanes busy it takes one at a time; otherwise a stream of new messages could keep it from taking any.
    """

    def __init__(
        self,
        leases: LeaseStore,
        held: Callable[[], Sequence[bytes]],
        free: Callable[[], int],
        app: str,
        handlers: Sequence[str],
    ) -> None:
        self._leases = leases
        self._held = held
        self._free = free
        self._app = app
        self._handlers = handlers
        self._outstanding = 0
        self._epoch = Epoch()
        self._stopped = asyncio.Event()

    async def fetch(self) -> Sequence[Delivery]:
        if self._epoch.ended:
            raise SessionEnded("sagas: closed")
        room = self._free() or int(self._outstanding == 0)
        taken = []
        if room > 0 and not self._stopped.is_set():
            try:
                unheld = await self._unheld()
                taken = await self._leases.take(self._app, self._handlers, room, unheld=unheld)
            except StoreUnavailable as error:
                self._epoch.end()
                raise SessionEnded(f"sagas: {error}") from error
        if not taken:  # what was taken is not kept waiting: its lease was over up to _EVERY ago
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY):
                    await self._stopped.wait()
                    await asyncio.sleep(_EVERY)
        self._outstanding += len(taken)
        return [Delivery(holding.message, self._epoch, handle=holding) for holding in taken]

    async def _unheld(self) -> list[tuple[bytes, int]]:
        """What is ours in the database, and not in hand here (L12). Read in this order: a saga that was begun in
        between is not among those seen, and what the last fetch took has been handed over by now."""
        own = await self._leases.own()
        held = set(self._held())
        return [(key, token) for key, token in own if key not in held]

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._outstanding -= len(deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Taken and never started: free for all workers at once, at no cost."""
        for delivery in deliveries:
            try:
                await self._leases.release(delivery.handle, 0.0, None, count=False)
            except Exception:  # noqa: BLE001 - the lease runs out instead
                return

    async def idle(self) -> bool:
        return self._outstanding == 0

    async def stop_fetching(self) -> None:
        self._stopped.set()

    async def close(self) -> None:
        self._epoch.end()
        self._stopped.set()
