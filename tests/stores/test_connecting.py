"""R15, R19, J6: what each connection of ours is, and where it leads to, whatever role, database or address prefer."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer.admin.sender import Statements
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Outgoing
from idemconsumer.settings import Settings
from idemconsumer.sql.connecting import asked_for, connect_async, with_settings
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.migrations import connect
from tests.support.inside import heart_connection, queue_connection
from tests.support.ledger import SCHEMA, Ledger, OpenStore
from tests.support.waiting import PATIENCE

LEVEL = "select current_setting('transaction_isolation')"


async def test_an_attempt_that_is_given_up_ends_at_once() -> None:
    """Its error may be kept for long, in a log or by a task."""
    begun, over = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        begun.set()
        with suppress(ConnectionError):
            while await reader.read(1024):
                pass
        writer.close()
        over.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, asyncio.timeout(PATIENCE):
        port = server.sockets[0].getsockname()[1]
        attempt = asyncio.ensure_future(connect_async(f"host=127.0.0.1 port={port} user=nobody sslmode=disable"))
        await begun.wait()
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError) as kept:
            await attempt
        await over.wait()
    assert kept.value.__traceback__ is not None


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
    async with await queue_connection(PostgresBroker(Settings(dsn=dsn)), dsn) as queue:
        levels.append(await (await queue.execute(LEVEL)).fetchone())
    async with Statements(dsn, SCHEMA).sending() as admin:
        levels.append(tuple((await (await admin.connection.execute(LEVEL)).fetchone() or {}).values()))
    with closing(heart_connection(Heartbeat(dsn, SCHEMA, lease=10.0, patience=10.0))) as heart:
        levels.append(heart.execute(LEVEL).fetchone())
    with closing(connect(dsn)) as migrations:
        levels.append(migrations.execute(LEVEL).fetchone())
    assert levels == [("read committed",)] * 5


@pytest.mark.parametrize("by", ["database", "environment"])
async def test_every_connection_reads_all_text_and_times(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """R15. One message id beyond Latin-1 would stop its queue, and no command would read a time."""
    if by == "environment":
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        monkeypatch.setenv("PGDATESTYLE", "German")
    else:
        with psycopg.connect(ledger.dsn, autocommit=True) as connection:
            name = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("alter database {} set client_encoding = latin1").format(name))
            connection.execute(sql.SQL("alter database {} set datestyle = german").format(name))
    read = "select '\u2713' as text, now() as at"
    dsn, found = ledger.dsn, list[tuple[Any, ...]]()
    async with await queue_connection(PostgresBroker(Settings(dsn=dsn)), dsn) as queue:
        found.append(await (await queue.execute(read)).fetchone() or ())
    async with Statements(dsn, SCHEMA).sending() as admin:
        found.append(tuple((await (await admin.connection.execute(read)).fetchone() or {}).values()))
    with closing(heart_connection(Heartbeat(dsn, SCHEMA, lease=10.0, patience=10.0))) as heart:
        found.append(heart.execute(read).fetchone() or ())
    with closing(connect(dsn)) as migrations:
        found.append(migrations.execute(read).fetchone() or ())
    assert [(text, isinstance(at, datetime)) for text, at in found] == [("\u2713", True)] * 4
    broker = PostgresBroker(Settings(dsn=dsn))
    await broker.publish("orders", [Outgoing(b"{}", key="\u2713"), Outgoing(b"{}", key="plain")])
    session = await broker.open([Subscription("postgres:orders", "pay", "shop")], Bounds(lanes=1, group=1, room=5))
    async with asyncio.timeout(PATIENCE):
        assert {each.message.message_id for each in await session.fetch()} == {"\u2713", "plain"}
    await session.close()


@pytest.mark.parametrize(("lease", "idle"), [(None, "35s"), (10.0, "10s")])
async def test_the_server_bounds_what_runs_on_a_connection(ledger: Ledger, lease: float | None, idle: str) -> None:
    """J6: of a worker that is frozen, or gone, whatever it was doing."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0, lease=lease)
    bounds = {
        "idle_in_transaction_session_timeout": idle,
        "statement_timeout": "35s",
        "lock_timeout": "10s",
        "client_connection_check_interval": "5s",
    }
    async with store.pool.connection() as connection:
        for name, value in bounds.items():
            cursor = await connection.execute("select current_setting(%s)", [name])
            assert (name, await cursor.fetchone()) == (name, (value,))
    await store.close()


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


