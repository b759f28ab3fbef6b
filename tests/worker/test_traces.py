"""A trace goes on: from who sends through a handler or a saga's steps to what they send, however late that is (O21)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context, propagate

from idemconsumer import App, ConfigurationError, Message, Reject, Saga, Step, Tx
from idemconsumer.admin.dead_letters import ALL
from idemconsumer.admin.redrives import Redrives
from idemconsumer.app import following
from idemconsumer.observe.opentelemetry_spans import OpenTelemetry
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from tests.support.kafka import world_of
from tests.support.servers.made import Server
from tests.support.spans import TRACER, Spans, collected, links, parent, said, traceparent, traceparent_of
from tests.support.workers import SCHEMA, Bench, Item, body, note


@pytest.fixture
def spans() -> Spans:
    return collected()


@pytest.fixture
def app(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> App:
    """Of a program that sends too."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    monkeypatch.setenv("IDEMCONSUMER_TRACING", "yes")
    return App("shop")


def order(id: str = "a") -> dict[str, str]:
    return {"id": id, "entity": ""}


# ---------------------------------------------------------------------------------------------------- joined handlers
async def test_what_a_handler_sends_is_linked_to_it_and_it_to_who_sent(app: App, bench: Bench, spans: Spans) -> None:
    @app.idempotent_handler("postgres:orders", key="id")
    async def take(item: Item, tx: Tx) -> None:
        await app.publish("postgres:mails", order(item.id), tx=tx)
        await app.publish("postgres:mails", order("beside"))
        await app.publish("postgres:mails", order("given"), headers={"Traceparent": traceparent(7), "x": "y"}, tx=tx)

    seen: dict[str, Message] = {}

    @app.idempotent_handler("postgres:mails", key="id")
    async def mail(item: Item, tx: Tx, message: Message) -> None:
        seen[item.id] = message

    with TRACER.start_as_current_span("sends"):
        await app.publish("postgres:orders", order(), headers={"x": "y"})
    await app.close()
    async with bench.running(app, tracing=True) as running:
        await running.until_count(applied=4)

    ((taken,), mailed) = spans.named("process orders"), spans.named("process mails")
    assert links(taken) == [traceparent_of(spans.only("sends"))]
    assert {link for each in mailed for link in links(each)} == {traceparent_of(taken)}
    assert taken.parent is None, "a trace of its own"
    assert seen["given"].headers == {"Traceparent": traceparent(7), "x": "y"}, "the user's own"
    assert said(taken)["system"] == "postgresql"


async def test_what_is_accepted_is_linked_to_who_has_accepted_it(app: App, bench: Bench, spans: Spans) -> None:
    seen: list[Message] = []

    @app.idempotent_handler("memory:q", key="id")
    async def take(item: Item, tx: Tx, message: Message) -> None:
        seen.append(message)

    with TRACER.start_as_current_span("accepts"):
        await app.accept(take, Item("a"), key="k", headers={"x": "y"})
    await app.close()
    async with bench.running(app, tracing=True) as running:
        await running.until_count(applied=1)

    (span,) = (span for span in spans.all if said(span).get("handler") == "take")
    assert links(span) == [traceparent_of(spans.only("accepts"))]
    assert seen[0].headers["x"] == "y"


def test_a_trace_that_is_given_is_not_mixed_with_the_current_one() -> None:
    tracing = OpenTelemetry()
    current = {"traceparent": traceparent(1), "tracestate": "its=own", "baggage": "a=1"}
    token = context.attach(propagate.extract(current))
    try:
        assert tracing.carried({"x": "y"}) == {"x": "y"} | current
        for given in ({"TraceParent": traceparent(2)}, {"tracestate": "b=2"}):
            assert tracing.carried(given) == given
        assert tracing.carried({"baggage": "c=3"}) == current | {"baggage": "c=3"}
    finally:
        context.detach(token)


