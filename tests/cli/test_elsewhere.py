"""Commands on servers that are not as a worker needs them: a role without rights, a pooler, a standby."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from idemconsumer.cli.main import main
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.process.child import Exit
from idemconsumer.stores import grants
from tests.support.servers.made import PrivatePgBouncer, PrivatePostgres
from tests.support.servers.postgres import migrated
from tests.support.servers.streaming import standby_of


def run(dsn: str, *words: str) -> Result:
    return CliRunner().invoke(main, words, env={"IDEMCONSUMER_DSN": dsn})


def test_who_lacks_rights_is_told_what_to_do(database: str) -> None:
    migrated(database, "idemconsumer")
    role = "reader_" + str(psycopg.conninfo.conninfo_to_dict(database)["dbname"])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"create role \"{role}\" login password 'x'".encode())
        for statement in grants.reader("idemconsumer", role):
            connection.execute(statement.encode())
    try:
        told = run(make_conninfo(database, user=role, password="x"), "pause", "take", "--app", "shop")
    finally:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(f'drop owned by "{role}"; drop role "{role}"'.encode())
    assert told.stderr == (
        "error: the database's role lacks rights in schema 'idemconsumer' (permission denied for table control); "
        "grant what `idemconsumer check` lists; the least role for `pause` is a worker, see `idemconsumer migrate "
        "grants --worker ROLE`\n"
    )


def test_sagas_are_moved_behind_a_pooler_whose_role_is_read_only(
    database: str, private_pgbouncer: PrivatePgBouncer
) -> None:
    migrated(database, "idemconsumer")
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f'alter database "{name}" set default_transaction_read_only = on'.encode())
    moved = run(private_pgbouncer(database, "transaction").dsn, "sagas", "move", "shop/a", "shop/b", "--json")
    assert moved.exit_code == 0, moved.output


@pytest.fixture(scope="module")
def primary(private_postgres: PrivatePostgres, postgres15_binaries: Path) -> EmbeddedPostgres:
    server = private_postgres(binaries=postgres15_binaries)
    migrated(server.dsn, "idemconsumer")
    return server


@pytest.fixture
def standby(primary: EmbeddedPostgres, folder: Path) -> Iterator[str]:
    with standby_of(primary, folder) as server:
        yield server.dsn


@pytest.mark.kill
def test_a_standby_is_looked_at_and_says_that_it_takes_no_writes(standby: str) -> None:
    for words in ("outbox list", "outbox discard --all --dry-run", "dead list", "keys list", "sagas list", "status"):
        looked = run(standby, *words.split(), "--json")
        assert looked.exit_code == 0, looked.output
        json.loads(looked.stdout)
    assert run(standby, "sagas", "export").exit_code == 0
    for words in ("outbox retry --all", "pause take --app shop", "sagas move shop/a shop/b", "prune", "migrate up"):
        refused = run(standby, *words.split())
        assert refused.exit_code == Exit.ERROR, refused.output
        assert "takes no writes" in refused.stderr
        assert "if this is a standby, give the primary's address" in refused.stderr


def test_a_statement_that_was_ended_is_no_database_that_is_away(database: str) -> None:
    migrated(database, "idemconsumer")
    with psycopg.connect(database) as holder:
        holder.execute("lock table idemconsumer.control")
        with psycopg.connect(database, autocommit=True) as connection:
            name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
            connection.execute(f'alter database "{name}" set lock_timeout = 1'.encode())
        told = run(database, "pause", "take", "--app", "shop")
    assert (told.exit_code, told.stderr) == (
        Exit.ERROR, "error: the database did not execute it: canceling statement due to lock timeout (55P03)\n",
    )  # fmt: skip
