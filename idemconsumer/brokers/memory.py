"""An in-process queue for unit tests: `memory:name`. Nothing survives the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Finding, Outgoing
from idemconsumer.settings import Settings

_IDLE_SECONDS: Final = 0.2


class _Queue:
    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int, Outgoing]] = deque()  # number, deliveries so far, message
        self.arrived = asyncio.Event()


class MemoryBroker:
    """Redelivers what a session left unsettled when it closed, in order, as a real broker would."""

    hands_over = False

    def __init__(self, settings: Settings | None = None) -> None:
        self._queues: dict[str, _Queue] = {}
        self._numbers = count(1)

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        (subscription,) = subscriptions
        return MemorySession(subscription.name, self._queue(subscription.name), bounds)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        queue = self._queue(name)
        queue.waiting.extend((next(self._numbers), 0, message) for message in messages)
        queue.arrived.set()

    async def check(self, subscription: Subscription) -> list[Finding]:
        return [Finding("ok", subscription.source, "in memory: for tests only")]

    async def close(self) -> None:
        self._queues.clear()


class MemorySession:
    def __init__(self, name: str, queue: _Queue, bounds: Bounds) -> None:
        self._name = name
        self._queue = queue
        self._bounds = bounds
        self._epoch = Epoch()
        self._outstanding: dict[int, tuple[int, Outgoing]] = {}
        self._stopped = False

    async def fetch(self) -> Sequence[Delivery]:
        if self._epoch.ended:
            raise SessionEnded(f"memory:{self._name} was closed")
        free = self._bounds.in_flight - len(self._outstanding)
        if self._stopped or free <= 0 or not self._queue.waiting:
            self._queue.arrived.clear()
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._queue.arrived.wait()
            except TimeoutError:
                pass
            if self._epoch.ended:
                raise SessionEnded(f"memory:{self._name} was closed")
            if self._stopped:
                return []
        return [self._take() for _ in range(min(free, len(self._queue.waiting)))]

    def _take(self) -> Delivery:
        number, before, message = self._queue.waiting.popleft()
        self._outstanding[number] = (before, message)
        return Delivery(
            Message(
                source=f"memory:{self._name}",
                body=message.body,
                headers=message.headers,
                message_id=message.key,
                position=f"{self._name}#{number}",
            ),
            self._epoch,
            handle=number,
            suspect=before > 0,
            count=before + 1,
        )

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.epoch.ended:
                self._outstanding.pop(delivery.handle, None)
        self._queue.arrived.set()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in reversed(deliveries):
            if not delivery.epoch.ended and delivery.handle in self._outstanding:
                before, message = self._outstanding.pop(delivery.handle)
                self._queue.waiting.appendleft((delivery.handle, before, message))
        self._queue.arrived.set()

    async def idle(self) -> bool:
        return not self._queue.waiting

    async def stop_fetching(self) -> None:
        self._stopped = True

    async def close(self) -> None:
        self._epoch.end()
        for number, (before, message) in sorted(self._outstanding.items(), reverse=True):
            self._queue.waiting.appendleft((number, before + 1, message))
        self._outstanding.clear()
        self._queue.arrived.set()
