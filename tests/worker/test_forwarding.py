"""Dead letters are stored, and forwarded to where `dead_letter_to` says: at least once, under one id (O19)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from uuid import uuid4

import aio_pika
import psycopg
import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Message, Tx
from idemconsumer.admin.dead_letters import ALL, Admin, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.brokers.adapters import connect
from idemconsumer.cli.inspect import findings
from idemconsumer.errors import BadMessage, BrokerUnavailable
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from tests.support.brokers import SCHEMES, Brokers
from tests.support.foreign import FOREIGN
from tests.support.inside import give_settings
from tests.support.logs import LogCapture, times
from tests.support.requesters import requester_of_kafka
from tests.support.servers.made import Server
from tests.support.workers import SCHEMA, Bench, Item, body, note

LARGE = b'{"id": "' + b"x" * 2_000 + b'"}'


async def received(settings: Settings, destination: str, count: int) -> list[Message]:
    """What is there, as another worker would get it; it stays."""
    scheme, _, name = destination.partition(":")
    broker = connect(scheme, settings)
    session = await broker.open([Subscription(destination, "reader", f"reader-{name}")], Bounds(lanes=1, group=8))
    found: list[Message] = []
    while len(found) < count:
        found += [delivery.message for delivery in await session.fetch()]
    await session.close()
    await broker.close()
    return found


@pytest.fixture
async def brokers(kafka: Server, rabbitmq: Server, sqs: Server) -> Any:
    made = Brokers(kafka, rabbitmq, sqs)
    await made.create()
    yield made
    await made.delete()


async def test_each_destination_gets_the_message_and_what_became_of_it(brokers: Brokers, bench: Bench) -> None:
    app = App("all")

    async def handle(item: Item, tx: Tx) -> None:
        raise ValueError(item.id)

    async with requester_of_kafka(brokers.kafka.address) as origin:
        for scheme in SCHEMES:
            app.idempotent_handler(
                origin.source,
                key="id",
                name=scheme,
                consumer_group=f"{brokers.name}-{scheme}",
                max_attempts=1,
                dead_letter_to=f"{scheme}:{brokers.name}",
            )(handle)
        async with AIOKafkaProducer(bootstrap_servers=brokers.kafka.address) as producer:
            headers = [("trace", b"t-1"), ("raw", b"\xff")]
            for sent in (body(Item("poison")), b"\xff{", LARGE):
                await producer.send_and_wait(origin.name, sent, key=b"\xfekey", headers=headers)
        async with bench.running(app, max_message_bytes=1_000, **brokers.addresses) as running:
            await running.until(lambda: len(unforwarded(bench, forwarded=True)) == 12)
    settings = bench.settings(**brokers.addresses)
    for scheme in SCHEMES:
        letters = {str(number): rest for number, *rest in bench.do(LETTERS, scheme)}
        for message in await received(settings, f"{scheme}:{brokers.name}", 3):
            given = dict(message.headers)
            number = str(given["idemconsumer-dead-letter"])
            reason, position, size, digest = letters.pop(number)
            assert given["idemconsumer-dead-reason"] == reason
            assert given["idemconsumer-dead-handler"] == scheme
            assert given["idemconsumer-dead-source"] == origin.source
            assert given["idemconsumer-dead-position"] == position
            assert (given["trace"], given["raw"]) == ("t-1", b"\xff")
            raised = "ValueError" if reason == "attempts_exhausted" else None
            assert given.get("idemconsumer-dead-error") == raised
            if scheme == "kafka":
                assert (message.record_key, given["idemconsumer-message-id"]) == (b"\xfekey", f"all-dead-{number}")
            else:
                assert (given["idemconsumer-dead-record-key"], message.message_id) == (b"\xfekey", f"all-dead-{number}")
            if reason == "oversized":
                assert (message.body, given["idemconsumer-dead-truncated"]) == (LARGE[:1_000], str(size))
                assert given["idemconsumer-dead-sha256"] == sha256(LARGE).hexdigest() == bytes(digest).hex()
            else:
                assert "idemconsumer-dead-truncated" not in given
                assert message.body in (body(Item("poison")), b"\xff{")
        assert letters == {}


LETTERS = "select id, reason, position, body_size, body_sha256 from idemconsumer.dead_letter where handler = %s"


def unforwarded(bench: Bench, *, forwarded: bool = False) -> Sequence[Any]:
    if forwarded:
        return bench.do("select id from idemconsumer.dead_letter where forwarded_at is not null")
    return bench.do("select letter from idemconsumer.outbox where letter is not null")


async def test_a_destination_that_is_away_holds_nothing_up_and_gets_all_once_it_is_back(
    bench: Bench, rabbitmq: Server, logged: LogCapture
) -> None:
    name, app = f"dlq-{uuid4().hex}", App("shop/eu")

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to=f"rabbitmq:{name}")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id.startswith("poison"):
            raise ValueError(item.id)

    bench.enqueue("orders", Item("poison-1"), Item("a"))
    async with bench.running(app, rabbitmq=rabbitmq.address) as running:
        await running.until(lambda: times(logged, "outgoing messages cannot be relayed, will retry") == 1)
        bench.enqueue("orders", Item("poison-2"), Item("b"))
        await running.until(lambda: bench.effects() == ["a", "b"] and len(unforwarded(bench)) == 2)
        (waiting,) = await Admin(bench.dsn, SCHEMA).unforwarded("shop/eu")
        assert (waiting.handler, waiting.letters, waiting.seconds > 0) == ("handle", 2, True)
        with pytest.raises(AttributeError, match="'tries' is no column of this row; it has handler, letters, seconds"):
            print(waiting.tries)
        checked = {(f.level, f.subject) async for f in findings(app, bench.settings(rabbitmq=rabbitmq.address))}
        assert ("error", f"rabbitmq:{name}") in checked
        async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
            queue = await channel.declare_queue(name, auto_delete=False)
            await running.until(lambda: len(unforwarded(bench, forwarded=True)) == 2)
            found = [await queue.get(no_ack=True) for _ in range(2)]
            await queue.delete()
    letters = await Admin(bench.dsn, SCHEMA).dead_letters()
    assert {f"{app.name}-dead-{letter.id}" for letter in letters} == {message.message_id for message in found}
    assert all(letter.forwarded_at is not None for letter in letters)
    assert times(logged, "outgoing messages cannot be relayed, will retry") == 1
    assert times(logged, "outgoing messages are relayed again") == 1


class Picky:
    """A broker that refuses what is large, as SQS does, and everything that is refused together with it."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, name: str, messages: Sequence[Outgoing]) -> None:
        if any(len(message.body) > 100 for message in messages):
            raise BadMessage("oversized", "too large")
        await self._broker.publish(name, messages)


