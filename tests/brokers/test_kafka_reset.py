"""K20: a person sets where a group begins, in Kafka and in the database together."""

from __future__ import annotations

import pytest

from idemconsumer.admin.resets import Reset, reset
from idemconsumer.brokers.kafka.resetting import GroupOffsets
from idemconsumer.errors import ConfigurationError
from idemconsumer.settings import Settings
from tests.support.kafka import World, joined, offset_of, take
from tests.support.positions import Database


async def processed(world: World, count: int) -> None:
    await world.create()
    await world.produce(count)
    session = await world.open()
    await session.settle(await take(session, count))
    await session.close()


async def reset_to(world: World, kept: Database, to: str) -> list[Reset]:
    settings = Settings(kafka=world.server.address)
    return await reset(kept.dsn, settings, f"kafka:{world.topic}/0", world.group, to, by="ann")


@pytest.mark.parametrize("forgotten", [False, True])
async def test_the_next_worker_begins_there_even_if_kafka_has_forgotten_it(
    world: World, kept: Database, forgotten: bool
) -> None:
    await processed(world, 4)
    kept.do(
        "insert into idemconsumer.kafka_stop select cluster, group_name, topic, partition, 4, 5, 'CRC', false, now(), "
        "now() from idemconsumer.kafka_position"
    )
    (done,) = await reset_to(world, kept, "1")
    assert (done.before, done.offset) == (4, 1)
    assert await world.committed() == 1
    assert kept.position() == 1
    if forgotten:
        await world.forget()
    assert [offset_of(each) for each in await take(await world.open(), 3)] == [1, 2, 3]
    assert kept.do("select by, what from idemconsumer.audit") == [("ann", "kafka reset")]
    assert kept.do("select first from idemconsumer.kafka_stop") == []


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "joins meanwhile"])
async def test_a_group_with_live_members_is_refused_and_nothing_has_changed(
    world: World, kept: Database, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    await processed(world, 4)
    session = await world.open()
    await joined(session)

    async def unseen(_: GroupOffsets) -> None: ...

    if not seen:
        monkeypatch.setattr(GroupOffsets, "_refuse_members", unseen)
    before = kept.do("select history, position from idemconsumer.kafka_position")
    with pytest.raises(ConfigurationError, match=r"has live members .*; stop its workers, and run this again"):
        await reset_to(world, kept, "1")
    assert await world.committed() == 4
    assert kept.do("select history, position from idemconsumer.kafka_position") == before
