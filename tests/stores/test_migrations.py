"""The schema, brought up to date by one runner or by ten."""

from __future__ import annotations

import threading
from dataclasses import replace

import psycopg
import pytest
from psycopg import sql

from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.sql.queries import check_schema
from idemconsumer.stores import migrations
from idemconsumer.stores.migrations import files, migrate, script, status

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


def test_a_failing_migration_leaves_nothing_of_itself(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(files()[-1], version=9000, name="broken", text="create table {schema}.half (); select 1/0")
    extended = (*files(), broken)
    monkeypatch.setattr(migrations, "files", lambda: extended)

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


def test_a_runner_that_another_one_keeps_waiting_says_so(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_LOCK_TIMEOUT", "set local lock_timeout = '100ms'")
    with psycopg.connect(database) as other:
        other.execute(migrations._LOCK, ["idemconsumer"])
        with pytest.raises(StoreUnavailable, match="kept a lock: canceling statement due to lock timeout"):
            migrate(database, "idemconsumer")
    assert migrate(database, "idemconsumer")


@pytest.mark.parametrize("name", ["", "o'clock", "a$$b", "50%", "nul\0", "x" * 64, "pg_mine"])
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
