"""K12, K18: the positions in the database: when that was set back behind Kafka, and when a topic is another one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import KafkaError

from idemconsumer.admin.resets import reset
from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.brokers.kafka.questions import topic_ids
from idemconsumer.brokers.kafka.start import OffsetMark, Resume, next_counter, resume
from idemconsumer.errors import StoreUnavailable
from idemconsumer.settings import Settings
from idemconsumer.stores.kafka_positions import Kept, Place, Reached
from tests.support.inside import client_of, commit_now
from tests.support.kafka import World, offset_of, partition_of, take
from tests.support.logs import LogCapture, entries
from tests.support.positions import Database, opened
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.pgbouncer import carry
from tests.support.servers.postgres import migrated
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

SET_BACK = "the database has lost commits, reading kafka messages again"
ANEW_THERE = "the database was restarted or replaced, reading kafka positions again"
FORGOTTEN = "kafka has lost the group's offset, using the stored position"
OLDER = "kafka has an older offset than the database, using the stored position"
HERE = Kept("b", base=100, counter=5, position=150)
LED = replace(HERE, leader=7)


@pytest.mark.parametrize(
    ("committed", "mark", "kept", "found"),
    [
        (None, None, None, Resume(None)),
        (None, None, HERE, Resume(None, forgotten=True)),  # or it was deleted with an older topic: nothing is skipped
        # Without a mark a person has set it.
        (70, None, None, Resume(70)),
        (70, None, HERE, Resume(70)),
        (170, None, HERE, Resume(170)),
        (70, None, LED, Resume(70)),  # of which leader that is nobody knows
        (150, None, LED, Resume(150, kept=LED, leader=7)),  # both are from `kafka reset`
        # The database has this write, or a later one: its row decides.
        (150, OffsetMark("b", 5, 100), HERE, Resume(150, kept=HERE)),
        (150, OffsetMark("b", 4, 100), HERE, Resume(150, kept=HERE)),  # since then a reader began, and read nothing
        (140, OffsetMark("b", 4, 100), HERE, Resume(150, kept=HERE, older=True)),  # Kafka never had it, or lost it
        (160, OffsetMark("b", 4, 100), HERE, Resume(150, kept=HERE, older=True)),
        (90, OffsetMark("a", 4, 20), HERE, Resume(150, kept=HERE, older=True)),  # of a history before this one
        (170, OffsetMark("a", 4, 20), HERE, Resume(150, kept=HERE, older=True)),
        (150, OffsetMark("b", 5, 100), LED, Resume(150, kept=LED, leader=7)),
        (140, OffsetMark("b", 4, 100), LED, Resume(150, kept=LED, older=True, leader=7)),
        # The database lacks this write: it was set back.
        (170, OffsetMark("b", 6, 100), HERE, Resume(150, set_back=True)),
        (140, OffsetMark("b", 6, 100), HERE, Resume(140, set_back=True)),
        (170, OffsetMark("c", 6, 160), HERE, Resume(150, set_back=True)),
        (130, OffsetMark("c", 6, 120), HERE, Resume(120, set_back=True)),  # a person had set the group back to 120
        (170, OffsetMark("b", 6, 100), LED, Resume(150, set_back=True, leader=7)),
        (170, OffsetMark("b", 1, 100), None, Resume(None, set_back=True)),
    ],
)
def test_who_is_believed(committed: int | None, mark: OffsetMark | None, kept: Kept | None, found: Resume) -> None:
    assert resume(committed, mark, kept) == found


@pytest.mark.parametrize(
    ("mark", "row", "counter"),
    [
        (None, None, 0),
        (None, HERE, 6),
        (OffsetMark("b", 9, 100), HERE, 10),  # the row was set back: what Kafka has is older than what is written now
        (OffsetMark("a", 2, 100), HERE, 6),
        (OffsetMark("b", 9, 100), None, 10),
    ],
)
def test_every_write_is_later_than_all_that_is_known(mark: OffsetMark | None, row: Kept | None, counter: int) -> None:
    assert next_counter(mark, row) == counter


THERE = Kept("b_t2", base=0, counter=5, position=50)


@pytest.mark.parametrize(
    ("committed", "mark", "kept", "topic", "found"),
    [
        (None, None, THERE, "t3", Resume(None, anew=True)),  # its offsets went with the topic
        (None, None, THERE, "t2", Resume(50, kept=THERE, forgotten=True)),
        (None, None, THERE, None, Resume(None, forgotten=True)),
        (70, OffsetMark("b_t2", 5, 0), THERE, "t3", Resume(None, anew=True)),  # and came back with a late commit
        (70, OffsetMark("b_t2", 5, 0), None, "t3", Resume(None, anew=True)),
        (70, OffsetMark("a_t1", 9, 0), THERE, "t2", Resume(50, kept=THERE)),  # later, the new topic being read up to 50
        (70, OffsetMark("c_t3", 6, 20), THERE, "t3", Resume(None, set_back=True)),  # a database from before
        (70, None, THERE, "t3", Resume(70)),  # a person has set it
        (50, OffsetMark("b_t2", 5, 0), THERE, "t2", Resume(50, kept=THERE)),
        (50, OffsetMark("b_t2", 5, 0), THERE, None, Resume(50, kept=THERE)),  # an older Kafka tells no ids
        (150, OffsetMark("b", 5, 100), HERE, "t2", Resume(150, kept=HERE)),  # nor did it when they were noted
    ],
)
def test_offsets_of_another_topic_say_nothing_about_this_one(
    committed: int | None, mark: OffsetMark | None, kept: Kept | None, topic: str | None, found: Resume
) -> None:
    assert resume(committed, mark, kept, topic) == found


def test_a_mark_is_read_back_and_nothing_else_is_one() -> None:
    mark = OffsetMark("0a1b_77", 12, 7)
    assert OffsetMark.of(str(mark)) == mark
    assert [OffsetMark.of(text) for text in ("", "idemconsumer:x:1", "idemconsumer:x:1:2 ", "else")] == [None] * 4


async def processed(world: World, count: int) -> None:
    """Read so many and finish them, in a session that ends."""
    session = await world.open()
    await session.settle(await take(session, count))
    await session.close()


async def commits_again(world: World, former: Any) -> None:
    """Put Kafka's offset of the group back to a former one, mark and all."""
    options = {"bootstrap_servers": world.server.address, "group_id": world.group, "enable_auto_commit": False}
    async with AIOKafkaConsumer(**options) as consumer:
        at = TopicPartition(world.topic, 0)
        consumer.assign([at])
        await consumer.commit({at: (former.offset, former.metadata)})


