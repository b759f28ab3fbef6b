"""Kafka through aiokafka: connecting, publishing and checking. Consuming is in `session`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any

from idemconsumer.addresses import is_local, read_hosts
from idemconsumer.errors import BrokerUnavailable, ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Finding, Outgoing
from idemconsumer.settings import Settings

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
    from aiokafka.errors import KafkaError
except ImportError as error:
    raise ConfigurationError("kafka: sources need aiokafka; pip install 'idemconsumer[kafka]'") from error

from idemconsumer.brokers.kafka.client import create_command, stop, words
from idemconsumer.brokers.kafka.session import KafkaSession

OPEN_TIMEOUT = 15.0
PUBLISH_TIMEOUT = 30.0
CHECK_TIMEOUT = 10.0
HEARTBEAT_MS = 1_000  # a member notices a rebalance by its heartbeat, and all wait for the last one to notice
METADATA_MAX_AGE_MS = 30_000  # a topic or partition that appears is consumed after this long at the latest

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class KafkaBroker:
    """See `ports.Broker`. One session is one membership in a consumer group, for all topics of that group.

    The constructor raises ConfigurationError for settings that cannot work. It also silences aiokafka's
    loggers, which write hundreds of lines while a broker is down; set a level on the logger "aiokafka" to
    see them.
    """

    hands_over = False

    def __init__(self, settings: Settings) -> None:
        if settings.kafka is None:
            raise ConfigurationError("kafka: no address; set IDEMCONSUMER_KAFKA=host:9092[,host:9092]")
        instead = "write host:9092[,host:9092], and credentials into IDEMCONSUMER_KAFKA_SASL_USERNAME and _PASSWORD"
        hosts = read_hosts(settings.kafka, "kafka", instead)
        self._servers = settings.kafka
        self._settings = settings
        self._connection = _connection(settings)
        plain = not self._connection["security_protocol"].endswith("SSL")
        self._exposed = plain and not all(map(is_local, hosts))
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._confirmed: set[str] = set()
        quiet = logging.getLogger("aiokafka")
        if quiet.level == logging.NOTSET:
            quiet.setLevel(logging.CRITICAL)

    def feed(self, subscription: Subscription) -> str:
        return f"kafka:{subscription.group}"

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> KafkaSession:
        """Join the group for all topics. BrokerUnavailable when none exists; a missing one is logged, once."""
        group = subscriptions[0].group
        topics = sorted({subscription.name for subscription in subscriptions})
        rebalance_ms = int((bounds.drain + 10) * 1000)
        consumer = AIOKafkaConsumer(
            **self._connection,
            group_id=group,
            group_instance_id=_instance(self._settings.kafka_group_instance_id),
            # By default it commits what still runs, skips what came before it joined, reads what was aborted (K9).
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=int(self._settings.kafka_session_timeout * 1000),
            heartbeat_interval_ms=HEARTBEAT_MS,
            rebalance_timeout_ms=rebalance_ms,
            request_timeout_ms=rebalance_ms + 10_000,  # a join is answered when the slowest member has drained
            metadata_max_age_ms=METADATA_MAX_AGE_MS,
        )
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                # With topics in the constructor this hangs for as long as one is missing.
                await consumer.start()
                missing = set(topics) - await consumer.topics()
            if len(missing) == len(topics):
                raise BrokerUnavailable(self._missing(topics))
            session = KafkaSession(consumer, group, topics, bounds, self._servers)
            session.start(missing)
        except (TimeoutError, KafkaError, OSError) as error:
            await stop(consumer)
            raise self._unreachable(error) from error
        except BaseException:
            await stop(consumer)
            raise
        return session

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        """Publish all and wait until every in-sync replica has them. Raises BrokerUnavailable.

        When it raises, some may be on the topic and others may still get there: publish again, with the same
        keys.
        """
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT):
                producer = await self._ready(name)
                sent = [
                    await producer.send(
                        name,
                        value=message.body,
                        key=None if message.key is None else message.key.encode(),
                        headers=[(header, value.encode()) for header, value in message.headers.items()],
                    )
                    for message in messages
                ]
                for answer in await asyncio.gather(*sent, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer
        except (TimeoutError, KafkaError, OSError) as error:
            raise BrokerUnavailable(
                f"Kafka at {self._servers} did not confirm {len(messages)} message(s) to topic {name!r}: {words(error)}"
            ) from error

    async def check(self, subscription: Subscription) -> list[Finding]:
        subject = subscription.source
        found = []
        if self._exposed:
            instead = "set IDEMCONSUMER_KAFKA_SECURITY_PROTOCOL=SSL or SASL_SSL"
            text = f"Kafka at {self._servers} is reached over a network without TLS; {instead}"
            found.append(Finding("warning", subject, text))
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), self._admin() as admin:
                partitions = await _partitions(admin, subscription.name)
                if not partitions:
                    return [*found, Finding("error", subject, self._missing([subscription.name]))]
                retention = await _retention(admin, subscription.name)
        except (TimeoutError, KafkaError, OSError) as error:
            return [*found, Finding("error", subject, str(self._unreachable(error)))]
        found.append(Finding("ok", subject, f"topic {subscription.name!r} with {partitions} partition(s)"))
        if retention is None:
            found.append(Finding("warning", subject, "this client may not read the topic's retention"))
        elif math.isinf(retention):
            found.append(Finding("warning", subject, "Kafka keeps messages for ever; a replay can exceed `retain`"))
        else:
            found.append(Finding("ok", subject, f"Kafka keeps messages for {retention:.0f} s"))
        return found

    async def retention_seconds(self, subscription: Subscription) -> float | None:
        """How long the topic keeps a message, and so can redeliver it; `inf`: for ever, None: unknown."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT), self._admin() as admin:
                return await _retention(admin, subscription.name)
        except (TimeoutError, KafkaError, OSError):
            return None

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(TimeoutError, KafkaError, OSError):
                async with asyncio.timeout(CHECK_TIMEOUT):
                    await producer.stop()

    async def _ready(self, name: str) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **self._connection,
                    acks="all",
                    enable_idempotence=True,
                    max_request_size=max(self._settings.max_message_bytes, 1024 * 1024),
                )
                try:
                    await producer.start()
                except BaseException:
                    await producer.stop()
                    raise
                self._producer = producer
            if name not in self._confirmed:
                # Sending to a missing topic waits for the whole request time-out, and gives no reason.
                async with self._admin() as admin:
                    if not await _partitions(admin, name):
                        raise BrokerUnavailable(self._missing([name]))
                self._confirmed.add(name)
            return self._producer

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(**self._connection)
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()

    def _missing(self, topics: Sequence[str]) -> str:
        commands = "; ".join(create_command(self._servers, name) for name in topics)
        names = ", ".join(repr(name) for name in topics)
        return f"Kafka at {self._servers} has no topic {names}, or this client may not see it; create it: {commands}"

    def _unreachable(self, error: BaseException) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"Kafka at {self._servers} cannot be used ({words(error)}); start it, or "
            "correct IDEMCONSUMER_KAFKA, IDEMCONSUMER_KAFKA_SECURITY_PROTOCOL and the credentials"
        )


