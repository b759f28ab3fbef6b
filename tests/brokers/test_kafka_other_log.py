"""K21: an offset is of a log: what a reader has read ends where another log begins."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import KafkaError

from idemconsumer.admin.resets import reset
from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.settings import Settings
from tests.support.inside import client_of
from tests.support.kafka import MortalWorld, World, killing, offset_of, take, world_of
from tests.support.logs import LogCapture, entries
from tests.support.positions import Database, opened
from tests.support.servers.kafka import Kafka
from tests.support.servers.made import PrivateKafka
from tests.support.servers.postgres import migrated
from tests.support.waiting import until

LOST = "kafka messages lost"


@pytest.fixture(scope="module")
def own(private_kafka: PrivateKafka) -> Iterator[Kafka]:
    with killing(private_kafka()) as server:
        yield server


@pytest.fixture
async def world(own: Kafka) -> AsyncIterator[MortalWorld]:
    async with world_of(own) as world:
        yield MortalWorld(own, world.admin, world.topic, world.brokers, world.sessions, own=own)


@pytest.fixture
async def kept(world: MortalWorld, database: str) -> AsyncIterator[Database]:
    migrated(database, "idemconsumer")
    async with opened(database) as kept:
        world.broker.keep_positions_in(kept)
        yield kept
        await world.close()


class Snapshot:
    """Of a topic's log on the disk, of a broker that is restarted for it."""

    def __init__(self, world: MortalWorld, tmp_path: Path) -> None:
        self._own = world.own
        self._log = world.own._processes.folder / "data" / f"{world.topic}-0"
        self._copy = tmp_path / "copy"
        self._own.kill()
        shutil.copytree(self._log, self._copy)
        self._own.start()

    def restore(self) -> None:
        self._own.kill()
        shutil.rmtree(self._log)
        shutil.copytree(self._copy, self._log)
        self._own.start()


@pytest.mark.kill
async def test_what_was_read_ends_where_another_log_begins(
    world: MortalWorld, kept: Database, logged: LogCapture, tmp_path: Path
) -> None:
    """Of a group whose reader goes on, and of others whose next reader is placed: one has read all, one was placed at
    the end and has read nothing, and one was set there by a person."""
    await world.create()
    await world.produce(5)
    going_on = await world.open()
    first = await take(going_on, 5)
    await going_on.settle(first[:4])
    await world.commits(4)
    snapshot = Snapshot(world, tmp_path)
    await world.produce(5, start=5)
    second = await take(going_on, 5)  # a leader that has all that was read costs nothing
    assert ([offset_of(each) for each in second], first[4].epoch.ended) == ([5, 6, 7, 8, 9], False)
    await going_on.settle([first[4], *second])
    await world.commits(10)
    other = World(world.server, world.admin, world.topic, world.brokers, world.sessions, suffix=".other")
    session = await other.open()
    await session.settle(await take(session, 10))
    await other.commits(10)
    await session.close()
    latest = World(world.server, world.admin, world.topic, sessions=world.sessions, suffix=".latest")
    latest.brokers.append(KafkaBroker(Settings(kafka=world.server.address, kafka_auto_offset_reset="latest")))
    latest.broker.keep_positions_in(kept)
    session = await latest.open()
    await latest.commits(10)
    await session.close()
    person = World(world.server, world.admin, world.topic, world.brokers, world.sessions, suffix=".person")
    await reset(
        kept.dsn, Settings(kafka=world.server.address), f"kafka:{world.topic}", person.group, "latest", by="ann"
    )
    assert not entries(logged, LOST)

    client_of(going_on).pause(TopicPartition(world.topic, 0))  # it comes back to a log that is long enough again
    snapshot.restore()
    await world.produce(7, start=100)
    placed = [(each, await each.open()) for each in (other, latest, person)]
    for its_world, session in ((world, going_on), *placed):
        taken = await take(session, 7)
        # One that is read from where another log begins can be told from the next one, before it has read anything.
        assert None not in {leader for (leader,) in kept.do("select leader from idemconsumer.kafka_position")}
        assert [offset_of(each) for each in taken] == list(range(5, 12))
        assert [int(each.message.body) for each in taken] == list(range(100, 107))
        assert [said["group"] for said in entries(logged, LOST)].count(its_world.group) == 1
        await session.settle(taken)
        await its_world.commits(12)
        await session.close()
    assert [(said["beyond_end"], said["begins_at"]) for said in entries(logged, LOST)] == [(5, 5)] * 4
    await world.produce(1, start=107)
    assert [offset_of(each) for each in await take(await world.open(), 1)] == [12]
    assert len(entries(logged, LOST)) == 4


@pytest.mark.long
@pytest.mark.kill
async def test_after_an_unclean_election_nothing_of_the_new_log_is_passed_over(
    world: MortalWorld, kept: Database, logged: LogCapture, private_kafka: PrivateKafka
) -> None:
    assert await world.committed() is None  # the topic of offsets is made while there is one broker
    other = World(world.server, world.admin, world.topic, world.brokers, world.sessions, suffix=".other")
    with killing(private_kafka(joins=world.own)) as ahead, killing(private_kafka(joins=world.own)) as behind:
        brokers = [ahead.node, behind.node]
        unclean = {"unclean.leader.election.enable": "true"}
        await world.admin.create_topics([NewTopic(world.topic, -1, -1, {0: brokers}, unclean)])
        await until(lambda: replicas(world, ahead.node, brokers))
        await world.produce(5)
        going_on, ended = await world.open(), await other.open()
        sessions = (world, going_on), (other, ended)
        for _, session in sessions:
            await session.settle(await take(session, 5))  # so they are on both
        behind.kill()
        await until(lambda: replicas(world, ahead.node, [ahead.node]))
        await world.produce(5, start=5)
        for its_world, session in sessions:
            await session.settle(await take(session, 5))
            await its_world.commits(10)
        await ended.close()
        client_of(going_on).pause(TopicPartition(world.topic, 0))
        ahead.kill()
        behind.start()
        await until(lambda: replicas(world, behind.node, [behind.node]))
        await world.produce(7, start=100)
        for session in (going_on, await other.open()):
            taken = await take(session, 7)
            assert [(offset_of(each), int(each.message.body)) for each in taken] == [(n, 95 + n) for n in range(5, 12)]
        assert [(said["beyond_end"], said["begins_at"]) for said in entries(logged, LOST)] == [(5, 5), (5, 5)]


async def replicas(world: World, leader: int, in_sync: list[int]) -> bool:
    try:
        [found] = await world.admin.describe_topics([world.topic])
    except KafkaError:  # the broker that was asked is gone
        return False
    return [(each["leader"], sorted(each["isr"])) for each in found["partitions"]] == [(leader, sorted(in_sync))]