# ---------------------------------------------------------------------------------------------------- on real Kafka
async def test_an_offset_is_in_the_database_before_it_is_in_kafka(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(3)
    session = await world.open()
    taken = await take(session, 3)
    await world.commits(0)
    refused: list[object] = []

    async def refuse(offsets: object) -> None:
        refused.append(offsets)
        raise KafkaError("not now")

    real, client_of(session).commit = client_of(session).commit, refuse
    await session.settle(taken)
    await until(lambda: kept.position() == 3)
    assert await world.committed() == 0
    client_of(session).commit = real
    await world.commits(3)
    found = await world.admin.list_consumer_group_offsets(world.group)
    mark = OffsetMark.of(found[TopicPartition(world.topic, 0)].metadata)
    assert mark is not None
    ((history, counter, base),) = kept.do("select history, counter, base from idemconsumer.kafka_position")
    assert mark == OffsetMark(history, counter, base)
    assert base == 0


@pytest.mark.parametrize("reset_to", [None, "latest"], ids=["rolled back", "reset before"])
async def test_where_kafka_has_an_older_offset_of_ours_the_row_decides(
    world: World, kept: Database, logged: LogCapture, reset_to: str | None
) -> None:
    """Its topic of offsets was restored from a snapshot, say."""
    await world.create()
    await world.produce(3)
    await processed(world, 3)
    old = (await world.admin.list_consumer_group_offsets(world.group))[TopicPartition(world.topic, 0)]
    await world.produce(3, start=3)
    await processed(world, 3)
    if reset_to is not None:
        settings = Settings(kafka=world.server.address)
        for _ in range(2):
            await reset(kept.dsn, settings, f"kafka:{world.topic}", world.group, reset_to, by="ann")
    await commits_again(world, old)
    await world.produce(2, start=6)
    session = await world.open()
    taken = await take(session, 2)
    assert [offset_of(each) for each in taken] == [6, 7]
    (said,) = entries(logged, OLDER)
    assert (said["log_level"], said["committed"], said["begins_at"]) == ("warning", 3, 6)
    assert not entries(logged, SET_BACK)
    await session.settle(taken)
    await world.commits(8)
    await session.close()
    await world.produce(1, start=8)
    await take(await world.open(), 1)
    assert len(entries(logged, OLDER)) == 1


async def test_a_database_that_was_set_back_is_believed_and_not_kafka(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(6)
    await processed(world, 6)
    kept.do("update idemconsumer.kafka_position set counter = counter - 1, position = 2")
    session = await world.open()
    taken = await take(session, 4)
    assert [offset_of(each) for each in taken] == [2, 3, 4, 5]
    (said,) = entries(logged, SET_BACK)
    assert (said["log_level"], said["partition"]) == ("error", f"{world.topic}-0")
    assert (said["committed"], said["begins_at"]) == (6, 2)
    await session.settle(taken)
    await world.commits(6)
    await session.close()
    await world.produce(1, start=6)
    await take(await world.open(), 1)
    assert len(entries(logged, SET_BACK)) == 1


async def test_a_worker_that_dies_before_kafka_hears_of_it_leaves_it_to_the_next(
    world: World, kept: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create()
    await world.produce(6)
    await processed(world, 6)
    kept.do("update idemconsumer.kafka_position set counter = counter - 1, position = 2")
    first = await world.open()

    async def never(offsets: object) -> None:
        raise KafkaError("it died")

    client_of(first).commit = never
    taken = await take(first, 4)
    for delivery in taken:  # many writes, more than Kafka's offset counts
        await first.settle([delivery])
        await commit_now(first)
    assert await world.committed() == 6
    await first.close()
    assert kept.position() == 6
    await world.produce(1, start=6)
    kept.do("update idemconsumer.kafka_position set position = 5, counter = counter - 1")
    assert [offset_of(each) for each in await take(await world.open(), 2)] == [5, 6]


@pytest.mark.parametrize("reset", ["earliest", "latest"])
async def test_where_kafka_has_forgotten_the_offset_the_row_decides(
    world: World, kept: Database, logged: LogCapture, reset: str
) -> None:
    world.brokers.insert(0, KafkaBroker(Settings(kafka=world.server.address, kafka_auto_offset_reset=reset)))
    world.broker.keep_positions_in(kept)
    await world.create()
    await world.produce(3)
    session = await world.open()
    if reset == "latest":
        await world.commits(3)
        await world.produce(3, start=3)
    await session.settle(await take(session, 3))
    done = 6 if reset == "latest" else 3
    await world.commits(done)
    await session.close()
    await world.forget()
    await world.produce(2, start=done)
    session = await world.open()
    taken = await take(session, 2)
    assert [offset_of(each) for each in taken] == [done, done + 1]
    (said,) = entries(logged, FORGOTTEN)
    assert (said["log_level"], said["partition"], said["begins_at"]) == ("warning", f"{world.topic}-0", done)
    await session.settle(taken)
    await world.commits(done + 2)
    assert not entries(logged, SET_BACK)


async def test_what_retention_deleted_after_kafka_forgot_the_offset_is_an_error(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(5)
    await processed(world, 5)
    await world.forget()
    await world.produce(5, start=5)
    await world.delete_below(8)
    assert [offset_of(each) for each in await take(await world.open(), 2)] == [8, 9]
    assert [said["lost"] for said in entries(logged, "kafka messages lost")] == [3]


async def test_an_offset_that_a_person_has_set_is_obeyed(world: World, kept: Database, logged: LogCapture) -> None:
    await world.create()
    await world.produce(6)
    await processed(world, 6)
    await world.set_offset(4)
    session = await world.open()
    taken = await take(session, 2)
    assert [offset_of(each) for each in taken] == [4, 5]
    assert not entries(logged, SET_BACK)
    before = kept.do("select history, counter, position, base from idemconsumer.kafka_position")
    await session.settle(taken)
    await world.commits(6)
    await session.close()
    # The database loses that, and what came after: it knows the history before, which had got further.
    kept.do("update idemconsumer.kafka_position set history = 'former', counter = 1, position = 6")
    assert [offset_of(each) for each in await take(await world.open(), 2)] == [4, 5]
    assert before[0][3] == 4


async def test_a_database_that_knows_nothing_is_filled_from_the_logs_start(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(3)
    await processed(world, 3)
    kept.do("delete from idemconsumer.kafka_position")
    await take(await world.open(), 3)
    assert entries(logged, SET_BACK)[0]["begins_at"] == 0


async def test_without_the_database_nothing_is_read_and_nothing_committed(
    world: World, kept: Database, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_place_pause=0.05)
    kept.away = True
    await world.create()
    await world.produce(3)
    session = await world.open()
    await until(lambda: bool(entries(logged, "kafka position unknown, waiting")))
    assert not await session.fetch()
    await commit_now(session)
    assert not await session.idle()
    assert await world.committed() is None
    kept.away = False
    await take(session, 3)
    assert len(entries(logged, "kafka position unknown, waiting")) == 1


async def test_on_another_server_nothing_that_was_finished_before_counts(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create(partitions=2)
    await world.produce(3, partition=0)
    session = await world.open()
    taken = await take(session, 3)
    await session.settle(taken[:1])
    await world.commits(1)
    kept.moved = timedelta(seconds=1)
    await session.settle(taken[1:])
    await until(lambda: taken[0].epoch.ended)
    assert [offset_of(each) for each in await take(session, 2)] == [1, 2]
    assert await world.committed() == 1
    assert len(entries(logged, ANEW_THERE)) == 1
    assert not entries(logged, SET_BACK)


async def test_a_server_that_was_replaced_while_nothing_came_is_noticed(
    world: World, kept: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_probe_pause=0.05)
    await world.create()
    await world.produce(3)
    session = await world.open()
    await session.settle(await take(session, 3))
    await world.commits(3)
    kept.do("update idemconsumer.kafka_position set counter = counter - 1, position = 1")
    kept.moved = timedelta(seconds=1)
    assert [offset_of(each) for each in await take(session, 2)] == [1, 2]


async def test_a_probe_leaves_alone_what_is_being_placed(
    world: World, kept: Database, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_probe_pause=0.05)
    await world.create()
    await world.produce(3)
    session = await world.open()
    await session.settle(await take(session, 3))
    await world.commits(3)
    gate, probes, begun = asyncio.Event(), 0, 0
    real_begin, real_started = kept.real.begin, kept.real.server_started

    async def held(*given: Any) -> Mapping[Place, int]:
        nonlocal begun
        begun += 1
        await gate.wait()
        return await real_begin(*given)

    async def counted() -> datetime:
        nonlocal probes
        probes += 1
        return await real_started()

    kept.real.begin, kept.real.server_started = held, counted  # type: ignore[method-assign,assignment]
    kept.moved = timedelta(seconds=1)
    await until(lambda: begun == 1)
    after = probes + 5
    await until(lambda: probes >= after)
    gate.set()
    await world.produce(1, start=3)
    assert [offset_of(each) for each in await take(session, 1)] == [3]
    assert (begun, len(entries(logged, ANEW_THERE))) == (1, 1)


async def test_a_write_that_fails_after_nobody_waits_for_it_leaves_no_error(
    world: World, kept: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_commit_patience=0.1)
    unhandled: list[Mapping[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    await world.create()
    await world.produce(3)
    session = await world.open()
    taken = await take(session, 3)
    await commit_now(session)
    gate, failed, real = asyncio.Event(), asyncio.Event(), kept.real.save

    async def failing(*_: Any) -> Mapping[Place, int]:
        await gate.wait()
        failed.set()
        raise StoreUnavailable("it was away for too long")

    kept.real.save = failing  # type: ignore[method-assign,assignment]
    await session.settle(taken)
    await commit_now(session)
    kept.real.save = real  # type: ignore[method-assign]
    gate.set()
    await failed.wait()
    tuned(monkeypatch, kafka_commit_patience=3.0)
    await world.commits(3)
    gc.collect()
    assert unhandled == []


async def test_a_former_owner_writes_into_its_own_history_only(world: World, kept: Database) -> None:
    await world.create()
    await world.produce(4)
    first = await world.open()
    taken = await take(first, 4)
    await first.settle(taken[:1])
    await world.commits(1)
    ((cluster, group, history),) = kept.do("select cluster, group_name, history from idemconsumer.kafka_position")
    server = await kept.server_started()
    await first.close()
    await world.set_offset(2)
    second = await world.open()
    late = await take(second, 2)
    place = (world.topic, 0)
    assert await kept.save(cluster, group, {place: Reached(history, 4)}, server) == {}
    await second.settle(late)
    await world.commits(4)
    assert kept.position() == 4


async def test_a_rebalance_between_the_two_writes_costs_nothing(world: World, kept: Database) -> None:
    await world.create(partitions=2)
    for partition in (0, 1):
        await world.produce(4, partition=partition)
    first = await world.open()
    taken = await take(first, 8)
    gate, waiting = asyncio.Event(), asyncio.Event()
    real = client_of(first).commit

    async def held(offsets: Any) -> None:
        waiting.set()
        await gate.wait()
        await real(offsets)

    client_of(first).commit = held
    await first.settle([each for each in taken if offset_of(each) < 2])
    await waiting.wait()
    second = await world.open()
    await until(lambda: all(each.epoch.retiring for each in taken))
    gate.set()
    rest = await asyncio.gather(take(first, 2), take(second, 2))
    assert sorted((partition_of(each), offset_of(each)) for each in [*rest[0], *rest[1]]) == [
        (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip


async def test_what_is_due_is_written_with_one_statement_for_all_partitions(world: World, kept: Database) -> None:
    await world.create(partitions=3)
    for partition in range(3):
        await world.produce(2, partition=partition)
    session = await world.open()
    taken = await take(session, 6)
    saves: list[int] = []
    real = kept.real.save

    async def counted(*given: Any) -> Mapping[Place, int]:
        saves.append(len(given[2]))
        return await real(*given)

    kept.real.save = counted  # type: ignore[method-assign,assignment]
    await commit_now(session)
    saves.clear()
    await session.settle(taken)
    await commit_now(session)
    await commit_now(session)
    assert saves == [3]


async def test_positions_are_kept_behind_a_pooler(
    world: World, database: str, private_pgbouncer: PrivatePgBouncer
) -> None:
    migrated(database, "idemconsumer")
    carry(database)
    pooler = private_pgbouncer(database, "transaction")
    async with opened(pooler.dsn) as kept:
        world.broker.keep_positions_in(kept)
        await world.create()
        await world.produce(3)
        await processed(world, 3)
        assert await world.committed() == 3
        await world.produce(1, start=3)
        await take(await world.open(), 1)
        await world.close()


# ------------------------------------------------------------------------------------------- topics made anew (K18)
ANEW = "kafka topic was recreated, reading it from its start"


async def made_anew(world: World, count: int) -> None:
    """Delete the topic, create it again, and produce at least as many messages as it had."""
    client = world.admin._client
    before = await topic_ids(client, [world.topic])
    await world.delete(world.topic)

    async def other() -> bool:
        found = await topic_ids(client, [world.topic])
        return bool(found) and found != before

    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await world.admin.create_topics([NewTopic(world.topic, 1, 1)])
            if answer.topic_errors[0][1] == 0:
                break
            await asyncio.sleep(0.02)
    await until(other)
    await world.produce(count)


async def test_a_topic_that_is_made_anew_is_read_from_its_start(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(5)
    session = await world.open()
    await session.settle(await take(session, 5))
    await world.commits(5)
    await made_anew(world, 8)
    seen: set[int] = set()
    async with asyncio.timeout(PATIENCE):
        while seen < set(range(8)):
            taken = await session.fetch()
            seen |= {offset_of(each) for each in taken}
            await session.settle(taken)
    await until(lambda: kept.position() == 8)
    await world.commits(8)
    assert len(entries(logged, ANEW)) == 1
    assert not entries(logged, SET_BACK)


async def test_a_commit_that_came_too_late_for_its_topic_moves_nobody_in_the_next_one(
    world: World, kept: Database, logged: LogCapture
) -> None:
    await world.create()
    await world.produce(5)
    await processed(world, 5)
    late = (await world.admin.list_consumer_group_offsets(world.group))[TopicPartition(world.topic, 0)]
    await made_anew(world, 8)
    await commits_again(world, late)
    world.brokers.insert(0, KafkaBroker(Settings(kafka=world.server.address, kafka_auto_offset_reset="latest")))
    world.broker.keep_positions_in(kept)
    assert [offset_of(each) for each in await take(await world.open(), 8)] == list(range(8))
    assert len(entries(logged, ANEW)) == 1
    assert not entries(logged, SET_BACK)


async def test_a_reader_in_the_middle_of_another_topic_begins_at_its_start(world: World, kept: Database) -> None:
    """The client has seen neither that the topic was deleted nor that it is there again."""
    await world.create()
    await world.produce(3)
    session = await world.open()
    [*_, old] = await take(session, 3)
    session._placing._topics[TopicPartition(world.topic, 0)] = "another"
    assert [offset_of(each) for each in await take(session, 3)] == [0, 1, 2]
    assert old.epoch.ended
