"""An in-process queue for unit tests: `memory:name`. Nothing survives the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

from idemconsumer.brokers.outstanding import Outstanding
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
        self._delayed: list[asyncio.TimerHandle] = []

    def _queue(self, name: str) -> _Queue:
        return self._queues.setdefault(name, _Queue())

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
        queue = self._queue(name)
        queue.waiting.append((next(self._numbers), 0, message))
        queue.arrived.set()

    async def check_destination(self, name: str) -> None:
        return

    async def check(self, subscription: Subscription) -> list[Finding]:
        return [Finding("ok", subscription.source, "in memory: for tests only")]

    async def close(self) -> None:
        for timer in self._delayed:
            timer.cancel()
        self._queues.clear()


class MemorySession:
    losses_count = False

    def __init__(self, name: str, queue: _Queue, bounds: Bounds) -> None:
        self._name = name
        self._queue = queue
        self._epoch = Epoch()
        self._held = Outstanding(bounds, f"memory:{name}")
        self._outstanding: dict[int, tuple[int, Outgoing]] = {}
        self._stopped = False

    async def fetch(self) -> Sequence[Delivery]:
        if self._epoch.ended:
            raise SessionEnded(f"memory:{self._name} was closed")
        if self._stopped or self._free() <= 0 or not self._queue.waiting:
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
        taken: list[Delivery] = []
        while self._queue.waiting and self._free() > 0:
            taken.append(self._take())
        return taken

    def _free(self) -> int:
        return self._held.may_take(self._epoch.waiting)

    def _take(self) -> Delivery:
        number, before, message = self._queue.waiting.popleft()
        self._outstanding[number] = (before, message)
        taken = Message(
            source=f"memory:{self._name}",
            body=message.body,
            headers=message.headers,
            message_id=message.key,
            position=f"{self._name}#{number}",
        )
        self._held.arrived(number, taken)
        return Delivery(taken, self._epoch, handle=number, suspect=before > 0, count=before + 1)

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
        return ()

    async def close(self) -> None:
        self._epoch.end()
        for number, (before, message) in sorted(self._outstanding.items(), reverse=True):
            self._queue.waiting.appendleft((number, before + 1, message))
        self._outstanding.clear()
        self._held.clear()
        self._queue.arrived.set()
