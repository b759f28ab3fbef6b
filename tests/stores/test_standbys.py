"""R22: what a failover would lose is said, and with `require_synchronous_standby` it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import Tx, idempotent_handler
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.values import State
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.server import durability, judged
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, works, write
from tests.support.servers.made import PrivatePostgres
from tests.support.servers.streaming import promote, standby_of
from tests.support.waiting import until

pytestmark = pytest.mark.kill


@pytest.fixture(scope="module")
def primary(private_postgres: PrivatePostgres, postgres15_binaries: Path) -> EmbeddedPostgres:
    return private_postgres(binaries=postgres15_binaries)


@pytest.fixture
def ledger(primary: EmbeddedPostgres) -> Iterator[Ledger]:
    """Asynchronous standbys are all it has, if any."""
    with closing(Ledger(primary.dsn)) as ledger:
        yield ledger
        ledger.run("alter system reset synchronous_standby_names")
        ledger.run("select pg_reload_conf()")
        ledger.run("drop table witness")
        ledger.run("drop schema idemconsumer cascade")


@pytest.fixture
def standby(ledger: Ledger, primary: EmbeddedPostgres, folder: Path) -> Iterator[EmbeddedPostgres]:
    with standby_of(primary, folder) as standby:
        yield standby


@pytest.fixture
async def store(ledger: Ledger, standby: EmbeddedPostgres) -> AsyncIterator[PostgresStore]:
    """It requires a synchronous standby, and has one."""
    await configured(ledger, "standby")
    await until(lambda: ledger.run("select 1 from pg_stat_replication where sync_state = 'sync'"))
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=2, longest_run=30.0, require_standby=True)
    yield store
    await store.close()


@pytest.fixture
def engine(store: PostgresStore) -> Engine:
    return Engine(store)


async def configured(ledger: Ledger, names: str) -> None:
    """Of which standbys one has to confirm each commit."""
    ledger.run(f"alter system set synchronous_standby_names = '{names}'".encode())  # type: ignore[arg-type]
    ledger.run("select pg_reload_conf()")
    await until(lambda: ledger.run(NAMES) == [(names,)])


NAMES: LiteralString = "select current_setting('synchronous_standby_names')"


@idempotent_handler(SOURCE, key="id", max_attempts=1)
async def pay(order: dict[str, Any], tx: Tx) -> None:
    await write(tx, order["id"])


@idempotent_handler(SOURCE, key="id", max_attempts=1, name="pay")
async def pay_carelessly(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute("set local synchronous_commit = local")
    await write(tx, order["id"])


async def test_asynchronous_standbys_are_warned_of_and_refused_where_one_is_required(
    ledger: Ledger, standby: EmbeddedPostgres
) -> None:
    await until(lambda: ledger.run("select 1 from pg_stat_replication where state = 'streaming'"))
    found = await durability(ledger.dsn)
    assert found.commits == "commits survive a crash of this server"
    assert found.warning is not None
    assert "asynchronous: a failover loses the last acknowledged messages" in found.warning
    assert "ALTER SYSTEM SET synchronous_standby_names" in found.warning
    with pytest.raises(ConfigurationError, match=r"waits for no synchronous standby.*; run: ALTER SYSTEM SET"):
        await check_database(ledger.dsn, SCHEMA, require_standby=True)
    await configured(ledger, "standby")
    await until(lambda: ledger.run("select 1 from pg_stat_replication where sync_state = 'sync'"))
    await check_database(ledger.dsn, SCHEMA, require_standby=True)
    found = await durability(ledger.dsn)
    assert (found.commits, found.warning) == ("each commit waits for a synchronous standby", None)


async def test_a_standby_that_is_away_counts_by_its_slot(ledger: Ledger) -> None:
    assert (await durability(ledger.dsn)).warning is None
    ledger.run("select pg_create_physical_replication_slot('away')")
    try:
        assert (await durability(ledger.dsn)).warning is not None
    finally:
        ledger.run("select pg_drop_replication_slot('away')")


async def test_a_role_that_sees_no_state_is_told_that_it_is_unknown(ledger: Ledger, standby: EmbeddedPostgres) -> None:
    ledger.run("drop role if exists blind")
    ledger.run("create role blind login password 'blind'")
    await until(lambda: ledger.run("select 1 from pg_stat_replication where state = 'streaming'"))
    blind = make_conninfo(ledger.dsn, user="blind", password="blind")
    assert "asynchronous" in str((await durability(blind)).warning)
    await configured(ledger, "standby")
    await until(lambda: ledger.run("select 1 from pg_stat_replication where sync_state = 'sync'"))
    assert "this role cannot see" in str((await durability(blind)).warning)
    assert (await durability(ledger.dsn)).warning is None


async def test_a_synchronous_standby_that_is_not_there_is_warned_of(ledger: Ledger) -> None:
    await configured(ledger, "nobody")
    assert "each COMMIT hangs until one is" in str((await durability(ledger.dsn)).warning)


def test_a_commit_that_does_not_wait_for_the_standby_is_not_called_synchronous() -> None:
    assert "synchronous_commit is local" in str(judged("standby", "local", 1, 1, 1).warning)
    assert "synchronous_commit is remote_write" in str(judged("standby", "remote_write", 1, 1, 1).warning)


async def test_what_was_acknowledged_outlives_a_failover(
    ledger: Ledger, engine: Engine, primary: EmbeddedPostgres, standby: EmbeddedPostgres
) -> None:
    ids = [f"{n:02}" for n in range(50)]
    for id in ids:
        assert kinds(await engine.run(works(pay, id))) == ["applied"]
    primary.kill()
    try:
        promote(standby)
        with psycopg.connect(standby.dsn) as connection:
            assert connection.execute("select id from witness order by id").fetchall() == [(id,) for id in ids]
            assert connection.execute("select count(*) from idemconsumer.record").fetchone() == (50,)
    finally:
        primary.start()
        ledger.close()
        ledger._connection = None


async def _unset(connection: Connection) -> bool:
    """The server tells each of its sessions by itself."""
    return await (await connection.execute(NAMES)).fetchone() == ("",)


async def test_nothing_is_sealed_once_no_standby_is_required_by_the_server(
    ledger: Ledger, store: PostgresStore, engine: Engine
) -> None:
    await engine.run(works(pay, 1))
    await configured(ledger, "")
    async with store.pool.connection() as connection:
        await until(lambda: _unset(connection))
    with pytest.raises(ConfigurationError, match=r"require_synchronous_standby is set.*set synchronous_standby_names"):
        await engine.run(works(pay, 2))
    with pytest.raises(ConfigurationError, match="require_synchronous_standby is set"):
        await store.count_dead(b"")
    with pytest.raises(ConfigurationError, match="require_synchronous_standby is set"):
        async with store.transaction(group=1) as claims:
            await claims.commit([("count_dead", {"key": b""})])
    ((key,),) = ledger.run("select key from idemconsumer.record")
    (found,) = await store.peek([key])  # what was committed before is told all the same
    assert found is not None
    assert found.state is State.COMPLETED
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["1"], [], [])


async def test_a_handler_that_asks_for_less_is_refused_at_the_seal(ledger: Ledger, engine: Engine) -> None:
    assert kinds(await engine.run(works(pay_carelessly, 1))) == ["dead"]
    assert (ledger.effects, ledger.states) == ([], [State.DEAD])