async def test_stored_retries_and_redrives_are_linked_to_who_sent(bench: Bench, spans: Spans) -> None:
    app, fails = App("shop"), [ValueError("once"), ValueError("twice")]

    @app.idempotent_handler("memory:q", key="id", backoff="1h, 1h", max_attempts=2)
    async def take(item: Item, tx: Tx) -> None:
        if fails:
            raise fails.pop()

    await bench.broker.publish("q", [Outgoing(body(Item("a")), {"traceparent": traceparent(3)})])
    await bench.until_empty(app, tracing=True)
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    await bench.until_empty(app, tracing=True)
    await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    await bench.until_empty(app, tracing=True)

    assert [links(span) for span in spans.named("process q")] == [[traceparent(3)]] * 3
    outcomes = [next(name for name in said(span) if name.startswith("outcomes")) for span in spans.named("process q")]
    assert outcomes == ["outcomes.retrying", "outcomes.dead", "outcomes.applied"]


async def test_one_that_is_processed_in_a_program_is_part_of_what_the_program_does(
    app: App, bench: Bench, spans: Spans
) -> None:
    @app.idempotent_handler("memory:q", key="id")
    def take(item: Item) -> None:  # in a thread
        with TRACER.start_as_current_span("own"):
            pass

    message = Message("memory:q", body(Item("a")), {"traceparent": traceparent(3)})
    with TRACER.start_as_current_span("polls"):
        await app.process(message)
    await app.close()

    span = spans.only("process q")
    assert (parent(span), links(span)) == (traceparent_of(spans.only("polls")), [traceparent(3)])
    assert parent(spans.only("own")) == traceparent_of(span)


async def test_a_header_of_kafka_and_where_the_record_was(kafka: Server, bench: Bench, spans: Spans) -> None:
    async with world_of(kafka) as world:
        await world.create(partitions=1)
        app = App(world.topic.replace(".", "_"))

        @app.idempotent_handler(f"kafka:{world.topic}", key="id")
        async def take(item: Item, tx: Tx) -> None: ...

        app.worker(bench.settings(kafka=kafka.address, tracing=True))  # whose settings are those of `publish`
        with TRACER.start_as_current_span("sends"):
            await app.publish(f"kafka:{world.topic}", order(), key="record-key")
        await app.close()
        async with bench.running(app, kafka=kafka.address, tracing=True) as running:
            await running.until_count(applied=1)

    span = spans.only(f"process {world.topic}")
    assert links(span) == [traceparent_of(spans.only("sends"))]
    assert said(span) | {"key": ""} == {
        "system": "kafka",
        "operation.name": "process",
        "operation.type": "process",
        "destination.name": world.topic,
        "destination.partition.id": "0",
        "kafka.offset": 0,
        "consumer.group.name": app.name,
        "app": app.name,
        "handler": "take",
        "key": "",
        "attempt": 1,
        "outcomes.applied": 1,
    }
    assert "record-key" not in span.to_json()


# ----------------------------------------------------------------------------------------------------------- sagas
class Rides:
    """A saga, and what its remote was sent. Its call fails once, and it starts another saga; or it is `refused`, and
    undone."""

    def __init__(self, app: App, *, refused: bool = False) -> None:
        self.app = app
        self.sent: list[dict[str, str]] = []
        self.refused = refused
        options: Any = {"key": "id", "backoff": "1ms, 1ms"}

        @app.idempotent_handler("postgres:rides", **options)
        async def ride(item: Item, saga: Saga) -> None:
            await saga.tx("reserved", self.reserve, item, undo=self.unreserve)
            await saga.call("charged", self.charge, undo=self.refund)
            if self.refused:
                raise Reject("too_late")
            child = await saga.start("mailed", mail, item)
            await saga.result("read", child)

        @app.idempotent_handler("postgres:mails", **options)
        async def mail(item: Item, saga: Saga) -> None: ...

        self.ride = ride

    async def reserve(self, tx: Tx, item: Item) -> None:
        await note(tx, item)

    async def unreserve(self, tx: Tx, output: object, item: Item) -> None: ...

    async def charge(self, step: Step) -> None:
        self.sent.append(dict(step.headers))
        if len(self.sent) == 1 and not self.refused:
            raise ValueError("secret")

    async def refund(self, step: Step, output: object) -> None:
        self.sent.append(dict(step.headers))


