"""Whether messages are followed in traces, and by what: the setting `tracing`, and a library that few programs have."""

from __future__ import annotations

from functools import cache

from idemconsumer.missing import cannot_import
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.settings import Settings


def tracing_of(settings: Settings) -> Tracing:
    """Raises ConfigurationError where it is on and its library is missing."""
    return _opened() if settings.tracing else NO_TRACING


@cache
def _opened() -> Tracing:
    try:
        from idemconsumer.observe.opentelemetry_spans import OpenTelemetry  # for those alone who want it
    except ImportError as missing:
        raise cannot_import("tracing is on, and its library", missing) from missing
    return OpenTelemetry()
