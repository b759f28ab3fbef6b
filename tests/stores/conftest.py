"""Stores on a database of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing

import pytest

from idemconsumer.engine.engine import Engine
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, Ledger, OpenStore
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database, lent


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with closing(Ledger(database)) as ledger:
        yield ledger


@pytest.fixture(scope="module", params=["postgres18", "postgres15"])
def _one_database(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    with fresh_database(request.getfixturevalue(request.param).dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture
def shared_ledger(_one_database: Ledger) -> Iterator[Ledger]:
    """As `ledger`, in each supported version of Postgres; emptied instead of made, which takes a second."""
    with lent(_one_database) as ledger:
        yield ledger


@pytest.fixture(scope="module")
def _one_version(postgres18: PostgresServer) -> Iterator[Ledger]:
    with fresh_database(postgres18.dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture
def book(_one_version: Ledger) -> Iterator[Ledger]:
    """In one version of Postgres, where that makes no difference; emptied."""
    with lent(_one_version) as ledger:
        yield ledger


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Opens stores on a DSN; they are closed at the end."""
    async with AsyncExitStack() as stack:

        async def open_(dsn: str) -> PostgresStore:
            store = await PostgresStore.open(dsn, SCHEMA, connections=8, longest_run=30.0)
            stack.push_async_callback(store.close)
            return store

        yield open_


@pytest.fixture
async def store(ledger: Ledger, open_store: OpenStore) -> PostgresStore:
    return await open_store(ledger.dsn)


@pytest.fixture
async def one_connection(book: Ledger) -> AsyncIterator[PostgresStore]:
    """With a single connection, which every message gets."""
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=1, longest_run=30.0)
    yield store
    await store.close()


@pytest.fixture
def engine(store: PostgresStore) -> Engine:
    return Engine(store)
