"""RabbitMQ: classic and quorum queues, consumed on plain connections and published to with confirms."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeGuard

from aio_pika import Connection
from aio_pika.abc import AbstractChannel, AbstractConnection
from aiormq import spec
from aiormq.abc import AbstractChannel as Wire
from aiormq.abc import DeliveredMessage, FieldTable
from aiormq.exceptions import ChannelNotFoundEntity, ChannelPreconditionFailed

from idemconsumer.brokers.rabbitmq.limits import limits, read_queue, time_to_live
from idemconsumer.brokers.rabbitmq.link import LOSS, RabbitmqLink, answered, channel_beside, farewell
from idemconsumer.brokers.rabbitmq.rabbitmq_session import RabbitmqSession
from idemconsumer.brokers.rabbitmq.tap import TappedConnection
from idemconsumer.brokers.reaching import text_of
from idemconsumer.brokers.sendable import one_after_another
from idemconsumer.errors import BadMessage, BrokerUnavailable, ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.message.reply_address import OUTCOME
from idemconsumer.opening import Opening
from idemconsumer.ports.broker import BEHIND, Bounds, Finding, Outgoing, Reply, Unsent
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings

# Seconds for a publish, connecting included. Under a memory or disk alarm the broker accepts publishes and never
# answers.
CONFIRM = 30.0
PERSISTENT = 2
DIRECT = "amq.rabbitmq.reply-to."  # prefix of the reply address of a requester without a queue
_Send: TypeAlias = Callable[[Wire], Awaitable[object]]
_AROUND_HEADERS = 1024  # bytes of the frame with the headers: the other properties, none of which has more than 255
# No queue can be declared with these arguments: an expiry of 0 is invalid. If the queue exists, the error names the
# argument that differs, and for a stream that is its type.
_NEVER: Final[FieldTable] = {"x-queue-type": "classic", "x-expires": 0}
_STREAM = "is a stream, which has no acks per message: its earlier messages would be skipped; use a quorum queue"


class RabbitmqBroker:
    """See `ports.Broker`. Each session has its own connection; all publishing shares another one.

    Raises ConfigurationError when the settings have no usable address, or TLS files that cannot be read.
    """

    hands_over = True  # a quorum queue deletes a message that was delivered too often

    def __init__(self, settings: Settings) -> None:
        self._link = RabbitmqLink(settings)
        self._management = settings.rabbitmq_management
        self._publisher = _Publisher(self._link)

    def feed(self, subscription: Subscription) -> str:
        return subscription.source

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> RabbitmqSession:
        """Raises ConfigurationError for a stream."""
        (queue,) = {subscription.name for subscription in subscriptions}
        connection = await self._link.connect(f"consumer of {queue}", TappedConnection)
        try:
            if await is_stream(connection, queue):  # each time: the name may be another queue's by now
                raise ConfigurationError(f"rabbitmq:{queue}: {_STREAM}")
            session = RabbitmqSession(self._link, connection, queue, bounds)
            await session.start()
        except BaseException:
            await farewell(connection)
            raise
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish to a queue, or to `exchange/routing.key`; persistent and confirmed. `Outgoing.key` is the message id.

        The first `/` ends the exchange's name: `/a/b` is the queue `a/b`. Raises BrokerUnavailable when the queue does
        not exist, when the exchange routes a message to no queue, or when not every message was confirmed in time;
        BadMessage for a message that RabbitMQ never accepts. Some messages may have been published: publish all again,
        with the same keys.
        """
        await self._publisher.publish(name, messages)

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        """See `ports.Replying`. Sends to the queue in `reply_to`, through the default exchange of the same vhost.

        With direct reply-to the broker stores nothing, and does not report a requester that has left.
        """
        return await self._publisher.reply(replies)

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        """See `ports.Relaying`. Persistent, mandatory and confirmed."""
        return await one_after_another(
            messages, [message.key for message in messages], partial(self._publisher.relay, name), CONFIRM
        )

    async def check_destination(self, name: str) -> None:
        """Check that the queue or the exchange exists, else raise BrokerUnavailable; not whether the exchange routes
        the key to a queue."""
        connection = await self._link.connect("check", Connection)
        try:
            await self._demand(connection, *route(name))
        finally:
            await farewell(connection)

    async def check(self, subscription: Subscription) -> list[Finding]:
        subject, queue = subscription.source, subscription.name
        found = []
        if self._link.exposed:
            text = f"RabbitMQ at {self._link.where} is reached over a network without TLS; write amqps://"
            found.append(Finding("warning", subject, text))
        try:
            connection = await self._link.connect("check", Connection)
            try:
                await self._demand(connection, "", queue)
                if await is_stream(connection, queue):
                    return [*found, Finding("error", subject, f"{queue!r} {_STREAM}")]
            finally:
                await farewell(connection)
        except BrokerUnavailable as error:
            return [*found, Finding("error", subject, str(error))]
        found.append(Finding("ok", subject, f"RabbitMQ at {self._link.where} has the queue {queue!r}"))
        if self._management is None:
            unread = "set IDEMCONSUMER_RABBITMQ_MANAGEMENT=http://user:password@host:15672"
            return [*found, Finding("warning", subject, f"the limits of {queue!r} were not read; {unread}")]
        try:
            described, version = await self._read(self._management, queue)
        except (OSError, ValueError) as error:
            return [*found, Finding("warning", subject, f"the limits of {queue!r} cannot be read: {error_text(error)}")]
        return [*found, *limits(subject, described, version)]

    async def retention_seconds(self, subscription: Subscription) -> float | None:
        """Seconds for which a message may wait in the queue, and so be redelivered; `inf`: for ever, None: unknown."""
        if self._management is None:
            return None
        try:
            described, _ = await self._read(self._management, subscription.name)
        except (OSError, ValueError):
            return None
        return time_to_live(described)

    async def _read(self, management: str, queue: str) -> tuple[dict[str, Any], str]:
        return await asyncio.to_thread(read_queue, management, self._link.vhost, queue, self._link.tls)

    async def close(self) -> None:
        await self._publisher.close()

    async def _demand(self, connection: AbstractConnection, exchange: str, key: str) -> None:
        """Check that the exchange exists, or the queue `key` if the exchange has no name. Raises BrokerUnavailable."""
        try:
            async with channel_beside(connection) as wire:
                if exchange:
                    await answered(wire.exchange_declare(exchange, passive=True))
                else:
                    await answered(wire.queue_declare(key, passive=True))
        except LOSS as error:
            if not exchange:
                raise self._link.refused(key, error) from error
            if isinstance(error, ChannelNotFoundEntity):
                raise self._link.unrouted(exchange, key) from error
            raise self._link.unavailable(f"exchange {exchange!r} cannot be used", error) from error


