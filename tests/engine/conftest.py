"""An engine on a real database of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from idemconsumer.engine.engine import Engine
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database, lent


@pytest.fixture(scope="module")
def _one_database(postgres18: PostgresServer) -> Iterator[Ledger]:
    with fresh_database(postgres18.dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture
def ledger(_one_database: Ledger) -> Iterator[Ledger]:
    with lent(_one_database) as ledger:
        yield ledger


@pytest.fixture
async def store(ledger: Ledger) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=12, longest_run=30.0)
    yield store
    await store.close()


@pytest.fixture
def engine(store: PostgresStore) -> Engine:
    return Engine(store)
