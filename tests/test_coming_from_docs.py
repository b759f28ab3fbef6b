"""The examples of docs/coming-from.md run as printed."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Outcome
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from tests.support import ROOT
from tests.support.servers.postgres import migrated
from tests.support.waiting import until

PAGE = (ROOT / "docs" / "coming-from.md").read_text("utf-8")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    found = re.findall(r"^```python\n# (\S+)\.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == PAGE.count("```python") == 3
    for name, code in found:
        (tmp_path / f"{name}.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, _ in found:
        sys.modules.pop(name, None)


@pytest.fixture
def shop(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    migrated(database, "idemconsumer")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("create table stock as select 'pen' as sku, 10 as qty")
        connection.execute("create table parcel (id int generated always as identity, name text)")
        yield connection


@asynccontextmanager
async def working(app: App, dsn: str) -> AsyncIterator[None]:
    worker = app.worker(Settings(dsn=dsn, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.drain()
        await running
        await app.close()


def publish(shop: psycopg.Connection[Any], queue: str, payload: dict[str, str]) -> None:
    shop.execute("select idemconsumer.publish(%s, %s::jsonb)", (queue, json.dumps(payload)))


async def ended(module: ModuleType, saga: str, key: str) -> Outcome:
    app: App = module.app
    return await app.result(getattr(module, saga), key=key, wait="30s")


@pytest.mark.usefixtures("examples")
async def test_an_approved_ride_and_one_that_is_not(shop: psycopg.Connection[Any], database: str) -> None:
    rides = importlib.import_module("from_temporal")
    async with working(rides.app, database):
        for key in ("r-1", "r-2"):
            publish(shop, "rides", {"id": key, "card": key})
        shop.execute("select idemconsumer.signal('rides', 'book_ride', 'r-1', 'approved')")
        assert (await ended(rides, "book_ride", "r-1")).result == b'"charge of r-1"'

        def waits() -> bool:
            return shop.execute("select from idemconsumer.saga where worker is null").fetchone() is not None

        await until(waits, "the other ride waits")
        shop.execute("set session_replication_role = replica")  # as if seven days were over; the guard is not asked
        shop.execute("update idemconsumer.step set until = now() where signal = 'approved' and position is null")
        shop.execute("update idemconsumer.saga set due = now()")
        outcome = await ended(rides, "book_ride", "r-2")
    assert (outcome.state, outcome.result) == (State.FAILED, b'{"code":"signal_timeout","body":{"signal":"approved"}}')
    assert sorted(rides.remote) == ["charge r-1", "charge r-2", "refund charge of r-2"]


@pytest.mark.usefixtures("examples")
async def test_a_checkout_that_is_begun_twice_is_made_once(shop: psycopg.Connection[Any], database: str) -> None:
    checkouts = importlib.import_module("from_dbos")
    async with working(checkouts.app, database):
        for _ in range(2):
            await checkouts.begin({"id": "o-1", "sku": "pen", "card": "c-1"})
        assert (await ended(checkouts, "checkout", "o-1")).result == b'"charge of c-1"'
    assert shop.execute("select qty from stock").fetchone() == (9,)


@pytest.mark.usefixtures("examples")
async def test_a_parcel_is_shipped_with_its_labels(shop: psycopg.Connection[Any], database: str) -> None:
    parcels = importlib.import_module("from_celery")
    async with working(parcels.app, database):
        publish(shop, "parcels", {"id": "o-1"})
        assert (await ended(parcels, "ship", "o-1")).result == b"3"
    assert shop.execute("select name from parcel").fetchall() == [("o-1",)]
