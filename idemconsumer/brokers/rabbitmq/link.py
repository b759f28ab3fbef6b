"""Connecting to RabbitMQ: address, TLS, heartbeat, and its errors in our words."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable
from typing import Protocol, TypeVar
from urllib.parse import parse_qs, unquote

import aio_pika
import aiormq
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import CONNECTION_EXCEPTIONS

from idemconsumer.addresses import is_local, read_url
from idemconsumer.brokers.rabbitmq.decoding import read_everything
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.redaction import error_text
from idemconsumer.settings import Settings
from idemconsumer.user_code.cancellation import being_cancelled

read_everything()

T = TypeVar("T")

# Seconds. aiormq calls a silent peer dead after three heartbeats; shorter ones would cost the connection
# whenever a handler keeps the event loop busy for some seconds.
HEARTBEAT = 15
# Seconds for anything that the broker answers at once when it is healthy.
ANSWER = 10.0
# Seconds to close one channel or connection; what is not acked by then comes again.
FAREWELL = 5.0

# What the client raises for a lost channel or connection: besides its own errors, those that it runs into.
LOSS: tuple[type[Exception], ...] = (*CONNECTION_EXCEPTIONS, EOFError, asyncio.InvalidStateError)


class _Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


class Link:
    """Where RabbitMQ is and how to get in. Raises ConfigurationError for settings that cannot work."""

    def __init__(self, settings: Settings) -> None:
        if settings.rabbitmq is None:
            raise ConfigurationError(
                "settings: a `rabbitmq:` source is used, but no address is given; "
                "set IDEMCONSUMER_RABBITMQ=amqp://user:password@host:5672/vhost"
            )
        example = "amqp://user:password@host:5672/vhost, or amqps:// for TLS"
        parts = read_url(settings.rabbitmq, "rabbitmq", ("amqp", "amqps"), example)
        self.where = f"{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"
        self.vhost = unquote(parts.path[1:]) or "/"
        self.tls = _tls(settings)
        self.exposed = parts.scheme == "amqp" and not is_local(parts.hostname)
        self._url = settings.rabbitmq
        self._heartbeat = None if "heartbeat" in parse_qs(parts.query) else HEARTBEAT
        for name in ("aio_pika", "aiormq"):
            # Both log every loss several times, as errors; the feed that reconnects logs once that a session ended.
            if (logger := logging.getLogger(name)).level == logging.NOTSET:
                logger.setLevel(logging.CRITICAL)

    async def connect(self, purpose: str) -> AbstractConnection:
        """A plain connection (Q4): one that reconnected by itself would ack old tags on a new channel.

        Raises BrokerUnavailable.
        """
        try:
            return await answered(
                aio_pika.connect(
                    self._url,
                    ssl_context=self.tls,
                    client_properties={"connection_name": f"idemconsumer {purpose}"},
                    heartbeat=self._heartbeat,
                )
            )
        except LOSS as error:
            raise self.unavailable("cannot connect", error) from error

    def unavailable(self, what: str, error: BaseException) -> BrokerUnavailable:
        return BrokerUnavailable(f"RabbitMQ at {self.where}: {what}: {text_of(error)}")

    def refused(self, queue: str, error: BaseException) -> BrokerUnavailable:
        """In our words, why a queue cannot be consumed."""
        if isinstance(error, aiormq.ChannelNotFoundEntity):
            return self.missing(queue)
        if isinstance(error, TimeoutError):
            return BrokerUnavailable(
                f"RabbitMQ at {self.where}: no answer about queue {queue!r} in {ANSWER:.0f} s; a quorum queue without "
                f"a leader does not answer: see `rabbitmq-queues quorum_status {queue}`"
            )
        return self.unavailable(f"queue {queue!r} cannot be consumed", error)

    def missing(self, queue: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"RabbitMQ at {self.where} has no queue {queue!r} in vhost {self.vhost!r}; create it, for "
            f"example: rabbitmqadmin --vhost={self.vhost} declare queue name={queue} durable=true "
            """arguments='{"x-queue-type":"quorum"}'"""
        )


def text_of(error: BaseException | None) -> str:
    """The text of an error, or its name where it has none."""
    return (error and error_text(error)) or type(error).__name__


async def answered(answer: Awaitable[T], within: float = ANSWER) -> T:
    """Wait for the client, at most `within` seconds; raises one of LOSS.

    A channel that closes cancels what waits on it. That becomes ConnectionResetError, so that only a
    cancellation of the caller itself is one.
    """
    try:
        async with asyncio.timeout(within):
            return await answer
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise ConnectionResetError("the channel was closed") from None


async def farewell(*resources: _Closable) -> None:
    """Close each in turn, within FAREWELL seconds; a dead one cannot be closed, and that is not reported."""
    for resource in resources:
        with contextlib.suppress(*LOSS):
            await answered(resource.close(), FAREWELL)


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """None leaves the choice to the address (plain, or TLS with the system's authorities)."""
    ca, cert, key = settings.rabbitmq_ca_file, settings.rabbitmq_cert_file, settings.rabbitmq_key_file
    if ca is None and cert is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"settings: TLS for RabbitMQ: {error}; rabbitmq_ca_file={ca}, rabbitmq_cert_file={cert} and "
            f"rabbitmq_key_file={key} must name readable PEM files"
        ) from error
    return context
