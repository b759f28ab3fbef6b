"""The database goes away while messages are worked on, and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from structlog.testing import LogCapture

from idemconsumer import App, Message, Tx
from idemconsumer.embedded import EmbeddedPostgres
from tests.conftest import PrivatePostgres
from tests.worker.conftest import PATIENCE, Bench, Item, connected, note, prepare, times


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
        failed = running.watch.seen.copy()
        assert running.worker.counts == {}
        await asyncio.to_thread(server.start)
        await running.until_count(applied=60)
        assert len(running.watch.seen) > len(failed)
    assert Counter(bench.effects()) == Counter(item.id for item in items)
    assert times(logged, "store unreachable, waiting") == 1
    assert times(logged, "store reachable again") == 1
    assert bench.attempts() == 0, "an outage is nobody's failed attempt"
    if source == "postgres:q":
        assert times(logged, "broker session lost, reconnecting") == 1
        assert times(logged, "broker unavailable, waiting") <= 1
        assert bench.do("select 1 from idemconsumer.queue") == []
    else:
        assert not bench.broker._queue("q").waiting


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
    assert len(bench.broker._queue("q").waiting) == 2
