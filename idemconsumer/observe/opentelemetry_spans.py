"""OpenTelemetry spans, by its semantic conventions for messaging. Only this module uses its library.

Shown are names from code and configuration, and types of errors. Never shown: bodies, headers, tenants, error texts,
and message ids and record keys, which may be keys. A stored key is shortened as in the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from idemconsumer.errors import Reject
from idemconsumer.logs import log
from idemconsumer.message.message import Message
from idemconsumer.ports.tracing import Processing, Requested, Tracing
from idemconsumer.redaction import type_name
from idemconsumer.rules.values import Outcome, OutcomeKind

T = TypeVar("T")

_SYSTEMS: Final = {"sqs": "aws_sqs", "postgres": "postgresql"}  # where the conventions use another name than ours
_BAGGAGE: Final = "baggage"  # travels with a trace, but identifies none
_KEY_DIGITS: Final = 12

_now: Final[ContextVar[_Processing | None]] = ContextVar("idemconsumer_processing", default=None)


class OpenTelemetry(Tracing):
    """Sends the spans to the tracer provider that the program has set, now or later."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("idemconsumer")

    def processing(self, app: str, handler: str, group: str, messages: Iterable[Message], key: bytes) -> _Processing:
        its: dict[str, Any] = {"idemconsumer.app": app, "idemconsumer.handler": handler}

        def start() -> Span:
            given = list(messages)
            name, described = _described(given, group, key)
            return self._tracer.start_span(
                name, kind=SpanKind.CONSUMER, attributes=its | described, links=list(_links(given))
            )

        return _Processing(_safely(start), its)

    def begun(self) -> None:
        if (now := _now.get()) is not None:
            now.runs += 1

    def failed(self, error: BaseException) -> None:
        if (now := _now.get()) is not None:
            now.failed(type_name(error))

    def step(self, kind: str, name: str, attempt: int | None) -> _Current:
        now = _now.get()
        its: dict[str, Any] = {"idemconsumer.step": name, "idemconsumer.step.kind": kind}
        if now is not None:
            its |= now.its
        if attempt is not None:
            its["idemconsumer.step.attempt"] = attempt
        return _Current(_safely(lambda: self._tracer.start_span(f"{kind} {name}", attributes=its)))

    def request(self, app: str, route: str) -> _Request:
        its = {"idemconsumer.app": app, "idemconsumer.route": route}
        return _Request(_safely(lambda: self._tracer.start_span(f"idempotent {route}", attributes=its)))

    def carried(self, headers: Mapping[str, str]) -> dict[str, str]:
        return _safely(lambda: _injected(headers)) or dict(headers)


class _Current:
    """A span that is the current one during the block. An error in it, or in what the program has plugged into
    OpenTelemetry, fails no message (O20)."""

    def __init__(self, span: Span | None) -> None:
        self._span = span
        self._outer: Token[Context] | None = None
        self._failed: str | None = None
        self._attributes: dict[str, Any] = {}

    def failed(self, error_type: str) -> None:
        """Record an error; the first one is kept."""
        self._failed = self._failed or error_type

    def __enter__(self) -> Self:
        if self._span is not None:
            self._outer = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None:
            context.detach(self._outer)
        if isinstance(error, Exception) and not isinstance(error, Reject):
            self.failed(type_name(error))
        _safely(self._end)

    def _end(self) -> None:
        if (span := self._span) is None:
            return
        if span.is_recording():
            if self._failed is not None:
                span.set_status(Status(StatusCode.ERROR))
                self._attributes["error.type"] = self._failed
            span.set_attributes(self._attributes)
        span.end()


