"""A relay that is killed sends the same messages again under the same ids: once from topic to topic (X2, X3)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import aio_pika
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from idemconsumer import App, Key, Tx
from idemconsumer.message.reply_address import MESSAGE_ID
from idemconsumer.ports.observer import Point
from tests.support.brokers import Brokers
from tests.support.kafka import World, world_of
from tests.support.logs import LogCapture, times
from tests.support.servers.made import Server
from tests.support.servers.proxy import Proxy
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, Item, note
from tests.worker.crashes import payment, work

PAYMENTS = [f"{customer}-{n}" for n in range(4) for customer in ("ann", "bob", "cid")]
AROUND = [
    pytest.param(Point.SEALING, marks=pytest.mark.long),
    Point.COMMITTED,
    pytest.param(Point.SETTLING, marks=pytest.mark.long),
    Point.RELAYING,
    Point.RELAYED,
]


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.do("drop table effect")
    bench.do("create table effect (id text, amount int, place bigint generated always as identity)")
    return bench


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as made:
        await made.create(partitions=2)
        yield made


async def on_the_topic(world: World) -> list[tuple[str, str, str]]:
    """Key, message id and body of each record, as it was sent."""
    found: list[tuple[str, str, str]] = []
    async with AIOKafkaConsumer(bootstrap_servers=world.server.address, auto_offset_reset="earliest") as consumer:
        partitions = [TopicPartition(world.topic, number) for number in (0, 1)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        async with asyncio.timeout(PATIENCE):
            while len(found) < sum(ends.values()):
                for records in (await consumer.getmany(timeout_ms=1_000)).values():
                    for each in records:
                        found.append((each.key.decode(), dict(each.headers)[MESSAGE_ID].decode(), each.value.decode()))
    return found


def once(sent: list[tuple[str, str, str]]) -> dict[str, list[str]]:
    """What a consumer that knows the ids makes of it, by key."""
    bodies: dict[str, list[str]] = {}
    for key, _, each in dict.fromkeys(sent):
        bodies.setdefault(key, []).append(each)
    return bodies


WANTED = {customer: [f'{{"id":"{customer}-{n}","entity":""}}' for n in range(4)] for customer in ("ann", "bob", "cid")}


async def killed_and_run_again(bench: Bench, point: Point, environment: dict[str, str]) -> None:
    assert await asyncio.to_thread(work, bench.dsn, point, **environment) == -signal.SIGKILL, "it never came there"
    # What the dead worker held is visible again, which takes ten seconds otherwise.
    bench.do("update idemconsumer.queue set visible_at = clock_timestamp()")
    assert await asyncio.to_thread(work, bench.dsn, **environment) == 0
    assert sorted(bench.effects()) == sorted(PAYMENTS)
    assert bench.do("select 1 from idemconsumer.outbox") == []


@pytest.mark.kill
@pytest.mark.parametrize("point", AROUND)
async def test_effect_outgoing_message_and_key_are_one(bench: Bench, world: World, point: Point) -> None:
    for each in PAYMENTS:
        bench.enqueue("payments", payment(each))
    environment = {"CRASH_PUBLISH": f"kafka:{world.topic}", "IDEMCONSUMER_KAFKA": world.server.address}
    await killed_and_run_again(bench, point, environment)
    sent = await on_the_topic(world)
    assert once(sent) == WANTED
    assert len({number for _, number, _ in sent}) == len(PAYMENTS)
    assert (len(sent) > len(PAYMENTS)) == (point is Point.RELAYED), "sent again, under the same id"


@pytest.mark.kill
@pytest.mark.slow
async def test_from_topic_to_topic_and_what_its_consumer_makes_of_it(
    bench: Bench, world: World, kafka: Server, rabbitmq: Server, sqs: Server
) -> None:
    brokers = Brokers(kafka, rabbitmq, sqs)
    await brokers.create()
    await brokers.publish(bench.dsn, "kafka", *map(payment, PAYMENTS))
    environment = {
        "CRASH_SOURCE": f"kafka:{brokers.name}",
        "CRASH_PUBLISH": f"kafka:{world.topic}",
        "IDEMCONSUMER_KAFKA": kafka.address,
        "IDEMCONSUMER_KAFKA_SESSION_TIMEOUT": "6",
    }
    await killed_and_run_again(bench, Point.RELAYED, environment)
    sent = await on_the_topic(world)
    assert len(sent) > len(PAYMENTS)
    assert once(sent) == WANTED

    bench.do("truncate effect")
    app = App("of-b")

    @app.idempotent_handler(f"kafka:{world.topic}", key=Key.header(MESSAGE_ID))
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)

    async with bench.running(app, kafka=kafka.address) as running:
        await running.until_count(applied=len(PAYMENTS), duplicate=len(sent) - len(PAYMENTS))
    for customer in WANTED:
        assert [each for each in bench.effects() if each.startswith(customer)] == [f"{customer}-{n}" for n in range(4)]
    assert len(bench.effects()) == len(PAYMENTS)
    await brokers.delete()


async def test_a_broker_that_is_away_gets_all_in_order_once_it_is_back(
    bench: Bench, rabbitmq: Server, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemconsumer.worker.outgoing.next_look", lambda failures, jitter: 0.05)
    app, found = App("shop"), list[bytes]()

    @app.idempotent_handler("postgres:orders", key="id", group_size=1, concurrency=1)
    async def order(item: Item, tx: Tx) -> None:
        await note(tx, item)
        await app.publish(f"rabbitmq:{queue.name}", {"id": item.id}, tx=tx)

    async def arrived() -> bool:
        while (got := await queue.get(fail=False, no_ack=True)) is not None:
            found.append(got.body)
        return list(dict.fromkeys(found)) == [b'{"id":"%d"}' % n for n in range(6)]

    address = urlsplit(rabbitmq.address)
    async with Proxy(address.port or 5672) as proxy:
        through = address._replace(netloc=f"{address.username}:{address.password}@127.0.0.1:{proxy.port}").geturl()
        async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
            queue = await channel.declare_queue()
            async with bench.running(app, rabbitmq=through) as running:
                bench.enqueue("orders", *(Item(str(n)) for n in range(3)))
                await running.until(lambda: len(bench.effects()) == 3)
                await running.until(lambda: bench.do("select 1 from idemconsumer.outbox") == [])
                proxy.cut()
                bench.enqueue("orders", *(Item(str(n)) for n in range(3, 6)))
                await running.until(lambda: times(logged, "outgoing messages cannot be relayed, will retry") == 1)
                await running.until(lambda: len(bench.effects()) == 6)
                assert bench.do("select count(*) from idemconsumer.outbox") == [(3,)], "handlers go on meanwhile"
                await proxy.restore()
                await running.until(lambda: bench.do("select 1 from idemconsumer.outbox") == [])
                await until(arrived)
            await queue.delete(if_unused=False, if_empty=False)
    assert times(logged, "outgoing messages cannot be relayed, will retry") == 1


@pytest.mark.kill
async def test_a_relay_to_rabbitmq_that_is_killed_sends_the_same_ids_again(bench: Bench, rabbitmq: Server) -> None:
    for each in PAYMENTS:
        bench.enqueue("payments", payment(each))
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        queue = await channel.declare_queue()
        environment = {"CRASH_PUBLISH": f"rabbitmq:{queue.name}", "IDEMCONSUMER_RABBITMQ": rabbitmq.address}
        await killed_and_run_again(bench, Point.RELAYED, environment)
        sent: list[tuple[str | None, bytes]] = []

        async def empty() -> bool:
            if (got := await queue.get(fail=False, no_ack=True)) is not None:
                sent.append((got.message_id, got.body))
            return got is None and len(sent) > len(PAYMENTS)

        await until(empty)
        await queue.delete(if_unused=False, if_empty=False)
    assert [body for _, body in dict.fromkeys(sent)] == [f'{{"id":"{each}","entity":""}}'.encode() for each in PAYMENTS]
    assert len({number for number, _ in sent}) == len(PAYMENTS)
