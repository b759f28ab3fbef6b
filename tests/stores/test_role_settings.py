"""R44: settings of a role or database that would change what our statements mean, or hide our rows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.arguments import Tx
from idemconsumer.handlers.decorator import idempotent_handler
from idemconsumer.sql.connecting import connect, connect_async
from idemconsumer.stores import grants
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, OpenStore, kinds, works
from tests.support.servers.pgbouncer import carry


@pytest.fixture
def worker(ledger: Ledger) -> Iterator[str]:
    """The address of a role that owns nothing, and has the rights of a worker."""
    name = f"app_{secrets.token_hex(4)}"
    role = sql.Identifier(name)
    with psycopg.connect(ledger.dsn, autocommit=True) as owner, ExitStack() as stack:
        password = sql.Literal(owner.info.password)
        owner.execute(sql.SQL("create role {} login password {}").format(role, password))
        stack.callback(lambda: owner.execute(sql.SQL("drop owned by {0}; drop role {0}").format(role)))
        for statement in grants.worker(SCHEMA, name):
            owner.execute(statement.encode())
        owner.execute(sql.SQL("grant insert on witness to {}").format(role))
        yield make_conninfo(ledger.dsn, user=name)


@pytest.mark.parametrize("table", ["record", "queue", "control", "migration"])
@pytest.mark.parametrize("policy", ["", "create policy own on idemconsumer.{} for insert with check (true)"])
async def test_rows_that_a_policy_hides_are_refused_until_its_remedy_was_run(
    ledger: Ledger, worker: str, table: LiteralString, policy: LiteralString
) -> None:
    await check_database(worker, SCHEMA)
    ledger.run(f"alter table idemconsumer.{table} enable row level security")
    if policy:
        ledger.run(policy.replace("{}", table))
    with pytest.raises(ConfigurationError, match=f"row-level security hides rows of {table} from role 'app_") as said:
        await check_database(worker, SCHEMA)
    ledger.run(str(said.value).partition("run as the schema's owner: ")[2])
    await check_database(worker, SCHEMA)


async def test_a_policy_is_refused_that_is_forced_on_an_owner_whose_functions_we_call(
    ledger: Ledger, worker: str
) -> None:
    owner = sql.Identifier(f"owner_{secrets.token_hex(4)}").as_string()
    ledger.run(f"create role {owner}; alter table idemconsumer.saga owner to {owner}")
    ledger.run("alter table idemconsumer.saga enable row level security, force row level security")
    try:
        with pytest.raises(ConfigurationError, match="row-level security hides rows of saga "):
            await check_database(ledger.dsn, SCHEMA)
    finally:
        ledger.run(f"reassign owned by {owner} to current_user; drop role {owner}")


async def test_rows_that_are_hidden_later_on_are_an_error_and_not_an_empty_queue(ledger: Ledger, worker: str) -> None:
    async with await connect_async(worker) as connection:
        ledger.run("alter table idemconsumer.queue enable row level security")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            await connection.execute("select from idemconsumer.queue")
    with connect(worker) as blocking, pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        blocking.execute("select from idemconsumer.queue")


async def test_what_is_absent_is_stored_as_absent(ledger: Ledger, open_store: OpenStore) -> None:
    carry(ledger.dsn, {"array_nulls": "off"})

    @idempotent_handler(SOURCE, key="id", fingerprint=None)
    async def take(item: dict[str, str], tx: Tx) -> str | None:
        return None if item["id"] == "a" else "done"

    engine = Engine(await open_store(ledger.dsn))
    for again in ("applied", "duplicate"):
        assert kinds(await engine.run(works(take, "a", "b", "c"))) == [again] * 3
    assert ledger.run("select fingerprint, canonical, expires_at from idemconsumer.record") == [(None, None, None)] * 3
    assert ledger.run("select status, headers from idemconsumer.result") == [(None, None)] * 2
    async with await connect_async(ledger.dsn) as own:
        found = await own.execute("select array_position('{null}'::text[], null)")
        assert await found.fetchall() == [(1,)]


async def test_a_connection_that_rests_is_not_ended(ledger: Ledger, open_store: OpenStore) -> None:
    carry(ledger.dsn, {"idle_session_timeout": "100ms"})
    store = await open_store(ledger.dsn)
    async with await connect_async(ledger.dsn) as own, store.pool.connection() as lent:
        with connect(ledger.dsn) as blocking:
            await asyncio.sleep(0.4)
            for connection in (own, lent):
                assert await (await connection.execute("select 1")).fetchall() == [(1,)]
            assert blocking.execute("select 1").fetchall() == [(1,)]


async def test_a_transaction_may_take_as_long_as_a_handler(ledger: Ledger) -> None:
    if not ledger.run("select from pg_settings where name = 'transaction_timeout'"):
        pytest.skip("Postgres 17 or newer has it")
    carry(ledger.dsn, {"transaction_timeout": "10s"})
    with pytest.raises(ConfigurationError, match=r"transaction_timeout is '10000ms'; .* SET transaction_timeout = '0'"):
        await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)
    carry(ledger.dsn, {"transaction_timeout": "60s"})
    await check_database(ledger.dsn, SCHEMA)