async def test_what_its_destination_refuses_is_forwarded_without_its_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    app = App("shop")

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to="memory:dlq")
    async def handle(item: Item, tx: Tx) -> None:
        raise ValueError(item.id)

    picky = Picky(bench.broker)
    monkeypatch.setattr(
        "idemconsumer.worker.worker.connect",
        lambda scheme, settings: picky if scheme == "memory" else connect(scheme, settings),
    )
    bench.enqueue("orders", Item("x" * 100), Item("a"))
    await bench.until_empty(app)
    session = await bench.broker.open([Subscription("memory:dlq", "reader", "reader")], Bounds(lanes=1, group=8))
    bodies = {delivery.message.body: dict(delivery.message.headers) for delivery in await session.fetch()}
    assert bodies.keys() == {b"", body(Item("a"))}
    assert bodies[b""]["idemconsumer-dead-truncated"] == str(len(body(Item("x" * 100))))
    assert times(logged, "dead letter forwarded without its message") == 1
    assert unforwarded(bench) == []


@pytest.mark.parametrize("error", ["RuntimeError", "Gone"])
async def test_what_a_client_raises_costs_no_letter_its_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture, error: str
) -> None:
    """X10."""
    app, errors, publish = App("shop"), [FOREIGN[error]() for _ in range(3)], bench.broker.publish

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to="memory:dlq")
    async def handle(item: Item, tx: Tx) -> None:
        raise ValueError(item.id)

    async def reset(name: str, messages: Sequence[Outgoing]) -> None:
        if errors:
            raise errors.pop()
        await publish(name, messages)

    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda *_: 0.01)
    monkeypatch.setattr(bench.broker, "publish", reset)
    bench.enqueue("orders", Item("a"))
    async with bench.running(app) as running:
        await running.until(lambda: len(unforwarded(bench, forwarded=True)) == 1)
    session = await bench.broker.open([Subscription("memory:dlq", "reader", "reader")], Bounds(lanes=1, group=8))
    assert [delivery.message.body for delivery in await session.fetch()] == [body(Item("a"))]
    assert times(logged, "dead letter forwarded without its message") == 0


