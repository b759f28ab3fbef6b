"""A bench for workers on a database of the test's own."""

from __future__ import annotations

import pytest

from tests.support.workers import Bench, connected, prepare


@pytest.fixture
def bench(database: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    prepare(database)
    return connected(Bench(database), monkeypatch)
