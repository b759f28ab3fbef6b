"""The Kafka broker against a real Kafka: who owns what, what is committed, and what is logged."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import NewPartitions
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import JoinGroupRequest

from idemconsumer.brokers.kafka import kafka_client as kafka_client
from idemconsumer.brokers.kafka.kafka_broker import METADATA_MAX_AGE_MS, KafkaBroker
from idemconsumer.brokers.kafka.kafka_session import KafkaSession
from idemconsumer.channel import CHANNEL
from idemconsumer.errors import BadMessage, BrokerUnavailable, SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, BytesInHand, Delivery, Outgoing
from idemconsumer.settings import Settings
from tests.support.inside import (
    client_of,
    commit_now,
    coordinator_of,
    fail_next_commit,
    partitions_of,
    poll_ahead,
    rebalancing,
    rejoin,
    subscription_of,
)
from tests.support.kafka import (
    BOUNDS,
    MortalWorld,
    World,
    has_leaders,
    joined,
    offset_of,
    partition_of,
    positions,
    take,
    take_any,
)
from tests.support.logs import LogCapture, entries
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

T = TypeVar("T")


# ------------------------------------------------------------------------------------------ what is delivered
async def test_a_record_becomes_a_message_that_says_where_it_came_from(world: World) -> None:
    await world.create()
    async with AIOKafkaProducer(bootstrap_servers=world.server.address) as producer:
        headers = [("text", "\u00e9".encode()), ("raw", b"\xff\xfe"), ("none", None), ("text", None)]
        await producer.send_and_wait(world.topic, b"body", key=b"key", headers=headers)
        await producer.send_and_wait(world.topic, None, key=b"gone")
    first, tombstone = await take(await world.open(), 2)
    message = first.message
    assert message.source == f"kafka:{world.topic}"
    assert (message.body, message.order_hint, message.message_id) == (b"body", b"key", None)
    assert message.headers == {"text": "\u00e9", "raw": b"\xff\xfe"}
    assert message.position == f"{world.topic}-0-0"
    assert (first.suspect, first.count) == (False, 1)
    assert (message.partition, message.offset, message.record_key, message.tombstone) == (0, 0, b"key", False)
    assert message.timestamp is not None
    assert abs(message.timestamp.timestamp() - time.time()) < 60
    assert message.repeated_headers == ()
    assert (tombstone.message.body, tombstone.message.order_hint) == (b"", b"gone")
    assert tombstone.message.tombstone
    assert first.epoch is tombstone.epoch
    assert first.epoch.on_probation(0, lanes=1)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_each_codec_of_kafka_can_be_read(world: World, codec: str) -> None:
    await world.create()
    async with AIOKafkaProducer(bootstrap_servers=world.server.address, compression_type=codec) as producer:
        await asyncio.gather(*[await producer.send(world.topic, b"%d" % number * 50) for number in range(10)])
    taken = await take(await world.open(), 10)
    assert sorted(each.message.body for each in taken) == [b"%d" % number * 50 for number in range(10)]


async def test_subscriptions_of_one_group_share_a_feed(world: World) -> None:
    first = Subscription("kafka:a", "h", "g")
    assert world.broker.feed(first) == world.broker.feed(Subscription("kafka:b", "i", "g")) == "kafka:g"


async def test_one_session_reads_all_topics_of_its_group(world: World) -> None:
    other = world.topic + ".more"
    await world.create()
    await world.create(other)
    await world.broker.publish(world.topic, [Outgoing(b"1")])
    await world.broker.publish(other, [Outgoing(b"2")])
    taken = await take(await world.open(BOUNDS, world.topic, other), 2)
    assert {each.message.source for each in taken} == {f"kafka:{world.topic}", f"kafka:{other}"}
    assert len({id(each.epoch) for each in taken}) == 2


# ------------------------------------------------------------------------------------------ what is committed
async def test_only_what_is_finished_below_every_unfinished_delivery_is_committed(world: World) -> None:
    await world.create()
    await world.produce(5)
    session = await world.open()
    taken = await take(session, 5)
    await session.settle([taken[0], taken[1], taken[3], taken[4]])
    await world.commits(2)
    await session.settle([taken[2]])
    await world.commits(5)


async def test_transaction_markers_and_aborted_records_leave_no_lag(world: World) -> None:
    await world.create()
    async with AIOKafkaProducer(bootstrap_servers=world.server.address, transactional_id=world.topic) as producer:
        for keep in (True, True, False):
            await producer.begin_transaction()
            await producer.send_and_wait(world.topic, b"%d" % keep)
            await (producer.commit_transaction() if keep else producer.abort_transaction())
    session = await world.open()
    taken = await take(session, 2)
    assert [offset_of(each) for each in taken] == [0, 2]
    await session.settle(taken)
    async with asyncio.timeout(PATIENCE):
        while not await session.idle():
            await session.fetch()
    await world.commits(6)  # two records and their markers, one aborted record and its marker


async def test_a_partition_of_nothing_but_aborted_records_leaves_no_lag(world: World) -> None:
    await world.create()
    await world.produce_and_abort(1)
    session = await world.open()
    await joined(session)
    await world.commits(2)


async def test_nothing_is_committed_when_nothing_has_changed(world: World) -> None:
    await world.create()
    await world.produce(2)
    session = await world.open()
    taken = await take(session, 2)
    for each in partitions_of(session).values():  # as if another leader had written the second one
        each.leaders.proven(1)
        assert each.leaders.follow(1, [(1, 9)])
    await session.settle(taken)
    await world.commits(2)
    commits: list[object] = []
    client_of(session).commit = lambda offsets: commits.append(offsets)
    await commit_now(session)
    assert commits == []
    assert [len(each.leaders) for each in partitions_of(session).values()] == [1]  # that of what comes next


async def test_a_drain_commits_what_is_finished_and_leaves_the_rest_to_the_next_owner(world: World) -> None:
    await world.create()
    await world.produce(4)
    session = await world.open()
    taken = await take(session, 4)
    await world.produce(1, start=4)
    await poll_ahead(session)  # fetched, and not handed over yet
    await session.stop_fetching()
    assert not await session.fetch()
    assert not await session.fetch()
    await session.settle(taken[:2])
    await session.release(taken[2:])
    await session.close()
    assert await world.committed() == 2
    assert all(each.epoch.ended for each in taken)
    with pytest.raises(SessionEnded, match="closed"):
        await session.fetch()
    assert positions(await take(await world.open(), 3)) == ["0-2", "0-3", "0-4"]


async def test_a_failed_fetch_ends_the_session_and_its_position_is_not_trusted(world: World) -> None:
    await world.create()
    await world.produce(3)
    session = await world.open(Bounds(lanes=1, group=1, room=1))
    taken = await take(session, 2)

    real = client_of(session).getmany

    async def stumble(**how: Any) -> None:
        assert await real(**how)  # records are taken out of the client's buffer, and lost on the way
        raise KafkaError("corrupt")

    client_of(session).getmany = stumble
    await session.settle(taken)
    await poll_ahead(session)
    await commit_now(session)  # before the worker has noticed
    with pytest.raises(SessionEnded, match="corrupt"):
        await take_any(session)
    await session.close()
    assert await world.committed() == 2
    assert positions(await take(await world.open(), 1)) == ["0-2"]


# ------------------------------------------------------------------------------------------------- rebalances
async def test_the_launcher_knows_a_member_before_its_group_counts_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed while its group still agrees would be waited for (K15)."""
    known: list[tuple[str, str | None]] = []
    real = GroupCoordinator._send_req

    async def sending(coordinator: Any, request: Any) -> Any:
        if isinstance(request, JoinGroupRequest):
            known.append((coordinator.member_id, CHANNEL._members.get(world.group)))
        return await real(coordinator, request)

    monkeypatch.setattr(GroupCoordinator, "_send_req", sending)
    await world.create()
    session = await world.open()
    await joined(session)
    assert [member for member, _ in known][:1] == [""]
    members = [(member, told) for member, told in known if member]
    assert members
    assert all(member == told for member, told in members)
    await session.close()
    assert world.group not in CHANNEL._members


