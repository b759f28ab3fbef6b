"""K10: what a dead owner may have begun is inherited by the next one, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from aiokafka import TopicPartition

from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.brokers.kafka.low_water import Tracker
from idemconsumer.brokers.kafka.reading import Partition
from idemconsumer.brokers.kafka.start import Resume, left_quiet
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch
from idemconsumer.stores.kafka_positions import Kept, Place, Reached
from tests.support.inside import client_of, commit_now, partitions_of
from tests.support.kafka import BOUNDS, World, joined, offset_of, take
from tests.support.logs import LogCapture, entries
from tests.support.positions import Database

IMPATIENT = Bounds(lanes=4, group=8, drain=0.3)
READ = Kept("h", base=0, counter=5, position=9)
LEFT = Kept("h", base=0, counter=5, position=9, quiet=5)


# --------------------------------------------------------------------------------------------------------- decisions
@pytest.mark.parametrize(
    ("committed", "row", "found", "quiet"),
    [
        (None, None, Resume(None), True),  # a new group, or a new partition
        (9, None, Resume(9), False),  # its owner keeps no positions
        (None, None, Resume(None, set_back=True), False),
        (9, READ, Resume(9, kept=READ), False),
        (9, LEFT, Resume(9, kept=LEFT), True),
        (9, Kept("h", base=0, counter=6, position=9, quiet=5), Resume(9), False),  # written since then
        (20, LEFT, Resume(9, set_back=True), False),  # the row is from before
        (None, LEFT, Resume(None, anew=True), True),  # of the topic that was there before
        (None, READ, Resume(None, anew=True), False),
    ],
)
def test_whether_nobody_can_have_died(committed: int | None, row: Kept | None, found: Resume, quiet: bool) -> None:
    assert left_quiet(committed, row, found) == quiet


def partition(*, below: int, most: int = 3) -> Partition:
    return Partition("kafka:t", Epoch(), Tracker(), cast(Any, None), inherited=most, inherited_below=below)


def test_no_more_is_inherited_than_the_last_owner_can_have_had() -> None:
    far, near = partition(below=100), partition(below=4)
    assert [far.inherits(offset) for offset in (1, 3, 5, 6)] == [True, True, True, False]
    assert [near.inherits(offset) for offset in (1, 3, 4, 5)] == [True, True, False, False]
    assert far.inherited_below == 6


def test_a_partition_can_be_left_when_nothing_runs_and_all_that_was_inherited_is_finished() -> None:
    heir = partition(below=4)
    assert [heir.can_be_left(low_water) for low_water in (3, 4)] == [False, True]
    heir.epoch.start(1)
    assert not heir.can_be_left(4)
    heir.epoch.finish(1)
    heir.epoch.end()
    assert not heir.can_be_left(4)


# ------------------------------------------------------------------------------------------------------ on real Kafka
def inherited(deliveries: list[Delivery]) -> list[int]:
    return sorted(offset_of(each) for each in deliveries if each.inherited)


def quiet(kept: Database) -> int | None:
    [[counter]] = kept.do("select quiet from idemconsumer.kafka_position")
    return None if counter is None else int(counter)


async def drained(session: KafkaSession) -> None:
    """As a worker ends that has nothing in hand."""
    await session.stop_fetching()
    await session.close()


async def died(session: KafkaSession) -> None:
    """As after a SIGKILL, save that it leaves its group."""
    partitions_of(session).clear()
    await session.close()


async def test_a_dead_owner_is_inherited_from_until_all_that_it_may_have_begun_is_finished(
    world: World, kept: Database
) -> None:
    await world.create()
    await world.produce(5)
    first = await world.open()
    assert inherited(await take(first, 5)) == [], "nobody has read before"
    await died(first)

    second = await world.open()
    taken = await take(second, 5)
    await world.produce(2, start=5)
    assert inherited([*taken, *await take(second, 2)]) == [0, 1, 2, 3, 4], "what came since killed nobody"
    await second.settle(taken[:3])
    await drained(second)

    third = await world.open()
    taken = await take(third, 4)
    assert inherited(taken) == [3, 4, 5, 6], "it may have been 3, which nobody has tried since"
    await third.settle(taken)
    await drained(third)

    await world.produce(2, start=7)
    assert inherited(await take(await world.open(), 2)) == []


async def test_who_leaves_with_nothing_in_hand_bequeathes_nothing_until_it_is_read_again(
    world: World, kept: Database
) -> None:
    await world.create()
    await world.produce(4)
    first = await world.open()
    taken = await take(first, 4)
    await first.settle(taken[:1])
    await drained(first)
    assert quiet(kept) is not None
    second = await world.open()
    assert inherited(await take(second, 3)) == [], "they were never begun"
    assert quiet(kept) is None
    await died(second)
    assert inherited(await take(await world.open(), 3)) == [1, 2, 3]


async def test_a_worker_that_ends_without_a_drain_has_died(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(2)
    first = await world.open()
    await take(first, 2)
    await first.close()
    assert inherited(await take(await world.open(), 2)) == [0, 1]


async def test_what_runs_while_its_worker_leaves_is_inherited(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(2)
    first = await world.open()
    taken = await take(first, 2)
    taken[0].epoch.start(1)
    await drained(first)
    assert inherited(await take(await world.open(), 2)) == [0, 1]


@pytest.mark.parametrize("runs_on", [False, True])
async def test_after_a_rebalance_what_still_runs_elsewhere_is_inherited(
    world: World, kept: Database, logged: LogCapture, runs_on: bool
) -> None:
    await world.create(partitions=2)
    for number in (0, 1):
        await world.produce(2, partition=number)
    first = await world.open(IMPATIENT)
    for delivery in await take(first, 4):
        if runs_on and offset_of(delivery) == 0:
            delivery.epoch.start(1)
    second = await world.open(IMPATIENT)
    both = await asyncio.gather(take(first, 2), take(second, 2))
    assert [inherited(each) for each in both] == [[0, 1] if runs_on else []] * 2
    assert bool(entries(logged, "kafka drain timed out")) == runs_on


async def test_a_partition_with_nothing_to_read_is_left_as_it_was_found(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(2)
    first = await world.open()
    await first.settle(await take(first, 2))
    await world.commits(2)
    await died(first)
    second = await world.open()
    await joined(second)
    await drained(second)
    await world.produce(1)
    assert inherited(await take(await world.open(), 1)) == [], "what the first had is finished"


async def test_a_former_owner_that_is_late_says_nothing_about_who_reads_now(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(3)
    first = await world.open()
    await take(first, 3)
    await commit_now(first)
    ((cluster, group, history, counter),) = kept.do(
        "select cluster, group_name, history, counter from idemconsumer.kafka_position"
    )
    await died(first)
    second = await world.open()
    taken = await take(second, 3)
    late = {(world.topic, 0): Reached(history, 0, left=counter)}
    assert await kept.save(cluster, group, late, await kept.server_started())
    assert quiet(kept) is None
    await second.settle(taken)
    await commit_now(second)
    await drained(second)
    assert quiet(kept) is None, "who wrote there may still have something in hand"


async def test_without_a_database_nobody_knows(world: World) -> None:
    await world.create()
    await world.produce(2)
    session = await world.open()
    taken = await take(session, 2)
    await world.produce(1)
    assert inherited([*taken, *await take(session, 1)]) == [0, 1]


async def test_each_group_of_a_topic_has_owners_of_its_own(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(2)
    first = await world.open()
    await take(first, 2)
    await died(first)
    session = await world.broker.open([Subscription(f"kafka:{world.topic}", "handler", "another")], BOUNDS)
    world.sessions.append(session)
    assert inherited(await take(session, 2)) == []


async def test_a_reader_that_is_set_back_inherits_from_itself(world: World, kept: Database) -> None:
    """What it has delivered may still run."""
    await world.create()
    await world.produce(3)
    session = await world.open()
    assert inherited(await take(session, 3)) == []
    client_of(session).seek(TopicPartition(world.topic, 0), 1)
    again = await take(session, 2)
    await world.produce(1)
    assert inherited([*again, *await take(session, 1)]) == [1, 2]


async def test_who_begins_while_another_one_is_placed_may_die_too(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(2)
    first = await world.open()
    await take(first, 2)
    await drained(first)
    begin = kept.real.begin

    async def second(*given: Any) -> Mapping[Place, int]:
        kept.do("update idemconsumer.kafka_position set counter = counter + 1, quiet = null")
        return await begin(*given)

    kept.real.begin = second  # type: ignore[method-assign,assignment]
    assert inherited(await take(await world.open(), 2)) == [0, 1]
