"""Where sagas that were taken over run: at once, on lanes that are free, and no more of them than there is room for."""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Message, Saga
from idemconsumer.brokers.adapters import connect
from idemconsumer.brokers.due_sagas import DueSagas
from idemconsumer.brokers.memory import MemoryBroker, MemorySession
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.leased_saga import DueLook, LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.worker.worker import Worker
from tests.support.inside import lanes_of
from tests.support.sagas import Bench, FreeLanes, OpenStation, Station, due_sagas, order
from tests.support.tuning import tuned
from tests.support.waiting import until

LANES = 8


def on_one_lane(plan: BoundHandler, count: int) -> list[Message]:
    """Orders that have the same lane, as long as it follows from their keys."""
    found: list[Message] = []
    for number in itertools.count():
        call = Work.of(plan, message := order(f"k{number}")).call
        assert call is not None
        assert isinstance(call.order, str)
        if zlib.crc32(call.order.encode(), zlib.crc32(message.source.encode())) % LANES == 0:
            found.append(message)
        if len(found) == count:
            break
    return found


class Crowd:
    """An app each saga of which waits until as many run at once as there are to be."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop")
        self.running = 0
        self.go = asyncio.Event()

        @self.app.idempotent_handler("memory:orders", key="id", order_by="id", name="book", lease="1m", **options)
        async def book(order: dict[str, Any], saga: Saga) -> None:
            self.running += 1
            await self.go.wait()

        self.plan: BoundHandler = book.plan.bind("shop")
        self.orders = on_one_lane(self.plan, 4)

    @asynccontextmanager
    async def worker(self, dsn: str) -> AsyncIterator[Worker]:
        worker = self.app.worker(Settings(dsn=dsn, concurrency=LANES))
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            self.go.set()
            worker.drain()
            await running


class CountingBroker(MemoryBroker):
    """How many messages it may forget: by then each is applied, or the duplicate of a saga that was taken over.

    Which of the two is open: a message may look again just when the lease has ended, and take its saga itself.
    """

    settled = 0

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        session = await super().open(subscriptions, bounds)
        settle = session.settle

        async def counted(deliveries: Sequence[Delivery]) -> None:
            await settle(deliveries)
            self.settled += len(deliveries)

        session.settle = counted  # type: ignore[method-assign]
        return session


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> CountingBroker:
    """That of each worker."""
    broker = CountingBroker()
    monkeypatch.setattr(
        "idemconsumer.worker.worker.connect",
        lambda scheme, settings: broker if scheme == "memory" else connect(scheme, settings),
    )
    return broker


async def left_behind(station: Station, crowd: Crowd) -> None:
    """Its sagas have begun at this station."""
    for message in crowd.orders:
        call = Work.of(crowd.plan, message).call
        assert call is not None
        await station.leases.begin(call.claim, message, crowd.plan.name, None)


async def test_the_sagas_of_a_lost_worker_all_run_at_once_while_lanes_are_free(bench: Bench, one: Station) -> None:
    crowd = Crowd()
    await left_behind(one, crowd)
    bench.expire(one)
    async with crowd.worker(bench.dsn):
        await until(lambda: crowd.running == len(crowd.orders), "all run at once")
        crowd.go.set()
        await until(lambda: not bench.held, "all have ended")


async def test_redelivered_messages_of_a_lost_worker_do_not_hold_up_its_sagas(
    bench: Bench, one: Station, broker: CountingBroker
) -> None:
    """The broker kept them, so they wait here for the end of the sagas that they had begun."""
    crowd = Crowd(settle="finished")
    await left_behind(one, crowd)
    await broker.publish("orders", [Outgoing(message.body) for message in crowd.orders])
    async with crowd.worker(bench.dsn) as worker:
        await until(lambda: worker.counts.get("busy", 0) >= len(crowd.orders), "all messages wait")
        bench.expire(one)
        await until(lambda: crowd.running == len(crowd.orders), "all run at once")
        crowd.go.set()
        await until(lambda: broker.settled == len(crowd.orders), "all messages are settled")
        assert worker.counts.get("applied") == len(crowd.orders)
        assert "fenced" not in worker.counts


async def test_a_saga_whose_claim_was_lost_together_with_the_database_is_run_while_its_message_waits(
    bench: Bench, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner is this very process, which does not know."""
    begin, retake = PostgresLeases.begin, PostgresLeases.retake

    async def lost(leases: PostgresLeases, *args: Any) -> None:
        monkeypatch.setattr(PostgresLeases, "begin", begin)
        await begin(leases, *args)
        raise CommitUnknown("lost")

    async def away(leases: PostgresLeases, *args: Any) -> None:
        monkeypatch.setattr(PostgresLeases, "retake", retake)
        raise StoreUnavailable("away")

    monkeypatch.setattr(PostgresLeases, "begin", lost)
    monkeypatch.setattr(PostgresLeases, "retake", away)
    crowd = Crowd(settle="finished")
    await broker.publish("orders", [Outgoing(crowd.orders[0].body)])
    async with crowd.worker(bench.dsn):
        await until(lambda: crowd.running == 1, "it runs")
        crowd.go.set()
        await until(lambda: broker.settled == 1, "its message is settled")
    assert crowd.running == 1


