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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("alter table idemconsumer.record disable trigger sealed", "missing or disabled.*: `sealed` of table record;"),
        (
            "alter table idemconsumer.step enable replica trigger sealed",
            "missing or disabled.*: `sealed` of table step;",
        ),
        ("alter table idemconsumer.record disable trigger all", "missing or disabled.*: .*`expires` of table record"),
        ("alter table idemconsumer.child disable trigger all", "missing or disabled.*: `tell_parent` of table child;"),
        ("alter table idemconsumer.queue disable trigger all", "missing or disabled.*: `guarded` of table queue;"),
        ("drop trigger sealed on idemconsumer.record", "missing or disabled.*: `sealed` of table record;"),
        ("drop trigger sealed on idemconsumer.step", "missing or disabled.*: `sealed` of table step;"),
    ],
)
async def test_a_trigger_that_does_not_fire_is_refused_until_its_remedy_was_run(
    shared_ledger: Ledger, change: LiteralString, problem: str
) -> None:
    before = shared_ledger.run(TRIGGERS)
    shared_ledger.run(change)
    await remedied(shared_ledger, problem)
    assert shared_ledger.run(TRIGGERS) == before


async def test_a_trigger_of_the_users_is_theirs_to_disable(shared_ledger: Ledger) -> None:
    shared_ledger.run("create function noted() returns trigger language plpgsql as 'begin return null; end'")
    shared_ledger.run("create trigger noted after insert on idemconsumer.record execute function noted()")
    shared_ledger.run("alter table idemconsumer.record disable trigger noted")
    await check_database(shared_ledger.dsn, SCHEMA)
    shared_ledger.run("drop function noted cascade")


TRIGGERS: LiteralString = "select pg_get_triggerdef(oid), tgenabled from pg_trigger where not tgisinternal order by 1"
