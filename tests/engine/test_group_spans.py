"""One span for each group, linked to the producers of all its messages, with nothing that is not to be shown (O20)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, StatusCode

from idemconsumer import Batch, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.observe import opentelemetry_spans as tracing
from idemconsumer.observe.opentelemetry_spans import OpenTelemetry
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.logs import LogCapture, entries, times
from tests.support.spans import TRACER, Spans, collected, links, parent, said, traceparent, traceparent_of

PROCESS = "process orders"
SECRET = "4111-secret"


@pytest.fixture
def spans() -> Spans:
    return collected()


@pytest.fixture
def unsaid() -> None:
    """As in a new process."""
    tracing._SAID.clear()


@pytest.fixture
def engine(store: PostgresStore) -> Engine:
    return Engine(store, tracing=OpenTelemetry())


def sent(handler: Handler[..., Any], id: object, headers: Mapping[str, str | bytes], *, suspect: bool = False) -> Work:
    given = replace(message(id), headers=headers, message_id=f"{SECRET}-{id}")
    return work(handler.plan.bind("shop"), given, suspect=suspect)


def traced(handler: Handler[..., Any], *ids: int, suspect: bool = False) -> list[Work]:
    return [sent(handler, id, {"traceparent": traceparent(id)}, suspect=suspect) for id in ids]


def acting(**options: Any) -> Handler[..., Any]:
    """A handler that writes, and fails for some ids; within it a span of the user's own begins and ends."""

    @idempotent_handler(SOURCE, key="id", name="acts", **{"group_size": 8, "max_attempts": 2, **options})
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        with TRACER.start_as_current_span(f"own {order['id']}"):
            await write(tx, order["id"])
        match order["id"]:
            case 13:
                raise ValueError(SECRET)
            case 14:
                raise Reject("no_stock", SECRET)

    return handle


async def test_a_group_is_one_span_with_a_link_to_each_producer(ledger: Ledger, engine: Engine, spans: Spans) -> None:
    handler = acting()
    of_bytes = sent(handler, 4, {"traceparent": traceparent(4).encode(), "tracestate": "a=b"})
    untraced = [sent(handler, 5, {}), sent(handler, 6, {"traceparent": b"\xff\xfe"}), sent(handler, 7, {"other": "x"})]
    same = sent(handler, 8, {"traceparent": traceparent(1)})

    outcomes = await engine.run([*traced(handler, 1, 2, 3), of_bytes, *untraced, same])

    assert kinds(outcomes) == ["applied"] * 8
    span = spans.only(PROCESS)
    assert sorted(links(span)) == [traceparent(n) for n in (1, 2, 3, 4)], "one for the two of the same producer"
    assert (span.kind, span.parent, span.status.status_code) == (SpanKind.CONSUMER, None, StatusCode.UNSET)
    assert said(span) == {
        "system": "memory",
        "operation.name": "process",
        "operation.type": "process",
        "destination.name": "orders",
        "batch.message_count": 8,
        "app": "shop",
        "handler": "acts",
        "outcomes.applied": 8,
    }
    assert {parent(own) for own in spans.all if own is not span} == {traceparent_of(span)}


async def test_a_single_message_says_which_one_as_the_log_does(
    engine: Engine, spans: Spans, logged: LogCapture
) -> None:
    (given,) = traced(acting(), 13)

    assert kinds([await engine.process(given)]) == ["retrying"]

    span, (line,) = spans.only(PROCESS), entries(logged, "handler failed")
    assert said(span)["key"] == line["key"] == given.key.hex()[:12]
    assert said(span)["attempt"] == 1
    assert links(span) == [traceparent(13)]
    assert parent(spans.only("own 13")) == traceparent_of(span)
    assert "batch.message_count" not in said(span)


async def test_a_failure_is_a_type_and_never_a_text(engine: Engine, spans: Spans) -> None:
    handler = acting()
    outcomes = await to_the_end(engine, [*traced(handler, 13)])
    assert kinds(outcomes) == ["dead"]

    retried, dead = spans.named(PROCESS)
    for span in (retried, dead):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ValueError"
        assert (span.status.description, list(span.events)) == (None, [])
    assert said(retried)["outcomes.retrying"] == said(dead)["outcomes.dead"] == 1
    assert kinds(await engine.run(traced(handler, 14))) == ["failed"]
    assert spans.named(PROCESS)[-1].status.status_code is StatusCode.UNSET, "a rejection is an answer"
    assert SECRET not in "".join(span.to_json() for span in spans.all)