async def test_a_rebalance_waits_for_what_runs_and_the_next_owner_starts_exactly_behind_it(
    world: World,
) -> None:
    await world.create(partitions=2)
    for partition in (0, 1):
        await world.produce(3, partition=partition)
    first = await world.open()
    taken = await take(first, 6)
    running = [each for each in taken if offset_of(each) == 0]
    for delivery in running:
        delivery.epoch.start(1)
    second = await world.open()
    await until(lambda: all(each.epoch.retiring for each in taken))
    assert not any(each.epoch.ended for each in taken)
    assert not await first.idle()
    assert not await second.fetch()  # it waits for the first member
    assert not await first.fetch()
    assert not any(each.epoch.ended for each in taken), "a rebalance does not hold the fetch task"
    await first.settle(running)
    for delivery in running:
        delivery.epoch.finish(1)
    again = await asyncio.gather(take(first, 2), take(second, 2))
    assert all(each.epoch.ended for each in taken)
    assert positions([*again[0], *again[1]]) == ["0-1", "0-2", "1-1", "1-2"]
    assert {partition_of(each) for each in again[0]} != {partition_of(each) for each in again[1]}
    assert not any(each.epoch.retiring for each in again[0])


async def test_what_finishes_after_its_partition_was_revoked_is_forgotten(world: World, logged: LogCapture) -> None:
    await world.create()
    await world.produce(3)
    impatient = Bounds(lanes=4, group=8, drain=0.3)
    first = await world.open(impatient)
    taken = await take(first, 3)
    taken[0].epoch.start(1)  # and never finishes
    second = await world.open(impatient)
    await until(lambda: taken[0].epoch.ended)
    fetching = asyncio.gather(take_any(first), take_any(second))
    await until(lambda: len(owners(first, second)) == 1)
    await first.settle(taken)
    await commit_now(first)
    await commit_now(second)
    assert await world.committed() in (None, 0)
    fetching.cancel()
    assert entries(logged, "kafka drain timed out")


