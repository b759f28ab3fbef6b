"""Broker adapters by scheme. A driver is imported when its scheme is first used, never before."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.ports.broker import Broker
from idemconsumer.settings import Settings

_ADAPTERS: Final = {
    "kafka": ("idemconsumer.brokers.kafka", "KafkaBroker"),
    "rabbitmq": ("idemconsumer.brokers.rabbitmq", "RabbitmqBroker"),
    "sqs": ("idemconsumer.brokers.sqs", "SqsBroker"),
    "postgres": ("idemconsumer.brokers.postgres", "PostgresBroker"),
    "memory": ("idemconsumer.brokers.memory", "MemoryBroker"),
}
_PACKAGES: Final = {"kafka": "aiokafka", "rabbitmq": "aio-pika", "sqs": "aiobotocore"}  # as pip knows them


def destination(text: str) -> tuple[str, str]:
    """Scheme and name of `scheme:name`, as publishing takes it. Raises ConfigurationError for anything else."""
    scheme, colon, name = text.partition(":")
    if scheme not in _ADAPTERS:
        what = f"unknown scheme {scheme!r}" if colon else f"{text!r} is not a source"
        raise ConfigurationError(f"{what}; write scheme:name with one of {', '.join(sorted(_ADAPTERS))}")
    if not name or not name.isprintable() or name != name.strip():
        raise ConfigurationError(f"{text!r} names no {scheme} source; write {scheme}:name")
    if scheme == "sqs" and ("/" in name or ":" in name):
        raise ConfigurationError(f"{text!r} names no queue; write the queue's name, e.g. sqs:orders")
    if name.startswith("~"):
        raise ConfigurationError(f'{text!r}: names that start with "~" are reserved; choose another')
    return scheme, name


def connect(scheme: str, settings: Settings) -> Broker:
    """The client for a scheme; opens nothing yet. ConfigurationError when its driver or its address is missing."""
    try:
        module, name = _ADAPTERS[scheme]
    except KeyError:
        raise ConfigurationError(
            f"unknown scheme {scheme!r}; write scheme:name with one of {', '.join(sorted(_ADAPTERS))}"
        ) from None
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