async def test_what_runs_again_is_in_the_span_of_its_group(ledger: Ledger, engine: Engine, spans: Spans) -> None:
    outcomes = await engine.run(traced(acting(max_attempts=3), 1, 13, 2))

    assert kinds(outcomes) == ["applied", "retrying"]
    span = spans.only(PROCESS)
    assert links(span) == [traceparent(1), traceparent(13), traceparent(2)]
    assert said(span)["reruns"] == 1
    assert (said(span)["outcomes.applied"], said(span)["outcomes.retrying"]) == (1, 1)
    assert span.status.status_code is StatusCode.ERROR


async def test_so_are_suspects_and_a_batch(ledger: Ledger, engine: Engine, spans: Spans) -> None:
    assert kinds(await engine.run(traced(acting(), 1, 2, suspect=True))) == ["applied"] * 2

    @idempotent_handler(SOURCE, key="id", name="batch", group_size=8)
    async def handle(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        with TRACER.start_as_current_span("own of batch"):
            await write(tx, len(orders))

    assert kinds(await engine.run(traced(handle, 3, 4))) == ["applied"] * 2
    suspects, batch = spans.named(PROCESS)
    assert (links(suspects), links(batch)) == ([traceparent(1), traceparent(2)], [traceparent(3), traceparent(4)])
    assert {parent(spans.only(f"own {id}")) for id in (1, 2)} == {traceparent_of(suspects)}
    assert parent(spans.only("own of batch")) == traceparent_of(batch)


async def test_outcomes_are_counted_by_their_kind(ledger: Ledger, engine: Engine, spans: Spans) -> None:
    handler = acting()
    await engine.run(traced(handler, 1))
    other = replace(message(1, amount=2), headers={"traceparent": traceparent(9)})

    outcomes = await engine.run([*traced(handler, 1, 2), work(handler.plan.bind("shop"), other)])

    counted = {name: n for name, n in said(spans.all[-1]).items() if name.startswith("outcomes")}
    assert counted == {f"outcomes.{kind}": kinds(outcomes).count(kind) for kind in set(kinds(outcomes))}
    assert kinds(outcomes) == ["duplicate", "applied", "conflict"]
    assert (spans.all[-1].attributes or {})["error.type"] == "conflict"


async def test_a_handler_that_asks_for_another_attempt_and_a_database_that_is_away(
    engine: Engine, spans: Spans, store: PostgresStore
) -> None:
    @idempotent_handler(SOURCE, key="id", name="later")
    async def later(order: dict[str, Any], tx: Tx) -> None:
        raise Retry(SECRET)

    await engine.run(works(later, 1))
    await store.close()
    with pytest.raises(StoreUnavailable):
        await engine.run(works(later, 2))
    asked, away = spans.named(PROCESS)
    assert (asked.attributes or {})["error.type"] == "idemconsumer.errors.Retry"
    assert str((away.attributes or {})["error.type"]).startswith("idemconsumer.errors.")
    assert SECRET not in asked.to_json()


# ------------------------------------------------------------------------------------------- it decides nothing
@pytest.mark.parametrize("moments", [("start",), ("end",), ("start", "end")])
async def test_a_processor_that_raises_costs_no_message(
    moments: tuple[str, ...], ledger: Ledger, engine: Engine, spans: Spans, logged: LogCapture, unsaid: None
) -> None:
    @idempotent_handler(SOURCE, key="id", name="plain", group_size=8)
    async def handle(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    with spans.fails(*moments):
        assert kinds(await engine.run(traced(handle, 1, 2))) == ["applied"] * 2
        assert kinds(await engine.run(traced(handle, 3, 4))) == ["applied"] * 2
    assert ledger.effects == ["1", "2", "3", "4"]
    assert times(logged, "tracing failed, continuing without it") == 1
    assert not trace.get_current_span().get_span_context().is_valid, "nothing stays current"


async def test_so_does_a_propagator_that_raises(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch, logged: LogCapture, unsaid: None
) -> None:
    class Broken:
        fields = frozenset({"traceparent"})

        def extract(self, *_: object, **__: object) -> None:
            raise ZeroDivisionError

        inject = extract

    monkeypatch.setattr(propagate, "_HTTP_TEXT_FORMAT", Broken())
    assert kinds(await engine.run(traced(acting(), 1, 2))) == ["applied"] * 2
    assert engine.tracing.carried({"a": "b"}) == {"a": "b"}
    assert times(logged, "tracing failed, continuing without it") == 1
