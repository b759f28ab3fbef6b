"""The front door's metrics, in a registry that the web service serves itself: it has no launcher to collect from
processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram

from idemconsumer.errors import ConfigurationError
from idemconsumer.observe.counts import SECONDS
from idemconsumer.observe.texts import LABELS, PREFIX, TEXTS

_NAME: Final = "http_requests"
_TOOK: Final = "http_request_duration_seconds"


class RequestNumbers:
    """The metrics of one registry. Each is a metric of prometheus_client, so where a server has many processes, the
    multiprocess mode of that library adds these up too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(PREFIX + _NAME, TEXTS[_NAME], LABELS[_NAME], registry=registry)
        self._seconds = Histogram(PREFIX + _TOOK, TEXTS[_TOOK], LABELS[_TOOK], buckets=SECONDS, registry=registry)

    def expect(self, app: str, route: str, outcomes: Iterable[str]) -> None:
        """Create the metrics of this route at 0 (O31)."""
        self._seconds.labels(app, route)
        for outcome in outcomes:
            self._requests.labels(app, route, outcome)

    def count(self, app: str, route: str, outcome: str, seconds: float | None) -> None:
        """Count one request. `seconds`: None for a request that was refused before its key was checked."""
        self._requests.labels(app, route, outcome).inc()
        if seconds is not None:
            self._seconds.labels(app, route).observe(seconds)


_KNOWN: Final[WeakKeyDictionary[CollectorRegistry, RequestNumbers]] = WeakKeyDictionary()


def numbers_in(registry: CollectorRegistry) -> RequestNumbers:
    """The metrics of all front doors that count in this registry, which accepts each name only once. Raises
    ConfigurationError for an object that is not a registry."""
    if not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(
            f"Idempotency: `metrics` is a {type(registry).__name__}; write prometheus_client.REGISTRY or another one"
        )
    if (known := _KNOWN.get(registry)) is None:
        known = _KNOWN[registry] = RequestNumbers(registry)
    return known
