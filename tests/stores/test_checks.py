"""R16: a database that a crash would ruin, or in which the guard does not fire, is refused with what to run."""

from __future__ import annotations

import re
from typing import Any, LiteralString, cast

import pytest

from idemconsumer.errors import ConfigurationError
from idemconsumer.stores.checks import check_database
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.made import PrivatePostgres


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_server_that_does_not_write_safely_is_refused(private_postgres: PrivatePostgres, setting: str) -> None:
    server = private_postgres(settings={setting: "off"})
    with pytest.raises(ConfigurationError, match=f"{setting} is off.* ALTER SYSTEM SET {setting} = on"):
        await check_database(server.dsn, SCHEMA)


async def remedied(ledger: Ledger, problem: str) -> None:
    """Refused for that reason, and no more once what it names was run."""
    with pytest.raises(ConfigurationError, match=problem) as refused:
        await check_database(ledger.dsn, SCHEMA)
    found: Any = re.search(r"; run: (.*)", str(refused.value))
    ledger.run(cast(LiteralString, found[1]))
    await check_database(ledger.dsn, SCHEMA)


@pytest.mark.parametrize("table", ["record", "result"])
async def test_an_unlogged_table_is_refused_until_its_remedy_was_run(
    shared_ledger: Ledger, table: LiteralString
) -> None:
    shared_ledger.run(f"alter table idemconsumer.{table} set unlogged")
    await remedied(shared_ledger, f"table {table} is unlogged")


@pytest.mark.parametrize("table", ["record", "step"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("alter table idemconsumer.{} disable trigger sealed", "disabled"),
        ("alter table idemconsumer.{} disable trigger all", "disabled"),
        ("alter table idemconsumer.{} enable replica trigger sealed", "disabled"),
        ("drop trigger sealed on idemconsumer.{}", "missing"),
    ],
)
async def test_a_guard_that_does_not_fire_is_refused_until_its_remedy_was_run(
    shared_ledger: Ledger, table: LiteralString, change: LiteralString, problem: str
) -> None:
    before = shared_ledger.run(TRIGGERS)
    shared_ledger.run(change.replace("{}", table))
    await remedied(shared_ledger, f"the trigger `sealed` of table {table} is {problem}")
    assert shared_ledger.run(TRIGGERS) == before


TRIGGERS: LiteralString = "select pg_get_triggerdef(oid), tgenabled from pg_trigger where tgname = 'sealed' order by 1"