def owners(*sessions: KafkaSession) -> list[int]:
    """Which sessions have taken something over."""
    return [id(each) for each in sessions if any(p.tracker.outstanding for p in partitions_of(each).values())]


async def test_a_late_mark_of_a_former_epoch_does_not_count_for_the_present_one(world: World) -> None:
    await world.create()
    await world.produce(3)
    session = await world.open()
    old = await take(session, 3)
    rejoin(session)  # the same partition comes back to the same member
    new = await take(session, 3)
    assert old[0].epoch.ended
    assert new[0].epoch is not old[0].epoch
    await session.settle(old)
    await commit_now(session)
    assert await world.committed() in (None, 0)
    await session.settle(new)
    await world.commits(3)


async def test_a_commit_under_way_ends_before_the_group_goes_on(world: World) -> None:
    """The client would retry it after the rebalance, under the new generation, and move the group back."""
    await world.create()
    await world.produce(3)
    session = await world.open()
    taken = await take(session, 3)
    real, entered, release = client_of(session).commit, asyncio.Event(), asyncio.Event()

    async def slow(offsets: dict[TopicPartition, int]) -> None:
        client_of(session).commit = real
        entered.set()
        await release.wait()
        await real(offsets)

    client_of(session).commit = slow
    await session.settle(taken[:1])
    await asyncio.wait_for(entered.wait(), PATIENCE)
    rejoin(session)
    await until(lambda: taken[0].epoch.retiring)
    assert not await session.fetch()
    assert not taken[0].epoch.ended
    release.set()
    assert positions(await take(session, 2)) == ["0-1", "0-2"]


async def test_a_failure_in_the_revoke_callback_still_ends_the_epochs(world: World) -> None:
    await world.create()
    await world.produce(1)
    session = await world.open()
    [old] = await take(session, 1)
    fail_next_commit(session, RuntimeError("broken"))
    rejoin(session)
    await until(lambda: old.epoch.ended)
    [new] = await take(session, 1)
    assert not new.epoch.ended


async def test_closing_does_not_wait_for_a_rebalance_that_waits_for_work(world: World) -> None:
    await world.create()
    await world.produce(1)
    session = await world.open()
    [delivery] = await take(session, 1)
    delivery.epoch.start(1)
    rejoin(session)
    await until(lambda: delivery.epoch.retiring)
    fetching = asyncio.create_task(take_any(session))
    started = time.monotonic()
    await session.close()
    with pytest.raises(SessionEnded):
        await asyncio.wait_for(fetching, PATIENCE)
    assert time.monotonic() - started < kafka_client.STOP_TIMEOUT
    assert not session._poll or session._poll.done()


