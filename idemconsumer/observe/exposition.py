"""The metrics in Prometheus's text format. Only this module and `request_metrics` use its client library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Final, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from idemconsumer.certificates import expires_at
from idemconsumer.observe.counts import Histogram
from idemconsumer.observe.database import RETRIES, Figures
from idemconsumer.observe.fleet import Fleet
from idemconsumer.observe.reports import HandlerState, PoolState
from idemconsumer.observe.texts import LABELS, PREFIX, TEXTS
from idemconsumer.rules.held_up import WORKS, HeldUp
from idemconsumer.rules.redriven import REASONS
from idemconsumer.rules.values import OutcomeKind

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_LAG: Final = ("lag_messages", "lag_seconds")

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]
T = TypeVar("T")

# Exported from the start (O31: an increase from nothing is none); the others are not outcomes of deliveries.
_OUTCOMES: Final = {str(kind): 0 for kind in OutcomeKind if kind not in (OutcomeKind.UNKNOWN, OutcomeKind.ABSENT)}
_LETTERS: Final = dict.fromkeys(REASONS, 0)
_LANES: Final[Mapping[str, Callable[[Sequence[HandlerState]], float]]] = {
    "lanes": lambda of: sum(each.lanes for each in of),
    "busy_lanes": lambda of: sum(each.busy for each in of),
    "waiting_room_messages": lambda of: sum(each.waiting for each in of),
    "waiting_room_oldest_seconds": lambda of: max(each.oldest for each in of),
}
_POOLS: Final[Mapping[str, Callable[[PoolState], int]]] = {
    "pool_connections_used": lambda of: of.used,
    "pool_connections_max": lambda of: of.most,
    "pool_pending_requests": lambda of: of.pending,
}


def exposition(
    crew: Fleet, found: Figures | None, certificates: Mapping[str, str] | None = None, *, answer: float | None = None
) -> bytes:
    """All metrics that are known.

    `found`: None when the database did not answer; its metrics are then left out. `answer`: as in
    `observe.database.DatabaseLook`. `certificates`: our certificate files, by the server that they are for.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers(crew, found, certificates or {}, answer))
    return generate_latest(registry)


class Numbers(Collector):
    """All metric families, including those without a sample."""

    def __init__(
        self, crew: Fleet, found: Figures | None, certificates: Mapping[str, str], answer: float | None
    ) -> None:
        self._answer = answer
        self._crew = crew
        self._found = found
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        found = self._found or {}
        yield from _counted(self._crew)
        yield from _standing(self._crew)
        expiries = {name: expires_at(file) for name, file in self._certificates.items()}
        yield _gauge("certificate_expiry_timestamp_seconds", _named(expiries))
        yield _gauge("database_up", _one(self._answer is not None))
        yield _gauge("database_answer_seconds", _one(self._answer))
        for name, values in found.items():
            if name not in _LAG:
                yield _gauge(name, values.items())
        for name, values in zip(_LAG, _lag(self._crew), strict=True):
            yield _gauge(name, (values | found.get(name, {})).items())


def _counted(crew: Fleet) -> Iterator[Metric]:
    counts = crew.counts
    handlers = [((crew.app, name), of) for name, of in sorted(counts.handlers.items())]
    yield _counter("deliveries", _each(handlers, lambda of: of.deliveries))
    yield _counter("messages", _each(handlers, lambda of: {**_OUTCOMES, **of.outcomes}))
    yield _counter("dead_letters", _each(handlers, lambda of: {**_LETTERS, **of.letters}))
    yield _histogram("handler_duration_seconds", ((name, of.handling) for name, of in handlers))
    yield _histogram("group_duration_seconds", ((name, of.groups) for name, of in handlers))
    yield _histogram("group_size", ((name, of.sizes) for name, of in handlers))
    yield _counter("pruned_records", _one(counts.pruned))
    yield _counter("relayed_messages", sorted(_named(counts.relayed)))
    yield _counter("parked_messages", sorted(_named(counts.parked)))
    yield _counter("worker_deaths", _one(crew.deaths))


def _standing(crew: Fleet) -> Iterator[Metric]:
    reports = list(crew.reports)
    handlers = [((crew.app, name), of) for name, of in _gathered(report.handlers for report in reports)]
    yield _gauge("workers", _named(crew.states))
    # O33: exported as 0, not left out, while a server is unreachable.
    yield _gauge("ready", _one(not crew.against_readiness()))
    yield _gauge("source_up", _named({name: up for name, up in crew.up.items() if not name.startswith(RETRIES)}))
    yield _gauge("handler_state", _each(handlers, _states))
    for name, total in _LANES.items():
        yield _gauge(name, [(labels, total(of)) for labels, of in handlers])
    yield _gauge("in_hand_messages", _one(sum(report.in_hand for report in reports)))
    yield _gauge("in_hand_bytes", _one(sum(report.bytes_in_hand for report in reports)))
    pools = _gathered(report.pools for report in reports)
    for name, number in _POOLS.items():
        yield _gauge(name, [((pool,), sum(map(number, of))) for pool, of in pools])


def _states(of: Sequence[HandlerState]) -> Mapping[str, int]:
    """In how many workers the handler is in each state."""
    return {str(state): sum(state in (each.held_up or [WORKS]) for each in of) for state in (WORKS, *HeldUp)}


def _lag(crew: Fleet) -> tuple[dict[Labels, float], dict[Labels, float]]:
    """Messages and seconds of lag of the sources outside Postgres."""
    lags = crew.lag.items()
    seconds: dict[Labels, float] = {(source,): lag.seconds for source, lag in lags if lag.seconds is not None}
    return {(source,): lag.messages for source, lag in lags}, seconds


def _gathered(told: Iterable[Mapping[str, T]]) -> list[tuple[str, list[T]]]:
    """All values of each name, from all reports, by name."""
    found: dict[str, list[T]] = {}
    for name, its in (pair for each in told for pair in each.items()):
        found.setdefault(name, []).append(its)
    return sorted(found.items(), key=itemgetter(0))


# ---------------------------------------------------------------------------------------------------- samples, families
def _one(value: float | None) -> Samples:
    return [] if value is None else [((), value)]


def _named(values: Mapping[str, float | None]) -> Samples:
    """One sample for each name whose value is known."""
    return [((name,), value) for name, value in values.items() if value is not None]


def _each(of: Iterable[tuple[Labels, T]], numbers: Callable[[T], Mapping[str, float]]) -> Samples:
    """For each of them, one sample for each of its `numbers`, whose name is the last label."""
    return [((*labels, str(name)), number) for labels, its in of for name, number in numbers(its).items()]


def _counter(name: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(PREFIX + name, TEXTS[name], labels=LABELS[name]), samples)


def _gauge(name: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, TEXTS[name], labels=LABELS[name]), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, samples: Iterable[tuple[Labels, Histogram]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, TEXTS[name], labels=LABELS[name])
    for values, of in samples:
        bounds = [*map(str, of.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(of.buckets), strict=True)), of.sum)
    return family