async def test_a_letter_is_forwarded_each_time_that_it_is_written_by_whichever_worker_comes(bench: Bench) -> None:
    app = App("shop")

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to="postgres:dlq")
    async def handle(item: Item, tx: Tx) -> None:
        raise AssertionError("nothing can be decoded")

    message = Message("postgres:orders", b"{", position="orders#1")
    give_settings(app, bench.settings())
    assert (await app.process(message)).kind == "dead"
    assert len(unforwarded(bench)) == 1
    await bench.until_empty(app)
    ids = "select message_id from idemconsumer.queue where name = 'dlq' order by id"
    ((number,),) = bench.do("select id from idemconsumer.dead_letter")
    assert bench.do(ids) == [(f"shop-dead-{number}",)]
    give_settings(app, bench.settings())
    assert (await app.process(message)).kind == "dead"  # another arrival of the same
    await app.close()
    assert (bench.do("select arrivals from idemconsumer.dead_letter"), unforwarded(bench)) == ([(2,)], [])
    await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
    await bench.until_empty(app)
    assert bench.do(ids) == [(f"shop-dead-{number}",), (f"shop-dead-{number}.2",)]
    await Admin(bench.dsn, SCHEMA).discard(ALL, by="ann")
    assert bench.do("select 1 from idemconsumer.outbox") == []


async def test_what_waits_for_its_destination_is_sent_as_it_is_then(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted it goes nowhere, emptied it goes without its message, and written again it goes once, as it is now."""
    app, publish, away = App("shop"), bench.broker.publish, True

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to="memory:dlq")
    async def handle(item: Item, tx: Tx) -> None:
        raise ValueError(item.id)

    async def unsteady(name: str, messages: Sequence[Outgoing]) -> None:
        if away:
            raise BrokerUnavailable("it is away")
        await publish(name, messages)

    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda *_: 0.01)
    monkeypatch.setattr(bench.broker, "publish", unsteady)
    bench.enqueue("orders", *map(Item, ("deleted", "emptied", "again")))
    await bench.until_empty(app)
    numbers = {
        json.loads(bytes(sent))["id"]: number
        for number, sent in bench.do("select id, body from idemconsumer.dead_letter")
    }
    admin = Admin(bench.dsn, SCHEMA)
    assert await admin.discard(Which(ids=[numbers["deleted"]]), by="ann") == 1
    assert (numbers["deleted"],) not in unforwarded(bench)
    bench.do(
        "update idemconsumer.dead_letter set body = '', body_size = 10, emptied_at = now() where id = %s",
        numbers["emptied"],
    )
    await Redrives(bench.dsn, SCHEMA).redrive(Which(ids=[numbers["again"]]), by="ann", run="r")
    await bench.until_empty(app)
    assert sorted(unforwarded(bench)) == sorted([(numbers["emptied"],), (numbers["again"],)])
    away = False
    await bench.until_empty(app)
    session = await bench.broker.open([Subscription("memory:dlq", "reader", "reader")], Bounds(lanes=1, group=8))
    assert {delivery.message.message_id: delivery.message.body for delivery in await session.fetch()} == {
        f"shop-dead-{numbers['emptied']}": b"",
        f"shop-dead-{numbers['again']}.2": body(Item("again")),
    }
    assert (unforwarded(bench), len(unforwarded(bench, forwarded=True))) == ([], 2)


async def test_who_deletes_a_letter_while_it_is_sent_and_who_marks_it_do_not_wait_for_each_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, publish, sent = App("shop"), bench.broker.publish, 0

    @app.idempotent_handler("postgres:orders", key="id", max_attempts=1, dead_letter_to="memory:dlq")
    async def handle(item: Item, tx: Tx) -> None:
        raise ValueError(item.id)

    with psycopg.connect(bench.dsn) as deleting:
        deleting.execute("set deadlock_timeout = '10ms'")  # it is the one who is told

        async def watched(name: str, messages: Sequence[Outgoing]) -> None:
            nonlocal sent
            await publish(name, messages)
            sent += 1
            if sent == 1:
                deleting.execute("select from idemconsumer.dead_letter for update")

        monkeypatch.setattr(bench.broker, "publish", watched)
        bench.enqueue("orders", Item("a"))
        async with bench.running(app) as running:
            await running.until(lambda: sent == 1 and bench.do("select from pg_locks where not granted") != [])
            await asyncio.to_thread(deleting.execute, "delete from idemconsumer.dead_letter")
            deleting.commit()
    assert (sent, unforwarded(bench)) == (1, [])
