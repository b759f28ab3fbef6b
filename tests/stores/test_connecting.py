"""R15: what each connection of ours is, whatever the role or the database prefers."""

from __future__ import annotations

import asyncio
from contextlib import closing

import psycopg
import pytest
from psycopg import sql

from idemconsumer.admin.dead_letters import connected
from idemconsumer.brokers.postgres import PostgresBroker
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.connecting import with_settings
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.migrations import connect
from tests.support.ledger import SCHEMA, Ledger, OpenStore

LEVEL = "select current_setting('transaction_isolation')"


@pytest.fixture
def serializable(ledger: Ledger) -> Ledger:
    with psycopg.connect(ledger.dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("alter database {} set default_transaction_isolation = serializable").format(
                sql.Identifier(connection.info.dbname)
            )
        )
    return ledger


async def test_every_connection_is_read_committed_whatever_the_role_prefers(
    serializable: Ledger, open_store: OpenStore
) -> None:
    dsn = serializable.dsn
    levels = []
    store = await open_store(dsn)
    async with store.pool.connection() as pooled:
        levels.append(await (await pooled.execute(LEVEL)).fetchone())
    async with await PostgresBroker(Settings(dsn=dsn))._connect() as queue:
        levels.append(await (await queue.execute(LEVEL)).fetchone())
    async with connected(dsn, SCHEMA) as admin:
        levels.append(tuple((await (await admin.execute(LEVEL)).fetchone() or {}).values()))
    with closing(Heartbeat(dsn, SCHEMA, lease=10.0, patience=10.0)._connect()) as heart:
        levels.append(heart.execute(LEVEL).fetchone())
    with closing(connect(dsn)) as migrations:
        levels.append(migrations.execute(LEVEL).fetchone())
    assert levels == [("read committed",)] * 5


async def test_takers_of_a_queue_do_not_fail_where_serializable_is_the_default(serializable: Ledger) -> None:
    broker = PostgresBroker(Settings(dsn=serializable.dsn))
    await broker.publish("orders", [Outgoing(b"{}")] * 200)
    bounds = Bounds(lanes=1, group=1, room=5)
    sessions = [await broker.open([Subscription("postgres:orders", "pay", "shop")], bounds) for _ in range(4)]

    async def consume(index: int) -> int:
        taken = 0
        while deliveries := await sessions[index].fetch():
            taken += len(deliveries)
            await sessions[index].settle(deliveries)
        return taken

    assert sum(await asyncio.gather(*map(consume, range(4)))) == 200
    for session in sessions:
        await session.close()


def test_settings_are_added_to_those_of_the_address(database: str) -> None:
    mine = with_settings(with_settings(database, {"application_name": r"a \ b"}), {"search_path": "x, y"})
    with psycopg.connect(mine) as connection:
        assert connection.execute("show search_path").fetchone() == ("x, y",)
        assert connection.execute("show application_name").fetchone() == (r"a \ b",)