async def test_sagas_that_were_taken_by_a_lost_answer_are_run_while_their_messages_wait(
    bench: Bench, one: Station, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PostgresLeases.take

    async def lost(leases: PostgresLeases, *args: Any, **more: Any) -> list[LeasedSaga]:
        if taken := await take(leases, *args, **more):
            monkeypatch.setattr(PostgresLeases, "take", take)
            raise StoreUnavailable("lost")
        return taken

    crowd = Crowd(settle="finished")
    await left_behind(one, crowd)
    await broker.publish("orders", [Outgoing(message.body) for message in crowd.orders])
    async with crowd.worker(bench.dsn) as worker:
        await until(lambda: worker.counts.get("busy", 0) >= len(crowd.orders), "all messages wait")
        monkeypatch.setattr(PostgresLeases, "take", lost)
        bench.expire(one)
        await until(lambda: crowd.running == len(crowd.orders), "all run at once")
        crowd.go.set()
        await until(lambda: broker.settled == len(crowd.orders), "all messages are settled")


async def test_a_saga_that_is_being_begun_among_those_that_wait_is_not_taken_from_oneself(
    bench: Bench, one: Station, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, look, looks = PostgresLeases.begin, PostgresLeases.look, 0

    async def counted(leases: PostgresLeases, *args: Any) -> DueLook:
        nonlocal looks
        looks += 1
        return await look(leases, *args)

    async def slowly(leases: PostgresLeases, *args: Any) -> object:
        begun = await begin(leases, *args)
        before = looks
        if isinstance(begun, LeasedSaga):
            await until(lambda: looks >= before + 3, "what is in nobody's hands was looked for since the commit")
        return begun

    crowd = Crowd(settle="finished")
    await left_behind(one, crowd)
    await broker.publish("orders", [Outgoing(crowd.orders[0].body)])
    async with crowd.worker(bench.dsn) as worker:
        await until(lambda: worker.counts.get("busy", 0) > 0, "it waits")
        monkeypatch.setattr(PostgresLeases, "look", counted)
        monkeypatch.setattr(PostgresLeases, "begin", slowly)
        bench.run("delete from idemconsumer.saga")
        bench.run("delete from idemconsumer.record")
        await until(lambda: crowd.running > 0, "it has begun")
        crowd.go.set()
        lanes = lanes_of(worker)
        await until(lambda: lanes.in_hand.in_flight == 0, "it has ended")
        assert (crowd.running, worker.counts.get("fenced", 0)) == (1, 0)


async def test_each_message_that_waits_has_its_turn_whatever_the_group_size(
    bench: Bench, one: Station, broker: CountingBroker
) -> None:
    """A saga runs alone, so those behind the first one of a group would never be presented."""
    crowd = Crowd(settle="finished", group_size=8)
    await left_behind(one, crowd)
    await broker.publish("orders", [Outgoing(message.body) for message in crowd.orders])
    async with crowd.worker(bench.dsn) as worker:
        await until(lambda: worker.counts.get("busy", 0) >= len(crowd.orders), "all messages wait")
        ((last,),) = bench.run("delete from idemconsumer.saga where body = %s returning key", (crowd.orders[-1].body,))
        bench.run("delete from idemconsumer.record where key = %s", (last,))
        await until(lambda: crowd.running == 1, "it has begun, while the others still wait")


async def test_a_drain_ends_a_saga_that_had_to_be_begun_anew_among_those_that_wait(
    bench: Bench, one: Station, broker: CountingBroker
) -> None:
    crowd = Crowd(settle="finished")
    await left_behind(one, crowd)
    await broker.publish("orders", [Outgoing(crowd.orders[0].body)])
    async with crowd.worker(bench.dsn) as worker:
        await until(lambda: worker.counts.get("busy", 0) > 0, "it waits")
        bench.run("delete from idemconsumer.saga")
        bench.run("delete from idemconsumer.record")
        await until(lambda: crowd.running == 1, "it has begun")
        worker.drain()
        await until(lambda: bench.run("select worker from idemconsumer.saga") == [(None,)], "it is released")


async def test_no_more_sagas_are_taken_over_than_there_are_free_lanes(bench: Bench, one: Station, two: Station) -> None:
    crowd = Crowd()
    await left_behind(one, crowd)
    bench.expire(one)
    lanes = FreeLanes(2)
    session = await due_sagas(two, lanes)
    assert len(await session.fetch()) == 2
    lanes.free = 0
    assert await session.fetch() == [], "others may have a free lane"
    lanes.free = 1
    assert len(await session.fetch()) == 1
    await session.close()


async def test_what_a_lost_worker_leaves_is_taken_in_full_batches_and_once(
    bench: Bench, one: Station, two: Station, open_station: OpenStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, many, batches, take = 32, 320, list[int](), PostgresLeases.take
    await left_behind(one, Crowd())
    bench.run(
        "insert into idemconsumer.saga select (jsonb_populate_record(s, jsonb_build_object("
        "'key', sha256(s.key || int4send(n)), 'token', nextval('idemconsumer.saga_token')))).*"
        " from idemconsumer.saga as s, generate_series(1, %s) as n",
        (many // 4 - 1,),
    )
    bench.expire(one)

    async def counted(leases: PostgresLeases, *args: Any, **more: Any) -> list[LeasedSaga]:
        taken = await take(leases, *args, **more)
        batches.append(len(taken))
        return taken

    monkeypatch.setattr(PostgresLeases, "take", counted)
    sessions = [await due_sagas(each, FreeLanes(room)) for each in (two, await open_station())]
    keys: list[bytes] = []
    while len(keys) < many:
        for fetched in await asyncio.gather(*(session.fetch() for session in sessions)):
            keys += [delivery.handle.key for delivery in fetched]
    assert len(set(keys)) == len(keys) == many
    assert batches == [room] * (many // room)
    for session in sessions:
        await session.close()


async def test_what_a_busy_process_leaves_is_taken_by_one_with_nothing_to_do(
    bench: Bench, one: Station, two: Station
) -> None:
    crowd = Crowd()
    await left_behind(one, crowd)
    bench.run("update idemconsumer.saga set worker = null, due = clock_timestamp() - interval '1 hour'")
    busy, free = FreeLanes(0), FreeLanes(len(crowd.orders))
    session, other = await due_sagas(one, busy), await due_sagas(two, free)
    assert await session.fetch() == []
    assert busy.kept == {"book"}, "nobody has taken them for long, so the next lane that is free is theirs"
    assert len(await other.fetch()) == len(crowd.orders)
    busy.free = 1
    assert (await session.fetch(), busy.kept) == ([], set()), "there is nothing left to keep it for"
    for each in (session, other):
        await each.close()


async def test_one_that_is_free_again_takes_what_was_left_without_another_look(
    bench: Bench, one: Station, two: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd()
    await left_behind(one, crowd)
    bench.expire(one)
    lanes = FreeLanes(1)
    session = await due_sagas(two, lanes)
    first = await session.fetch()

    async def look(*_: object) -> DueLook:
        raise AssertionError("it knows that there are more")

    monkeypatch.setattr(two.leases, "look", look)
    lanes.free = 0
    fetching = asyncio.create_task(session.fetch())
    session._next += 60
    await until(lambda: lanes.freed._waiters, "it waits for a lane")
    lanes.free = 1
    lanes.freed.set()
    (second,) = await fetching
    assert second.handle.key not in {delivery.handle.key for delivery in first}
    await session.close()


async def test_a_process_with_nothing_to_do_sends_one_statement_a_look(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, due_saga_longest_pause=0.0)
    sent: list[str] = []
    await left_behind(one, Crowd())
    own = [key for key, _ in await one.leases.own()]
    session = await due_sagas(one, FreeLanes(1, lambda: own))

    def counted(send: Any) -> Any:
        def counting(self: object, statement: bytes, *args: Any, **more: Any) -> Any:
            sent.append(statement.decode().split()[0])
            return send(self, statement, *args, **more)

        return counting

    monkeypatch.setattr(OwnCursor, "execute", counted(OwnCursor.execute))
    monkeypatch.setattr(Connection, "_simple", counted(Connection._simple))  # several in one message
    for _ in range(3):
        assert await session.fetch() == []
    assert sent == ["with"] * 3
    await session.close()


class LockedQueue:
    """Beside the sagas; it does not come back from being held up."""

    def __init__(self) -> None:
        self.queues = ["emails"]
        self.heard = list[str]()

    def wake_sagas_by(self, wake: object) -> None: ...

    def looked(self, found: Mapping[str, float]) -> None:
        self.heard.append("looked")

    def held_up(self) -> None:
        self.heard.append("held up")
        self.queues = []


@pytest.mark.parametrize("table", ["queue", "delayed"])
async def test_a_lock_on_the_queues_does_not_hold_up_the_sagas(
    bench: Bench, one: Station, two: Station, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    tuned(monkeypatch, due_queue_patience=0.05)
    crowd, beside = Crowd(), LockedQueue()
    await left_behind(one, crowd)
    bench.expire(one)
    source = DueSagas(two.leases, FreeLanes(1), beside=[beside])
    session = await source.open([Subscription("saga:book", "book", "shop")], Bounds(4, 1))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(f"lock table idemconsumer.{table}".encode())
        for _ in range(2):
            assert len(await session.fetch()) == 1
        assert beside.heard == ["held up"]
    await session.close()


async def test_a_stream_of_new_messages_does_not_keep_a_due_saga_waiting(
    bench: Bench, one: Station, broker: CountingBroker
) -> None:
    """All lanes are busy, and each of them always has a next message. So the next one that is free is kept."""
    app, begun = App("shop"), list[str]()

    @app.idempotent_handler("memory:orders", key="id", name="book", lease="1m", concurrency=2)
    async def book(order: dict[str, Any], saga: Saga) -> None:
        begun.append(order["id"])
        await asyncio.sleep(0.05)
        if order["id"] != "due":
            await broker.publish("orders", [Outgoing(json.dumps({"id": f"new {len(begun)}"}).encode())])

    plan = book.plan.bind("shop")
    call = Work.of(plan, message := order("due")).call
    assert call is not None
    await one.leases.begin(call.claim, message, "book", None)
    await broker.publish("orders", [Outgoing(json.dumps({"id": f"{n}"}).encode()) for n in range(20)])
    worker = app.worker(Settings(dsn=bench.dsn))
    running = asyncio.create_task(worker.run())
    await until(lambda: len(begun) > 4, "all lanes are busy")
    bench.expire(one)
    await until(lambda: "due" in begun, "it has a lane")
    assert begun.count("due") == 1
    before = len(begun)
    await until(lambda: len(begun) > before + 4, "and the others go on with all lanes")
    worker.drain()
    await running
