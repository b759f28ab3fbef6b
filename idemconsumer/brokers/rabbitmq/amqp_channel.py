"""The state of one channel: the tags to acknowledge next, and its consumer with its prefetch.

A channel numbers its deliveries 1, 2, 3, … without holes. RabbitMQ closes the channel when an ack names a tag that is
not outstanding, including one that an earlier `multiple` covered. A `multiple` acknowledges everything up to its tag,
finished or not. So `multiple` is used only over a finished prefix, and a tag is never named twice (Q3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiormq.abc import AbstractChannel as Wire
from aiormq.abc import DeliveredMessage

from idemconsumer.rules.fetching import next_prefetch

# AMQP carries the prefetch in 16 bits, and 0 would mean "no limit".
MAX_PREFETCH = 65_535


@dataclass(frozen=True, slots=True)
class Ack:
    """One `basic.ack`. With `multiple` it acknowledges every outstanding tag up to `tag`."""

    tag: int
    multiple: bool


class AckTags:
    """Which tags are finished, and which are acked. Pure: finished tags in, acks out."""

    def __init__(self) -> None:
        self._through = 0
        self._alone: set[int] = set()
        self._finished: set[int] = set()

    def finish(self, tags: Iterable[int]) -> None:
        """Mark these deliveries as finished. Tags that were acked before are ignored."""
        self._finished.update(tag for tag in tags if tag > self._through and tag not in self._alone)

    def due(self) -> list[Ack]:
        """The acks to send next: one for the finished prefix, and one for each finished tag beyond it."""
        tag, last, taken = self._through + 1, 0, 0
        while (finished := tag in self._finished) or tag in self._alone:
            if finished:
                last, taken = tag, taken + 1
            tag += 1
        acks = [Ack(last, multiple=taken > 1)] if taken else []
        return acks + [Ack(beyond, multiple=False) for beyond in sorted(self._finished) if beyond > last]

    def sent(self, acks: Iterable[Ack]) -> None:
        """Record that these acks were sent on the channel."""
        for ack in acks:
            if ack.multiple:
                covered = range(self._through + 1, ack.tag + 1)
                self._finished.difference_update(covered)
                self._alone.difference_update(covered)
                self._through = ack.tag
            else:
                self._finished.discard(ack.tag)
                self._alone.add(ack.tag)
        while self._through + 1 in self._alone:
            self._through += 1
            self._alone.remove(self._through)


@dataclass(slots=True)
class _Consumer:
    tag: str
    prefetch: int


class Consumers:
    """The consumers of one channel: usually one.

    There are two while one replaces the other (Q11), and none while their handler is paused (O14).

    RabbitMQ applies `basic.qos` only to new consumers, and a quorum queue refuses a qos for the whole channel. So
    another prefetch needs another consumer. The former consumer is cancelled once the new one has received a delivery.
    On a queue with a single active consumer the new one never does, and cancelling the former would activate another
    worker's consumer while this worker still runs its deliveries. Deliveries of a cancelled consumer stay with the
    channel, unacked.
    """

    def __init__(self, wire: Wire, queue: str) -> None:
        self._wire = wire
        self._queue = queue
        self._consumers: list[_Consumer] = []
        self._served: set[str] = set()
        self._begun = 0

    def serves(self, tag: str) -> None:
        """Record that the consumer with this tag got a delivery. It may arrive before the answer to basic.consume."""
        self._served.add(tag)

    async def begin(self, prefetch: int) -> None:
        prefetch = min(prefetch, MAX_PREFETCH)
        await self._wire.basic_qos(prefetch_count=prefetch)
        self._begun += 1
        tag = f"idemconsumer-{self._begun}"
        await self._wire.basic_consume(self._queue, _tapped, consumer_tag=tag)
        self._consumers.append(_Consumer(tag, prefetch))

    async def regulate(self, wanted: int, most: int) -> None:
        """Bring the prefetch to `wanted`, if the change is worth it; never leave it above `most`."""
        if not self._consumers:
            await self.begin(min(wanted, most))
            return
        *former, newest = self._consumers
        if newest.tag in self._served:
            await self._cancel(former)
        prefetch = min(next_prefetch(newest.prefetch, wanted, most), MAX_PREFETCH)
        if prefetch == newest.prefetch:
            return
        if former and newest.tag not in self._served:
            await self._cancel([newest])
        await self.begin(prefetch)

    async def cancel(self) -> None:
        await self._cancel(list(self._consumers))

    async def _cancel(self, consumers: list[_Consumer]) -> None:
        for consumer in consumers:
            self._consumers.remove(consumer)
            self._served.discard(consumer.tag)
            await self._wire.basic_cancel(consumer.tag)


async def _tapped(_: DeliveredMessage) -> None:
    """The client's callback, never called: the session takes deliveries before the client sees them (Q12)."""
