"""The database goes away while messages are worked on, and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Message, Saga, Tx
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.message.keys import digest
from idemconsumer.ports.observer import Point
from idemconsumer.worker.saga_lease import SagaLease
from tests.support.inside import in_memory
from tests.support.logs import LogCapture, entries, times
from tests.support.servers.made import PrivatePostgres
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, Item, connected, note, prepare


@pytest.fixture
def server(private_postgres: PrivatePostgres) -> EmbeddedPostgres:
    return private_postgres()


@pytest.fixture
def bench(server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Bench:
    prepare(server.dsn)
    return connected(Bench(server.dsn), monkeypatch)


@pytest.mark.kill
@pytest.mark.parametrize("source", ["memory:q", "postgres:q"])
async def test_while_the_database_is_away_nothing_is_settled_and_then_it_goes_on(
    bench: Bench, server: EmbeddedPostgres, logged: LogCapture, source: str
) -> None:
    app = App("outage")
    inside, go = 0, asyncio.Event()

    @app.idempotent_handler(source, key="id", group_size=4)
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        nonlocal inside
        await note(tx, item)
        if not go.is_set():
            inside += 1
            await go.wait()

    items = [Item(str(n)) for n in range(60)]
    if source == "memory:q":
        await bench.publish("q", *items)
    else:
        bench.enqueue("q", *items)
    async with bench.running(app, concurrency=4) as running:
        await running.until(lambda: inside == 4)
        await asyncio.to_thread(server.kill)
        go.set()
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        # Long enough for every lane to have tried again.
        failed = running.points.seen.copy()
        assert running.worker.counts == {}
        assert not running.points.count(Point.SETTLING)
        await asyncio.to_thread(server.start)
        await running.until_count(applied=60)
        assert len(running.points.seen) > len(failed)
    assert Counter(bench.effects()) == Counter(item.id for item in items)
    assert times(logged, "store unreachable, waiting") == 1
    assert times(logged, "store reachable again") == 1
    assert bench.attempts() == 0, "an outage is nobody's failed attempt"
    if source == "postgres:q":
        lost = [entry["feed"] for entry in entries(logged, "broker session lost, reconnecting")]
        assert lost == ["postgres"], "one session of the source and of the queue of its retries"
        waits = Counter(entry["feed"] for entry in entries(logged, "broker unavailable, waiting"))
        assert max(waits.values(), default=0) <= 1
        assert bench.do("select 1 from idemconsumer.queue") == []
    else:
        assert not in_memory(bench.broker, "q")


@pytest.mark.kill
async def test_a_worker_started_before_its_database_waits_for_it(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    prepare(server.dsn)
    bench = connected(Bench(server.dsn), monkeypatch)
    app = App("outage")

    @app.idempotent_handler("postgres:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    bench.enqueue("q", Item("patient"))
    await asyncio.to_thread(server.kill)
    async with bench.running(app) as running:
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        await asyncio.to_thread(server.start)
        await running.until_count(applied=1)
    assert times(logged, "store unreachable, waiting") == 1


@pytest.mark.kill
async def test_a_drain_ends_a_worker_whose_database_is_away(
    bench: Bench, server: EmbeddedPostgres, logged: LogCapture
) -> None:
    app = App("outage")
    started, go = asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        started.set()
        await go.wait()

    await bench.publish("q", Item("one"), Item("two"))
    async with bench.running(app, drain_timeout=5.0) as running:
        await started.wait()
        await asyncio.to_thread(server.kill)
        go.set()
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        async with asyncio.timeout(PATIENCE):
            await running.leave()
    assert len(in_memory(bench.broker, "q")) == 2


# ------------------------------------------------------------------------------------------------- other people's locks
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, session_lock_patience=0.1)


@pytest.mark.usefixtures("impatient")
async def test_a_table_that_somebody_locks_is_waited_for_and_costs_nothing(bench: Bench, logged: LogCapture) -> None:
    """As VACUUM FULL and many migrations do: here while a failed attempt is to be counted."""
    app = App("outage")

    @app.idempotent_handler("memory:q", key="id", order_by="entity", max_attempts=2, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id == "fails":
            raise ValueError

    await bench.publish("q", Item("fails", "e"), Item("behind", "e"))
    await bench.opened_before()
    async with await psycopg.AsyncConnection.connect(bench.dsn) as other:
        await other.execute("lock table idemconsumer.attempt in access exclusive mode")
        async with bench.running(app) as running:
            await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
            handled = running.points.count(Point.ROLLED_BACK)
            await running.until(lambda: running.points.count(Point.ROLLED_BACK) > handled)
            assert (bench.effects(), dict(running.worker.counts)) == ([], {})
            await other.rollback()
            await running.until_count(applied=1, dead=1)
    assert running.worker.counts == {"applied": 1, "dead": 1, "retrying": 1}
    assert bench.effects() == ["behind"]
    assert times(logged, "store unreachable, waiting") == 1


@pytest.mark.usefixtures("impatient")
async def test_a_record_table_that_somebody_locks_while_the_room_looks_is_waited_for(
    bench: Bench, logged: LogCapture
) -> None:
    app = App("outage")

    @app.idempotent_handler("memory:q", key="id", wait="0s")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", Item("busy"))
    async with (
        bench.rival(digest("outage", None, "handle", "busy")) as let_go,
        await psycopg.AsyncConnection.connect(bench.dsn) as other,
        bench.running(app) as running,
    ):
        await running.until_count(busy=1)
        await other.execute("lock table idemconsumer.record in access exclusive mode")
        await running.until(lambda: times(logged, "store unreachable, waiting") == 1)
        assert not running.task.done()
        await let_go()
        await other.rollback()
        await running.until_count(applied=1)
    assert bench.effects() == ["busy"]


@pytest.mark.usefixtures("impatient")
async def test_a_mark_that_cannot_be_taken_back_does_not_end_the_worker(bench: Bench) -> None:
    """A suspect is marked, then found busy; meanwhile the marks are locked."""
    app = App("outage")

    @app.idempotent_handler("postgres:q", key="id", wait="200ms")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    bench.enqueue("q", Item("busy"))
    bench.do("update idemconsumer.queue set deliveries = 1")
    async with (
        bench.rival(digest("outage", None, "handle", "busy")) as let_go,
        await psycopg.AsyncConnection.connect(bench.dsn) as other,
        bench.running(app) as running,
    ):
        await running.until(lambda: running.points.count(Point.SUSPECTS_MARKED) == 1)
        await other.execute("lock table idemconsumer.attempt in access exclusive mode")
        await running.until_count(busy=1)
        await let_go()
        await other.rollback()
        await running.until_count(applied=1)
    assert (bench.effects(), bench.attempts()) == (["busy"], 0)


# ------------------------------------------------------------------------------------------------------- durability off
async def test_durability_turned_off_under_a_worker_ends_it_and_blames_no_message(
    bench: Bench, logged: LogCapture
) -> None:
    app = App("outage")
    off = True

    @app.idempotent_handler("memory:q", key="id", max_attempts=1, group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if off and item.id == "second":
            bench.do("alter system set synchronous_commit = off")
            bench.do("select pg_reload_conf()")

            async def turned_off() -> bool:
                return await (await tx.execute("show synchronous_commit")).one() == ("off",)

            await until(turned_off)

    await bench.publish("q", *map(Item, ("first", "second", "third")))
    try:
        with pytest.raises(ConfigurationError, match=r"synchronous_commit is off.*set it to on"):
            async with bench.running(app, concurrency=1) as running:
                await running.until(lambda: False)
        assert (bench.effects(), bench.attempts()) == ([], 0)
        assert bench.do("select 1 from idemconsumer.dead_letter") == []
        with pytest.raises(ConfigurationError, match="synchronous_commit is off"):
            await bench.until_empty(app)
    finally:
        off = False
        bench.do("alter system reset synchronous_commit")
        bench.do("select pg_reload_conf()")
    await until(lambda: bench.do("show synchronous_commit") == [("on",)])
    await bench.until_empty(app)
    assert sorted(bench.effects()) == ["first", "second", "third"]
    assert bench.do("select 1 from idemconsumer.dead_letter") == []


async def test_a_database_that_is_gone_again_when_the_sagas_begin_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    app, opened, gone = App("outage"), SagaLease.open, [StoreUnavailable("it went away")]

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, saga: Saga) -> None:
        await saga.tx("noted", note, item)

    async def failing_once(*arguments: Any, **more: Any) -> SagaLease:
        if gone:
            raise gone.pop()
        return await opened(*arguments, **more)

    monkeypatch.setattr(SagaLease, "open", failing_once)
    await bench.publish("q", Item("a"))
    async with bench.running(app) as running:
        await running.until_count(applied=1)
    assert times(logged, "store unreachable, waiting") == 1
