"""RabbitMQ: classic and quorum queues, consumed by plain connections and published to with confirms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq import spec
from aiormq.abc import AbstractChannel as Wire
from aiormq.abc import DeliveredMessage

from idemconsumer.addresses import read_url
from idemconsumer.brokers.rabbitmq.limits import limits, read_queue
from idemconsumer.brokers.rabbitmq.link import LOSS, Link, answered, farewell
from idemconsumer.brokers.rabbitmq.session import RabbitmqSession
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Finding, Outgoing
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings

# Seconds for a publish, connecting included. Under a memory or disk alarm the broker takes publishes and
# never answers.
CONFIRM = 30.0
PERSISTENT = 2


class RabbitmqBroker:
    """See `ports.Broker`. Each session has a connection of its own; all publishing shares another one.

    Raises ConfigurationError when the settings name no usable address or TLS files that cannot be read.
    """

    hands_over = True  # a quorum queue deletes a message that was delivered too often

    def __init__(self, settings: Settings) -> None:
        self._link = Link(settings)
        self._management = settings.rabbitmq_management
        if self._management is not None:
            example = "http(s)://user:password@host:15672"
            read_url(self._management, "rabbitmq_management", ("http", "https"), example)
        self._publisher = _Publisher(self._link)

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> RabbitmqSession:
        (queue,) = {subscription.name for subscription in subscriptions}
        connection = await self._link.connect(f"consumer of {queue}")
        session = RabbitmqSession(self._link, connection, queue)
        try:
            await session.start(bounds)
        except BaseException:
            await farewell(connection)
            raise
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to the queue, persistent and confirmed, with `Outgoing.key` as message id.

        Raises BrokerUnavailable when the queue is missing, or when not every message was confirmed in time.
        Some may have been: publish all again, with the same keys.
        """
        await self._publisher.publish(name, messages)

    async def check(self, subscription: Subscription) -> list[Finding]:
        subject, queue = subscription.source, subscription.name
        found = []
        if self._link.exposed:
            text = f"RabbitMQ at {self._link.where} is reached over a network without TLS; write amqps://"
            found.append(Finding("warning", subject, text))
        try:
            connection = await self._link.connect("check")
            try:
                await self._exists(connection, queue)
            finally:
                await farewell(connection)
        except BrokerUnavailable as error:
            return [*found, Finding("error", subject, str(error))]
        found.append(Finding("ok", subject, f"RabbitMQ at {self._link.where} has the queue {queue!r}"))
        if self._management is None:
            unread = "set IDEMCONSUMER_RABBITMQ_MANAGEMENT=http://user:password@host:15672"
            return [*found, Finding("warning", subject, f"limits of {queue!r} were not read; {unread}")]
        try:
            described, version = await asyncio.to_thread(
                read_queue, self._management, self._link.vhost, queue, self._link.tls
            )
        except (OSError, ValueError) as error:
            return [*found, Finding("warning", subject, f"limits of {queue!r} cannot be read: {error_text(error)}")]
        return [*found, *limits(subject, described, version)]

    async def close(self) -> None:
        await self._publisher.close()

    async def _exists(self, connection: AbstractConnection, queue: str) -> None:
        try:
            channel = connection.channel()
            await answered(channel.initialize())
            await answered(channel.declare_queue(queue, passive=True))
        except LOSS as error:
            raise self._link.refused(queue, error) from error


class _Publisher:
    """One connection for all publishing (Q5): the broker may block it for hours, and no ack would pass there.

    A channel serves one publish at a time: the client tells returned messages apart by message id alone, so
    the same id in two publishes would let one of them count a returned message as confirmed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()
        self._spare: list[AbstractChannel] = []

    async def publish(self, queue: str, messages: Sequence[Outgoing]) -> None:
        try:
            answers = await answered(self._send_all(queue, messages), CONFIRM)
        except TimeoutError as error:
            await self.close()
            raise BrokerUnavailable(
                f"RabbitMQ at {self._link.where} did not confirm what went to {queue!r} in {CONFIRM:.0f} s; "
                "does it have an alarm? See `rabbitmq-diagnostics alarms`"
            ) from error
        except LOSS as error:
            raise self._link.unavailable(f"publishing to {queue!r} failed", error) from error
        for answer in answers:
            if isinstance(answer, DeliveredMessage):
                raise self._link.missing(queue)
            if isinstance(answer, BaseException):
                raise self._link.unavailable(f"publishing to {queue!r} failed", answer) from answer

    async def _send_all(self, queue: str, messages: Sequence[Outgoing]) -> list[object]:
        """The answer to each: a confirmation, the message itself if no queue took it, an error."""
        channel = await self._channel()
        try:
            wire = await channel.get_underlay_channel()
            sends = (_send(wire, queue, message) for message in messages)
            return await asyncio.gather(*sends, return_exceptions=True)
        finally:
            if not channel.is_closed:
                self._spare.append(channel)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        self._spare.clear()
        if connection is not None:
            await farewell(connection)

    async def _channel(self) -> AbstractChannel:
        while self._spare:
            if not (channel := self._spare.pop()).is_closed:
                return channel
        async with self._connecting:
            # `is_closed` stays False on a connection that was lost; `connected` is cleared.
            if self._connection is None or not self._connection.connected.is_set():
                self._connection = await self._link.connect("publisher")
            connection = self._connection
        channel = connection.channel()
        await channel.initialize()
        return channel


async def _send(wire: Wire, queue: str, message: Outgoing) -> object:
    properties = spec.Basic.Properties(delivery_mode=PERSISTENT, headers=dict(message.headers), message_id=message.key)
    return await wire.basic_publish(message.body, routing_key=queue, mandatory=True, properties=properties)
