"""Whether messages are followed in traces, and by what: the setting `tracing`, and a library that few programs have."""

from __future__ import annotations

from functools import cache

from idemconsumer.errors import ConfigurationError
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.settings import Settings


def tracing_of(settings: Settings) -> Tracing:
    """Raises ConfigurationError where it is on and its library is missing."""
    return _opened() if settings.tracing else NO_TRACING


@cache
def _opened() -> Tracing:
    try:
        from idemconsumer.observe.tracing import OpenTelemetry  # for those alone who want it
    except ImportError as missing:
        raise ConfigurationError(
            "tracing is on, and opentelemetry-api is not installed; pip install 'idemconsumer[opentelemetry]', and the "
            "SDK with an exporter of your choice"
        ) from missing
    return OpenTelemetry()
