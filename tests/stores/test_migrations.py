"""The schema, brought up to date by one runner or by ten."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer.cli.main import main
from idemconsumer.errors import ConfigurationError, LockNotGiven, StoreUnavailable
from idemconsumer.process.child import Exit
from idemconsumer.sql.queries import check_schema
from idemconsumer.stores import migrations, waiting_for_locks
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.migrations import Migration, files, migrate, script, status
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned

ODD = 'Shop "eu" {1}'


def objects(dsn: str, schema: str) -> list[tuple[object, ...]]:
    """Everything in the schema that can be named, with the id that a second creation would change."""
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "select oid, relname::text from pg_class where relnamespace = %(s)s::text::regnamespace "
            "union all "
            "select oid, proname::text from pg_proc where pronamespace = %(s)s::text::regnamespace "
            "order by 1",
            {"s": sql.Identifier(schema).as_string(None)},
        ).fetchall()


def test_applying_twice_changes_nothing_the_second_time(any_database: str) -> None:
    first = migrate(any_database, "idemconsumer")
    before = objects(any_database, "idemconsumer")

    second = migrate(any_database, "idemconsumer")

    assert [each.version for each in first] == [each.version for each in files()]
    assert second == []
    assert objects(any_database, "idemconsumer") == before


def test_ten_workers_may_migrate_at_once(database: str) -> None:
    barrier = threading.Barrier(10)
    applied: list[int] = []
    errors: list[BaseException] = []

    def worker() -> None:
        barrier.wait()
        try:
            applied.extend(each.version for each in migrate(database, "idemconsumer"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=worker) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert errors == []
    assert sorted(applied) == [each.version for each in files()]


def test_a_changed_file_that_was_applied_is_an_error(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(database, "idemconsumer")
    edited = (replace(files()[0], checksum="0" * 64), *files()[1:])
    monkeypatch.setattr(migrations, "files", lambda: edited)

    with pytest.raises(ConfigurationError, match="0001_records has changed since it was applied"):
        migrate(database, "idemconsumer")
    with pytest.raises(ConfigurationError, match="0001_records has changed since it was applied"):
        status(database, "idemconsumer")


def test_a_schema_with_an_odd_name_works_to_its_last_function(database: str) -> None:
    migrate(database, ODD)

    with psycopg.connect(database) as connection:
        publish = sql.SQL("select {}.publish('q', '1')").format(sql.Identifier(ODD))
        assert connection.execute(publish).fetchone() == (1,)
    assert all(each.applied_at for each in status(database, ODD))


def test_two_schemas_in_one_database_do_not_meet(database: str) -> None:
    migrate(database, "one")

    assert all(each.applied_at is None for each in status(database, "two"))
    assert len(migrate(database, "two")) == len(files())


def test_a_failing_migration_leaves_nothing_of_itself_and_those_before_it_are_said(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(files()[-1], version=9000, name="broken", text="create table {schema}.half (); select 1/0")
    extended = (*files(), broken)
    monkeypatch.setattr(migrations, "files", lambda: extended)

    result = CliRunner().invoke(main, ["migrate", "up", "--dsn", database, "--json"])
    assert (result.exit_code, "division by zero" in result.stderr) == (Exit.ERROR, True)
    assert [each["version"] for each in json.loads(result.stdout)] == [each.version for each in files()]
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(database, "idemconsumer")

    assert [each.version for each in status(database, "idemconsumer") if each.applied_at is None] == [9000]
    assert "half" not in {name for _, name in objects(database, "idemconsumer")}


def test_status_of_an_empty_database_is_all_pending_and_changes_nothing(database: str) -> None:
    assert [each.applied_at for each in status(database, "idemconsumer")] == [None] * len(files())
    with psycopg.connect(database) as connection:
        assert connection.execute("select to_regnamespace('idemconsumer')").fetchone() == (None,)


def test_an_owner_of_the_schema_who_may_not_create_schemas_can_migrate(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as admin:
        role = "r" + str(abs(hash(database)))[:12]
        login = sql.SQL("create role {0} login password {1}")
        admin.execute(login.format(sql.Identifier(role), sql.Literal(admin.info.password)))
        admin.execute(sql.SQL("create schema idemconsumer authorization {}").format(sql.Identifier(role)))
        try:
            assert migrate(psycopg.conninfo.make_conninfo(database, user=role), "idemconsumer")
        finally:
            admin.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(role)))


def test_the_printed_script_does_what_up_does(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(script(files(), ODD).encode())

    assert all(each.applied_at for each in status(database, ODD))
    assert migrate(database, ODD) == []


@pytest.fixture
def shortly(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database, where a lock is asked for only half as long."""
    monkeypatch.setattr(waiting_for_locks, "backoff", lambda *_, **__: 0.01)
    tuned(monkeypatch, migration_lock_pause=0.05)
    return make_conninfo(database, options="-c deadlock_timeout=100ms")


