"""Replies on the real brokers: before settlement, the same for each duplicate, and nowhere that no one asked for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aio_pika
import pytest

from idemconsumer import App, Reject, Saga, Tx
from idemconsumer.brokers.rabbitmq.rabbitmq_broker import RabbitmqBroker
from idemconsumer.ports.broker import Reply, Unsent
from idemconsumer.ports.observer import Point
from idemconsumer.settings import Settings
from tests.support.logs import LogCapture, entries, times
from tests.support.requesters import (
    OfRabbitmq,
    Replied,
    Requester,
    requester_of_kafka,
    requester_of_rabbitmq,
    requester_of_sqs,
)
from tests.support.servers.made import Server
from tests.support.waiting import until
from tests.support.workers import Bench, Item, body, connected, note
from tests.worker.crashes import payment, work

MAKE: dict[str, Any] = {"rabbitmq": requester_of_rabbitmq, "kafka": requester_of_kafka, "sqs": requester_of_sqs}


@pytest.fixture
async def requester(rabbitmq: Server) -> AsyncIterator[OfRabbitmq]:
    async with requester_of_rabbitmq(rabbitmq.address) as made:
        yield made


def quoting(source: str, **options: Any) -> App:
    app = App("quotes")

    @app.idempotent_handler(source, key="id", **({"reply": True} | options))
    async def quote(item: Item, tx: Tx) -> dict[str, str] | None:
        if item.id == "refused":
            raise Reject("unknown_item", {"id": item.id})
        await note(tx, item)
        return None if item.id == "nothing" else {"price": item.id}

    return app


@pytest.mark.parametrize("scheme", MAKE)
async def test_the_result_and_the_rejection_are_told_to_each_who_asks(
    scheme: str, bench: Bench, logged: LogCapture, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(scheme)
    async with AsyncExitStack() as stack:
        requester: Requester = await stack.enter_async_context(MAKE[scheme](server.address))
        for item, correlation in (("a", "1"), ("a", "2"), ("refused", "3"), ("nothing", "4")):
            await requester.ask(body(Item(item)), correlation, to=requester.here)
        await requester.ask(body(Item("b")), "5", to=None)
        await requester.ask(body(Item("c")), "6", to="gone-since")
        async with bench.running(quoting(requester.source), **{scheme: server.address}) as running:
            await running.until_count(applied=4, duplicate=1, failed=1)
            found = {each.correlation: each for each in await requester.replies(4)}
            await requester.ask(body(Item("refused")), "7", to=requester.here)
            (again,) = await requester.replies(1)
            await running.until(lambda: times(logged, "reply given up") == 1)
        rejection = b'{"code":"unknown_item","body":{"id":"refused"}}'
        assert {name: (each.outcome, each.body) for name, each in found.items()} == {
            "1": ("completed", b'{"price":"a"}'),
            "2": ("completed", b'{"price":"a"}'),
            "3": ("rejected", rejection),
            "4": ("completed", b"null"),
        }
        assert (again.correlation, again.outcome, again.body) == ("7", "rejected", rejection)
        assert len({each.id for each in (*found.values(), again)}) == 5
        (given_up,) = entries(logged, "reply given up")
        assert given_up["log_level"] == "info"
        assert sorted(bench.effects()) == ["a", "b", "c", "nothing"]


@pytest.mark.kill
@pytest.mark.parametrize(("point", "before"), [(Point.COMMITTED, 0), (Point.SETTLING, 1)])
async def test_a_crash_before_and_after_the_reply(
    point: Point, before: int, bench: Bench, rabbitmq: Server, requester: OfRabbitmq
) -> None:
    """Before it there is none, and behind it the delivery is not settled yet: the next worker replies the same."""
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int)")
    await requester.ask(payment("one"), "7", to=requester.here)
    environment = {"CRASH_SOURCE": requester.source, "IDEMCONSUMER_RABBITMQ": rabbitmq.address}
    environment |= {"IDEMCONSUMER_HANDLERS": "pay", "CRASH_REPLY": "1"}
    crashed = await asyncio.to_thread(work, bench.dsn, point, **environment)
    assert crashed == -signal.SIGKILL
    first = await requester.replies(before)
    assert await requester.queue.get(fail=False) is None
    assert await asyncio.to_thread(work, bench.dsn, **environment) == 0
    (last,) = await requester.replies(1)
    assert last == Replied("7", last.id, "completed", b'{"paid":1}')
    assert first == [last] * before
    assert bench.do("select id from effect") == [("one",)]


class Unsteady(RabbitmqBroker):
    """Cannot send some replies, as long as it is `away`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.away = True
        self.refused = 0

    async def reply(self, replies: Sequence[Reply]) -> list[Unsent | None]:
        if not self.away:
            return await super().reply(replies)
        held = [each for each in replies if each.address.correlation != "2"]
        self.refused += len(held)
        sent = await super().reply([each for each in replies if each not in held])
        left = iter(sent)
        return [Unsent("no answer") if each in held else next(left) for each in replies]


