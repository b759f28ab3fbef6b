"""A client of the kit's brokers, as a worker uses it: `ports.Broker` over `hub.Hub`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from idemconsumer.brokers.outstanding import Outstanding
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.message.replies import CONTENT_TYPE, MESSAGE_ID, OUTCOME
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Finding, Lag, Outgoing, Reply, Unsent
from idemconsumer.testing.kit.hub import Copy, Hub, Queue

_LONGEST: Final = 0.1  # seconds of a fetch


class KitBroker:
    """Of one scheme, over a hub that other clients have too. What a session leaves unsettled comes again, in order."""

    hands_over = False

    def __init__(self, scheme: str, hub: Hub) -> None:
        self._scheme = scheme
        self._hub = hub

    def feed(self, subscription: Subscription) -> str:
        return f"{subscription.group} {subscription.source}"

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> KitSession:
        (subscription,) = subscriptions
        return KitSession(subscription, self._hub.queue(subscription), bounds)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        self._hub.publish(self._scheme, name, messages)

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """See `ports.Relaying`."""
        self._hub.publish(self._scheme, name, messages)
        return [None] * len(messages)

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`."""
        for each in replies:
            headers: dict[str, str | bytes] = {OUTCOME: each.outcome, MESSAGE_ID: each.id}
            headers[CONTENT_TYPE] = each.content_type
            if each.address.correlation is not None:
                headers["correlation-id"] = each.address.correlation
            self._hub.publish(self._scheme, each.address.to, [Outgoing(each.body, headers, each.id)])
        return [None] * len(replies)

    async def check_destination(self, name: str) -> None:
        return

    async def check(self, subscription: Subscription) -> list[Finding]:
        return [Finding("ok", subscription.source, "in memory: for tests only")]

    async def close(self) -> None:
        """What the hub has stays."""


class KitSession:
    """See `ports.Session`."""

    losses_count = False

    def __init__(self, subscription: Subscription, queue: Queue, bounds: Bounds) -> None:
        self._subscription = subscription
        self._queue = queue
        self._epoch = Epoch()
        self._bound = Outstanding(bounds, subscription.source)
        self._in_hand: dict[int, Copy] = {}
        self._taken = 0
        self._stopped = False

    async def fetch(self) -> Sequence[Delivery]:
        self._raise_if_over()
        if not (deliveries := self._take()):
            self._queue.arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST):
                    await self._queue.arrived.wait()
            self._raise_if_over()
            deliveries = self._take()
        return deliveries

    def _raise_if_over(self) -> None:
        if self._epoch.ended:
            raise SessionEnded(f"{self._subscription.source} was closed")

    def _take(self) -> list[Delivery]:
        taken: list[Delivery] = []
        while not self._stopped and self._queue.waiting and self._bound.may_take(self._epoch.waiting) > 0:
            copy = self._queue.waiting.popleft()
            self._taken += 1
            self._in_hand[self._taken] = copy
            self._bound.arrived(self._taken, copy.message)
            again, kafka = copy.before > 0, self._subscription.scheme == "kafka"
            taken.append(
                Delivery(
                    copy.message, self._epoch, self._taken, suspect=again and not kafka, inherited=again and kafka,
                    count=copy.before + 1, anonymous=self._subscription.scheme == "rabbitmq",
                    source=self._subscription.source,
                )
            )  # fmt: skip
        return taken

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.epoch.ended and self._in_hand.pop(delivery.handle, None) is not None:
                self._bound.left((delivery.handle,))
        self._queue.arrived.set()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in reversed(deliveries):
            if not delivery.epoch.ended and (copy := self._in_hand.pop(delivery.handle, None)) is not None:
                self._bound.left((delivery.handle,))
                self._queue.waiting.appendleft(copy)
        self._queue.arrived.set()

    async def lag(self, *, whole: bool) -> dict[str, Lag]:
        """See `ports.KnowsLag`."""
        waiting = len(self._queue.waiting)
        return {self._subscription.source: Lag(waiting, 0.0 if not waiting else None)}

    async def idle(self) -> bool:
        return not self._queue.waiting

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        self._queue.arrived.set()
        return ()

    async def close(self) -> None:
        self._epoch.end()
        for _, copy in sorted(self._in_hand.items(), reverse=True):
            self._queue.waiting.appendleft(Copy(copy.message, copy.before + 1))
        self._in_hand.clear()
        self._bound.clear()
        self._queue.arrived.set()
