"""R17: a session on which a rule of ours would not hold is refused, with what to run."""

from __future__ import annotations

import re
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import sql

from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.stores.pool import Pool
from idemconsumer.stores.session import PoolSession, SessionRules
from tests.support.ledger import SCHEMA, Ledger, OpenStore


def alter(ledger: Ledger, setting: LiteralString) -> None:
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("alter database {} set " + setting).format(name))


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("session_replication_role = replica", "session_replication_role is 'replica'"),
        ("search_path = public, pg_catalog", "search_path is 'public,pg_catalog'"),
    ],
)
async def test_what_a_direct_session_inherits_is_refused_until_its_remedy_was_run(
    ledger: Ledger, open_store: OpenStore, setting: LiteralString, problem: str
) -> None:
    alter(ledger, setting)
    with pytest.raises(ConfigurationError, match=f"database: {problem}; .*; run: ALTER ROLE") as refused:
        await open_store(ledger.dsn)
    remedy: Any = re.search(r"run: (.*)", str(refused.value))
    ledger.run(cast(LiteralString, remedy[1]))
    await open_store(ledger.dsn)


@pytest.mark.parametrize("setting", ["session_replication_role = local", "search_path = pg_catalog, public"])
async def test_what_harms_no_rule_is_not_refused(ledger: Ledger, open_store: OpenStore, setting: LiteralString) -> None:
    alter(ledger, setting)
    await open_store(ledger.dsn)


async def test_text_in_another_encoding_is_refused(database: str) -> None:
    rules = SessionRules(database, 30.0, None)
    async with await PoolSession.connect(rules.conninfo, autocommit=True) as connection:
        await connection.execute("set client_encoding = latin1")
        with pytest.raises(ConfigurationError, match="client_encoding is 'LATIN1'"):
            await rules.prepare(connection)


async def test_a_session_made_later_is_refused_too_and_says_why(ledger: Ledger, open_store: OpenStore) -> None:
    store = await open_store(ledger.dsn)
    async with store.pool.connection():  # so that another one is needed
        alter(ledger, "session_replication_role = replica")
        with pytest.raises(ConfigurationError, match="session_replication_role is 'replica'"):
            async with store.pool.connection():
                pass
        alter(ledger, "session_replication_role = origin")
        async with store.pool.connection():
            pass


async def test_a_refusal_is_not_taken_for_an_outage_nor_an_outage_for_a_refusal() -> None:
    pool = Pool("postgresql://127.0.0.1:1/x", SCHEMA, connections=1, longest_run=30.0)
    await pool.open()
    try:
        with pytest.raises(StoreUnavailable):
            async with pool.connection():
                pass
    finally:
        await pool.close()
