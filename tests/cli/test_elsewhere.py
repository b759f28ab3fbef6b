"""Commands on servers that are not as a worker needs them: a role without rights, a pooler, a standby."""

from __future__ import annotations

import psycopg
from click.testing import CliRunner, Result

from idemconsumer.cli.main import main
from tests.support.servers.made import PrivatePgBouncer
from tests.support.servers.postgres import migrated


def run(dsn: str, *words: str) -> Result:
    return CliRunner().invoke(main, words, env={"IDEMCONSUMER_DSN": dsn})


def test_sagas_are_moved_behind_a_pooler_whose_role_is_read_only(
    database: str, private_pgbouncer: PrivatePgBouncer
) -> None:
    migrated(database, "idemconsumer")
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f'alter database "{name}" set default_transaction_read_only = on'.encode())
    moved = run(private_pgbouncer(database, "transaction").dsn, "sagas", "move", "shop/a", "shop/b", "--json")
    assert moved.exit_code == 0, moved.output