def _connection(settings: Settings) -> dict[str, Any]:
    """The arguments of every client of aiokafka. Raises ConfigurationError."""
    protocol, mechanism = settings.kafka_security_protocol.upper(), settings.kafka_sasl_mechanism.upper()
    if protocol not in PROTOCOLS:
        raise ConfigurationError(f"kafka_security_protocol: {protocol!r}; write one of {', '.join(PROTOCOLS)}")
    options: dict[str, Any] = {"bootstrap_servers": settings.kafka, "security_protocol": protocol}
    if protocol.startswith("SASL"):
        if mechanism not in MECHANISMS:
            raise ConfigurationError(f"kafka_sasl_mechanism: {mechanism!r}; write one of {', '.join(MECHANISMS)}")
        if settings.kafka_sasl_username is None or settings.kafka_sasl_password is None:
            raise ConfigurationError(
                f"kafka_security_protocol: {protocol} needs credentials; set "
                "IDEMCONSUMER_KAFKA_SASL_USERNAME and IDEMCONSUMER_KAFKA_SASL_PASSWORD"
            )
        options["sasl_mechanism"] = mechanism
        options["sasl_plain_username"] = settings.kafka_sasl_username
        options["sasl_plain_password"] = settings.kafka_sasl_password
    if protocol.endswith("SSL"):
        try:
            context = ssl.create_default_context(cafile=settings.kafka_ca_file)
            if settings.kafka_cert_file is not None:
                context.load_cert_chain(settings.kafka_cert_file, settings.kafka_key_file)
        except OSError as error:
            raise ConfigurationError(
                f"kafka: a certificate file cannot be used ({error}); IDEMCONSUMER_KAFKA_CA_FILE, _CERT_FILE "
                "and _KEY_FILE name PEM files"
            ) from error
        options["ssl_context"] = context
    return options


def _instance(name: str | None) -> str | None:
    """The static member's id; each worker process of one program needs its own."""
    worker = os.environ.get("IDEMCONSUMER_WORKER")
    return f"{name}-{worker}" if name and worker else name


async def _partitions(admin: AIOKafkaAdminClient, topic: str) -> int:
    [found] = await admin.describe_topics([topic])
    return 0 if found["error_code"] else len(found["partitions"])


async def _retention(admin: AIOKafkaAdminClient, topic: str) -> float | None:
    names = dict.fromkeys(("retention.ms", "cleanup.policy"))
    [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, names)])
    values = {
        entry["config_names"]: entry["config_value"]
        for resource in answer.to_object()["resources"]
        for entry in resource["config_entries"]
    }
    if "delete" not in str(values.get("cleanup.policy", "delete")):
        return math.inf  # compacted: the last message of a key stays
    if (milliseconds := values.get("retention.ms")) is None:
        return None
    return math.inf if int(milliseconds) < 0 else int(milliseconds) / 1000
