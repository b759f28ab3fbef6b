"""Messages that always fail stop nobody else, however many of them come first (D17), and an outage kills none."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from idemconsumer import App, Message, Saga, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from tests.support.brokers import SCHEMES, Brokers
from tests.support.servers.made import Server
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, Running, body, note

LETTERS = "select handler, reason, attempts from idemconsumer.dead_letter"


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> AsyncIterator[Brokers]:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    await made.delete()


def some(kind: str, number: int) -> list[str]:
    return [f"{kind}-{n}" for n in range(number)]


async def handle(item: Item, tx: Tx) -> None:
    if item.id.startswith("bad"):
        raise ValueError("it can never succeed")
    await note(tx, item)


async def until_applied(number: int, *running: Running) -> None:
    await running[0].until(lambda: sum(each.worker.counts.get("applied", 0) for each in running) >= number)


async def until_dead(bench: Bench, letters: int, publish: Callable[[Item], Awaitable[None]]) -> None:
    """What was tried last may be nothing but bad ones: further good ones show that it is their own fault."""
    for n in range(500):
        if len(bench.do(LETTERS)) >= letters:
            break
        await publish(Item(f"more-{n}", "b"))
        await asyncio.sleep(0.1)


async def test_twenty_bad_ones_ahead_of_two_hundred_at_each_broker(brokers: Brokers, bench: Bench) -> None:
    """With the default options, but for how soon the bad ones are tried again. Kafka's records have keys, so they have
    an order."""
    app = App("bad")
    for scheme in SCHEMES:
        app.idempotent_handler(f"{scheme}:{brokers.name}", name=scheme, key="id", backoff="50ms, 50ms")(handle)
        broker = connect(scheme, bench.settings(**brokers.addresses))
        names = [f"{each}-{scheme}" for each in some("bad", 20) + some("good", 200)]
        await broker.publish(brokers.name, [Outgoing(body(Item(each)), key=each) for each in names])
        await broker.close()

    async def more(item: Item) -> None:
        for scheme in SCHEMES:
            await brokers.publish(bench.dsn, scheme, body(Item(f"{item.id}-{scheme}")))

    async with bench.running(app, concurrency=8, **brokers.addresses) as running:
        await until_applied(4 * 200, running)
        await until_dead(bench, 4 * 20, more)
    assert Counter(bench.do(LETTERS)) == {(scheme, "attempts_exhausted", 5): 20 for scheme in SCHEMES}
    assert len(set(bench.effects())) == len(bench.effects())


async def test_sixty_bad_ones_of_a_tenant_ahead_of_anothers_hundred_and_two_workers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, next_probe_pause=0.03)
    app = App("bad")
    app.idempotent_handler("postgres:q", key="id", tenant="entity", backoff="10ms, 10ms")(handle)
    bench.enqueue("q", *(Item(each, "a") for each in some("bad", 60)), *(Item(each, "b") for each in some("good", 100)))
    async with bench.running(app) as one, bench.running(app) as other:
        await until_applied(100, one, other)

        async def more(item: Item) -> None:
            bench.enqueue("q", item)

        await until_dead(bench, 60, more)
    assert Counter(bench.do(LETTERS)) == {("handle", "attempts_exhausted", 5): 60}


@pytest.mark.parametrize("order", [None, "entity"])
async def test_an_outage_kills_none_and_what_has_an_order_keeps_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, order: str | None
) -> None:
    """All that can run of a backlog is tried in it, some of it again."""
    tuned(monkeypatch, next_probe_pause=0.02, failed_probe_pause=0.05)
    app, up, calls = App("bad"), asyncio.Event(), Counter[str]()

    @app.idempotent_handler("memory:q", key="id", order_by=order, max_attempts=2, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        calls[item.id] += 1
        if not up.is_set():
            raise ConnectionError("the service is down")
        await note(tx, item)

    entities = [f"e{n}" for n in range(12)]
    await bench.publish("q", *(Item(f"{entity}-{n}", entity) for n in range(3) for entity in entities))
    heads = 36 if order is None else 12
    async with bench.running(app, concurrency=8) as running:
        await running.until(lambda: len(calls) >= heads and sum(calls.values()) > heads + 1)
        up.set()
        await running.until_count(applied=36)
    assert bench.do(LETTERS) == []
    for entity in entities if order else ():
        its = [name for name in bench.effects() if name.startswith(f"{entity}-")]
        assert its == [f"{entity}-{n}" for n in range(3)]


async def test_twenty_sagas_whose_first_step_fails_ahead_of_a_hundred(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, next_probe_pause=0.03, longest_probe_pause=0.5)
    app = App("bad")
    app.idempotent_handler("postgres:q", key="id", backoff="10ms, 10ms")(book)
    bench.enqueue("q", *(Item(each) for each in some("bad", 20) + some("good", 100)))
    async with bench.running(app) as running:
        await until_applied(100, running)
        await running.until_count(dead=20)
    assert Counter(bench.do(LETTERS)) == {("book", "attempts_exhausted", 5): 20}


async def book(item: Item, saga: Saga) -> None:
    await saga.tx("book", lambda tx: handle(item, tx))


@pytest.mark.parametrize("handler", [handle, book])
async def test_while_no_message_can_be_read_none_becomes_a_letter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, handler: Any
) -> None:
    """A wrong schema: once it is right, they are applied."""
    tuned(monkeypatch, next_probe_pause=0.02, failed_probe_pause=0.05)
    app, up, reads = App("bad"), asyncio.Event(), Counter[bytes]()

    def decode(body: bytes, message: Message) -> Item:
        reads[body] += 1
        if not up.is_set():
            raise ValueError("it is no message of this schema")
        return Item(**json.loads(body))

    app.idempotent_handler("memory:q", key="id", decode=decode)(handler)
    await bench.publish("q", *(Item(each) for each in some("good", 60)))
    async with bench.running(app) as running:
        await running.until(lambda: len(reads) == 60 and sum(reads.values()) > 61)
        assert bench.do(LETTERS) == []
        up.set()
        await running.until_count(applied=60)
    assert bench.do(LETTERS) == []
    assert len(bench.effects()) == 60


@pytest.mark.parametrize("handler", [handle, book])
async def test_five_of_a_hundred_that_cannot_be_read_become_letters(bench: Bench, handler: Any) -> None:
    """Also if they come first."""
    app = App("bad")
    app.idempotent_handler("memory:q", key="id")(handler)
    await bench.publish("q", *[b"{"] * 5, *(Item(each) for each in some("good", 95)))
    async with bench.running(app) as running:
        await running.until_count(applied=95, dead=5)
    assert Counter(bench.do(LETTERS)) == {(handler.__name__, "undecodable", 0): 5}
