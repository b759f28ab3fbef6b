"""A client or a server that is gone is noticed, whoever waits (R21)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.errors import StoreUnavailable
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import migrate
from idemconsumer.stores.pool import Pool
from tests.support.ledger import SCHEMA, Ledger, OpenStore
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.proxy import Proxy
from tests.support.servers.streaming import standby_of
from tests.support.waiting import until


@pytest.fixture
async def proxy(ledger: Ledger) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        yield proxy


async def test_the_kernel_gives_up_a_peer_that_acknowledges_nothing(store: PostgresStore) -> None:
    wanted = {
        "TCP_USER_TIMEOUT": 30_000,
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
    }
    async with store.pool.connection() as connection:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as same:
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            found = {name: same.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in wanted}
    assert found == wanted


async def test_what_the_address_says_of_it_counts(ledger: Ledger, open_store: OpenStore) -> None:
    store = await open_store(make_conninfo(ledger.dsn, keepalives_idle=77))
    async with store.pool.connection() as connection:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77


async def test_a_statement_whose_client_is_gone_ends_within_seconds(
    ledger: Ledger, proxy: Proxy, open_store: OpenStore
) -> None:
    """Else it would hold its locks for as long as it runs, or waits."""
    store = await open_store(make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port))

    async def sleep() -> None:
        async with store.pool.connection() as connection:
            await connection.execute("select pg_sleep(25)")

    def asleep() -> bool:
        return bool(
            ledger.run("select 1 from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()")
        )

    sleeping = asyncio.create_task(sleep())
    await until(asleep)
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        await sleeping
    await until(lambda: not asleep(), "it sleeps for nobody", within=12.0)


async def test_a_connection_that_reported_an_outage_is_not_used_again(store: PostgresStore) -> None:
    pids = []
    for error in (StoreUnavailable, None):
        try:
            async with store.pool.connection() as connection:
                pids.append(connection.info.backend_pid)
                if error is not None:
                    raise error
        except StoreUnavailable:
            pass
    assert pids[0] != pids[1]


async def test_a_connection_that_ended_while_it_rested_is_given_to_nobody(store: PostgresStore, proxy: Proxy) -> None:
    """After a cut each of them would be an outage of its own, for whoever gets it."""
    dsn = make_conninfo(store.pool._dsn, host="127.0.0.1", port=proxy.port)
    pool = Pool(dsn, SCHEMA, connections=4, longest_run=30.0)
    await pool.open()
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(pool.connection())
    proxy.cut()
    await proxy.restore()
    for _ in range(4):
        assert await pool.alone("waiting", {"names": ["q"]}) == [(0, 0)]
    await pool.close()


@pytest.mark.kill
async def test_a_connection_that_leads_to_a_standby_is_given_up(
    private_postgres: PrivatePostgres, postgres15_binaries: Path, folder: Path
) -> None:
    """A name or a proxy leads to the new primary after a failover, but a connection stays where it is."""
    primary = await asyncio.to_thread(private_postgres, binaries=postgres15_binaries)
    migrate(primary.dsn, SCHEMA)
    with standby_of(primary, folder) as standby:
        async with Proxy(standby.port) as proxy:
            dsn = make_conninfo(primary.dsn, host="127.0.0.1", port=proxy.port)
            pool = Pool(dsn, SCHEMA, connections=1, longest_run=30.0)
            await pool.open()
            with pytest.raises(StoreUnavailable, match=r"read-write|recovery"):
                await pool.alone("waiting", {"names": ["q"]})
            proxy.lead_to(primary.port)
            assert await pool.alone("waiting", {"names": ["q"]}) == [(0, 0)]
            await pool.close()
