"""What a broker gives beside the body: handlers see it, and keys are made of it."""

from __future__ import annotations

import json
from uuid import uuid4

import aio_pika
from aiobotocore.session import get_session
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer import App, Key, Message, Tx
from tests.support.kafka import create_topic
from tests.support.servers.made import Server
from tests.support.workers import Bench, Item, note


async def test_a_tombstone_of_kafka_is_none_under_the_key_of_its_record(bench: Bench, kafka: Server) -> None:
    app, topic = App("shop"), f"facts.{uuid4().hex[:8]}"
    seen: list[tuple[str | None, int | None]] = []

    @app.idempotent_handler(f"kafka:{topic}", key=Key.all(Key.record_key(), Key.header("version")))
    async def keep(item: Item | None, tx: Tx, message: Message) -> None:
        seen.append((None if item is None else item.id, message.offset))
        await note(tx, item or Item(f"no {message.record_key!r}"))

    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic)
    await admin.close()
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all") as producer:
        for body, version in ((b'{"id": "a"}', b"1"), (None, b"2"), (None, b"2"), (b"", b"3")):
            await producer.send_and_wait(topic, body, key=b"user-1", headers=[("version", version)])
    async with bench.running(app, kafka=kafka.address) as worker:
        await worker.until_count(applied=2, duplicate=1, dead=1)
    assert bench.effects() == ["a", "no b'user-1'"]
    assert seen == [("a", 0), (None, 1)]
    assert bench.do("select reason from idemconsumer.dead_letter") == [("undecodable",)]


async def test_a_producer_that_reorders_fields_makes_duplicates_and_no_conflicts(bench: Bench, kafka: Server) -> None:
    app, topic = App("shop"), f"facts.{uuid4().hex[:8]}"

    @app.idempotent_handler(f"kafka:{topic}", key="id")
    async def keep(item: Item, tx: Tx) -> None:
        await note(tx, item)

    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic)
    await admin.close()
    bodies = (b'{"id": "a", "entity": "e"}', b'{"entity":"e","id":"a"}', b'{"entity":"f","id":"a"}')
    async with AIOKafkaProducer(bootstrap_servers=kafka.address, acks="all") as producer:
        for body in bodies:
            await producer.send_and_wait(topic, body)
    async with bench.running(app, kafka=kafka.address) as worker:
        await worker.until_count(applied=1, duplicate=1, conflict=1)
    assert bench.effects() == ["a"]


async def test_a_property_of_rabbitmq_is_a_key(bench: Bench, rabbitmq: Server) -> None:
    app, name = App("shop"), f"facts-{uuid4().hex[:8]}"
    seen: list[Message] = []

    @app.idempotent_handler(f"rabbitmq:{name}", key=Key.property("correlation_id"))
    async def keep(item: Item, tx: Tx, message: Message) -> None:
        seen.append(message)
        await note(tx, item)

    async with await aio_pika.connect(rabbitmq.address) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        for correlation in ("c-1", "c-1", "c-2", None):
            sent = aio_pika.Message(b'{"id": "a"}', correlation_id=correlation, priority=4)
            await channel.default_exchange.publish(sent, name)
    async with bench.running(app, rabbitmq=rabbitmq.address) as worker:
        await worker.until_count(applied=2, duplicate=1, dead=1)
    assert sorted(message.key for message in seen) == ["c-1", "c-2"]
    assert {message.properties["routing_key"] for message in seen} == {name}
    assert {message.properties["priority"] for message in seen} == {4}
    assert bench.do("select reason from idemconsumer.dead_letter") == [("key_missing",)]


async def test_what_sns_sends_to_sqs_twice_is_one_message(bench: Bench, sqs: Server) -> None:
    app, name = App("shop"), f"facts-{uuid4().hex[:8]}"

    @app.idempotent_handler(f"sqs:{name}", key="id", envelope="sns")
    async def keep(item: Item, tx: Tx) -> None:
        await note(tx, item)

    payload = json.dumps({"id": "a"})
    notifications = [{"Type": "Notification", "MessageId": f"n-{n}", "Message": payload} for n in (1, 1, 2)]
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        url = (await client.create_queue(QueueName=name))["QueueUrl"]
        for body in (*map(json.dumps, notifications), payload):
            await client.send_message(QueueUrl=url, MessageBody=body)
    async with bench.running(app, sqs=sqs.address) as worker:
        await worker.until_count(applied=1, duplicate=2, dead=1)
    assert bench.effects() == ["a"]
    assert bench.do("select convert_from(body, 'UTF8') from idemconsumer.dead_letter") == [(payload,)]
