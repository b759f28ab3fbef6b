"""The spans of this process, as an exporter of OpenTelemetry gets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACER = trace.get_tracer("test")


class _Unruly(SpanProcessor):
    """Raises at these moments."""

    fails: frozenset[str] = frozenset()

    def on_start(self, span: Span, parent_context: object = None) -> None:
        if "start" in self.fails:
            raise ZeroDivisionError("start")

    def on_end(self, span: ReadableSpan) -> None:
        if "end" in self.fails:
            raise ZeroDivisionError("end")


class Spans:
    """All that have ended; `fails` has the program's own processor raise at `start` or at `end`."""

    def __init__(self, exporter: InMemorySpanExporter, unruly: _Unruly) -> None:
        self._exporter = exporter
        self._unruly = unruly

    @contextmanager
    def fails(self, *moments: str) -> Iterator[None]:
        self._unruly.fails = frozenset(moments)
        try:
            yield
        finally:
            self._unruly.fails = frozenset()

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def clear(self) -> None:
        self._exporter.clear()


def collected() -> Spans:
    """Those of the one provider that a process may set, emptied."""
    global _SPANS
    if _SPANS is None:
        exporter, unruly, provider = InMemorySpanExporter(), _Unruly(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        provider.add_span_processor(unruly)
        trace.set_tracer_provider(provider)
        _SPANS = Spans(exporter, unruly)
    _SPANS.clear()
    return _SPANS


_SPANS: Spans | None = None


def traceparent(number: int) -> str:
    """Of a producer's span with this number in this trace."""
    return f"00-{number:032x}-{number:016x}-01"


def _header(its: trace.SpanContext) -> str:
    return f"00-{its.trace_id:032x}-{its.span_id:016x}-{its.trace_flags:02x}"


def traceparent_of(span: ReadableSpan) -> str:
    its = span.get_span_context()
    assert its is not None
    return _header(its)


def links(span: ReadableSpan) -> list[str]:
    """The headers that it is linked to."""
    return [_header(link.context) for link in span.links]


def parent(span: ReadableSpan) -> str | None:
    return None if span.parent is None else _header(span.parent)


def said(span: ReadableSpan) -> dict[str, object]:
    """Its attributes, by names without their first word."""
    return {name.partition(".")[2]: value for name, value in (span.attributes or {}).items()}
