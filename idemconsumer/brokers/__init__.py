"""Broker adapters by scheme. A driver is imported when its scheme is first used, never before."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.ports import Broker
from idemconsumer.settings import Settings

_ADAPTERS: Final = {
    "kafka": ("idemconsumer.brokers.kafka", "KafkaBroker"),
    "rabbitmq": ("idemconsumer.brokers.rabbitmq", "RabbitmqBroker"),
    "postgres": ("idemconsumer.brokers.postgres", "PostgresBroker"),
    "memory": ("idemconsumer.brokers.memory", "MemoryBroker"),
}


def connect(scheme: str, settings: Settings) -> Broker:
    """The client for a scheme; opens nothing yet. ConfigurationError when its driver or its address is missing."""
    try:
        module, name = _ADAPTERS[scheme]
    except KeyError:
        raise ConfigurationError(f"unknown scheme {scheme!r}; one of {', '.join(sorted(_ADAPTERS))}") from None
    try:
        adapter = getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("idemconsumer"):
            raise
        raise ConfigurationError(
            f"{scheme}: the driver {missing.name} is not installed; pip install 'idemconsumer[{scheme}]'"
        ) from missing
    broker: Broker = adapter(settings)
    return broker
