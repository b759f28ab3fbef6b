"""Two stations and a remote; one database for each test module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from idemconsumer.ports.observer import Observer
from idemconsumer.stores.joined import PostgresStore
from tests.support.families import Family
from tests.support.inside import own_pool
from tests.support.points import Points
from tests.support.sagas import SCHEMA, Bench, OpenStation, Remote, Station
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database, lent


@pytest.fixture(scope="module")
def _one_database(postgres18: PostgresServer) -> Iterator[Bench]:
    with fresh_database(postgres18.dsn) as dsn, closing(Bench(dsn)) as bench:
        yield bench


@pytest.fixture
def bench(_one_database: Bench) -> Iterator[Bench]:
    with lent(_one_database) as bench:
        yield bench


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def points() -> Points:
    return Points()


@pytest.fixture
async def open_station(bench: Bench) -> AsyncIterator[OpenStation]:
    stores: list[PostgresStore] = []

    async def make(observer: Observer | None = None, *, dsn: str | None = None, lease: float | None = None) -> Station:
        store = await PostgresStore.open(dsn or bench.dsn, SCHEMA, connections=6, longest_run=30.0, lease=lease)
        stores.append(store)
        # A prepared COMMIT has no text that a proxy could look for.
        own_pool(store).kwargs = {"prepare_threshold": None}
        return Station(store, bench.register(), observer)

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def one(open_station: OpenStation, points: Points) -> Station:
    return await open_station(points)


@pytest.fixture
async def two(open_station: OpenStation) -> Station:
    return await open_station()


@pytest.fixture
async def family(bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Family]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    family = Family(bench, one)
    yield family
    await family.app.close()