@pytest.mark.parametrize("order", [None, "entity"])
async def test_a_reply_that_cannot_be_sent_holds_its_delivery_alone(
    order: str | None,
    bench: Bench,
    rabbitmq: Server,
    requester: OfRabbitmq,
    monkeypatch: pytest.MonkeyPatch,
    logged: LogCapture,
) -> None:
    broker = Unsteady(bench.settings(rabbitmq=rabbitmq.address))
    connected(bench, monkeypatch, rabbitmq=broker)
    for item, correlation in (("a", "1"), ("b", "2"), ("c", "3")):
        await requester.ask(body(Item(item, "one")), correlation, to=requester.here)
    async with bench.running(quoting(requester.source, order_by=order), rabbitmq=rabbitmq.address) as running:
        (settled,) = await requester.replies(1)
        await running.until(lambda: broker.refused >= 4)
        assert settled.correlation == "2"
        assert times(logged, "replies cannot be sent, waiting") == 1
        assert running.points.count(Point.SETTLED) == 1
        broker.away = False
        assert sorted(str(each.correlation) for each in await requester.replies(2)) == ["1", "3"]
        await running.until(lambda: sum(n for point, n in running.points.seen if point is Point.SETTLED) == 3)
        assert running.worker.counts == {"applied": 3}
    assert times(logged, "replies can be sent again") == 1
    assert sorted(bench.effects()) == ["a", "b", "c"]
    await until(lambda: empty(requester))


async def empty(requester: OfRabbitmq) -> bool:
    declared = await requester.channel.declare_queue(requester.name, passive=True)
    return bool(declared.declaration_result.message_count == 0)


async def test_an_address_that_is_not_allowed_gets_nothing(
    bench: Bench, rabbitmq: Server, requester: OfRabbitmq, logged: LogCapture
) -> None:
    await requester.ask(body(Item("a")), "1", to=requester.name)
    await requester.ask(body(Item("a")), "1", to=f"{requester.here}/elsewhere")
    await requester.ask(body(Item("a")), "2", to=requester.here)
    app = quoting(requester.source, reply=r"replies\.\w+")
    async with bench.running(app, rabbitmq=rabbitmq.address) as running:
        (found,) = await requester.replies(1)
        assert found.correlation == "2"
        await running.until_count(applied=1, duplicate=2)
    assert times(logged, "reply address not allowed") == 2


async def test_a_queue_elsewhere_is_no_address(bench: Bench, sqs: Server, logged: LogCapture) -> None:
    """Neither does a URL choose where we connect to, nor an ARN another account."""
    async with requester_of_sqs(sqs.address) as requester:
        elsewhere = requester.own.replace("127.0.0.1", "127.0.0.2").replace("localhost", "127.0.0.2")
        await requester.ask(body(Item("a")), "1", to=elsewhere)
        await requester.ask(body(Item("a")), "2", to=f"arn:aws:sqs:eu-west-1:999999999999:{requester.here}")
        await requester.ask(body(Item("a")), "3", to="no queue")
        await requester.ask(body(Item("a")), "4", to=requester.own)
        async with bench.running(quoting(requester.source), sqs=sqs.address) as running:
            (found,) = await requester.replies(1)
            await running.until(lambda: times(logged, "reply given up") == 3)
        assert found.correlation == "4"
        assert {entry["log_level"] for entry in entries(logged, "reply given up")} == {"error"}


async def test_a_requester_without_a_queue_is_answered_directly(
    bench: Bench, rabbitmq: Server, requester: OfRabbitmq, logged: LogCapture
) -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        direct = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
        await direct.consume(answers.put, no_ack=True)
        message = aio_pika.Message(body(Item("a")), message_id="m-1", reply_to=direct.name)
        await channel.default_exchange.publish(message, requester.name)
        async with bench.running(quoting(requester.source), rabbitmq=rabbitmq.address):
            answer = await answers.get()
            assert (answer.correlation_id, answer.body) == ("m-1", b'{"price":"a"}')
    assert times(logged, "reply given up") == 0


async def test_a_saga_answers_at_its_end(
    bench: Bench, rabbitmq: Server, requester: OfRabbitmq, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    """Also if the reply cannot be sent at first, when the saga has ended already."""
    app, broker = App("quotes"), Unsteady(bench.settings(rabbitmq=rabbitmq.address))
    connected(bench, monkeypatch, rabbitmq=broker)

    @app.idempotent_handler(requester.source, key="id", reply=True, settle="finished")
    async def quote(item: Item, saga: Saga) -> dict[str, str]:
        await saga.tx("note", note_item, item)
        return {"price": item.id}

    async def note_item(tx: Tx, item: Item) -> None:
        await note(tx, item)

    await requester.ask(body(Item("a")), "1", to=requester.here)
    async with bench.running(app, rabbitmq=rabbitmq.address) as running:
        await running.until(lambda: broker.refused == 1)
        broker.away = False
        (found,) = await requester.replies(1)
    assert (found.correlation, found.body) == ("1", b'{"price":"a"}')
    assert await requester.queue.get(fail=False) is None
    assert bench.effects() == ["a"]
    assert times(logged, "fenced") == 0  # by itself
