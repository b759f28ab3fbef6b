"""A bench for workers on a database of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import UsedDatabases
from tests.support.workers import Bench, connected, prepare


@pytest.fixture(scope="session")
def _databases() -> Iterator[UsedDatabases]:
    with closing(UsedDatabases(prepare, "effect")) as databases:
        yield databases


@pytest.fixture
def bench(postgres18: PostgresServer, _databases: UsedDatabases, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with _databases.one(postgres18.dsn) as dsn:
        yield connected(Bench(dsn), monkeypatch)
