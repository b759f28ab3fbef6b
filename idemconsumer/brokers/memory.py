"""An in-process queue for unit tests: `memory:name`. Nothing survives the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from idemconsumer.brokers.outstanding import Outstanding
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Message, Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Finding, Outgoing
from idemconsumer.settings import Settings


class MemoryQueue:
    """The messages that wait for one consumer, or for the consumers that share the queue."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int, Any]] = deque()  # number, deliveries so far, message
        self.arrived = asyncio.Event()

    def put(self, number: int, message: object, before: int = 0) -> None:
        self.waiting.append((number, before, message))
        self.arrived.set()


class MemoryBroker:
    """In-process queues. Messages that are unsettled when a session closes are redelivered in order, as a real broker
    would."""

    hands_over = False

    def __init__(self, settings: Settings | None = None) -> None:
        self._queues: dict[str, MemoryQueue] = {}
        self._numbers = count(1)
        self._delayed: list[asyncio.TimerHandle] = []

    def _queue(self, name: str) -> MemoryQueue:
        return self._queues.setdefault(name, MemoryQueue())

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        (subscription,) = subscriptions
        return MemorySession(subscription.name, self._queue(subscription.name), bounds)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            if message.delay:
                timer = asyncio.get_running_loop().call_later(message.delay, self._arrive, name, message)
                self._delayed.append(timer)
            else:
                self._arrive(name, message)

    def _arrive(self, name: str, message: Outgoing) -> None:
        self._queue(name).put(next(self._numbers), message)

    async def check_destination(self, name: str) -> None:
        return

    async def check(self, subscription: Subscription) -> list[Finding]:
        return [Finding("ok", subscription.source, "in memory: for tests only")]

    async def close(self) -> None:
        for timer in self._delayed:
            timer.cancel()
        self._queues.clear()


class MemorySession:
    """See `ports.Session`. The test kit's brokers use it too."""

    losses_count = False
    longest = 0.2  # seconds that an empty fetch waits

    def __init__(self, name: str, queue: MemoryQueue, bounds: Bounds, scheme: str = "memory") -> None:
        self._name = name
        self._source = f"{scheme}:{name}"
        self._queue = queue
        self._epoch = Epoch()
        self._held = Outstanding(bounds, self._source)
        self._outstanding: dict[int, tuple[int, Any]] = {}
        self._stopped = False

    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        if not (taken := self._take_all()):
            self._queue.arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.longest):
                    await self._queue.arrived.wait()
            self._raise_if_over()
            taken = self._take_all()
        return taken

    def _raise_if_over(self) -> None:
        if self._epoch.ended:
            raise SessionEnded(f"{self._source} was closed")

    def _take_all(self) -> list[Delivery]:
        taken: list[Delivery] = []
        while not self._stopped and self._queue.waiting and self._held.may_take(self._epoch.waiting) > 0:
            taken.append(self._take())
        return taken

    def _take(self) -> Delivery:
        number, before, message = self._queue.waiting.popleft()
        self._outstanding[number] = (before, message)
        delivery = self._delivery(number, before, message)
        self._held.arrived(number, delivery.message)
        return delivery

    def _delivery(self, number: int, before: int, sent: Any) -> Delivery:
        message = Message(
            source=self._source,
            body=sent.body,
            headers=sent.headers,
            message_id=sent.key,
            position=f"{self._name}#{number}",
        )
        return Delivery(message, self._epoch, handle=number, suspect=before > 0, count=before + 1)

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.epoch.ended:
                self._outstanding.pop(delivery.handle, None)
                self._held.left((delivery.handle,))
        self._queue.arrived.set()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in reversed(deliveries):
            if not delivery.epoch.ended and delivery.handle in self._outstanding:
                before, message = self._outstanding.pop(delivery.handle)
                self._held.left((delivery.handle,))
                self._queue.waiting.appendleft((delivery.handle, before, message))
        self._queue.arrived.set()

    async def idle(self) -> bool:
        return not self._queue.waiting

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        self._queue.arrived.set()
        return ()

    async def close(self) -> None:
        self._epoch.end()
        for number, (before, message) in sorted(self._outstanding.items(), reverse=True):
            self._queue.waiting.appendleft((number, before + 1, message))
        self._outstanding.clear()
        self._held.clear()
        self._queue.arrived.set()
