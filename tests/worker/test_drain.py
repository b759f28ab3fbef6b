"""A drain finishes what runs, settles it, and gives back the rest at no cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Message, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from tests.support.inside import draining, in_memory, lanes_if_any
from tests.support.logs import LogCapture, times
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, Item, Lasting, body, connected, note

SOON = 15.0  # seconds; a drain that waited for what it need not would take its 20


class Gate:
    """A handler that reports when it has started, and waits until it may go on."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.started: list[str] = []
        self.go = asyncio.Event()

    async def __call__(self, item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id in self.held:
            self.started.append(item.id)
            await self.go.wait()


def app_with(gate: Gate, *sources: str, **options: Any) -> App:
    app = App("drain")

    @app.idempotent_handler(*sources, key="id", **options)
    async def handle(item: Item, tx: Tx) -> None:
        await gate(item, tx)

    return app


def queue(bench: Bench) -> list[tuple[str, int, bool]]:
    """What the queue in Postgres still has: id, deliveries, whether it is visible."""
    return bench.do(
        "select convert_from(body, 'UTF8')::jsonb ->> 'id', deliveries, visible_at <= clock_timestamp()"
        " from idemconsumer.queue order by id"
    )


async def test_a_drain_finishes_what_runs_and_releases_what_has_not_started(bench: Bench) -> None:
    gate = Gate("running")
    bench.enqueue("q", Item("running"), *(Item(str(n)) for n in range(5)))
    async with bench.running(app_with(gate, "postgres:q"), concurrency=1) as running:
        await running.until(lambda: bool(gate.started))
        assert queue(bench)[1:3] == [("0", 1, False), ("1", 0, True)], "one waits behind the one that runs"
        running.worker.drain()
        gate.go.set()
    assert bench.effects() == ["running"]
    assert queue(bench) == [(str(n), 0, True) for n in range(5)]


async def test_a_drain_fetches_nothing_new(bench: Bench) -> None:
    gate = Gate("running")
    bench.enqueue("q", Item("running"))
    async with bench.running(app_with(gate, "postgres:q"), concurrency=2) as running:
        await running.until(lambda: bool(gate.started))
        running.worker.drain()
        assert lanes_if_any(running.worker) is not None
        await running.until(lambda: draining(running.worker))
        bench.enqueue("q", Item("late"))
        gate.go.set()
    assert bench.effects() == ["running"]
    assert queue(bench) == [("late", 0, True)]


async def test_what_a_fetch_under_way_still_brings_is_given_back_at_once(bench: Bench) -> None:
    """Its statement waits for a lock while the drain begins, and takes a message once it gets it."""
    waiting = "select count(*) from pg_stat_activity where application_name like '%% queue' and query like %s"
    pattern = '%insert into "idemconsumer".queue%'  # which comes before the take
    bench.enqueue("q", Item("late"))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as other:
        await other.execute("lock table idemconsumer.queue in share mode")  # it can be looked at, and not be taken from
        async with bench.running(app_with(Gate(), "postgres:q")) as running:
            await running.until(lambda: bench.do(waiting + " and wait_event_type = 'Lock'", pattern)[0][0] == 1)
            running.worker.drain()
            await running.until(lambda: draining(running.worker))
            await other.commit()
            async with asyncio.timeout(SOON):
                await running.leave()
    await running.until(lambda: bench.do(waiting + " and state = 'active'", pattern)[0][0] == 0)
    assert bench.effects() == []
    assert queue(bench) == [("late", 0, True)]


async def test_what_misses_the_deadline_is_rolled_back_given_back_and_costs_no_attempt(
    bench: Bench, logged: LogCapture
) -> None:
    gate = Gate("slow", "slow too")
    bench.enqueue("q", Item("slow"), Item("slow too"))
    bench.do("update idemconsumer.queue set deliveries = 1 where body like '%too%'")  # a suspect, put on record
    async with bench.running(app_with(gate, "postgres:q"), drain_timeout=0.2) as running:
        await running.until(lambda: len(gate.started) == 2)
        assert bench.do("select count from idemconsumer.attempt") == [(0,)]
    assert times(logged, "drain timed out, rolling back what still runs") == 1
    assert bench.effects() == []
    assert bench.do("select count from idemconsumer.attempt") == []
    assert queue(bench) == [("slow", 0, True), ("slow too", 1, True)]
    assert running.worker.counts == {}
    gate.go.set()
    await bench.until_empty(app_with(gate, "postgres:q"))
    assert sorted(bench.effects()) == ["slow", "slow too"]


async def test_a_drain_does_not_wait_for_a_next_attempt(bench: Bench) -> None:
    app = App("drain")

    @app.idempotent_handler("postgres:q", key="id", backoff="20s, 20s")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        if message.attempt == 1:
            raise ValueError

    bench.enqueue("q", Item("later"))
    async with bench.running(app) as running:
        await running.until_count(retrying=1)
        async with asyncio.timeout(SOON):
            await running.leave()
    assert queue(bench) == [("later", 0, True)]
    assert bench.attempts() == 1


async def test_a_drain_leaves_the_room_and_a_lane_that_waits_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idemconsumer.message.keys import digest

    tuned(monkeypatch, lane_room=1)
    busy = [f"busy-{n}" for n in range(3)]
    bench.enqueue("q", *map(Item, busy))
    app = app_with(Gate(), "postgres:q", wait="0s", order_by="entity")
    async with (
        bench.rival(digest("drain", None, "handle", busy[0])),
        bench.rival(digest("drain", None, "handle", busy[1])),
        bench.rival(digest("drain", None, "handle", busy[2])),
        bench.running(app) as running,
    ):
        await running.until_count(busy=2)
        async with asyncio.timeout(SOON):
            await running.leave()
    assert bench.effects() == []
    assert queue(bench) == [(name, 0, True) for name in busy]


async def test_aborting_rolls_back_at_once(bench: Bench) -> None:
    gate = Gate("running")
    await bench.publish("q", Item("running"))
    app = app_with(gate, "memory:q")
    worker = app.worker(bench.settings())
    task = asyncio.create_task(worker.run())
    await until(lambda: gate.started)
    async with asyncio.timeout(PATIENCE):
        worker.abort()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert bench.effects() == []
    assert len(in_memory(bench.broker, "q")) == 1


async def test_a_drain_before_the_database_answers_ends_the_worker(bench: Bench, logged: LogCapture) -> None:
    app = app_with(Gate(), "memory:q")
    nowhere = "postgresql://postgres@127.0.0.1:1/none"
    async with bench.running(app, dsn=nowhere) as running:
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)


