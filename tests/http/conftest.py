"""A front door on a real database, and clients that go through it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest

from idemconsumer import App
from idemconsumer.http import Idempotency
from tests.http.endpoints import Counting
from tests.http.fake_requests import FakeRequests
from tests.http.site import MakeDoor, by_header
from tests.support.ledger import Ledger
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database, lent


@pytest.fixture(scope="module")
def _one_database(postgres18: PostgresServer) -> Iterator[Ledger]:
    with fresh_database(postgres18.dsn) as dsn, closing(Ledger(dsn)) as ledger:
        yield ledger


@pytest.fixture
def ledger(_one_database: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """What the settings name."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", _one_database.dsn)
    with lent(_one_database) as ledger:
        yield ledger


@pytest.fixture
async def make_door(ledger: Ledger) -> AsyncIterator[MakeDoor]:
    """Makes front doors of the app `shop`, whose tenant is a header."""
    made = list[Idempotency]()

    def make(**options: Any) -> Idempotency:
        options.setdefault("tenant", by_header)
        made.append(Idempotency(App("shop"), **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def store() -> FakeRequests:
    return FakeRequests()


@pytest.fixture
def endpoint() -> Counting:
    return Counting()
