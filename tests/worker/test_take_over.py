"""A message that its broker would soon drop after too many deliveries is taken over into the queue in Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from idemconsumer import App, Message, Reject, Tx
from idemconsumer.brokers.memory import MemoryBroker, MemorySession
from idemconsumer.brokers.rabbitmq.limits import TAKE_OVER_AFTER
from idemconsumer.message.message import Message as Arrived
from idemconsumer.message.message import Subscription, Whole
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from tests.support.logs import LogCapture, times
from tests.support.workers import Bench, Item, body, connected, note


def outgoing(name: str) -> Outgoing:
    return Outgoing(body(Item(name)))


class WornOut(MemoryBroker):
    """Delivers like RabbitMQ's quorum queue: with a count, which is high already."""

    hands_over = True

    def __init__(self, count: int, message_id: str = "m-1", whole: Whole | None = None) -> None:
        super().__init__()
        self._count = count
        self._message_id = message_id
        self._whole = whole
        self.settled: list[str] = []

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> WornOutSession:
        (subscription,) = subscriptions
        # Both are asked by the name of their source, and that is not `memory:`.
        bounds = replace(bounds, share=None, paused=lambda _: False)
        return WornOutSession(self, subscription.name, self._queue(subscription.name), bounds)

    async def close(self) -> None:
        return


class WornOutSession(MemorySession):
    def __init__(self, broker: WornOut, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._broker = broker

    async def fetch(self) -> Sequence[Delivery]:
        return [
            Delivery(
                Arrived(
                    source="rabbitmq:rides", body=d.message.body, headers={"x": b"\xff\x00", "y": "1"},
                    message_id=self._broker._message_id, position=d.message.position, whole=self._broker._whole,
                ),
                d.epoch, handle=d.handle, suspect=True, count=self._broker._count,
                take_over=self._broker._count > TAKE_OVER_AFTER,
            )
            for d in await super().fetch()
        ]  # fmt: skip

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._broker.settled += [delivery.message.position for delivery in deliveries]
        await super().settle(deliveries)


async def test_it_is_stored_then_settled_then_run_as_if_it_had_come_from_its_broker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    app, broker = App("over"), WornOut(TAKE_OVER_AFTER + 1)
    connected(bench, monkeypatch, rabbitmq=broker)
    ran: list[Message] = []

    @app.idempotent_handler("rabbitmq:rides", key="id")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        ran.append(message)
        assert broker.settled == ["rides#1", "rides#2"]
        if item.id == "refused":
            raise Reject("no")

    await broker.publish("rides", [outgoing("worn out"), outgoing("refused")])
    worker = await bench.until_empty(app)
    assert worker.counts == {"applied": 1, "failed": 1}
    assert bench.effects() == ["worn out"]
    assert times(logged, "delivered too often, moved to postgres") == 2
    assert sorted((m.source, m.position, m.message_id) for m in ran) == [
        ("rabbitmq:rides", "rides#1", "m-1"),
        ("rabbitmq:rides", "rides#2", "m-1"),
    ]
    assert ran[0].headers == {"x": b"\xff\x00", "y": "1"}
    assert bench.do("select 1 from idemconsumer.queue") == []


async def test_of_which_only_the_beginning_is_held_is_a_letter_and_not_taken_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    """Our own queue would have the beginning for all of it (D8)."""
    app, broker = App("over"), WornOut(TAKE_OVER_AFTER + 1, whole=Whole(5_000_000, b"s" * 32))
    connected(bench, monkeypatch, rabbitmq=broker)

    @app.idempotent_handler("rabbitmq:rides", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await broker.publish("rides", [outgoing("beginning")])
    worker = await bench.until_empty(app)
    assert (worker.counts, bench.effects(), broker.settled) == ({"dead": 1}, [], ["rides#1"])
    letter = "select reason, body_size, body_sha256 from idemconsumer.dead_letter"
    assert bench.do(letter) == [("oversized", 5_000_000, b"s" * 32)]
    assert times(logged, "delivered too often, moved to postgres") == 0


async def test_an_id_that_no_text_column_takes_is_taken_over_and_comes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, broker = App("over"), WornOut(TAKE_OVER_AFTER + 1, message_id="a\0b")
    connected(bench, monkeypatch, rabbitmq=broker)
    ran: list[Message] = []

    @app.idempotent_handler("rabbitmq:rides", key="id")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        ran.append(message)

    await broker.publish("rides", [outgoing("odd"), outgoing("behind")])
    await bench.until_empty(app)
    assert sorted(bench.effects()) == ["behind", "odd"]
    assert [message.message_id for message in ran] == ["a\0b"] * 2


async def test_a_message_below_the_limit_stays_with_its_broker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app, broker = App("over"), WornOut(TAKE_OVER_AFTER)
    connected(bench, monkeypatch, rabbitmq=broker)

    @app.idempotent_handler("rabbitmq:rides", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        assert broker.settled == []

    await broker.publish("rides", [outgoing("tired")])
    await bench.until_empty(app)
    assert bench.effects() == ["tired"]


async def test_a_duplicate_of_what_was_taken_over_is_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, and the worker died before it could settle: the broker delivers it again, so it is stored twice."""
    app, broker = App("over"), WornOut(TAKE_OVER_AFTER + 1)
    connected(bench, monkeypatch, rabbitmq=broker)

    @app.idempotent_handler("rabbitmq:rides", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await broker.publish("rides", [outgoing("twice"), outgoing("twice")])
    worker = await bench.until_empty(app)
    assert worker.counts == {"applied": 1, "duplicate": 1}
    assert bench.effects() == ["twice"]
