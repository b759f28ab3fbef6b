"""K11: what Kafka no longer has, or does not have yet, is never passed over in silence."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from idemconsumer.brokers.kafka import kafka_session as kafka_session
from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.kafka.start import PartitionLog, PartitionStart, start_at
from idemconsumer.settings import Settings
from tests.support.inside import client_of
from tests.support.kafka import World, joined, offset_of, take
from tests.support.logs import LogCapture, entries
from tests.support.waiting import until

LOST = "kafka messages lost"


def using(world: World, **settings: Any) -> None:
    world.brokers.append(KafkaBroker(Settings(kafka=world.server.address, **settings)))


@pytest.mark.parametrize(
    ("group", "latest", "start"),
    [
        (None, False, PartitionStart(10)),
        (None, True, PartitionStart(20)),
        (10, True, PartitionStart(10)),
        (15, False, PartitionStart(15)),
        (20, False, PartitionStart(20)),
        (3, False, PartitionStart(10, lost=7)),
        (21, False, PartitionStart(10, beyond=1)),
    ],
)
def test_where_a_partition_begins(group: int | None, latest: bool, start: PartitionStart) -> None:
    assert start_at(group, PartitionLog(10, 20), latest=latest) == start


async def test_what_retention_deleted_unread_is_an_error_with_its_numbers(world: World, logged: LogCapture) -> None:
    await world.create()
    await world.produce(100)
    await world.set_offset(10)
    await world.delete_below(60)
    session = await world.open()
    taken = await take(session, 40)
    assert offset_of(taken[0]) == 60
    (said,) = entries(logged, LOST)
    assert (said["log_level"], said["partition"]) == ("error", f"{world.topic}-0")
    assert (said["lost"], said["begins_at"], said["group"]) == (50, 60, world.group)
    assert "retention.ms" in said["instead"]
    await session.settle(taken)
    await world.commits(100)
    assert len(entries(logged, LOST)) == 1


async def test_a_reader_that_retention_overtakes_says_so_too(world: World, logged: LogCapture) -> None:
    await world.create()
    await world.produce(100)
    await world.set_offset(100)
    session = await world.open()
    await joined(session)
    await world.delete_below(60)
    client_of(session).seek(TopicPartition(world.topic, 0), 10)
    await commit_of_session(world, session, 10)
    assert offset_of((await take(session, 40))[0]) == 60
    assert [said["lost"] for said in entries(logged, LOST)] == [50]


async def commit_of_session(world: World, session: kafka_session.KafkaSession, offset: int) -> None:
    """As if the group had got no further."""
    await client_of(session).commit({TopicPartition(world.topic, 0): offset})


async def test_an_offset_beyond_the_logs_end_is_an_error_and_the_log_is_read_from_its_start(
    world: World, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(5)
    await world.set_offset(1_000)
    session = await world.open()
    assert [offset_of(each) for each in await take(session, 5)] == list(range(5))
    (said,) = entries(logged, LOST)
    assert (said["beyond_end"], said["begins_at"]) == (995, 0)
    assert "recreated" in said["instead"]


@pytest.mark.parametrize(("reset", "first"), [("earliest", 0), ("latest", 10)])
async def test_a_new_group_begins_where_it_is_told_to(world: World, reset: str, first: int) -> None:
    using(world, kafka_auto_offset_reset=reset)
    await world.create()
    await world.produce(10)
    session = await world.open()
    if reset == "latest":
        await world.commits(10)  # at once: what comes from now on is not skipped after a crash either
    await world.produce(1, start=10)
    assert offset_of((await take(session, 11 - first))[0]) == first


async def test_what_stands_behind_an_open_transaction_is_not_the_end(world: World) -> None:
    await world.create()
    async with AIOKafkaProducer(bootstrap_servers=world.server.address, transactional_id=world.topic) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(world.topic, b"open")
        await world.produce(3)
        session = await world.open()
        await until(lambda: session._high_water(TopicPartition(world.topic, 0)) == 4)
        assert not await session.fetch()
        assert not await session.idle()
        await producer.commit_transaction()
    await take(session, 4)
    await joined(session)


async def test_check_says_what_was_lost_and_what_soon_may_be(world: World) -> None:
    await world.create(configs={"retention.ms": "86400000"})
    async with AIOKafkaProducer(bootstrap_servers=world.server.address) as producer:
        for hours in (20, 1):
            await producer.send_and_wait(world.topic, b"x", timestamp_ms=int((time.time() - hours * 3600) * 1000))
    await world.set_offset(1)
    assert [each.level for each in await world.broker.check(world.subscription())] == ["ok", "ok"]
    await world.set_offset(0)
    *_, late = await world.broker.check(world.subscription())
    assert (late.level, "older than half" in late.text) == ("warning", True)
    await world.delete_below(1)
    *_, lost = await world.broker.check(world.subscription())
    assert (lost.level, "deleted 1 unread" in lost.text) == ("error", True)
    await world.set_offset(7)
    *_, beyond = await world.broker.check(world.subscription())
    assert (beyond.level, "ends at 2" in beyond.text) == ("error", True)