class _Processing(_Current, Processing):
    """The processing of messages. `its`: attributes that its steps get too. `runs`: how many transactions have run
    handlers."""

    def __init__(self, span: Span | None, its: Mapping[str, Any]) -> None:
        super().__init__(span)
        self.its = its
        self.runs = 0
        self._around: _Processing | None = None

    def __enter__(self) -> Self:
        self._around = _now.get()
        _now.set(self)
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _now.set(self._around)
        if self.runs > 1:
            self._attributes["idemconsumer.reruns"] = self.runs - 1
        super().__exit__(kind, error, traceback)

    def decided(self, outcomes: Sequence[Outcome]) -> None:
        for kind, number in Counter(outcome.kind for outcome in outcomes).items():
            self._attributes[f"idemconsumer.outcomes.{kind}"] = number
        if len(outcomes) == 1:
            self._attributes["idemconsumer.attempt"] = outcomes[0].attempt
        for error_type in filter(None, map(_error_type, outcomes)):
            self.failed(error_type)


class _Request(_Current, Requested):
    def answered(self, outcome: str, key: str) -> None:
        self._attributes["idemconsumer.outcome"] = outcome
        if key:
            self._attributes["idemconsumer.key"] = key[:_KEY_DIGITS]


def _error_type(outcome: Outcome) -> str | None:
    """The type of a failure without an exception, or without one that may be shown. For a dead letter, `error` is a
    text."""
    match outcome.kind:
        case OutcomeKind.RETRYING:
            return outcome.error
        case OutcomeKind.DEAD | OutcomeKind.CONFLICT if outcome.letter is None:  # else it was dead before (O6)
            return outcome.reason
    return None


def _described(messages: Sequence[Message], group: str, key: bytes) -> tuple[str, dict[str, Any]]:
    """Name and attributes of a span for these messages."""
    first = messages[0]
    scheme, _, source = first.source.partition(":")
    name = "process"
    its: dict[str, Any] = {
        "messaging.system": _SYSTEMS.get(scheme, scheme),
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
    }
    if all(message.source == first.source for message in messages):
        name = f"process {source}"
        its["messaging.destination.name"] = source
    if scheme == "kafka":
        its["messaging.consumer.group.name"] = group
    if len(messages) > 1:
        its["messaging.batch.message_count"] = len(messages)
        return name, its
    if key:  # else the message cannot be read
        its["idemconsumer.key"] = key.hex()[:_KEY_DIGITS]
    if first.partition is not None and first.offset is not None:
        its |= {"messaging.destination.partition.id": str(first.partition), "messaging.kafka.offset": first.offset}
    return name, its


def _links(messages: Sequence[Message]) -> Iterator[Link]:
    """A link to each producer's span; messages of one batch often have the same."""
    fields = propagate.get_global_textmap().fields
    carriers = {tuple(each.headers.get(name) for name in fields): each.headers for each in messages if each.headers}
    for carrier in carriers.values():
        found = propagate.extract(carrier, Context(), _HEADERS)
        producer = trace.get_current_span(found).get_span_context()
        if producer.is_valid:
            yield Link(producer)


class _Headers(Getter[Mapping[str, str | bytes]]):
    def get(self, carrier: Mapping[str, str | bytes], key: str) -> list[str] | None:
        value = carrier.get(key)
        if value is None:
            return None
        return [value if isinstance(value, str) else value.decode("utf-8", "replace")]

    def keys(self, carrier: Mapping[str, str | bytes]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _Headers()


def _injected(headers: Mapping[str, str]) -> dict[str, str]:
    propagator, given = propagate.get_global_textmap(), {name.lower() for name in headers}
    if given & (propagator.fields - {_BAGGAGE}):
        return dict(headers)
    carried: dict[str, str] = {}
    propagator.inject(carried)
    return {name: value for name, value in carried.items() if name not in given} | dict(headers)


_SAID: Final = set[type[Exception]]()  # error types that were logged: once is enough, since each group would fail again


def _safely(act: Callable[[], T]) -> T | None:
    """The result of `act`; None if it raises: propagators, samplers and processors are the program's own code (O20)."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001
        if type(error) not in _SAID:
            _SAID.add(type(error))
            log.error("tracing failed, continuing without it", exc_info=error)
        return None