async def begun(rides: Rides, bench: Bench, ends: int, *, tracing: bool = True) -> None:
    with TRACER.start_as_current_span("starts"):
        await rides.app.start(rides.ride, Item("a"), key="k")
    await rides.app.close()
    async with bench.running(rides.app, tracing=tracing) as running:
        await running.until(
            lambda: bench.do("select count(*) from idemconsumer.record where state in (3, 4)") == [(ends,)]
        )


async def test_each_attempt_of_a_saga_is_linked_to_who_started_it_and_has_a_span_for_each_step_that_ran(
    app: App, bench: Bench, spans: Spans
) -> None:
    rides = Rides(app)

    await begun(rides, bench, 2)

    attempts = [span for span in spans.all if said(span).get("handler") == "ride" and span.name.startswith("process")]
    assert {link for span in attempts for link in links(span)} == {traceparent_of(spans.only("starts"))}
    assert all(len(links(span)) == 1 for span in attempts), "resumed ones too"
    first, second, *_ = attempts
    failed, charged = spans.named("call charged")
    assert parent(spans.only("tx reserved")) == traceparent_of(first), "a step that is replayed has none"
    assert (parent(failed), parent(charged)) == (traceparent_of(first), traceparent_of(second))
    assert [said(step)["step.attempt"] for step in (failed, charged)] == [1, 2]
    assert [(step.attributes or {}).get("error.type") for step in (failed, charged)] == ["ValueError", None]
    assert (first.attributes or {})["error.type"] == "ValueError"
    assert said(charged) == {
        "app": "shop",
        "handler": "ride",
        "step": "charged",
        "step.kind": "call",
        "step.attempt": 2,
    }
    assert [sent["traceparent"] for sent in rides.sent] == [traceparent_of(failed), traceparent_of(charged)]
    (child,) = (span for span in spans.all if said(span).get("handler") == "mail")
    assert links(child) == [traceparent_of(spans.only("tx mailed"))]
    assert "secret" not in "".join(span.to_json() for span in spans.all)


async def test_an_undo_is_a_span_too(app: App, bench: Bench, spans: Spans) -> None:
    rides = Rides(app, refused=True)

    await begun(rides, bench, 1)

    undos = [span for span in spans.all if span.name.startswith("undo ")]
    assert [span.name for span in undos] == ["undo charged", "undo reserved"]
    assert [said(span).get("step.attempt") for span in undos] == [2, None]
    assert rides.sent[-1]["traceparent"] == traceparent_of(undos[0])


# --------------------------------------------------------------------------------------------------- on, off, missing
async def test_without_the_setting_nothing_is_followed_and_nothing_passed_on(
    app: App, bench: Bench, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IDEMCONSUMER_TRACING")
    rides = Rides(app, refused=True)

    await begun(rides, bench, 1, tracing=False)

    assert [span.name for span in spans.all] == ["starts"]
    assert rides.sent == [{}, {}]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delitem(sys.modules, "idemconsumer.observe.opentelemetry_spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    following._opened.cache_clear()
    yield
    following._opened.cache_clear()


async def test_who_has_not_installed_it_is_told_what_to_install(app: App, bench: Bench, without_library: None) -> None:
    @app.idempotent_handler("memory:q", key="id")
    async def take(item: Item, tx: Tx) -> None: ...

    for attempt in (
        lambda: app.process(Message("memory:q", body(Item("a")))),
        lambda: app.publish("postgres:q", order()),
    ):
        with pytest.raises(ConfigurationError, match=r"pip install 'idemconsumer\[opentelemetry\]'"):
            await attempt()
    with pytest.raises(ConfigurationError, match="tracing is on"):
        app.worker(bench.settings(tracing=True))
    app.worker(Settings(dsn=bench.dsn))


def test_who_does_not_want_it_does_not_import_it() -> None:
    code = "import sys, idemconsumer.app.app; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
