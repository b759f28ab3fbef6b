"""What brokers confirm and refuse of messages that are relayed: for each, in order, one for itself (X2, X5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import product
from uuid import uuid4

import aio_pika
import aiormq
import pytest
from aiobotocore.client import AioBaseClient
from aiobotocore.session import get_session
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import UnknownError

from idemconsumer.brokers.rabbitmq.rabbitmq_broker import RabbitmqBroker
from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.errors import BrokerUnavailable
from idemconsumer.ports.broker import BEHIND, Outgoing, Unsent
from idemconsumer.settings import Settings
from tests.support.foreign import FOREIGN, Faults
from tests.support.kafka import World, world_of
from tests.support.servers.made import Server


@pytest.fixture
async def world(kafka: Server) -> AsyncIterator[World]:
    async with world_of(kafka) as made:
        yield made


def messages(*bodies: str) -> list[Outgoing]:
    """Each under the key that its body begins with."""
    return [Outgoing(body.encode(), {"n": "v"}, body.partition("-")[0] or None) for body in bodies]


def final(answers: Sequence[Unsent | None]) -> list[bool | None]:
    """None: confirmed; else whether no further try would help."""
    return [None if answer is None else answer.final for answer in answers]


async def values(world: World) -> list[str]:
    async with AIOKafkaConsumer(bootstrap_servers=world.server.address, auto_offset_reset="earliest") as consumer:
        at = TopicPartition(world.topic, 0)
        consumer.assign([at])
        end, found = (await consumer.end_offsets([at]))[at], list[str]()
        while end and await consumer.position(at) < end:
            for records in (await consumer.getmany(timeout_ms=1_000)).values():
                found += [record.value.decode()[:6] for record in records]
    return found


@pytest.mark.parametrize("partitions", [1, 3])
async def test_kafka_has_all_in_the_order_of_their_keys(world: World, partitions: int) -> None:
    await world.create(partitions=partitions)
    sent = messages(*(f"{key}-{n}" for n in range(50) for key in "abc"))
    assert await world.broker.relay(world.topic, sent) == [None] * 150
    if partitions == 1:
        assert await values(world) == [message.body.decode() for message in sent]


async def test_a_record_that_kafka_refuses_stops_its_key_and_no_other(world: World) -> None:
    await world.create(configs={"max.message.bytes": "3000"})
    sent = messages("a-1", "b-1", "a-2" + "x" * 4_000, "b-2", "a-3", "c-1")
    answers = await world.broker.relay(world.topic, sent)
    assert final(answers) == [None, None, True, None, False, None]
    assert answers[4] is BEHIND
    assert await values(world) == ["a-1", "b-1", "b-2", "c-1"]
    assert await world.broker.relay(world.topic, messages("a-3")) == [None], "and it goes on"
    assert (await values(world))[-1] == "a-3"


async def test_many_records_that_are_too_large_together_are_taken_apart(world: World) -> None:
    await world.create(configs={"max.message.bytes": "3000"})
    sent = messages(*(f"{n % 4}-{n:02}" + "x" * 400 for n in range(40)))
    assert await world.broker.relay(world.topic, sent) == [None] * 40
    found = await values(world)
    assert [each for each in found if each.startswith("1")] == [f"1-{n:02}xx" for n in range(1, 40, 4)]


async def test_a_record_without_a_key_is_refused_by_a_compacted_topic_alone(world: World) -> None:
    await world.create(configs={"cleanup.policy": "compact"})
    sent = [*messages("a-1"), Outgoing(b"none"), *messages("a-2")]
    assert final(await world.broker.relay(world.topic, sent)) == [None, True, None]
    assert await values(world) == ["a-1", "a-2"]


async def test_an_error_of_the_servers_own_is_an_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.create()

    async def failed(*_: object, **__: object) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_exception(UnknownError())
        return answer

    with monkeypatch.context() as within:
        within.setattr(AIOKafkaProducer, "send_batch", failed)
        with pytest.raises(BrokerUnavailable, match="did not confirm"):
            await world.broker.relay(world.topic, messages("a-1"))
    assert await world.broker.relay(world.topic, messages("a-1")) == [None]


async def test_what_is_larger_than_is_sent_to_kafka_is_not_sent(kafka: Server, world: World) -> None:
    await world.create()
    sent = messages("a-1", "a-2" + "x" * 4_194_304, "a-3", "b-1")
    assert final(await world.broker.relay(world.topic, sent)) == [None, True, False, None]
    assert await values(world) == ["a-1", "b-1"]


async def test_a_topic_that_is_missing_is_an_outage(world: World) -> None:
    with pytest.raises(BrokerUnavailable, match=world.topic):
        await world.broker.relay(world.topic, messages("a-1"))
    await world.create()
    assert await world.broker.relay(world.topic, messages("a-1")) == [None]


async def test_rabbitmq_confirms_each_in_order_and_a_missing_queue_is_an_outage(rabbitmq: Server) -> None:
    broker = RabbitmqBroker(Settings(rabbitmq=rabbitmq.address))
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        queue = await channel.declare_queue()
        sent = [Outgoing(b"%d" % n, {}, f"id-{n}") for n in range(20)]
        assert await broker.relay(queue.name, sent) == [None] * 20
        same = [Outgoing(b"%d" % n, {}, "same") for n in range(3)]
        assert await broker.relay(queue.name, same) == [None] * 3
        found = [await queue.get(no_ack=True) for _ in range(23)]
        assert [(each.body, each.message_id) for each in found] == [(m.body, m.key) for m in (*sent, *same)]
        answers = await broker.relay("nothing-here", same)
        assert final(answers) == [False, False, False]
        assert (answers[0] is not BEHIND, answers[1:]) == (True, [BEHIND, BEHIND])
        await queue.delete(if_unused=False, if_empty=False)
    await broker.close()


@pytest.mark.parametrize(
    "unsendable",
    [
        Outgoing(b"2", {"n": "x" * 200_000}, "b"),  # more than a frame
        Outgoing(b"2", {}, "é" * 200),
    ],
    ids=["large-headers", "long-id"],
)
async def test_a_message_that_rabbitmq_refuses_takes_no_other_along(rabbitmq: Server, unsendable: Outgoing) -> None:
    broker = RabbitmqBroker(Settings(rabbitmq=rabbitmq.address))
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        queue = await channel.declare_queue()
        sent = [Outgoing(b"1", {}, "a"), unsendable, Outgoing(b"3", {}, "c")]
        assert final(await broker.relay(queue.name, sent)) == [None, True, None]
        counted = await channel.declare_queue(queue.name, passive=True)
        assert counted.declaration_result.message_count == 2, "the others were sent once"
        await queue.delete(if_unused=False, if_empty=False)
    await broker.close()


@pytest.mark.parametrize("fifo", [False, True])
async def test_sqs_confirms_each_and_refuses_what_is_too_large_alone(sqs: Server, fifo: bool) -> None:
    name = f"relay-{uuid4().hex}" + (".fifo" if fifo else "")
    attributes = {"FifoQueue": "true"} if fifo else {}
    broker = SqsBroker(Settings(sqs=sqs.address))
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        url = (await client.create_queue(QueueName=name, Attributes=attributes))["QueueUrl"]
        sent = [
            Outgoing(body.encode(), {"MessageGroupId": body[0]}, f"id-{n}")
            for n, body in enumerate(["a1", "b1", "a2" + "x" * 300_000, "a3", "b2"])
        ]
        behind = False if fifo else None
        assert final(await broker.relay(name, sent)) == [None, None, True, behind, None]
        found = list[str]()
        while len(found) < (3 if fifo else 4):
            answer = await client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            found += [message["Body"] for message in answer.get("Messages", ())]
        assert sorted(found) == (["a1", "b1", "b2"] if fifo else ["a1", "a3", "b1", "b2"])
    await broker.close()


Relays = Callable[[], Awaitable[list[Unsent | None]]]


async def counts_against_none(faults: Faults, relay: Relays) -> None:
    """Whatever the client raises, at each of its calls."""
    await relay()  # it is connected
    faults.calls = 0
    assert await relay() == [None] * 3
    calls = faults.calls
    assert calls
    for error, at, behind in product(FOREIGN.values(), range(calls), (False, True)):
        answers: list[Unsent | None] = []
        with faults.one(error, at, behind=behind), suppress(BaseException):  # which its lane takes for an outage
            answers = await relay()
        assert faults.raised
        assert True not in final(answers), f"{error().__class__.__name__} at call {at}: {answers}"
    assert await relay() == [None] * 3


async def test_what_kafkas_client_raises_counts_against_no_message(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X10."""
    await world.create()
    faults = Faults(monkeypatch)
    faults.around(AIOKafkaProducer, "partitions_for", "send_batch")
    await counts_against_none(faults, lambda: world.broker.relay(world.topic, messages("a-1", "a-2", "b-1")))


async def test_what_rabbitmqs_client_raises_counts_against_no_message(
    rabbitmq: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X10."""
    broker, faults = RabbitmqBroker(Settings(rabbitmq=rabbitmq.address)), Faults(monkeypatch)
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        queue = await channel.declare_queue()
        faults.around(aiormq.Channel, "basic_publish")
        await counts_against_none(faults, lambda: broker.relay(queue.name, messages("a-1", "a-2", "b-1")))
        await queue.delete(if_unused=False, if_empty=False)
    await broker.close()


async def test_what_sqs_client_raises_counts_against_no_message(sqs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """X10."""
    broker, faults = SqsBroker(Settings(sqs=sqs.address)), Faults(monkeypatch)
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        name = f"relay-{uuid4().hex}"
        await client.create_queue(QueueName=name)
        faults.around(AioBaseClient, "_make_api_call")
        await counts_against_none(faults, lambda: broker.relay(name, messages("a-1", "a-2", "b-1")))
    await broker.close()
