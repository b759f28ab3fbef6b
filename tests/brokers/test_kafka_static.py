"""Static members of a group: who has a place, and who gives it up (K16)."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.protocol.group import LeaveGroupRequest

from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.errors import Replaced, SessionEnded
from idemconsumer.settings import Settings
from tests.support.inside import coordinator_of
from tests.support.kafka import BOUNDS, World, take, take_any
from tests.support.waiting import PATIENCE


class Process:
    """One process of a Deployment whose instance id does not differ."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.broker = KafkaBroker(Settings(kafka=world.server.address, kafka_group_instance_id="pod"))
        world.brokers.append(self.broker)

    async def open(self) -> KafkaSession:
        session = await self.broker.open([self._world.subscription()], BOUNDS)
        self._world.sessions.append(session)
        return session


@pytest.fixture
async def topic(world: World) -> World:
    await world.create(partitions=2)
    await world.produce(1, partition=0)
    return world


async def test_who_was_replaced_by_a_live_process_stops_and_leaves_it_alone(topic: World) -> None:
    first = await Process(topic).open()
    await take(first, 1)
    second = await Process(topic).open()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Replaced, match=r"'pod'.*IDEMCONSUMER_KAFKA_GROUP_INSTANCE_ID"):
            await asyncio.gather(take_any(first), take_any(second))
    member = coordinator_of(second).member_id
    await first.close()
    assert coordinator_of(first)._coordination_task.done(), "it can join no more"
    assert not await second.fetch()
    assert coordinator_of(second).member_id == member != ""


async def test_who_was_away_meanwhile_does_not_take_its_place_back(topic: World) -> None:
    away = Process(topic)
    session = await away.open()
    await take(session, 1)
    session._end("Kafka did not answer")
    with pytest.raises(SessionEnded):
        await session.fetch()
    await session.close()
    other = await Process(topic).open()
    await take(other, 1)
    with pytest.raises(Replaced):
        await away.open()
    assert not await other.fetch()


async def test_a_restarted_process_takes_its_own_place(topic: World) -> None:
    """The dead one's session is not over yet: its place is shown as taken."""
    dead = await Process(topic).open()
    await take(dead, 1)
    coordinator_of(dead)._coordination_task.cancel()
    await dead.close()  # a static member does not leave
    await take(await Process(topic).open(), 1)


async def test_a_process_that_was_forgotten_joins_again(topic: World) -> None:
    """Its session timed out while it was frozen, and nobody has taken its place."""
    session = await Process(topic).open()
    await take(session, 1)
    coordinator = coordinator_of(session)
    former = coordinator.member_id
    node = await topic.admin.find_coordinator(topic.group)
    answer = await topic.admin._send_request(LeaveGroupRequest(topic.group, former), node)
    assert answer.error_code == 0
    await take(session, 1)
    assert coordinator.member_id not in ("", former)
