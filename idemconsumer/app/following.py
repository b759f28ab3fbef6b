"""Which library follows messages in traces, if any: the setting `tracing`, and a library that few programs install."""

from __future__ import annotations

from functools import cache

from idemconsumer.missing import cannot_import
from idemconsumer.ports.tracing import NO_TRACING, Tracing
from idemconsumer.settings import Settings


def tracing_of(settings: Settings) -> Tracing:
    """The tracing that the settings ask for. Raises ConfigurationError if it is on and its library is missing."""
    return _opened() if settings.tracing else NO_TRACING


@cache
def _opened() -> Tracing:
    try:
        from idemconsumer.observe.opentelemetry_spans import OpenTelemetry  # imported only if tracing is on
    except ImportError as missing:
        raise cannot_import("tracing is on, and its library", missing) from missing
    return OpenTelemetry()
