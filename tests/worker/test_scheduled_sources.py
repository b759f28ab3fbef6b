"""A retry that is stored (D18), on each broker: settled there, and run later with all that the broker gave."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from idemconsumer import App, Message, Retry, Tx
from idemconsumer.brokers.adapters import connect
from idemconsumer.ports.broker import Outgoing
from tests.support.places import Place, kafka_place, rabbitmq_place, sqs_place
from tests.support.workers import Bench, Item, body, note


@pytest.fixture(params=["kafka", "rabbitmq", "sqs", "postgres"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    if request.param == "postgres":
        yield Place("postgres:q", lambda: pytest.fail("not sent to"), {})
        return
    places = {"kafka": kafka_place, "rabbitmq": rabbitmq_place, "sqs": sqs_place}
    async with places[request.param](request.getfixturevalue(request.param)) as place:
        yield place


async def test_it_is_settled_and_comes_back_as_it_was(bench: Bench, place: Place) -> None:
    app, seen = App("later"), list[Message]()

    @app.idempotent_handler(place.source, key="id")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        seen.append(message)
        if message.attempt == 1:
            raise Retry(after="3d")

    scheme, _, name = place.source.partition(":")
    broker = connect(scheme, bench.settings(**place.settings))
    await broker.publish(name, [Outgoing(body(Item("a")), {"n": "v"}, "k-1")])
    await broker.close()
    async with bench.running(app, **place.settings) as running:
        await running.until_count(retrying=1)
    assert bench.do("select state from idemconsumer.record") == [(0,)]
    worker = await bench.until_empty(app, **place.settings)
    assert worker.counts == {}, "its broker has it no more"

    bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
    async with bench.running(app, **place.settings) as running:
        await running.until_count(applied=1)
    first, second = seen
    assert second == replace(first, attempt=2)
    assert bench.effects() == ["a"]