class Slow(Lasting):
    """Loses its first session, and takes its time to open the next."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = asyncio.Event()
        self.go = asyncio.Event()
        self.sessions: list[MemorySession] = []

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        if self.sessions:
            self.opening.set()
            await self.go.wait()
        self.sessions.append(await super().open(subscriptions, bounds))
        return self.sessions[-1]


@pytest.mark.parametrize("opens", [False, True])
async def test_a_drain_while_a_session_is_being_opened_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    slow = Slow()
    connected(bench, monkeypatch, memory=slow)
    gate = Gate("running")
    await slow.publish("q", [])
    async with bench.running(app_with(gate, "memory:q"), drain_timeout=2.0) as running:
        await running.until(lambda: bool(slow.sessions))
        await slow.sessions[0].close()
        await running.until(slow.opening.is_set)
        running.worker.drain()
        if opens:
            slow.go.set()
        async with asyncio.timeout(PATIENCE):
            await running.task
    assert all(session._epoch.ended for session in slow.sessions)


class Late(MemorySession):
    """What its queue has arrives while its broker is being told of a drain, and a return of it would count."""

    fetching: asyncio.Event

    async def fetch(self) -> Sequence[Delivery]:
        self.fetching.set()
        if self._epoch.ended:
            raise SessionEnded("closed")
        await asyncio.sleep(0.01)
        return []

    async def stop_fetching(self) -> Sequence[Delivery]:
        await super().stop_fetching()
        self._epoch.returns_count = True
        return [self._take() for _ in range(len(self._queue.waiting))]


class Latecomers(Lasting):
    def __init__(self) -> None:
        super().__init__()
        self.fetching = asyncio.Event()

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        (subscription,) = subscriptions
        session = Late(subscription.name, self._queue(subscription.name), bounds)
        session.fetching = self.fetching
        return session


async def test_what_arrives_late_and_would_count_if_it_was_given_back_is_applied(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what has to be put on record before it is read, since it was delivered before."""
    latecomers = Latecomers()
    connected(bench, monkeypatch, memory=latecomers)
    await latecomers.publish("q", [Outgoing(body(Item(name))) for name in ("new", "again", "new too")])
    waiting = in_memory(latecomers, "q")
    waiting[1] = (waiting[1][0], 1, waiting[1][2])
    async with bench.running(app_with(Gate(), "memory:q")) as running:
        await running.until(latecomers.fetching.is_set)
        await running.leave()
    assert sorted(bench.effects()) == ["again", "new", "new too"]
    assert not waiting
