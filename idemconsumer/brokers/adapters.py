"""Broker adapters by scheme. A driver is imported when its scheme is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.message.sources import BadSource, is_pattern, split_source
from idemconsumer.missing import cannot_import
from idemconsumer.ports.broker import Broker
from idemconsumer.settings import Settings

_ADAPTERS: Final = {
    "kafka": ("idemconsumer.brokers.kafka.kafka_broker", "KafkaBroker"),
    "rabbitmq": ("idemconsumer.brokers.rabbitmq.rabbitmq_broker", "RabbitmqBroker"),
    "sqs": ("idemconsumer.brokers.sqs.sqs_broker", "SqsBroker"),
    "postgres": ("idemconsumer.brokers.postgres_broker", "PostgresBroker"),
    "memory": ("idemconsumer.brokers.memory", "MemoryBroker"),
}
_NAMES: Final = {"kafka": "Kafka", "rabbitmq": "RabbitMQ"}


def destination(text: str) -> tuple[str, str]:
    """Scheme and name of the destination `scheme:name`. Raises ConfigurationError for anything else."""
    try:
        scheme, name = split_source(text)
    except BadSource as error:
        raise ConfigurationError(str(error)) from None
    if is_pattern(text):
        raise ConfigurationError(f"{text!r} stands for many topics; publish to one of them")
    return scheme, name


def check_delay(scheme: str, name: str, delay: float) -> None:
    """Raise ConfigurationError if a message to this destination cannot be delayed as requested (P7)."""
    if not delay or scheme in ("postgres", "sqs", "memory"):
        return
    raise ConfigurationError(
        f"publish to '{scheme}:{name}' with a delay: {_NAMES[scheme]} cannot delay messages; publish to a postgres: "
        f"queue with the delay, and have its handler publish to '{scheme}:{name}'"
    )


def connect(scheme: str, settings: Settings) -> Broker:
    """The client for a scheme; does not connect yet. Raises ConfigurationError when its driver or its address is
    missing."""
    module, name = _ADAPTERS[scheme]
    try:
        adapter = getattr(import_module(module), name)
    except ImportError as missing:
        if (missing.name or "").startswith("idemconsumer"):
            raise
        raise cannot_import(f"{scheme}: its driver", missing) from missing
    broker: Broker = adapter(settings)
    return broker
