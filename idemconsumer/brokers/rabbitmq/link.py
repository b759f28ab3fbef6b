"""Connecting to RabbitMQ: address, TLS, heartbeat, and connection errors in our words."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shlex
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Protocol, TypeVar
from urllib.parse import SplitResult, unquote

import aio_pika
import aiormq
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from aiormq.abc import AbstractChannel as Wire

from idemconsumer.addresses import is_local, rabbitmq_parameters, rabbitmq_urls
from idemconsumer.brokers.rabbitmq.arrivals import read_everything
from idemconsumer.brokers.reaching import silence, speaks_tls, text_of, tls_of, unreached
from idemconsumer.certificates import RenewedContext, expired
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.settings import Settings
from idemconsumer.user_code.cancellation import being_cancelled

read_everything()

T = TypeVar("T")
C = TypeVar("C", bound=AbstractConnection)

# Seconds. aiormq declares a silent peer dead after three heartbeats; a shorter interval would lose the connection
# whenever a handler blocks the event loop for some seconds.
HEARTBEAT = 15
# Seconds to wait for an answer that a healthy broker gives at once.
ANSWER = 10.0
# Seconds to close one channel or connection; messages that are not acked by then are redelivered.
FAREWELL = 5.0

# What the client raises for a lost channel or connection: its own errors, and others that it lets through.
LOSS: tuple[type[Exception], ...] = (*CONNECTION_EXCEPTIONS, EOFError, asyncio.InvalidStateError)


class _Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


class _Host:
    """One server of a cluster."""

    def __init__(self, parts: SplitResult) -> None:
        self.url = parts.geturl()
        self.encrypted = parts.scheme == "amqps"
        self.name, self.port = parts.hostname or "", parts.port or (5671 if self.encrypted else 5672)
        self.at = f"{self.name}:{self.port}"


class RabbitmqLink:
    """The addresses of RabbitMQ, and the TLS and login for them. Raises ConfigurationError for settings that cannot
    work."""

    def __init__(self, settings: Settings) -> None:
        if settings.rabbitmq is None:
            raise ConfigurationError(
                "settings: a `rabbitmq:` source is used, but no address is given; "
                "set IDEMCONSUMER_RABBITMQ=amqp://user:password@host:5672[,host:5672]/vhost"
            )
        hosts = rabbitmq_urls(settings.rabbitmq)
        random.shuffle(hosts)  # so that workers spread over the nodes of a cluster
        self._hosts = [_Host(parts) for parts in hosts]
        self.where = ",".join(host.at for host in self._hosts)
        self.vhost = unquote(hosts[0].path[1:]) or "/"
        parameters = rabbitmq_parameters(hosts[0])
        self.tls = _tls(parameters)
        self.exposed = not all(host.encrypted or is_local(host.name) for host in self._hosts)
        self._guest = hosts[0].username == "guest"
        self._heartbeat = None if "heartbeat" in parameters else HEARTBEAT
        self.heartbeat = int(parameters.get("heartbeat", HEARTBEAT))
        silence("aio_pika", "aiormq")

    async def connect(self, purpose: str, kind: type[C]) -> C:
        """A plain connection (Q4): one that reconnects by itself would ack old tags on a new channel.

        Tries the hosts in order and takes the first that accepts it. Raises BrokerUnavailable.
        """
        why = []
        for host in list(self._hosts):
            try:
                return await answered(
                    aio_pika.connect(
                        host.url,
                        ssl_context=self.tls,
                        client_properties={"connection_name": f"idemconsumer {purpose}"},
                        heartbeat=self._heartbeat,
                        connection_class=kind,
                    )
                )
            except LOSS as error:
                why.append((f"RabbitMQ at {host.at}: cannot connect: {await self._why_not(host, error)}", error))
                if host is self._hosts[0]:
                    self._hosts.append(self._hosts.pop(0))  # the next connection tries it last
        raise BrokerUnavailable("; ".join(text for text, _ in why)) from why[-1][1]

    async def _why_not(self, host: _Host, error: BaseException) -> str:
        """Why no connection can be made."""
        if isinstance(error, aiormq.exceptions.ProbableAuthenticationError):
            only_local = "; the user guest may only connect from the server's own machine" if self._guest else ""
            return f"the login was refused: wrong user or password in IDEMCONSUMER_RABBITMQ{only_local}"
        if isinstance(error, aiormq.exceptions.InvalidFrameError) and "OpenOk" in str(error):
            return (
                f"the vhost {self.vhost!r} is refused: it does not exist, or this user may not use it; see "
                "`rabbitmqctl list_permissions`, or correct IDEMCONSUMER_RABBITMQ (for the vhost /, write no path)"
            )
        if why := unreached(error, host.at, "IDEMCONSUMER_RABBITMQ", "cafile in IDEMCONSUMER_RABBITMQ"):
            return why
        if self.tls is not None and (why := expired(self.tls.certificate)) is not None:
            return f"it refuses the connection: {why}"
        if (tls := await speaks_tls(host.name, host.port)) not in (None, host.encrypted):
            instead = "amqps://" if tls else "amqp://"
            return f"it speaks {'TLS' if tls else 'no TLS'} on that port; write {instead}, or the other port"
        if isinstance(error, aiormq.exceptions.IncompatibleProtocolError) or "0 bytes" in str(error):
            return f"it does not speak AMQP 0.9.1 on that port ({text_of(error)})"
        return text_of(error)

    def unavailable(self, what: str, error: BaseException) -> BrokerUnavailable:
        return BrokerUnavailable(f"RabbitMQ at {self.where}: {what}: {text_of(error)}")

    def refused(self, queue: str, error: BaseException) -> BrokerUnavailable:
        """The exception for a queue that cannot be consumed, with the reason in our words."""
        if isinstance(error, aiormq.ChannelNotFoundEntity):
            return self.missing(queue)
        if isinstance(error, TimeoutError):
            return BrokerUnavailable(
                f"RabbitMQ at {self.where}: no answer about queue {queue!r} in {ANSWER:.0f} s; a quorum queue without "
                f"a leader does not answer: see `rabbitmq-queues quorum_status {shlex.quote(queue)}`"
            )
        return self.unavailable(f"queue {queue!r} cannot be consumed", error)

    def missing(self, queue: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"RabbitMQ at {self.where} has no queue {queue!r} in vhost {self.vhost!r}; create it, for "
            f"example: rabbitmqadmin --vhost={self.vhost} declare queue {shlex.quote(f'name={queue}')} durable=true "
            """arguments='{"x-queue-type":"quorum"}'"""
        )

    def unrouted(self, exchange: str, key: str) -> BrokerUnavailable:
        """The exception for a message that no queue took. The exchange without a name routes to the queue `key`."""
        if not exchange:
            return self.missing(key)
        queue_like = f"{exchange}/{key}"
        return BrokerUnavailable(
            f"RabbitMQ at {self.where}: exchange {exchange!r} in vhost {self.vhost!r} does not exist, or routes "
            f"{key!r} to no queue; bind one, or write rabbitmq:/{queue_like} for the queue {queue_like!r}"
        )


async def answered(answer: Awaitable[T], within: float = ANSWER) -> T:
    """Wait for the client, at most `within` seconds. Raises one of LOSS.

    A channel that closes cancels the calls that wait on it. That becomes ConnectionResetError here, so that
    CancelledError always means a cancellation of the caller itself.
    """
    try:
        async with asyncio.timeout(within):
            return await answer
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise ConnectionResetError("the channel was closed") from None


@contextlib.asynccontextmanager
async def channel_beside(connection: AbstractConnection) -> AsyncIterator[Wire]:
    """A separate channel for one question: a negative answer closes its channel. Raises one of LOSS."""
    channel = connection.channel(publisher_confirms=False)
    try:
        await answered(channel.initialize())
        yield await channel.get_underlay_channel()
    finally:
        await farewell(channel)


async def farewell(*resources: _Closable) -> None:
    """Close each in turn, in at most FAREWELL seconds each. Failures are ignored: a dead one cannot be closed."""
    for resource in resources:
        with contextlib.suppress(*LOSS):
            await answered(resource.close(), FAREWELL)


def _tls(parameters: Mapping[str, str]) -> RenewedContext | None:
    """The TLS context; None leaves the choice to the address (plain, or TLS with the system's authorities)."""
    ca, cert, key = files = [parameters.get(name) for name in ("cafile", "certfile", "keyfile")]
    trusting = parameters.get("no_verify_ssl") == "1"
    if not (any(files) or trusting):
        return None

    def wrong(error: Exception) -> str:
        named = f"cafile={ca}, certfile={cert} and keyfile={key}"
        return f"settings: TLS for RabbitMQ: {error}; {named} in IDEMCONSUMER_RABBITMQ must name readable PEM files"

    return tls_of(ca, cert, key, wrong, trusting=trusting)
