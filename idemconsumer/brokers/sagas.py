"""Sagas that are due or stale, as a source: no redelivery is needed to resume one.

What it delivers is held already, under a new token. Settling says nothing: the saga's row is gone, released or parked
by the time its outcome is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from idemconsumer._model import Subscription
from idemconsumer.errors import BrokerUnavailable, SessionEnded, StoreUnavailable
from idemconsumer.ports import Bounds, Delivery, Epoch, Finding, LeaseStore, Outgoing

SCHEME: Final = "saga"
_EVERY: Final = 0.5  # seconds between two looks; a stale saga is resumed so much after its lease


class SagaBroker:
    """`held`: the keys that this process has in hand, from whatever source."""

    def __init__(self, leases: LeaseStore, held: Callable[[], Sequence[bytes]]) -> None:
        self._leases = leases
        self._held = held

    def feed(self, subscription: Subscription) -> str:
        return SCHEME

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> SagaSession:
        handlers = [subscription.handler for subscription in subscriptions]
        return SagaSession(self._leases, self._held, handlers, bounds)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        raise BrokerUnavailable("saga: is not a destination; start a saga with app.start")

    async def check(self, subscription: Subscription) -> list[Finding]:
        return []

    async def close(self) -> None:
        return


class SagaSession:
    """See `ports.Session`. Takes a saga only when a lane may be free for it."""

    def __init__(
        self, leases: LeaseStore, held: Callable[[], Sequence[bytes]], handlers: Sequence[str], bounds: Bounds
    ) -> None:
        self._leases = leases
        self._held = held
        self._handlers = handlers
        self._lanes = bounds.lanes
        self._outstanding = 0
        self._epoch = Epoch()
        self._stopped = asyncio.Event()

    async def fetch(self) -> Sequence[Delivery]:
        if self._epoch.ended:
            raise SessionEnded("sagas: closed")
        room = self._lanes - self._outstanding
        taken = []
        if room > 0 and not self._stopped.is_set():
            try:
                taken = await self._leases.take(self._handlers, room, held=self._held())
            except StoreUnavailable as error:
                self._epoch.end()
                raise SessionEnded(f"sagas: {error}") from error
        if len(taken) < room or room <= 0:
            try:
                async with asyncio.timeout(_EVERY):
                    await self._stopped.wait()
                await asyncio.sleep(_EVERY if not taken else 0)
            except TimeoutError:
                pass
        self._outstanding += len(taken)
        return [Delivery(holding.message, self._epoch, handle=holding) for holding in taken]

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._outstanding -= len(deliveries)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        """Taken and never started: anybody's at once, at no cost."""
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
