"""R45: what a process holds while it rests, and what `check` says of how many there is room for."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer import App, Tx
from idemconsumer.cli.inspect import findings
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.server import ConnectionLimit, narrowest
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.pgbouncer import carry
from tests.support.tuning import tuned
from tests.support.waiting import until


async def test_connections_that_are_not_needed_are_given_up(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, pool_idle=0.1)
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=30.0)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(store.pool.connection())
        assert ledger.sessions("idle") == 4
    await until(lambda: ledger.sessions("idle") == 0)
    async with store.pool.connection() as again:
        assert await (await again.execute("select 1")).fetchall() == [(1,)]
    await store.close()


def app() -> App:
    app = App("shop")

    @app.idempotent_handler("postgres:mails", key="id")
    async def send(item: dict[str, str], tx: Tx) -> None: ...

    return app


async def said(dsn: str, workers: int) -> list[str]:
    found = findings(app(), Settings(dsn=dsn, workers=workers))
    return [each.text async for each in found if "connections" in each.text]


async def test_the_narrowest_limit_is_compared_with_all_workers(ledger: Ledger) -> None:
    role = f"few_{secrets.token_hex(4)}"
    with psycopg.connect(ledger.dsn, autocommit=True) as owner:
        ((most,),) = owner.execute("select current_setting('max_connections')::int").fetchall()
        limit = await narrowest(ledger.dsn)
        assert limit.what.startswith("max_connections")
        assert 0 < (limit.most or 0) < most
        create = sql.SQL("create role {} superuser login connection limit 30 password {}")
        owner.execute(create.format(sql.Identifier(role), sql.Literal(owner.info.password)))
        theirs = make_conninfo(ledger.dsn, user=role)
        try:
            assert await narrowest(theirs) == ConnectionLimit(30, "CONNECTION LIMIT of the role")
            ((enough,), (_, few)) = await said(theirs, 2), await said(theirs, 3)
        finally:
            owner.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
    assert "opens at most 13 connections, and a few more for a moment; with nothing to do it holds 2; there" in enough
    assert "there is room for 2 (CONNECTION LIMIT of the role: 30)" in enough
    assert few.startswith("3 workers may need 39 connections, but only 30 are allowed (CONNECTION LIMIT of the role)")


async def test_of_a_pooler_its_console_says_it_where_we_may_ask(
    ledger: Ledger, private_pgbouncer: PrivatePgBouncer
) -> None:
    carry(ledger.dsn)
    pooler = private_pgbouncer(ledger.dsn, "transaction", settings={"default_pool_size": "17"})
    assert await narrowest(pooler.dsn) == ConnectionLimit(17, "the pooler's pool_size")
    few = private_pgbouncer(ledger.dsn, "transaction", settings={"max_client_conn": "12"})
    assert await narrowest(few.dsn) == ConnectionLimit(12, "the pooler's max_client_conn")