async def is_stream(connection: AbstractConnection, queue: str) -> bool:
    """Whether the name is that of a stream, which must not be consumed as a queue (Q10). Also False where that cannot
    be determined, for example without the configure right: AMQP has no request for it."""
    try:
        async with channel_beside(connection) as wire:
            await answered(wire.queue_declare(queue, durable=True, arguments=_NEVER))
    except LOSS as error:
        return "'x-queue-type'" in text_of(error) and "'stream'" in text_of(error)
    return False


class _Publisher:
    """One connection for all publishing (Q5): the broker may block it for hours, and acks on it would not get through.

    A channel serves one publish at a time. The client tells returned messages apart only by message id, so with the
    same id in two publishes, one of them could take a returned message for confirmed.
    """

    def __init__(self, link: RabbitmqLink) -> None:
        self._link = link
        self._connection: AbstractConnection | None = None
        self._connecting = Opening(BrokerUnavailable)
        self._spare: list[AbstractChannel] = []

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        exchange, key, answers = await self._answers(name, messages)
        for answer in answers:
            if isinstance(answer, DeliveredMessage | ChannelNotFoundEntity):
                raise self._link.unrouted(exchange, key)
            if _refused(answer):
                raise BadMessage("unsendable", f"RabbitMQ does not accept it for {name!r}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise self._link.unavailable(f"publishing to {name!r} failed", answer) from answer

    async def relay(self, name: str, messages: Sequence[Outgoing]) -> list[Unsent | None]:
        exchange, key, answers = await self._answers(name, messages)
        relayed = [self._relayed(answer, exchange, key) for answer in answers]
        if len(messages) > 1 and any(map(_refused, answers)):  # which closed the channel for the others
            clock = asyncio.get_running_loop().time
            until = clock() + CONFIRM
            for index, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    relayed[index] = (await self.relay(name, [messages[index]]))[0] if clock() < until else BEHIND
        return relayed

    async def _answers(self, name: str, messages: Sequence[Outgoing]) -> tuple[str, str, list[object]]:
        """The exchange and the routing key of a destination, and the answer to each message."""
        exchange, key = route(name)
        sends = [partial(_send, exchange=exchange, key=key, message=message) for message in messages]
        try:
            return exchange, key, await self._confirmed(sends, f"{name!r}")
        except LOSS as error:
            raise self._link.unavailable(f"publishing to {name!r} failed", error) from error

    def _relayed(self, answer: object, exchange: str, key: str) -> Unsent | None:
        if isinstance(answer, DeliveredMessage | ChannelNotFoundEntity):
            return Unsent(str(self._link.unrouted(exchange, key)))
        return self._unsent(answer)

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        try:
            answers = await self._confirmed([partial(_answer, reply=reply) for reply in replies], "reply queues")
        except BrokerUnavailable as error:
            return [Unsent(str(error))] * len(replies)
        except LOSS as error:
            return [Unsent(str(self._link.unavailable("replying failed", error)))] * len(replies)
        if len(replies) > 1 and any(map(_refused, answers)):  # which closed the channel for the others
            return [(await self.reply([reply]))[0] for reply in replies]
        return [self._unsent(answer) for answer in answers]

    def _unsent(self, answer: object) -> Unsent | None:
        if _refused(answer):
            return Unsent(f"RabbitMQ at {self._link.where} does not accept it: {answer}", final=True)
        if isinstance(answer, DeliveredMessage):
            return Unsent(f"RabbitMQ at {self._link.where} has no such queue", final=True, gone=True)
        if isinstance(answer, BaseException):
            return Unsent(str(self._link.unavailable("it was not confirmed", answer)))
        return None

    async def _confirmed(self, sends: Sequence[_Send], where: str) -> list[object]:
        """The answer to each message: a confirmation, the message itself if no queue took it, or an error. Raises what
        connecting raises, and BrokerUnavailable when not all have an answer in time."""
        try:
            return await answered(self._send_all(sends), CONFIRM)
        except TimeoutError as error:
            await self._drop()
            raise BrokerUnavailable(
                f"RabbitMQ at {self._link.where} did not confirm messages to {where} within {CONFIRM:.0f} s; "
                "does it have an alarm? See `rabbitmq-diagnostics alarms`"
            ) from error

    async def _send_all(self, sends: Sequence[_Send]) -> list[object]:
        channel = await self._channel()
        try:
            wire = await channel.get_underlay_channel()
            return await asyncio.gather(*(send(wire) for send in sends), return_exceptions=True)
        finally:
            if not channel.is_closed:
                self._spare.append(channel)

    async def close(self) -> None:
        await self._connecting.close()
        await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._spare.clear()
        if connection is not None:
            await farewell(connection)

    async def _channel(self) -> AbstractChannel:
        while self._spare:
            if not (channel := self._spare.pop()).is_closed:
                return channel
        async with self._connecting.turn():
            # `is_closed` stays False on a connection that was lost; `connected` is cleared.
            if self._connection is None or not self._connection.connected.is_set():
                self._connection = await self._link.connect("publisher", Connection)
            connection = self._connection
        channel = connection.channel()
        await channel.initialize()
        return channel


def route(name: str) -> tuple[str, str]:
    """Exchange and routing key of a destination. The exchange without a name routes to the queue named by the key."""
    exchange, slash, key = name.partition("/")
    return (exchange, key) if slash else ("", name)


def _refused(answer: object) -> TypeGuard[Exception]:
    """Whether no retry would send this message: it or its headers are too large, or it cannot be encoded."""
    too_large = isinstance(answer, ChannelPreconditionFailed) and "size" in str(answer)
    return too_large or isinstance(answer, _Unsendable)


async def _send(wire: Wire, exchange: str, key: str, message: Outgoing) -> object:
    headers: Any = {
        name: value if isinstance(value, str) else bytearray(value) for name, value in message.headers.items()
    }
    _check_headers(wire, message)
    properties = _encodable(spec.Basic.Properties(delivery_mode=PERSISTENT, headers=headers, message_id=message.key))
    return await wire.basic_publish(
        message.body, exchange=exchange, routing_key=key, mandatory=True, properties=properties
    )


def _encodable(properties: spec.Basic.Properties) -> spec.Basic.Properties:
    try:
        properties.marshal()
    except (TypeError, ValueError, struct.error) as error:
        raise _Unsendable(f"it cannot be encoded: {error}") from error
    return properties


def _check_headers(wire: Wire, message: Outgoing) -> None:
    """Refuse headers that exceed the agreed frame size: RabbitMQ would end the connection, with everything that other
    publishes have under way on it."""
    most = wire.connection.connection_tune.frame_max
    size = (
        sum(len(name.encode()) + len(_bytes(value)) + 16 for name, value in message.headers.items()) + _AROUND_HEADERS
    )
    if most and size > most:
        raise _Unsendable(f"its headers have {size} bytes, and a frame holds {most}")


class _Unsendable(Exception):
    """The message is known to be unsendable before it is sent: an error of sending does not blame a message (X10)."""


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


async def _answer(wire: Wire, reply: Reply) -> object:
    correlation = reply.address.correlation
    properties = _encodable(
        spec.Basic.Properties(
            delivery_mode=PERSISTENT,
            headers={OUTCOME: reply.outcome},
            message_id=reply.id,
            correlation_id=correlation if isinstance(correlation, str) else None,
            content_type=reply.content_type,
        )
    )
    to = reply.address.to
    # Older versions return every mandatory message to a requester without a queue, and deliver it as well.
    mandatory = not to.startswith(DIRECT)
    return await wire.basic_publish(reply.body, routing_key=to, mandatory=mandatory, properties=properties)