def with_one_more(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    more = (*files(), Migration(9000, "more", "", text))
    monkeypatch.setattr(migrations, "files", lambda: more)


def test_nobody_queues_behind_a_migration_that_waits_and_who_holds_its_lock_is_said(
    shortly: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(database, "idemconsumer")
    with_one_more(monkeypatch, "alter table {schema}.record add column more int")
    said: list[str] = []
    with psycopg.connect(database, application_name="report") as reader:
        reader.execute("select from idemconsumer.record")
        pid, late = reader.info.backend_pid, threading.Timer(20, reader.close)  # or a test that fails would hang

        def say(text: str) -> None:
            said.append(text)
            with psycopg.connect(database) as worker:  # between two tries
                worker.execute("lock table idemconsumer.record in row exclusive mode nowait")
            if "held by" in text:  # on a machine under load the first looks may come too late
                reader.rollback()

        late.start()
        (applied,) = migrate(shortly, "idemconsumer", say=say)
        late.cancel()
        assert applied.version == 9000
        assert f"waiting for the lock on idemconsumer.record, held by pid {pid} (" in said[-1]
        assert ", report, idle in transaction) since 20" in said[-1]


def test_a_migration_that_gets_no_lock_in_its_time_gives_up_and_leaves_nothing(
    shortly: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(database, "idemconsumer")
    with_one_more(monkeypatch, "create table {schema}.half (); alter table {schema}.record add column more int")
    with psycopg.connect(database) as reader:
        reader.execute("select from idemconsumer.record")
        with pytest.raises(
            LockNotGiven, match=rf"lock not granted within 0.5 s: .*pid {reader.info.backend_pid} .* longer --wait"
        ):
            # Long enough for a busy machine to make the connection that looks who it is.
            migrate(make_conninfo(shortly, options="-c deadlock_timeout=2s"), "idemconsumer", wait=0.5)
    assert "half" not in {name for _, name in objects(database, "idemconsumer")}
    assert len(migrate(database, "idemconsumer")) == 1


def test_a_runner_that_another_one_keeps_waiting_says_so(shortly: str, database: str) -> None:
    with psycopg.connect(database) as other:
        other.execute(migrations._LOCK, ["idemconsumer"])
        with pytest.raises(LockNotGiven, match=f"another migration, held by pid {other.info.backend_pid} "):
            migrate(shortly, "idemconsumer", wait=0.0)
    assert migrate(database, "idemconsumer")


async def test_a_database_that_takes_no_connections_yet_is_waited_for(database: str) -> None:
    said: list[str] = []
    parts = psycopg.conninfo.conninfo_to_dict(database)
    loop = asyncio.get_running_loop()
    async with Proxy(int(parts["port"] or 0)) as proxy:
        proxy.cut()

        def say(text: str) -> None:
            said.append(text)
            asyncio.run_coroutine_threadsafe(proxy.restore(), loop)

        there = make_conninfo(database, host="127.0.0.1", port=proxy.port)
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await asyncio.to_thread(migrate, there, "idemconsumer", wait=0.2, say=lambda _: None)
        applied = await asyncio.to_thread(migrate, there, "idemconsumer", wait=30.0, say=say)
    assert len(applied) == len(files())
    assert len(said) == 1
    assert said[0].startswith("waiting: the database cannot be reached: ")


def test_a_database_that_is_lost_on_the_way_is_waited_for_too(database: str) -> None:
    steps = migrations.apply(database, "idemconsumer", wait=30.0)
    first = next(steps)
    with psycopg.connect(database) as other:
        ended = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = current_database()"
        assert other.execute(f"{ended} and pid <> pg_backend_pid()".encode()).fetchall() == [(True,)]
    assert [first.version, *(each.version for each in steps)] == [each.version for each in files()]


def test_what_a_person_runs_waits_no_longer(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(database, "idemconsumer")
    with_one_more(monkeypatch, "alter table {schema}.record add column more int;")
    text = script(migrations.files()[-1:], "idemconsumer").encode()
    with psycopg.connect(database) as reader, psycopg.connect(database, autocommit=True) as person:
        reader.execute("select from idemconsumer.record")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            person.execute(text)


async def test_a_version_that_the_schema_has_outgrown_is_refused(database: str) -> None:
    migrate(database, "idemconsumer")
    with psycopg.connect(database) as connection:
        note = "insert into idemconsumer.migration (version, name, checksum) values (9000, 'later', '')"
        connection.execute(note)
    await check_database(database, "idemconsumer")  # as the version before will be
    assert [(each.known, each.pending) for each in status(database, "idemconsumer")][-2:] == [
        (True, False),
        (False, False),
    ]
    with psycopg.connect(database) as connection:
        connection.execute("update idemconsumer.migration set oldest = 9000 where version = 9000")
    with pytest.raises(
        ConfigurationError, match="a version of idemconsumer that knows migration 9000, and this version ends"
    ):
        await check_database(database, "idemconsumer")


@pytest.mark.parametrize(
    "name",
    ["", "o'clock", "a$$b", "50%", "nul\0", "two\nlines", "bell\a", "half\udcff", "x" * 64, "pg_mine"],
)
def test_a_schema_that_quoting_cannot_make_safe_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="write"):
        check_schema(name)


def test_a_database_that_is_away_and_a_dsn_that_is_none_are_told_apart() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        migrate("postgresql://127.0.0.1:1/x", "idemconsumer")
    with pytest.raises(ConfigurationError, match="cannot be parsed"):
        migrate("what is this", "idemconsumer")


def test_migrations_are_numbered_without_gaps() -> None:
    versions = [each.version for each in files()]
    assert versions == list(range(1, len(versions) + 1))
