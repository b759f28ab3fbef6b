"""The kit's own tests use it as its users do."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def idem_setup() -> str:
    return "create table effect (place bigint generated always as identity, id text)"