async def test_a_member_that_leaves_while_the_group_waits_for_another_is_not_given_a_partition(
    world: World,
) -> None:
    await world.create(partitions=4)
    busy, leaving = await world.open(), await world.open()
    await asyncio.gather(joined(busy), joined(leaving))
    for partition in range(4):
        await world.produce(1, partition=partition)
    [held, *_] = await take(busy, 2)
    await take(leaving, 2)
    held.epoch.start(1)
    newcomer = await world.open()
    await until(lambda: held.epoch.retiring and rebalancing(leaving))
    started = time.monotonic()
    await leaving.close()
    assert time.monotonic() - started < kafka_client.STOP_TIMEOUT
    held.epoch.finish(1)
    taken = await asyncio.gather(take(busy, 2), take(newcomer, 2))
    assert {partition_of(each) for each in [*taken[0], *taken[1]]} == {0, 1, 2, 3}


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning(world: World) -> None:
    await world.create()
    await world.produce(5)
    session = await world.open()
    old = await take(session, 5)
    await world.delete(world.topic)
    await until(lambda: gone(world))
    await world.create()
    await world.produce(2)
    new = await take(session, 2)
    assert positions(new) == ["0-0", "0-1"]
    assert old[0].epoch.ended
    await session.settle(old)
    await session.settle(new)
    await world.commits(2)


async def test_a_reader_that_is_set_back_without_a_rebalance_begins_a_new_epoch(world: World) -> None:
    await world.create()
    await world.produce(3)
    session = await world.open()
    old = await take(session, 3)
    client_of(session).seek(TopicPartition(world.topic, 0), 1)
    new = await take(session, 2)
    assert old[0].epoch.ended
    assert not new[0].epoch.ended
    await session.settle(old)
    await session.settle(new[:1])
    await world.commits(2)


async def gone(world: World) -> bool:
    [found] = await world.admin.describe_topics([world.topic])
    return bool(found["error_code"])


# ----------------------------------------------------------------------------------------------------- bounds
async def test_at_the_bound_it_goes_on_polling_and_nothing_is_dropped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_poll=0.2)
    await world.create()
    await world.produce(40)
    session = await world.open(Bounds(lanes=1, group=2, room=8))
    taken = await take(session, 10)
    for _ in range(3):
        assert not await session.fetch()
    assert subscription_of(session).fetcher_idle_time < 1.0, "it is still a member"
    assert not client_of(session).paused(), "what the client has fetched is kept"
    await session.settle(taken)
    while len(taken) < 40:
        more = await session.fetch()
        assert len(more) <= 10
        await session.settle(more)
        taken += more
    assert [offset_of(each) for each in taken] == list(range(40))


async def test_what_is_made_of_small_batches_stays_within_the_bound_in_bytes(world: World) -> None:
    """Small ones have taught that many can be taken; then large ones come that are small on the wire (D8)."""
    await world.create()
    large = 100_000
    async with AIOKafkaProducer(bootstrap_servers=world.server.address, compression_type="gzip") as producer:
        for size in [10] * 50 + [large] * 50:
            await producer.send(world.topic, b"x" * size)
    bounds = Bounds(lanes=4, group=32, memory=BytesInHand(20 * large))
    session, seen, most = await world.open(bounds), 0, 0
    while seen < 100:
        taken = await fetched(session)
        most = max(most, bounds.memory.held)
        seen += len(taken)
        await session.settle(taken)
    assert most <= 11 * large, "half of the bound, and what begins within it"


async def test_a_topic_at_its_bound_does_not_stop_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, kafka_poll=0.2)
    other = world.topic + ".fast"
    await world.create()
    await world.create(other)
    await world.broker.publish(world.topic, [Outgoing(b"slow")] * 30)
    session = await world.open(Bounds(lanes=2, group=2, share=lambda source: 4), world.topic, other)
    held = await take(session, 4)
    await world.broker.publish(other, [Outgoing(b"fast")] * 30)
    seen = 0
    while seen < 30:
        fast = await fetched(session)
        assert {each.message.body for each in fast} == {b"fast"}
        assert len(fast) <= 4
        await session.settle(fast)
        seen += len(fast)
    await session.settle(held)
    assert {each.message.body for each in await fetched(session)} == {b"slow"}


async def fetched(session: KafkaSession) -> Sequence[Delivery]:
    """What the first fetch brings that brings something."""
    async with asyncio.timeout(PATIENCE):
        while not (deliveries := await session.fetch()):
            pass
    return deliveries


