"""One RabbitMQ session: a connection, a channel, its consumer, and the acks of that channel's deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import TypeVar

import msgspec
from aio_pika.abc import AbstractChannel
from aiormq.abc import AbstractChannel as Wire

from idemconsumer.brokers.outstanding import Backlog, Outstanding
from idemconsumer.brokers.rabbitmq.amqp_channel import AckTags, Consumers
from idemconsumer.brokers.rabbitmq.arrivals import Arrival
from idemconsumer.brokers.rabbitmq.limits import TAKE_OVER_AFTER
from idemconsumer.brokers.rabbitmq.link import FAREWELL, LOSS, RabbitmqLink, answered, channel_beside, farewell
from idemconsumer.brokers.rabbitmq.tap import TappedConnection
from idemconsumer.brokers.reaching import text_of
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import PROPERTIES, Message
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Lag

T = TypeVar("T")

# Seconds that an empty fetch waits.
POLL = 1.0
# A quorum queue accepts this many unconfirmed acks from a channel; the channel holds back the rest for a while.
ACKS_ON_THE_WAY = 32
# The order is part of the identity of dead letters.
_NAMED = ("type", *(name for name in PROPERTIES if name not in ("routing_key", "exchange", "type")))
# Seconds for the channel to pass on the acks that it held back: a few fsyncs of the queue's log.
HANDING_ON = 0.4


class RabbitmqSession:
    """See `ports.Session`. The prefetch follows the limits on outstanding messages, in number and in bytes.

    Nothing is nacked or rejected while it consumes (Q1): on a quorum queue each return counts towards the delivery
    limit, beyond which the broker deletes the message. So `release` returns nothing to the queue. Released messages,
    and those unsettled at `close`, are redelivered when the channel is closed, which costs one delivery count before
    RabbitMQ 4.3.
    """

    def __init__(self, link: RabbitmqLink, connection: TappedConnection, queue: str, bounds: Bounds) -> None:
        self._link = link
        self._connection = connection
        self._queue = queue
        self._most_of_body = bounds.max_message_bytes
        self._channel: AbstractChannel = connection.channel(publisher_confirms=False)
        self._wire: Wire
        self._consumers: Consumers
        self._consuming = asyncio.Lock()
        self._outstanding = Outstanding(bounds, f"rabbitmq:{queue}")
        self._backlog = Backlog()
        self._epoch = Epoch(returns_count=True)
        self.losses_count = False  # until a delivery carries a delivery count: a quorum queue counts
        self._tags = AckTags()
        self._arrived: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self._stopped = False
        self._ended: str | None = None
        self._acks = 0

    async def start(self) -> None:
        """Begin to consume. Raises BrokerUnavailable, naming the queue if it is missing."""
        try:
            await answered(self._consume())
        except LOSS as error:
            raise self._link.refused(self._queue, error) from error

    async def _consume(self) -> None:
        await self._channel.initialize()
        self._wire = await self._channel.get_underlay_channel()
        self._epoch.returns_count = not nack_is_free(self._wire.connection.server_properties)
        self._connection.close_callbacks.add(self._on_close)
        self._channel.close_callbacks.add(self._on_close)
        # A deleted queue closes neither channel nor connection: this callback is the only sign.
        self._wire.on_consumer_cancel_callbacks.add(self._on_cancel)
        await self._wire.queue_declare(self._queue, passive=True)
        self._consumers = Consumers(self._wire, self._queue)
        self._connection.take(self._wire.number, self._on_arrival, self._most_of_body)
        if not self._outstanding.paused:
            await self._consumers.begin(self._outstanding.may_hold(0))

    async def fetch(self) -> Sequence[Delivery]:
        await self._regulate()
        if self._ended is None and not self._arrived:
            self._wake.clear()
            try:
                async with asyncio.timeout(POLL):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if self._ended is not None:
            await farewell(self._channel, self._connection)
            raise SessionEnded(f"RabbitMQ queue {self._queue!r} at {self._link.where}: {self._ended}")
        return self._take_arrived()

    def _take_arrived(self) -> list[Delivery]:
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def _regulate(self) -> None:
        async with self._consuming:
            if self._stopped or self._ended is not None:
                return
            held, consumers = self._outstanding, self._consumers
            with contextlib.suppress(SessionEnded):
                if held.paused:
                    await self._ask(consumers.cancel())
                else:
                    await self._ask(consumers.regulate(held.may_hold(self._epoch.waiting), held.most))

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        # Tags are valid on their own channel only: on another one the same number is another message.
        tags = [delivery.handle for delivery in deliveries if delivery.epoch is self._epoch]
        self._tags.finish(tags)
        self._outstanding.left(tags)
        self._flush()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        return

    async def idle(self) -> bool:
        if self._arrived or self._ended is not None:
            return False
        try:
            # The count excludes deliveries on their way to us. The broker writes those out before it answers the second
            # question, so they have arrived by then.
            count = (await self._ask(self._wire.queue_declare(self._queue, passive=True))).message_count
            await self._ask(self._wire.queue_declare(self._queue, passive=True))
        except SessionEnded:
            return False
        return count == 0 and not self._arrived

    async def lag(self, *, whole: bool) -> Mapping[str, Lag]:
        """See `ports.KnowsLag`."""
        if not whole or self._ended is not None:
            return {}
        async with channel_beside(self._connection) as wire:
            count = (await answered(wire.queue_declare(self._queue, passive=True))).message_count
        return {f"rabbitmq:{self._queue}": self._backlog.lag(count or 0)}

    @property
    def silence(self) -> float | None:
        """See `ports.KnowsSilence`. A server with nothing to send sends a heartbeat every `heartbeat` seconds."""
        seconds = time.monotonic() - self._connection.reader.heard_at
        return seconds if seconds > 1.25 * self._link.heartbeat > 0 else None

    async def stop_fetching(self) -> Sequence[Delivery]:
        self._stopped = True
        if not self._epoch.returns_count:
            self._arrived.clear()
        async with self._consuming:
            if self._ended is None:
                with contextlib.suppress(SessionEnded):
                    await self._ask(self._consumers.cancel())
        return self._take_arrived()

    async def close(self) -> None:
        await self._return()
        await self._hand_on()
        self._end("closed")
        # The channel first: the broker answers its close only after it has processed the acks before it.
        await farewell(self._channel, self._connection)

    def _flush(self) -> None:
        """Send every ack that is due (Q3). Lost acks are not sent again, since their messages are redelivered."""
        if not self._epoch.ended and not self._wire.is_closed and (acks := self._tags.due()):
            self._connection.acknowledge(self._wire.number, acks)
            self._tags.sent(acks)
            self._acks += len(acks)

    async def _return(self) -> None:
        """Where a nack costs no delivery count, return unsettled messages: closing the channel would cost one (Q1).

        Only after the consumer is cancelled, or the messages would be delivered here once more.
        """
        if self._ended is None and self._stopped and not self._epoch.returns_count:
            with contextlib.suppress(*LOSS):
                await answered(self._wire.basic_nack(0, multiple=True, requeue=True, wait=False), FAREWELL)

    async def _hand_on(self) -> None:
        """Keep the channel busy until the queue has its acks (Q6).

        A channel that is closed at once drops the acks that it held back: of 300 single acks up to 267 were lost, and
        their messages redelivered (RabbitMQ 3.10, quorum queue). It passes them on while it answers requests.
        """
        if self._acks <= ACKS_ON_THE_WAY:
            return
        with contextlib.suppress(SessionEnded):
            deadline = time.monotonic() + HANDING_ON
            while self._ended is None and time.monotonic() < deadline:
                await asyncio.sleep(HANDING_ON / 20)
                await self._ask(self._wire.queue_declare(self._queue, passive=True))

    async def _ask(self, answer: Awaitable[T]) -> T:
        try:
            return await answered(answer)
        except LOSS as error:
            self._end(f"no answer: {text_of(error)}")
            raise SessionEnded(self._ended) from error

    def _on_arrival(self, arrival: Arrival) -> None:
        # Deliveries still arrive until the broker has processed the cancel; where returning them counts, they run
        # (D11).
        if self._ended is None and (self._epoch.returns_count or not self._stopped):
            self._consumers.serves(arrival.consumer_tag)
            delivery = delivery_of(arrival, self._queue, self._epoch)
            self.losses_count |= arrival.redelivered and _counted(arrival) > 0
            self._outstanding.arrived(delivery.handle, delivery.message)
            self._backlog.newest = delivery.message.timestamp
            self._arrived.append(delivery)
            self._wake.set()

    def _on_cancel(self, _frame: object) -> None:
        self._end("the broker cancelled the consumer; was the queue deleted?")

    def _on_close(self, _sender: object, error: BaseException | None) -> None:
        self._end(f"connection lost: {text_of(error)}")

    def _end(self, reason: str) -> None:
        self._epoch.end()
        if self._ended is None:
            self._ended = reason
        self._outstanding.clear()
        self._arrived.clear()
        self._wake.set()


def nack_is_free(server: Mapping[str, object]) -> bool:
    """Whether this broker, by its product and version, does not count a nack as a delivery: RabbitMQ from 4.3 on."""
    version = server.get("version")
    text = version.decode() if isinstance(version, bytes) else str(version)
    major, _, minor = text.partition(".")
    digits = re.match(r"\d+", minor)
    return (
        server.get("product") in ("RabbitMQ", b"RabbitMQ")
        and major.isdigit()
        and digits is not None
        and ((int(major), int(digits[0])) >= (4, 3))
    )


def delivery_of(arrival: Arrival, queue: str, epoch: Epoch) -> Delivery:
    """Translate one arrival. Headers that are neither text nor bytes become JSON text (`x-death` is a list).

    A header without a value is left out: as the text "null" it would be the same key for all such messages (R41).

    `x-delivery-count` (quorum queues) counts only on a redelivery (Q8): a message that was dead-lettered or shovelled
    from another queue may carry the count of its former queue. A classic queue reports only that this is not the first
    delivery.
    """
    carried = arrival.properties
    raw = carried.get("headers") or {}
    returned = _counted(arrival)
    count = 1 + max(returned, 1) if arrival.redelivered else 1
    message_id = carried.get("message_id")
    properties: dict[str, str | int] = {"routing_key": arrival.routing_key, "exchange": arrival.exchange}
    for name in _NAMED:
        if name in carried:
            properties[name] = carried[name]
    return Delivery(
        message=Message(
            source=f"rabbitmq:{queue}",
            body=arrival.body,
            headers={name: _text(value) for name, value in raw.items() if value is not None},
            message_id=message_id,
            position=f"{queue}#{message_id or arrival.tag}",
            timestamp=carried.get("timestamp"),
            properties=properties,
            whole=arrival.whole,
        ),
        epoch=epoch,
        handle=arrival.tag,
        suspect=arrival.redelivered or returned > 0,
        count=count,
        take_over=count > TAKE_OVER_AFTER,
        anonymous=True,
    )


def _counted(arrival: Arrival) -> int:
    """How many deliveries of this message a queue has counted."""
    returned = (arrival.properties.get("headers") or {}).get("x-delivery-count")
    return returned if isinstance(returned, int) else 0


def _text(value: object) -> str | bytes:
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return bytes(value)
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')
