"""The numbers in Prometheus's text format. This module and `requests` alone know its client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from idemconsumer.certificates import expires_at
from idemconsumer.observe.counts import Histogram
from idemconsumer.observe.crew import Crew
from idemconsumer.observe.database import Found
from idemconsumer.observe.texts import PREFIX, TEXTS
from idemconsumer.rules.held_up import WORKS, HeldUp
from idemconsumer.rules.letters import REASONS
from idemconsumer.rules.values import OutcomeKind

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_HANDLER: Final = ("app", "handler")
# There from the beginning (O31); the others are not outcomes of deliveries.
_EXPECTED: Final = tuple(kind for kind in OutcomeKind if kind not in (OutcomeKind.UNKNOWN, OutcomeKind.ABSENT))

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


def exposition(
    crew: Crew, found: Found | None, certificates: Mapping[str, str] | None = None, *, answer: float | None = None
) -> bytes:
    """All that is known. `found`: None when the database did not tell it, and then what only it knows is left out;
    `answer`: as `observe.database.Database` has it. `certificates`: the files of ours, by the server that they are for.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers(crew, found, certificates or {}, answer))
    return generate_latest(registry)


class Numbers(Collector):
    """All families, also those without a sample."""

    def __init__(self, crew: Crew, found: Found | None, certificates: Mapping[str, str], answer: float | None) -> None:
        self._answer = answer
        self._crew = crew
        self._found = found
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        yield from _counted(self._crew)
        yield from _standing(self._crew)
        yield _gauge(
            "certificate_expiry_timestamp_seconds", ("server",),
            (((name,), at) for name, file in self._certificates.items() if (at := expires_at(file)) is not None),
        )  # fmt: skip
        yield _gauge(
            "database_up",
            (),
            [((), float(self._answer is not None))],
        )
        yield _gauge(
            "database_answer_seconds", (),
            [] if self._answer is None else [((), self._answer)],
        )  # fmt: skip
        if self._found is not None:
            yield from _stored(self._found)
        yield from _lag(self._crew, self._found)


def _counted(crew: Crew) -> Iterator[Metric]:
    app, counts = crew.app, crew.counts
    handlers = sorted(counts.handlers.items())
    yield _counter(
        "deliveries", (*_HANDLER, "source"),
        (((app, name, source), n) for name, of in handlers for source, n in of.deliveries.items()),
    )  # fmt: skip
    yield _counter(
        "messages", (*_HANDLER, "outcome"),
        (
            ((app, name, str(kind)), of.outcomes[kind])
            for name, of in handlers
            for kind in dict.fromkeys([*map(str, _EXPECTED), *map(str, of.outcomes)])
        ),
    )  # fmt: skip
    yield _counter(
        "dead_letters", (*_HANDLER, "reason"),
        (
            ((app, name, reason), of.letters[reason])
            for name, of in handlers
            for reason in dict.fromkeys([*REASONS, *of.letters])
        ),
    )  # fmt: skip
    yield _histogram(
        "handler_duration_seconds",
        (((app, name), of.handling) for name, of in handlers),
    )  # fmt: skip
    yield _histogram(
        "group_duration_seconds",
        (((app, name), of.groups) for name, of in handlers),
    )  # fmt: skip
    yield _histogram("group_size", (((app, name), of.sizes) for name, of in handlers))
    yield _counter("pruned_records", (), [((), counts.pruned)])
    yield _counter(
        "relayed_messages", ("destination",),
        (((name,), n) for name, n in sorted(counts.relayed.items())),
    )  # fmt: skip
    yield _counter(
        "parked_messages", ("destination",),
        (((name,), n) for name, n in sorted(counts.parked.items())),
    )  # fmt: skip
    yield _counter("worker_deaths", (), [((), crew.deaths)])


def _standing(crew: Crew) -> Iterator[Metric]:
    app, reports = crew.app, list(crew.reports)
    handlers = sorted({name for report in reports for name in report.handlers})
    states = {name: [report.handlers[name] for report in reports if name in report.handlers] for name in handlers}
    pools = sorted({name for report in reports for name in report.pools})
    used = {name: [report.pools[name] for report in reports if name in report.pools] for name in pools}
    yield _gauge("workers", ("state",), (((state,), n) for state, n in crew.states.items()))
    # O33: 0, and not left out, while something is away.
    yield _gauge("ready", (), [((), float(not crew.against_readiness()))])
    yield _gauge(
        "source_up", ("source",),
        (((source,), float(up)) for source, up in crew.up.items() if not source.startswith(_RETRIES)),
    )  # fmt: skip
    yield _gauge(
        "handler_state", (*_HANDLER, "state"),
        (
            ((app, name, str(state)), float(sum(state in (each.held_up or [WORKS]) for each in of)))
            for name, of in states.items()
            for state in (WORKS, *HeldUp)
        ),
    )  # fmt: skip
    yield _gauge(
        "lanes",
        _HANDLER,
        (((app, name), sum(s.lanes for s in of)) for name, of in states.items()),
    )
    yield _gauge(
        "busy_lanes", _HANDLER,
        (((app, name), sum(s.busy for s in of)) for name, of in states.items()),
    )  # fmt: skip
    yield _gauge(
        "waiting_room_messages", _HANDLER,
        (((app, name), sum(s.waiting for s in of)) for name, of in states.items()),
    )  # fmt: skip
    yield _gauge(
        "waiting_room_oldest_seconds", _HANDLER,
        (((app, name), max(s.oldest for s in of)) for name, of in states.items()),
    )  # fmt: skip
    yield _gauge("in_hand_messages", (), [((), sum(r.in_hand for r in reports))])
    yield _gauge("in_hand_bytes", (), [((), sum(r.bytes_in_hand for r in reports))])
    yield _gauge(
        "pool_connections_used", ("pool",),
        (((name,), sum(p.used for p in of)) for name, of in used.items()),
    )  # fmt: skip
    yield _gauge(
        "pool_connections_max", ("pool",),
        (((name,), sum(p.most for p in of)) for name, of in used.items()),
    )  # fmt: skip
    yield _gauge(
        "pool_pending_requests", ("pool",),
        (((name,), sum(p.pending for p in of)) for name, of in used.items()),
    )  # fmt: skip


