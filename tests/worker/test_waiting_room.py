"""Busy keys: what waits in its lane, what waits in the room, and the room's bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from idemconsumer import App, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import Contention
from idemconsumer.message.keys import digest
from idemconsumer.ports.broker import Delivery
from idemconsumer.ports.observer import Point
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record
from idemconsumer.stores.columns import NewDeadLetter
from idemconsumer.stores.joined import PostgresStore
from tests.support.inside import in_flight, in_memory, lanes_of, nothing_in_flight, waiting_room
from tests.support.logs import LogCapture, times
from tests.support.tuning import tuned
from tests.support.waiting import until
from tests.support.workers import Bench, Item, note

APP = "room"


def key_of(name: str) -> bytes:
    return digest(APP, None, "handle", name)


async def test_a_busy_message_that_waits_stops_its_lane_until_its_rival_ends(bench: Bench) -> None:
    app = App(APP)

    @app.idempotent_handler("memory:q", key="id", order_by="entity", wait="15s")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", *(Item(name, "e") for name in ("first", "busy", "behind")))
    async with bench.rival(key_of("busy")) as let_go, bench.running(app) as running:
        await running.until_count(applied=1)
        claims = running.points.count(Point.CLAIMED)
        await running.until(lambda: running.points.count(Point.CLAIMED) > claims + 1)
        assert bench.effects() == ["first"]
        assert in_flight(running.worker) == 2
        await let_go()
        await running.until_count(applied=3)
    assert bench.effects() == ["first", "busy", "behind"]


async def test_a_busy_message_that_is_deferred_lets_its_lane_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, given_back = App(APP), list[Delivery]()

    async def noted(session: MemorySession, deliveries: Sequence[Delivery]) -> None:
        given_back.extend(deliveries)

    monkeypatch.setattr(MemorySession, "release", noted)

    @app.idempotent_handler("memory:q", key="id", order_by="entity", wait="0s", group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", *(Item(name, "e") for name in ("first", "busy", "behind")))
    async with bench.rival(key_of("busy")) as let_go, bench.running(app) as running:
        await running.until_count(applied=2, busy=1)
        assert bench.effects() == ["first", "behind"]
        # A later delivery of the key follows it into the room instead of meeting it as a rival.
        await bench.publish("q", Item("busy", "e"), Item("later", "e"))
        await running.until_count(applied=3)
        await let_go()
        await running.until_count(applied=4, duplicate=1)
    assert bench.effects() == ["first", "behind", "later", "busy"]
    assert given_back == []


async def test_a_wait_that_runs_out_goes_to_the_room_and_is_not_lost(bench: Bench) -> None:
    app = App(APP)

    @app.idempotent_handler("memory:q", key="id", order_by="entity", wait="150ms")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", Item("busy", "e"), Item("behind", "e"))
    async with bench.rival(key_of("busy")) as let_go, bench.running(app) as running:
        await running.until_count(applied=1, busy=1)
        assert bench.effects() == ["behind"]
        await let_go()
        await running.until_count(applied=2)
    assert bench.effects() == ["behind", "busy"]
    assert not in_memory(bench.broker, "q")


async def test_no_connection_is_held_while_a_message_waits_for_its_rival(bench: Bench) -> None:
    app = App(APP)

    @app.idempotent_handler("memory:q", key="id", wait="60s")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    names = [f"busy-{n}" for n in range(8)]
    await bench.publish("q", *map(Item, names))
    async with AsyncExitStack() as stack:
        rivals = [await stack.enter_async_context(bench.rival(key_of(name))) for name in names]
        # With more connections than wait, what one pinned would be seen before the server ends it.
        async with bench.running(app, concurrency=16) as running:
            pinned = (
                "select count(*) from pg_stat_activity where application_name like '%% worker 0' and xact_start < %s"
            )
            await running.until(lambda: running.points.count(Point.CLAIMED) >= 16)
            begun = bench.do("select clock_timestamp()")[0][0]
            claims = running.points.count(Point.CLAIMED)
            await running.until(lambda: running.points.count(Point.CLAIMED) >= claims + 16)
            await until(lambda: bench.do(pinned, begun)[0][0] == 0, "transactions are open between claims", within=10)
            for let_go in rivals:
                await let_go()
            await running.until_count(applied=8)


async def test_a_full_room_stops_the_lane_and_says_so_once(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, lane_room=2)
    app = App(APP)

    # What is behind busy ones in a group of theirs may run.
    @app.idempotent_handler("memory:q", key="id", order_by="entity", wait="0s", group_size=1)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    busy = [f"busy-{n}" for n in range(4)]
    await bench.publish("q", *(Item(name, "e") for name in (*busy, "behind")))
    async with AsyncExitStack() as stack:
        rivals = [await stack.enter_async_context(bench.rival(key_of(name))) for name in busy]
        async with bench.running(app, concurrency=1) as running:
            await running.until_count(busy=3)
            await running.until(lambda: times(logged, "waiting room full, orders are held up") == 1)
            rounds = running.points.count(Point.CLAIMED)
            await running.until(lambda: running.points.count(Point.CLAIMED) > rounds + 3)
            assert len(waiting_room(running.worker, "handle")) == 2
            assert bench.effects() == []
            for let_go in rivals:
                await let_go()
            await running.until_count(applied=5)
    assert sorted(bench.effects()) == ["behind", *busy]
    assert times(logged, "waiting room full, orders are held up") == 1


def resting(count: Callable[[], int]) -> Callable[[], bool]:
    """Whether the count has stood still for 0.5 s, so that the room now rests for 0.8 s or 1 s."""
    last, since = -1, 0.0

    def rests() -> bool:
        nonlocal last, since
        if count() != last:
            last, since = count(), time.monotonic()
        return time.monotonic() - since > 0.5

    return rests


async def test_the_room_settles_at_once_what_its_rivals_have_committed(bench: Bench) -> None:
    """All of the room is one read and one settlement, not a claim for each."""
    started, go = asyncio.Event(), asyncio.Event()
    names = [str(n) for n in range(20)]

    def app_on(source: str, group_size: int) -> App:
        app = App(APP)  # of one name, so that they are two workers of one service

        @app.idempotent_handler(source, key="id", wait="0s", group_size=group_size)
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)
            if item.id == names[-1]:
                started.set()
                await go.wait()

        return app

    await bench.publish("theirs", *map(Item, names))
    await bench.publish("ours", *map(Item, names))
    async with bench.running(app_on("memory:theirs", 64), concurrency=1) as rival:
        await started.wait()
        async with bench.running(app_on("memory:ours", 1), concurrency=2) as running:
            await running.until_count(busy=len(names))
            await running.until(resting(lambda: running.worker.counts["busy"]))
            settled = running.points.count(Point.SETTLING)
            go.set()
            await running.until_count(duplicate=len(names))
            assert running.points.count(Point.SETTLING) == settled + 1
        await rival.until_count(applied=len(names))
    assert bench.effects() == names


async def test_a_conflict_in_the_room_is_not_settled_before_its_dead_letter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead letter comes too late the first time, as if its table had been locked."""
    started, go = asyncio.Event(), asyncio.Event()
    tried: list[float] = []
    bury = PostgresStore.bury

    async def locked_at_first(
        self: PostgresStore, letter: NewDeadLetter, claim: Claim | None, *, forget: Sequence[bytes] = ()
    ) -> Record | int:
        tried.append(asyncio.get_running_loop().time())
        if len(tried) == 1:
            raise Contention("55P03")
        return await bury(self, letter, claim, forget=forget)

    monkeypatch.setattr(PostgresStore, "bury", locked_at_first)

    def app_on(source: str) -> App:
        app = App(APP)

        @app.idempotent_handler(source, key="id", wait="0s")
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)
            started.set()
            await go.wait()

        return app

    await bench.publish("theirs", Item("a", "of theirs"))
    await bench.publish("ours", Item("a", "of ours"))
    async with bench.running(app_on("memory:theirs")) as rival:
        await started.wait()
        async with bench.running(app_on("memory:ours")) as running:
            await running.until_count(busy=1)
            go.set()
            await running.until(lambda: nothing_in_flight(running.worker))
            assert bench.do("select reason from idemconsumer.dead_letter") == [("conflict",)]
            assert running.worker.counts["conflict"] == 1
            assert tried[1] - tried[0] >= 0.02, "it was not due yet"
        await rival.until_count(applied=1)
    assert bench.effects() == ["a"]


@pytest.mark.parametrize("end", ["its epoch retires", "the worker drains"])
async def test_the_room_starts_nothing_more_in_the_midst_of_a_round(bench: Bench, end: str) -> None:
    app, gone = App(APP), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", order_by="entity", wait="0s", group_size=1)
    async def handle(item: Item, tx: Tx) -> None:
        lanes = lanes_of(running.worker)
        if end == "the worker drains":
            running.worker.drain()
            await until(lambda: lanes.in_hand.draining)
        else:
            for held in waiting_room(running.worker, "handle"):
                held.delivery.epoch.retiring = True
        await gone.wait()
        await note(tx, item)

    busy = ["0", "1"]
    await bench.publish("q", *(Item(name, "e") for name in busy))
    async with AsyncExitStack() as stack:
        rivals = [await stack.enter_async_context(bench.rival(key_of(name))) for name in busy]
        async with bench.running(app, concurrency=1) as running:
            await running.until(lambda: len(waiting_room(running.worker, "handle")) == 2)
            for let_go in rivals:
                await let_go()
            gone.set()
            await running.until(lambda: nothing_in_flight(running.worker))
    assert len(bench.effects()) == 1
