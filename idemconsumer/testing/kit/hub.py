"""The brokers of the kit: queues and topics in memory, under the names that handlers consume from and publish to."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from idemconsumer.brokers.memory import MemoryQueue
from idemconsumer.brokers.sendable import check_sendable
from idemconsumer.message.message import NO_PROPERTIES, Message, Subscription
from idemconsumer.message.sources import consumes
from idemconsumer.ports.broker import Outgoing

LARGEST: Final = 4 * 1024 * 1024


class Published(msgspec.Struct, frozen=True):
    """A message that an app has published to `target`: its `body`, its `headers` and its `key` (for Kafka the record
    key, else the message id)."""

    target: str
    body: bytes
    headers: Mapping[str, str | bytes]
    key: str | None

    @property
    def json(self) -> Any:
        """The decoded body."""
        return msgspec.json.decode(self.body)


class Hub:
    """All queues of a kit. A Kafka topic keeps its messages, and each consumer group reads it from the beginning. In
    any other queue each message goes to one consumer."""

    def __init__(self) -> None:
        self.published: list[Published] = []
        self._numbers = count(1)
        self._copies = count(1)
        self._queues: dict[str, MemoryQueue] = {}
        self._topics: defaultdict[str, list[Message]] = defaultdict(list)
        self._groups: dict[tuple[str, str], MemoryQueue] = {}  # by group and subscription, which may be a pattern
        self._delayed: dict[asyncio.TimerHandle, None] = {}

    def queue(self, subscription: Subscription) -> MemoryQueue:
        """The queue from which a consumer reads."""
        source = subscription.source
        if subscription.scheme != "kafka":
            return self._queues.setdefault(source, MemoryQueue())
        if (queue := self._groups.get((subscription.group, source))) is None:
            queue = self._groups[subscription.group, source] = MemoryQueue()
            for topic, messages in list(self._topics.items()):
                for message in messages if consumes(source, topic) else ():
                    queue.put(next(self._copies), message)
        return queue

    def publish(self, scheme: str, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish as an app does. Raises what every broker of this scheme raises for such a message."""
        for message in messages:
            check_sendable(scheme, name, message, LARGEST)
        for message in messages:
            self.published.append(Published(f"{scheme}:{name}", message.body, message.headers, message.key))
            if message.delay:
                self._later(message.delay, partial(self._arrive, scheme, name, message))
            else:
                self._arrive(scheme, name, message)

    def _arrive(self, scheme: str, name: str, message: Outgoing) -> None:
        self.arrive(self.made(scheme, name, message))

    def made(
        self, scheme: str, name: str, sent: Outgoing, properties: Mapping[str, str | int] = NO_PROPERTIES
    ) -> Message:
        """The message as the broker of this scheme delivers it."""
        number, source, now = next(self._numbers), f"{scheme}:{name}", datetime.now(UTC)
        if scheme == "kafka":
            key = sent.record_key if sent.record_key is not None else None if sent.key is None else sent.key.encode()
            offset = len(self._topics[source])
            return Message(
                source, sent.body, sent.headers, order_hint=key, position=f"{name}-0-{offset}", timestamp=now,
                partition=0, offset=offset, record_key=key,
            )  # fmt: skip
        own = sent.key or (f"kit-{number}" if scheme == "sqs" else None)
        if scheme == "rabbitmq":
            exchange, slash, routing_key = name.partition("/")
            at: dict[str, str | int] = {"exchange": exchange, "routing_key": routing_key} if slash else {
                "exchange": "", "routing_key": name,
            }  # fmt: skip
            properties = at | dict(properties)
        group = sent.headers.get("MessageGroupId") if name.endswith(".fifo") else None
        return Message(
            source, sent.body, sent.headers, message_id=own, order_hint=group, position=f"{name}#{number}",
            timestamp=now, properties=properties,
        )  # fmt: skip

    def arrive(self, message: Message, *, before: int = 0) -> None:
        """Make a message available to its consumers. `before`: how often it was delivered before, for a redelivery."""
        if not message.source.startswith("kafka:"):
            self._queues.setdefault(message.source, MemoryQueue()).put(next(self._copies), message, before)
            return
        if not before:
            self._topics[message.source].append(message)
        for (_, source), queue in self._groups.items():
            if consumes(source, message.source):
                queue.put(next(self._copies), message, before)

    @property
    def delayed(self) -> list[float]:
        """The times, on the loop's clock, at which delayed messages arrive."""
        return [timer.when() for timer in self._delayed]

    def _later(self, seconds: float, arrive: Callable[[], None]) -> None:
        def act() -> None:
            del self._delayed[timer]
            arrive()

        timer = asyncio.get_running_loop().call_later(seconds, act)
        self._delayed[timer] = None

    def clear(self) -> None:
        for timer in self._delayed:
            timer.cancel()
        self._delayed.clear()
        for each in (self._queues, self._topics, self._groups, self.published):
            each.clear()
