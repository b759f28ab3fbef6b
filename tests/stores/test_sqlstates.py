"""The driver's errors as ours, for those that a test cannot have a server raise when it wants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from idemconsumer.errors import Contention, StoreUnavailable
from idemconsumer.stores.sqlstates import translate


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "53200"])
def test_what_collides_is_contention_whose_statement_it_was(state: str, ours: bool) -> None:
    connection: Any = SimpleNamespace(closed=False, schema="idemconsumer")
    contention = translate(connection, psycopg.errors.lookup(state)(), ours=ours)
    assert isinstance(contention, Contention)
    assert contention.cap_groups is (state == "53200")


@pytest.mark.parametrize("state", ["53100", "53300", "57P01", "57014", "58030", "0A000", "25006", "23514", "P0001"])
def test_trouble_of_our_own_statements_is_an_outage(state: str) -> None:
    """Among others the two with which a server that became a standby refuses to write (R7)."""
    connection: Any = SimpleNamespace(closed=False, schema="idemconsumer")
    assert isinstance(translate(connection, psycopg.errors.lookup(state)(), ours=True), StoreUnavailable)


@pytest.mark.parametrize(
    ("state", "outage"), [("53100", True), ("58030", True), ("53300", False), ("25006", False), ("23514", False)]
)
def test_of_a_handlers_statements_a_disk_that_is_full_or_broken_is_an_outage(state: str, outage: bool) -> None:
    connection: Any = SimpleNamespace(closed=False, schema="idemconsumer")
    error = psycopg.errors.lookup(state)()
    found = translate(connection, error)
    assert isinstance(found, StoreUnavailable) if outage else found is error
