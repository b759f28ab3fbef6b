"""A dead letter loses nothing: on each broker every message is a letter of its own, with all that the broker gave."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import aio_pika
import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Message, Retry, Saga, Tx
from idemconsumer.admin.dead_letters import Admin, DeadLetterDetail
from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.brokers.rabbitmq.rabbitmq_session import RabbitmqSession
from idemconsumer.brokers.sqs.sqs_session import SqsSession
from idemconsumer.ports.broker import Delivery
from tests.support.places import Place, kafka_place, rabbitmq_place, sqs_place
from tests.support.servers.made import Server
from tests.support.workers import SCHEMA, Bench, Item, note


@pytest.fixture(params=["kafka", "rabbitmq", "sqs", "postgres"])
async def place(request: pytest.FixtureRequest, bench: Bench) -> AsyncIterator[Place]:
    if request.param == "postgres":

        async def send() -> None:
            bench.enqueue("q", b"{")

        yield Place("postgres:q", send, {})
        return
    places = {"kafka": kafka_place, "rabbitmq": rabbitmq_place, "sqs": sqs_place}
    async with places[request.param](request.getfixturevalue(request.param)) as place:
        yield place


def shop(source: str) -> App:
    app = App("shop")

    @app.idempotent_handler(source, key="id")
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return app


def letters(bench: Bench) -> list[int]:
    return [count for (count,) in bench.do("select arrivals from idemconsumer.dead_letter order by id")]


async def shown(bench: Bench) -> list[DeadLetterDetail]:
    admin = Admin(bench.dsn, SCHEMA)
    found = [await admin.dead_letter(letter.id) for letter in await admin.dead_letters()]
    return [letter for letter in reversed(found) if letter is not None]


async def unsettled(monkeypatch: pytest.MonkeyPatch, bench: Bench, app: App, count: int, **settings: Any) -> None:
    """A worker that writes its letters and dies before it settles."""

    async def settle(self: object, deliveries: Sequence[Delivery]) -> None:
        return

    with monkeypatch.context() as patch:
        for session in (KafkaSession, RabbitmqSession, SqsSession, PostgresSession):
            patch.setattr(session, "settle", settle)
        async with bench.running(app, **settings) as worker:
            await worker.until(lambda: sum(letters(bench)) >= count)
    bench.do("update idemconsumer.queue set visible_at = clock_timestamp()")


async def test_another_message_is_another_letter_and_a_redelivery_counts_up(
    bench: Bench, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(place.source)
    for _ in range(3):
        await place.send()
    await unsettled(monkeypatch, bench, app, 3, **place.settings)
    assert letters(bench) == [1, 1, 1]
    async with bench.running(app, **place.settings) as worker:
        await worker.until(lambda: sum(letters(bench)) == 6)
    assert len(letters(bench)) == 3
    await place.send()
    async with bench.running(app, **place.settings) as worker:
        await worker.until(lambda: len(letters(bench)) == 4)


async def test_a_letter_shows_all_that_kafka_gave(bench: Bench, kafka: Server) -> None:
    async with kafka_place(kafka) as place:
        topic = place.source.partition(":")[2]
        async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all") as producer:
            headers = [("trace", b"1"), ("n", b"\xff"), ("trace", b"2")]
            for key in (b"user-1", b"\xff\x00"):
                await producer.send_and_wait(topic, b"{", key=key, headers=headers, timestamp_ms=1_700_000_000_123)
            for user in range(2):
                await producer.send_and_wait(topic, None, key=b"gone-%d" % user)
        async with bench.running(shop(place.source), **place.settings) as worker:
            await worker.until(lambda: len(letters(bench)) == 4)
    found = sorted(await shown(bench), key=lambda letter: letter.position)  # each record key has a lane of its own
    first, second = found[:2]
    assert (first.record_key, second.record_key) == (b"user-1", b"\xff\x00")
    assert first.headers == (("trace", "1"), ("n", b"\xff"), ("trace", "2"))
    assert first.timestamp == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert (first.position, first.body, first.body_size) == (f"{topic}-0-0", b"{", 1)
    assert [letter.record_key for letter in found[2:]] == [b"gone-%d" % user for user in range(2)]
    assert {(letter.tombstone, letter.reason) for letter in found[2:]} == {(True, "tombstone")}


async def test_a_letter_shows_all_that_rabbitmq_gave(bench: Bench, rabbitmq: Server) -> None:
    async with rabbitmq_place(rabbitmq) as place:
        name = place.source.partition(":")[2]
        sent = aio_pika.Message(
            b"{",
            headers={"trace": "1"},
            content_type="application/json",
            content_encoding="utf-8",
            priority=3,
            correlation_id="c-1",
            reply_to="answers",
            message_id="m-1",
            timestamp=datetime(2024, 1, 2, tzinfo=UTC),
            type="order.placed",
            app_id="web",
        )
        async with await aio_pika.connect(rabbitmq.address) as connection:
            await (await connection.channel()).default_exchange.publish(sent, name)
        async with bench.running(shop(place.source), **place.settings) as worker:
            await worker.until(lambda: len(letters(bench)) == 1)
    (letter,) = await shown(bench)
    assert letter.properties == {
        "routing_key": name,
        "exchange": "",
        "correlation_id": "c-1",
        "reply_to": "answers",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "type": "order.placed",
        "app_id": "web",
        "priority": 3,
        "delivery_mode": 1,
    }
    assert (letter.message_id, letter.headers) == ("m-1", (("trace", "1"),))
    assert letter.timestamp == datetime(2024, 1, 2, tzinfo=UTC)


async def test_a_letter_shows_all_that_sqs_gave(bench: Bench, sqs: Server) -> None:
    async with sqs_place(sqs) as place:
        before = time.time()
        await place.send()
        async with bench.running(shop(place.source), **place.settings) as worker:
            await worker.until(lambda: len(letters(bench)) == 1)
    (letter,) = await shown(bench)
    assert letter.message_id is not None
    assert letter.position.endswith(letter.message_id)
    assert letter.timestamp is not None
    assert abs(letter.timestamp.timestamp() - before) < 60


async def test_a_saga_has_all_of_it_when_it_is_resumed(bench: Bench, kafka: Server) -> None:
    seen: list[Message] = []
    async with kafka_place(kafka) as place:
        app, topic = App("shop"), place.source.partition(":")[2]

        @app.idempotent_handler(place.source, key="id", max_attempts=3)
        async def take(item: Item, saga: Saga, message: Message) -> None:
            seen.append(message)
            if message.attempt == 1:
                raise Retry(after="0.1s")

        async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all") as producer:
            body = json.dumps({"id": "a"}).encode()
            await producer.send_and_wait(topic, body, key=b"user-1", headers=[("t", b"1"), ("t", b"2")])
        async with bench.running(app, **place.settings) as worker:
            await worker.until(lambda: len(seen) == 2)
    first, again = seen
    assert (again.record_key, again.offset, again.partition) == (b"user-1", 0, 0)
    assert (again.timestamp, again.all_headers) == (first.timestamp, (("t", "1"), ("t", "2")))
