"""A client of the kit's brokers for workers: `ports.Broker` over `hub.Hub`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from idemconsumer.brokers.memory import MemoryQueue, MemorySession
from idemconsumer.message.message import Subscription
from idemconsumer.message.reply_address import CONTENT_TYPE, MESSAGE_ID, OUTCOME
from idemconsumer.ports.broker import Bounds, Delivery, Finding, Lag, Outgoing, Reply, Unsent
from idemconsumer.testing.kit.hub import Hub


class KitBroker:
    """The broker of one scheme, over a hub shared with other clients. Unsettled messages come again, in order."""

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
        """Does nothing: the hub keeps its messages."""


class KitSession(MemorySession):
    """See `ports.Session`. Delivers like the broker of its scheme."""

    longest = 0.1

    def __init__(self, subscription: Subscription, queue: MemoryQueue, bounds: Bounds) -> None:
        super().__init__(subscription.name, queue, bounds, subscription.scheme)
        self._scheme = subscription.scheme

    def _delivery(self, number: int, before: int, sent: Any) -> Delivery:
        again, kafka = before > 0, self._scheme == "kafka"
        return Delivery(
            sent, self._epoch, number, suspect=again and not kafka, inherited=again and kafka, count=before + 1,
            anonymous=self._scheme == "rabbitmq", source=self._source,
        )  # fmt: skip

    async def lag(self, *, whole: bool) -> dict[str, Lag]:
        """See `ports.KnowsLag`."""
        waiting = len(self._queue.waiting)
        return {self._source: Lag(waiting, 0.0 if not waiting else None)}
