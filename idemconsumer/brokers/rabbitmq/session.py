"""One RabbitMQ session: a connection, a channel, a consumer, and the acks of what that channel delivered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq.abc import AbstractChannel as Wire
from aiormq.abc import DeliveredMessage

from idemconsumer.brokers.rabbitmq.ack_tags import AckTags
from idemconsumer.brokers.rabbitmq.limits import TAKE_OVER_AFTER
from idemconsumer.brokers.rabbitmq.link import FAREWELL, LOSS, Link, answered, farewell, text_of
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Bounds, Delivery, Epoch

T = TypeVar("T")

# AMQP carries the prefetch as 16 bits, and 0 would mean "no bound".
MAX_PREFETCH = 65_535
# Seconds that an empty fetch waits.
POLL = 1.0
# A quorum queue takes this many unconfirmed acks from a channel; the channel holds the others back for a while.
ACKS_ON_THE_WAY = 32
# Seconds for the channel to hand on what it held back: a few forced writes of the queue's log.
HANDING_ON = 0.4


class RabbitmqSession:
    """See `ports.Session`. The broker itself keeps at most `bounds.in_flight` deliveries unacked.

    Nothing is ever nacked or rejected (Q1): on a quorum queue each return counts towards the delivery limit,
    beyond which the broker deletes the message. So `release` gives nothing back; what was released, and what
    is unsettled at `close`, comes again when the channel is closed, which costs one delivery count.
    """

    def __init__(self, link: Link, connection: AbstractConnection, queue: str) -> None:
        self._link = link
        self._connection = connection
        self._queue = queue
        self._channel: AbstractChannel = connection.channel(publisher_confirms=False)
        self._wire: Wire
        self._consumer = ""
        self._epoch = Epoch()
        self._tags = AckTags()
        self._sending = asyncio.Lock()
        self._arrived: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self._stopped = False
        self._ended: str | None = None
        self._acks = 0

    async def start(self, bounds: Bounds) -> None:
        """Begin to consume. Raises BrokerUnavailable, naming the queue if it is missing."""
        try:
            await answered(self._consume(min(bounds.in_flight, MAX_PREFETCH)))
        except LOSS as error:
            raise self._link.refused(self._queue, error) from error

    async def _consume(self, prefetch: int) -> None:
        await self._channel.initialize()
        self._wire = await self._channel.get_underlay_channel()
        self._connection.close_callbacks.add(self._on_close)
        self._channel.close_callbacks.add(self._on_close)
        # A deleted queue closes neither channel nor connection: this is its only sign.
        self._wire.on_consumer_cancel_callbacks.add(self._on_cancel)
        await self._wire.queue_declare(self._queue, passive=True)
        await self._wire.basic_qos(prefetch_count=prefetch)
        self._consumer = (await self._wire.basic_consume(self._queue, self._on_message)).consumer_tag or ""

    async def fetch(self) -> Sequence[Delivery]:
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
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        # Tags mean something to their own channel only: elsewhere the same number is another message.
        self._tags.finish(delivery.handle for delivery in deliveries if delivery.epoch is self._epoch)
        await self._flush()

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        return

    async def idle(self) -> bool:
        if self._arrived or self._ended is not None:
            return False
        try:
            # The count excludes what is on its way to us; the broker writes that out before it answers the
            # second question, so it has arrived by then.
            count = (await self._ask(self._wire.queue_declare(self._queue, passive=True))).message_count
            await self._ask(self._wire.queue_declare(self._queue, passive=True))
        except SessionEnded:
            return False
        return count == 0 and not self._arrived

    async def stop_fetching(self) -> None:
        self._stopped = True
        self._arrived.clear()
        if self._ended is None:
            with contextlib.suppress(SessionEnded):
                await self._ask(self._wire.basic_cancel(self._consumer))

    async def close(self) -> None:
        await self._flush()
        await self._hand_on()
        self._end("closed")
        # The channel first: its close is answered after the acks before it were taken.
        await farewell(self._channel, self._connection)

    async def _flush(self) -> None:
        """Send every ack that is due; forget every loss, since the messages come again.

        One sender at a time: a `multiple` that overtook a smaller ack would cover its tag, and the smaller
        ack would then close the channel. A cancelled sender leaves the rest to the next one.
        """
        async with self._sending:
            try:
                while not self._epoch.ended and (ack := self._tags.due()) is not None:
                    # A dead connection's writer takes nothing more from its full queue, and reports nothing.
                    await answered(self._wire.basic_ack(ack.tag, ack.multiple, wait=False), FAREWELL)
                    self._tags.sent(ack)
                    self._acks += 1
            except LOSS as error:
                self._end(f"acks cannot be sent: {text_of(error)}")

    async def _hand_on(self) -> None:
        """Keep the channel busy until its acks are with the queue (Q6).

        A channel that is closed at once forgets those that it held back: of 300 single acks up to 267 were lost,
        and their messages delivered again (RabbitMQ 3.10, quorum queue). It hands them on while it serves us.
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

    async def _on_message(self, delivered: DeliveredMessage) -> None:
        # No await in here: the client runs each delivery as a task, and only so do they stay in order.
        if not self._stopped:
            self._arrived.append(delivery_of(delivered, self._queue, self._epoch))
            self._wake.set()

    def _on_cancel(self, _frame: object) -> None:
        self._end("the broker cancelled the consumer; was the queue deleted?")

    def _on_close(self, _sender: object, error: BaseException | None) -> None:
        self._end(f"connection lost: {text_of(error)}")

    def _end(self, reason: str) -> None:
        self._epoch.end()
        if self._ended is None:
            self._ended = reason
        self._arrived.clear()
        self._wake.set()


def delivery_of(delivered: DeliveredMessage, queue: str, epoch: Epoch) -> Delivery:
    """Translate one arrival. Headers that are neither text nor bytes become JSON text (`x-death` is a list).

    `x-delivery-count` (quorum queues) is trusted only on a redelivery (Q8): a message that was dead-lettered or
    shovelled from another queue may carry the count of its former queue. A classic queue only tells that it
    is not the first time.
    """
    properties = delivered.header.properties
    raw = properties.headers or {}
    returned = raw.get("x-delivery-count")
    returned = returned if isinstance(returned, int) else 0
    redelivered = bool(delivered.redelivered)
    count = 1 + max(returned, 1) if redelivered else 1
    return Delivery(
        message=Message(
            source=f"rabbitmq:{queue}",
            body=delivered.body,
            headers={name: _text(value) for name, value in raw.items()},
            message_id=properties.message_id,
            position=f"{queue}#{properties.message_id or delivered.delivery_tag}",
        ),
        epoch=epoch,
        handle=delivered.delivery_tag,
        suspect=redelivered or returned > 0,
        count=count,
        take_over=count > TAKE_OVER_AFTER,
    )


def _text(value: object) -> str | bytes:
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return bytes(value)
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')
