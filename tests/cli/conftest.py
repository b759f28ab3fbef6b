"""The database of the golden outputs, once for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.seeding import seed
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database


@pytest.fixture(scope="session")
def seeded(postgres18: PostgresServer) -> Iterator[str]:
    """A database to copy."""
    with fresh_database(postgres18.dsn) as dsn:
        seed(dsn)
        yield dsn