def _stored(found: Found) -> Iterator[Metric]:
    state, reason = (*_HANDLER, "state"), (*_HANDLER, "reason")
    yield _gauge("sagas", state, ((name, of.number) for name, of in found.sagas.items()))
    yield _gauge(
        "oldest_saga_seconds", state,
        ((name, of.oldest or 0.0) for name, of in found.sagas.items()),
    )  # fmt: skip
    yield _gauge(
        "due_sagas", _HANDLER,
        ((name, of.number) for name, of in found.due.items()),
    )  # fmt: skip
    yield _gauge(
        "oldest_due_saga_seconds", _HANDLER,
        ((name, of.oldest or 0.0) for name, of in found.due.items()),
    )  # fmt: skip
    retries = {_of_retries(source): source for source in found.queues if source.startswith(_RETRIES)}
    yield _gauge(
        "retries", state,
        (
            ((*name, of), float(n))
            for name, source in retries.items()
            for of, n in (("waiting", found.delayed.get(source, 0)), ("due", found.queues[source].number))
        ),
    )  # fmt: skip
    yield _gauge(
        "oldest_due_retry_seconds", _HANDLER,
        ((name, found.queues[source].oldest or 0.0) for name, source in retries.items()),
    )  # fmt: skip
    yield _gauge(
        "delayed_messages", ("source",),
        (((source,), n) for source, n in found.delayed.items() if not source.startswith(_RETRIES)),
    )  # fmt: skip
    yield _gauge(
        "open_dead_letters", reason,
        ((name, of.number) for name, of in found.letters.items()),
    )  # fmt: skip
    yield _gauge(
        "oldest_dead_letter_seconds", reason,
        ((name, of.oldest or 0.0) for name, of in found.letters.items()),
    )  # fmt: skip
    yield _gauge(
        "unforwarded_dead_letters", _HANDLER,
        ((name, of.number) for name, of in found.forwards.items()),
    )  # fmt: skip
    yield _gauge(
        "oldest_unforwarded_dead_letter_seconds", _HANDLER,
        ((name, of.oldest or 0.0) for name, of in found.forwards.items()),
    )  # fmt: skip
    yield _gauge(
        "leases", ("state",),
        (((state,), n) for state, n in found.leases.items()),
    )  # fmt: skip
    yield _gauge(
        "outbox_messages",
        ("destination", "state"),
        (((name, state), float(n)) for name, of in found.outbox.items()
         for state, n in (("waiting", of.waiting), ("later", of.later), ("parked", of.parked))),
    )  # fmt: skip
    yield _gauge(
        "oldest_outbox_message_seconds",
        ("destination",), (((name,), of.oldest or 0.0) for name, of in found.outbox.items()),
    )  # fmt: skip
    if found.pruned_at is not None:
        yield _gauge("last_prune_timestamp_seconds", (), [((), found.pruned_at)])


def _lag(crew: Crew, found: Found | None) -> Iterator[Metric]:
    messages = {source: lag.messages for source, lag in crew.lag.items()}
    seconds = {source: lag.seconds for source, lag in crew.lag.items() if lag.seconds is not None}
    for source, of in ({} if found is None else found.queues).items():
        if not source.startswith(_RETRIES):
            messages[source], seconds[source] = of.number, of.oldest or 0.0
    yield _gauge(
        "lag_messages", ("source",),
        (((source,), n) for source, n in messages.items()),
    )  # fmt: skip
    yield _gauge(
        "lag_seconds", ("source",),
        (((source,), n) for source, n in seconds.items()),
    )  # fmt: skip


_RETRIES: Final = "postgres:~~"  # as `message.sources.retry_source` has it


def _of_retries(source: str) -> Labels:
    """App and handler."""
    app, _, handler = source.removeprefix(_RETRIES).rpartition("/")
    return app, handler


def _counter(name: str, labels: Labels, samples: Samples) -> Metric:
    family = CounterMetricFamily(PREFIX + name, TEXTS[name], labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _gauge(name: str, labels: Labels, samples: Samples) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, TEXTS[name], labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(name: str, samples: Iterable[tuple[Labels, Histogram]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, TEXTS[name], labels=_HANDLER)
    for values, of in samples:
        bounds = [*map(str, of.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(of.buckets), strict=True)), of.sum)
    return family