async def test_a_topic_that_is_not_asked_for_is_not_said_to_be_stalled(
    world: World, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_poll=0.1)
    await world.create()
    await world.produce(20)
    session = await world.open(Bounds(lanes=1, group=2, room=2))
    await take(session, 4)
    for _ in range(3):
        assert not await session.fetch()
        await session._probe()
    assert not entries(logged, "kafka fetch stalled")


async def test_a_pause_is_made_again_after_a_rebalance(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, kafka_poll=0.2)
    await world.create()
    await world.produce(4)
    session = await world.open()
    await take(session, 4)
    await session.stop_fetching()
    assert client_of(session).paused()
    before = subscription_of(session).subscription.assignment
    rejoin(session)
    await until(lambda: subscription_of(session).subscription.assignment is not before)
    await until(lambda: not rebalancing(session))
    assert client_of(session).paused() == client_of(session).assignment() != set()


async def test_too_many_uncommitted_offsets_pause_their_partition_alone(
    world: World, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_poll=0.2)
    await world.create(partitions=2)
    session = await world.open(Bounds(lanes=1, group=1, room=1_000, max_uncommitted=20))
    await joined(session)
    await world.produce(25, partition=0)
    stuck, *others = await take(session, 25)
    await session.settle(others)
    assert not await session.fetch()
    assert client_of(session).paused() == {TopicPartition(world.topic, 0)}
    await world.produce(30, partition=1)
    await world.produce(5, start=25, partition=0)
    taken = await take(session, 30)
    assert {partition_of(each) for each in taken} == {1}
    await session.settle(taken)
    assert not await session.fetch()
    assert client_of(session).paused() == {TopicPartition(world.topic, 0)}
    await session.settle([stuck])
    assert [offset_of(each) for each in await take(session, 5)] == list(range(25, 30))
    for event in ("kafka paused", "kafka resumed"):
        assert [entry["partition"] for entry in entries(logged, event)] == [f"{world.topic}-0"]


# ------------------------------------------------------------------------------------------------------- idle
async def test_idle_means_assigned_and_read_to_the_end_whatever_is_still_held(world: World) -> None:
    await world.create(partitions=2)
    await world.produce(3, partition=0)
    session = await world.open()
    assert not await session.idle()
    await take(session, 3)
    assert await session.idle()
    await world.produce(1, partition=1)
    assert not await session.idle()
    await take(session, 1)
    assert await session.idle()


async def test_a_member_without_a_partition_is_idle(world: World) -> None:
    await world.create()
    sessions = [await world.open(), await world.open()]
    await asyncio.gather(*map(joined, sessions))
    assert sorted(len(client_of(each).assignment()) for each in sessions) == [0, 1]


# ------------------------------------------------------------------------------------------- missing and dead
async def test_a_missing_topic_is_an_error_that_says_how_to_create_it(world: World) -> None:
    with pytest.raises(BrokerUnavailable, match=f"no topic '{world.topic}'.*--create --topic {world.topic}"):
        await world.open()


async def test_a_missing_topic_is_said_once_and_consumed_when_it_appears(
    world: World, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_metadata_age=0.5, kafka_probe_pause=0.1)
    other = world.topic + ".late"
    await world.create()
    await world.produce(2)
    session = await world.open(BOUNDS, world.topic, other)
    await session.settle(await take(session, 2))
    for _ in range(2):
        await session.fetch()
    await world.create(other)
    await world.broker.publish(other, [Outgoing(b"late")])
    [late] = await take(session, 1)
    assert late.message.source == f"kafka:{other}"
    await until(lambda: len(entries(logged, "kafka topic found")) == 1)
    [missing] = entries(logged, "kafka topic missing")
    assert missing["topic"] == other
    assert f"--create --topic {other}" in missing["instead"]
    assert not entries(logged, "kafka unreachable")


async def test_a_fetch_that_brings_nothing_is_said_once(
    world: World, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, kafka_probe_pause=0.05)
    await world.create()
    session = await world.open()
    await joined(session)
    real = client_of(session).getmany

    async def nothing(**how: Any) -> dict[Any, Any]:
        await asyncio.sleep(0.01)
        return {}

    client_of(session).getmany = nothing
    await world.produce(1)

    async def stalled() -> bool:
        await session.fetch()
        return bool(entries(logged, "kafka fetch stalled"))

    await until(stalled)
    for _ in range(20):
        await session.fetch()
    client_of(session).getmany = real
    await take(session, 1)
    await until(lambda: bool(entries(logged, "kafka fetch resumed")))
    assert len(entries(logged, "kafka fetch stalled")) == 1


