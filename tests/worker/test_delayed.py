"""A message that is put off is delivered once it is due, and not before (P7)."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer import App, ConfigurationError, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.brokers.sqs import wire
from idemconsumer.brokers.sqs.sqs_client import Queue
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from tests.support.workers import Bench, Item, body, note


def emails() -> App:
    app = App("delayed")

    @app.idempotent_handler("postgres:emails", "memory:emails", key="id")
    async def send(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return app


def fall_due(bench: Bench) -> None:
    """The days until then."""
    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")


async def test_it_is_run_once_it_is_due(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    app = emails()
    await app.publish("postgres:emails", {"id": "later", "entity": ""}, delay="3d", headers={"n": "v"}, key="k")
    await app.publish("postgres:emails", {"id": "now", "entity": ""})
    await app.close()
    assert bench.do("select message_id, due_at > now() + interval '71h' from idemconsumer.delayed") == [("k", True)]
    await bench.until_empty(emails())
    assert bench.effects() == ["now"], "and a worker that empties its queues does not wait for it"
    fall_due(bench)
    await bench.until_empty(emails())
    assert bench.effects() == ["now", "later"]
    assert bench.do("select 1 from idemconsumer.delayed") == []


async def test_a_running_worker_notices_what_falls_due(bench: Bench) -> None:
    async with bench.running(emails()) as running:
        await running.until_count(applied=0)
        bench.do("select idemconsumer.publish('emails', %s, delay => interval '1 hour')", body(Item("a")).decode())
        bench.enqueue("emails", Item("b"))
        await running.until_count(applied=1)
        fall_due(bench)
        await running.until_count(applied=2)
    assert bench.effects() == ["b", "a"]


async def test_it_joins_the_transaction_that_publishes_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    app = App("publishing")

    @app.idempotent_handler("memory:q", key="id", max_attempts=1)
    async def handle(item: Item, tx: Tx) -> None:
        await app.publish("postgres:emails", item, delay="10m", tx=tx)
        if item.id == "bad":
            raise ValueError

    await bench.publish("q", Item("bad"), Item("good"))
    await bench.until_empty(app)
    assert bench.do("select convert_from(body, 'UTF8')::jsonb ->> 'id' from idemconsumer.delayed") == [("good",)]


async def test_in_memory_too(bench: Bench) -> None:
    async with bench.running(emails()) as running:
        await bench.broker.publish("emails", [Outgoing(body(Item("later")), delay=0.3), Outgoing(body(Item("now")))])
        await running.until_count(applied=2)
    assert bench.effects() == ["now", "later"]


@pytest.mark.parametrize("destination", ["kafka:orders", "rabbitmq:orders"])
async def test_where_it_cannot_be_put_off_an_error_says_what_to_write(destination: str) -> None:
    with pytest.raises(ConfigurationError, match=f"publish to a postgres: queue .* publish to '{destination}'"):
        await App("delayed").publish(destination, {}, delay="1s")


@pytest.mark.parametrize("delay", ["10", "-1s", "400000d", float("nan")])
async def test_what_is_no_delay_is_refused(delay: str | float) -> None:
    with pytest.raises(ConfigurationError, match=r"not a duration|longer than|at most"):
        await App("delayed").publish("postgres:emails", {}, delay=delay)


def test_sqs_puts_off_for_a_quarter_of_an_hour() -> None:
    queue = Queue("q", "https://sqs/q")
    assert wire.entry_of(queue, Outgoing(b"x", delay=1.2))["DelaySeconds"] == 2
    assert "DelaySeconds" not in wire.entry_of(queue, Outgoing(b"x"))
    with pytest.raises(ConfigurationError, match="15 minutes at most; publish to a postgres: queue"):
        wire.entry_of(queue, Outgoing(b"x", delay=901.0))
    with pytest.raises(ConfigurationError, match="a FIFO queue cannot delay a message; publish to a postgres: queue"):
        wire.entry_of(Queue("q.fifo", "https://sqs/q.fifo"), Outgoing(b"x", {"MessageGroupId": "g"}, delay=1.0))


def test_calls_without_a_delay_mean_what_they_meant(bench: Bench) -> None:
    for call in (
        "publish('q', '{}')", "publish('q', '{}', 'k')", "publish('q', '{}', 'k', '{}')",
        "publish('q', '{}', key => 'k')",
        "publish_bytes('q', '\\x00', null, '{}')", "publish('q', '{}', delay => null)",
        "publish('q', '{}', delay => interval '-1 hour')",
    ):  # fmt: skip
        bench.do(f"select idemconsumer.{call}")
    bench.do("select idemconsumer.publish_bytes(%s, %s, %s, %s)", "q", b"x", None, "{}")  # as workers send it
    assert bench.do("select count(*) from idemconsumer.queue where name = 'q'") == [(8,)]


async def test_a_session_moves_no_more_than_its_queues(bench: Bench) -> None:
    for queue in ("emails", "others"):
        bench.do("select idemconsumer.publish_bytes(%s, %s, delay => interval '1 day')", queue, body(Item(queue)))
    fall_due(bench)
    await bench.until_empty(emails())
    assert bench.do("select name from idemconsumer.delayed") == [("others",)]
    assert bench.effects() == ["emails"]


async def test_check_says_what_is_not_due(bench: Bench) -> None:
    bench.do("select idemconsumer.publish_bytes('emails', '\\x00', delay => interval '1 day')")
    broker = connect("postgres", Settings(dsn=bench.dsn))
    (subscription, _) = next(iter(emails().bound_handlers(Settings()))).subscriptions
    (finding,) = await asyncio.wait_for(broker.check(subscription), 10)
    assert "0 waiting, 1 not due yet" in finding.text
