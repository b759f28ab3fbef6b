"""Broker adapters by scheme. A driver is imported when its scheme is first used, never before."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.message.sources import BadSource, split_source
from idemconsumer.ports.broker import Broker
from idemconsumer.settings import Settings

_ADAPTERS: Final = {
    "kafka": ("idemconsumer.brokers.kafka.broker", "KafkaBroker"),
    "rabbitmq": ("idemconsumer.brokers.rabbitmq.broker", "RabbitmqBroker"),
    "sqs": ("idemconsumer.brokers.sqs.broker", "SqsBroker"),
    "postgres": ("idemconsumer.brokers.postgres", "PostgresBroker"),
    "memory": ("idemconsumer.brokers.memory", "MemoryBroker"),
}
_PACKAGES: Final = {"kafka": "aiokafka", "rabbitmq": "aio-pika", "sqs": "aiobotocore"}  # as pip knows them


def destination(text: str) -> tuple[str, str]:
    """Scheme and name of `scheme:name`, where to publish. Raises ConfigurationError for anything else."""
    try:
        return split_source(text)
    except BadSource as error:
        raise ConfigurationError(str(error)) from None


def connect(scheme: str, settings: Settings) -> Broker:
    """The client for a scheme; opens nothing yet. ConfigurationError when its driver or its address is missing."""
    module, name = _ADAPTERS[scheme]
    try:
        adapter = getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("idemconsumer"):
            raise
        raise ConfigurationError(
            f"{scheme}: the driver {_PACKAGES.get(scheme, missing.name)} is not installed; "
            f"pip install 'idemconsumer[{scheme}]'"
        ) from missing
    broker: Broker = adapter(settings)
    return broker
