"""What a worker costs its database while it has nothing to do (L61, L62)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from idemconsumer import App, Saga, Tx
from idemconsumer.stores.leased_saga import DueLook
from idemconsumer.stores.leases import PostgresLeases
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, note


def crowded(sagas: int = 10) -> App:
    app = App("idle")

    @app.idempotent_handler("postgres:emails", key="id")
    async def send(item: Item, tx: Tx) -> None:
        await note(tx, item)

    for number in range(sagas):

        @app.idempotent_handler(f"postgres:orders{number}", key="id", name=f"book{number}")
        async def book(item: Item, saga: Saga) -> None:
            await saga.tx("noted", note, item)

    return app


async def test_the_number_of_handlers_does_not_raise_the_number_of_connections(bench: Bench) -> None:
    async with bench.running(crowded()) as running:
        bench.enqueue("emails", Item("a"))
        bench.enqueue("orders7", Item("b"))
        await running.until_count(applied=2)
        held = (
            "select count(*)::int from pg_stat_activity"
            " where datname = current_database() and application_name = 'idemconsumer idle worker 0 queue'"
        )
        # One for statements, and one that listens; a third asks about each source at the start.
        await running.until(lambda: bench.do(held) == [(2,)])


async def test_one_look_is_for_all_sagas_and_queues_of_a_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(
        monkeypatch,
        queue_look_pause=3_600.0,  # no queue is looked at but by the look for sagas
        steering_retry_pause=3_600.0,  # what a worker says of itself comes every twelve seconds (O13)
        queue_lead_pause=3_600.0,  # who else listens is asked once a minute in the end (P11)
    )
    look, looks = PostgresLeases.look, list[DueLook]()
    execute, sent = psycopg.AsyncCursor.execute, list[str]()

    async def looked(leases: PostgresLeases, *args: Any) -> DueLook:
        looks.append(await look(leases, *args))
        return looks[-1]

    async def counted(cursor: psycopg.AsyncCursor[Any], query: bytes, *args: Any, **more: Any) -> Any:
        sent.append(str(query, "utf-8") if isinstance(query, bytes) else str(query))
        return await execute(cursor, query, *args, **more)

    monkeypatch.setattr(PostgresLeases, "look", looked)
    async with bench.running(crowded()) as running:
        brokers = running.worker._brokers
        await running.until(lambda: "postgres" in brokers and bool(brokers["postgres"].queues))  # type: ignore[attr-defined]
        began = len(looks)
        await running.until(lambda: len(looks) >= began + 2)
        monkeypatch.setattr(psycopg.AsyncCursor, "execute", counted)
        began = len(looks)
        await running.until(lambda: len(looks) == began + 3)
        assert [query[:20] for query in sent] == ["with recursive owner"] * 3
        bench.do("insert into idemconsumer.queue (name, body) values ('orders3', %s)", b'{"id": "quiet"}')
        await running.until_count(applied=1)
    assert bench.effects() == ["quiet"]