@pytest.mark.kill
@pytest.mark.parametrize("fault", ["killed", "silent"])
async def test_a_broker_that_comes_back_loses_nothing_and_is_said_once(
    mortal: MortalWorld,
    logged: LogCapture,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    tuned(monkeypatch, kafka_probe_pause=0.2, kafka_probe_patience=3.0)
    await mortal.create()
    await mortal.produce(10)
    session = await mortal.open(Bounds(lanes=1, group=1, room=4))
    taken = await take(session, 5)
    await session.settle(taken[:2])
    await mortal.commits(2)
    assert session.silence is None
    own = mortal.own
    leave, back = (own.kill, own.start) if fault == "killed" else (own.freeze, own.thaw)
    leave()
    await session.settle(taken[2:])
    await until(lambda: bool(entries(logged, "kafka unreachable")))
    assert (session.silence or 0) > 0, "long before it is given up"
    await asyncio.to_thread(back)
    rest = {offset_of(each) for each in taken}
    async with asyncio.timeout(40):
        while rest != set(range(10)):
            more = await session.fetch()
            await session.settle(more)
            rest |= {offset_of(each) for each in more}
    await mortal.commits(10)
    await until(lambda: bool(entries(logged, "kafka reachable")))
    assert session.silence is None
    assert len(entries(logged, "kafka unreachable")) == 1
    assert [record for record in caplog.records if record.name.startswith("aiokafka")] == []


@pytest.mark.long
@pytest.mark.kill
async def test_a_broker_that_stays_away_ends_the_session_and_closing_is_bounded_and_leaves_no_task(
    mortal: MortalWorld, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(
        monkeypatch, kafka_probe_pause=0.2, kafka_probe_patience=0.3, kafka_given_up_after=0.5, kafka_commit_pause=0.1
    )
    await mortal.create()
    await mortal.produce(6)
    before = asyncio.all_tasks()
    brief = Bounds(lanes=4, group=8, drain=0)  # the next member waits for this and 10 s more for one that cannot leave
    session = await mortal.open(brief)
    taken = await take(session, 6)
    await session.settle(taken[:2])
    await mortal.commits(2)
    mortal.own.kill()
    await session.settle(taken[2:3])
    await until(session._committing.locked)  # a commit that will never be answered
    with pytest.raises(SessionEnded, match="has not answered"):
        await asyncio.wait_for(take_any(session), PATIENCE)
    assert all(each.epoch.ended for each in taken)
    started = time.monotonic()
    await session.close()
    assert time.monotonic() - started < kafka_client.STOP_TIMEOUT + 5
    await until(lambda: not (asyncio.all_tasks() - before))
    with pytest.raises(BrokerUnavailable, match=r"cannot be used.*IDEMCONSUMER_KAFKA"):
        await mortal.open()
    mortal.own.start()
    assert positions(await take(await mortal.open(brief), 4)) == ["0-2", "0-3", "0-4", "0-5"]


# ------------------------------------------------------------------------------------------ publish and check
async def again(act: Callable[[], Awaitable[T]]) -> T:
    """As a worker does: a broker that has stood still for nine seconds is fenced, and for a moment there is none."""
    while True:
        with suppress(BrokerUnavailable):
            return await act()
        await asyncio.sleep(0.1)


@pytest.mark.kill
async def test_what_a_silent_broker_did_not_confirm_is_relayed_again_and_in_order(
    mortal: MortalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mortal.create()
    messages = [Outgoing(b"%d" % n, key="k") for n in range(20)]
    assert await mortal.broker.relay(mortal.topic, messages[:5]) == [None] * 5
    with monkeypatch.context() as brief:
        tuned(brief, kafka_confirm_patience=0.5)
        mortal.own.freeze()
        with pytest.raises(BrokerUnavailable, match="did not confirm"):
            await mortal.broker.relay(mortal.topic, messages[5:])
        mortal.own.thaw()
    assert await again(lambda: mortal.broker.relay(mortal.topic, messages[5:])) == [None] * 15
    session, bodies = await again(mortal.open), list[bytes]()
    while bodies[-1:] != [b"19"]:
        bodies += [each.message.body for each in await session.fetch()]
    assert list(dict.fromkeys(bodies)) == [each.body for each in messages]


async def test_publishing_keeps_keys_headers_and_order(world: World) -> None:
    await world.create()
    messages = [Outgoing(b"%d" % n, {"number": str(n)}, key="k" if n % 2 else None) for n in range(50)]
    await world.broker.publish(world.topic, messages)
    taken = await take(await world.open(), 50)
    assert [each.message.body for each in taken] == [each.body for each in messages]
    assert [each.message.headers["number"] for each in taken] == [str(n) for n in range(50)]
    assert [each.message.order_hint for each in taken[:2]] == [None, b"k"]


async def test_publishing_to_a_missing_topic_says_how_to_create_it(world: World) -> None:
    with pytest.raises(BrokerUnavailable, match="--create --topic"):
        await world.broker.publish(world.topic, [Outgoing(b"1")])


async def test_a_message_that_is_too_large_for_the_topic_is_refused(world: World) -> None:
    await world.create(configs={"max.message.bytes": "1000"})
    with pytest.raises(BadMessage, match=f"oversized: Kafka accepts no message of that size for topic '{world.topic}'"):
        await world.broker.publish(world.topic, [Outgoing(b"x" * 2_000)])


async def test_behind_a_message_that_was_refused_others_are_published(world: World) -> None:
    """Its partition takes nothing more of a producer that has had a batch refused."""
    await world.create(configs={"max.message.bytes": "1000"})
    await world.broker.publish(world.topic, [Outgoing(b"0")])
    with pytest.raises(BadMessage, match="oversized"):
        await world.broker.publish(world.topic, [Outgoing(b"x" * 2_000)])
    await world.broker.publish(world.topic, [Outgoing(b"1"), Outgoing(b"2")])
    assert [each.message.body for each in await take(await world.open(), 3)] == [b"0", b"1", b"2"]


async def test_check_finds_partitions_and_retention(world: World) -> None:
    await world.create(partitions=3, configs={"retention.ms": "86400000"})
    found = await world.broker.check(world.subscription())
    assert [each.level for each in found] == ["ok", "ok"]
    assert "3 partition" in found[0].text
    assert "86400 s" in found[1].text
    assert await world.broker.retention_seconds(world.subscription()) == 86_400


@pytest.mark.parametrize("configs", [{"retention.ms": "-1"}, {"cleanup.policy": "compact"}])
async def test_check_warns_of_a_topic_that_keeps_messages_for_ever(world: World, configs: dict[str, str]) -> None:
    await world.create(configs=configs)
    assert [each.level for each in await world.broker.check(world.subscription())] == ["ok", "warning"]
    assert await world.broker.retention_seconds(world.subscription()) == math.inf


async def test_check_reports_a_missing_topic_and_a_missing_broker_without_raising(world: World) -> None:
    [missing] = await world.broker.check(world.subscription())
    assert (missing.level, "--create --topic" in missing.text) == ("error", True)
    nobody = KafkaBroker(Settings(kafka="127.0.0.1:1"))
    [away] = await nobody.check(world.subscription())
    assert (away.level, "cannot be used" in away.text) == ("error", True)
    assert await nobody.retention_seconds(world.subscription()) is None


# --------------------------------------------------------------------------------------------- static membership
async def test_a_static_member_that_restarts_causes_no_rebalance_and_keeps_its_partition(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_WORKER", "3")
    await world.create()
    await world.produce(2)
    world.brokers.append(KafkaBroker(Settings(kafka=world.server.address, kafka_group_instance_id="node")))
    session = await world.open()
    assert client_of(session)._group_instance_id == "node-3"
    await session.settle((await take(session, 2))[:1])
    generation = coordinator_of(session).generation
    await session.close()
    again = await world.open()
    await take(again, 1)
    assert coordinator_of(again).generation == generation


async def test_a_partition_that_is_added_is_consumed_within_seconds(world: World) -> None:
    await world.create()
    await world.produce(1)
    session = await world.open()
    await session.settle(await take(session, 1))
    await world.admin.create_partitions({world.topic: NewPartitions(total_count=2)})
    await until(lambda: has_leaders(world.admin, world.topic, 2))
    await world.produce(1, partition=1)
    async with asyncio.timeout(METADATA_MAX_AGE_MS / 1000 + 15):  # the rest is for a rebalance on a slow machine
        assert [delivery.message.position for delivery in await take(session, 1)] == [f"{world.topic}-1-0"]
    assert METADATA_MAX_AGE_MS < 5_000