@pytest.mark.parametrize("by", ["address", "variable"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ("", {}),
        ("-c search_path=a,b", {"search_path": "a,b"}),
        (r"  -csearch_path=a,\ b --Work-Mem=4MB -c x.y=a=b", {"search_path": "a, b", "work_mem": "4MB", "x.y": "a=b"}),
        ("-c work_mem=1MB -c work_mem=2MB", {"work_mem": "2MB"}),
        ("-c lock_timeout=5 -c application_name=x -c client_encoding=latin1", {}),
    ],
)
def test_settings_of_an_address_are_found_however_they_are_written(
    database: str, monkeypatch: pytest.MonkeyPatch, options: str, asked: dict[str, str], by: str
) -> None:
    if by == "address":
        monkeypatch.setenv("PGOPTIONS", "-c search_path=shadowed")
        database = make_conninfo(database, options=options)
    else:
        monkeypatch.setenv("PGOPTIONS", options)
    assert asked_for(database, ["lock_timeout"]) == asked
    with psycopg.connect(with_settings(database, {"lock_timeout": "10s"})) as connection:
        for name, value in asked.items():
            assert connection.execute("select current_setting(%s)", [name]).fetchone() == (value,)
        assert connection.execute("show lock_timeout").fetchone() == ("10s",)


@pytest.mark.parametrize("options", ["-F", "-c", "-c search_path", "--work_mem", "tenant"])
def test_options_that_are_no_settings_are_refused(database: str, options: str) -> None:
    with pytest.raises(ConfigurationError, match="in `options`, or in PGOPTIONS; write -c name=value"):
        asked_for(make_conninfo(database, options=options), [])


# ------------------------------------------------------------------------------------------------------------------ R19
@pytest.fixture(params=["address", "variable", "service", "named service"])
def read_write(request: pytest.FixtureRequest, ledger: Ledger, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The standard address of a highly available Postgres, which libpq would refuse for a read-only session."""
    if request.param == "address":
        return make_conninfo(ledger.dsn, target_session_attrs="read-write")
    if request.param == "variable":
        monkeypatch.setenv("PGTARGETSESSIONATTRS", "read-write")
        return ledger.dsn
    (folder / "services").write_text("[shop]\ntarget_session_attrs=read-write\n")
    monkeypatch.setenv("PGSERVICEFILE", str(folder / "services"))
    if request.param == "named service":
        return make_conninfo(ledger.dsn, service="shop")
    monkeypatch.setenv("PGSERVICE", "shop")
    return ledger.dsn


async def test_read_write_is_a_primary(read_write: str, open_store: OpenStore) -> None:
    store = await open_store(read_write)
    async with store.pool.connection() as pooled:
        assert await (await pooled.execute("show transaction_read_only")).fetchone() == ("on",)
    async with await queue_connection(PostgresBroker(Settings(dsn=read_write)), read_write):
        pass
    connect(read_write).close()


@pytest.mark.parametrize("wanted", ["standby", "prefer-standby", "read-only"])
@pytest.mark.parametrize("by", ["address", "variable"])
async def test_an_address_of_standbys_is_refused(
    database: str, monkeypatch: pytest.MonkeyPatch, wanted: str, by: str
) -> None:
    if by == "variable":
        monkeypatch.setenv("PGTARGETSESSIONATTRS", wanted)
    else:
        database = make_conninfo(database, target_session_attrs=wanted)
    with pytest.raises(
        ConfigurationError, match=f"target_session_attrs={wanted} .* write target_session_attrs=primary"
    ):
        await check_database(database, SCHEMA)


@pytest.mark.parametrize("strings", ["on", "off"])
async def test_an_array_of_keys_is_what_it_is_whatever_the_role_makes_of_backslashes(
    ledger: Ledger, strings: str
) -> None:
    key = b"\x00\\k'\xff"
    async with await connect_async(ledger.dsn) as connection:
        await connection.execute(f"set standard_conforming_strings = {strings}")
        found = await (await connection.execute("select %s::bytea = any(%s::bytea[])", (key, [key]))).fetchone()
    assert found == (True,)
