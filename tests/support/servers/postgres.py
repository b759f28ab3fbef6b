"""Postgres for tests: 18 from the wheel, 15 from Debian, and databases in them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.stores.migrations import migrate
from tests.support.servers.processes import ServerMissing

_UNTOUCHED: LiteralString = """
select not exists (select from pg_class where relnamespace = 'public'::regnamespace)
    and not exists (select from pg_namespace where nspname = %s)
    and not exists (select from pg_db_role_setting as s join pg_database as d on d.oid = s.setdatabase
        where d.datname = current_database())
"""
_templates: dict[tuple[str, str, str], str] = {}  # by server and schema


def system_binaries() -> Path:
    """The `bin` folder of Debian's Postgres 15."""
    binaries = Path("/usr/lib/postgresql/15/bin")
    if not (binaries / "postgres").exists():
        raise ServerMissing(f"no Postgres 15 in {binaries}; apt-get install postgresql-15")
    return binaries


@contextlib.contextmanager
def fresh_database(dsn: str, options: LiteralString = "") -> Iterator[str]:
    """An empty database on that server, dropped at the end even while connections to it are open."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} " + options).format(sql.Identifier(name)))
    try:
        yield make_conninfo(dsn, dbname=name)
    finally:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def migrated(dsn: str, schema: str) -> None:
    """As `migrate`, in a tenth of the time: a database of `fresh_database` that is as it was made becomes a copy of one
    that was migrated before on that server."""
    address = conninfo_to_dict(dsn)
    name = str(address.get("dbname", ""))
    if not name.startswith("test_"):
        migrate(dsn, schema)
        return
    with psycopg.connect(dsn) as connection:
        ((untouched,),) = connection.execute(_UNTOUCHED, (schema,)).fetchall()
    if not untouched:
        migrate(dsn, schema)
        return
    server = (str(address.get("host")), str(address.get("port")), schema)
    with psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as admin:
        if server not in _templates or not _there(admin, _templates[server]):
            _templates[server] = template = f"migrated_{os.getpid()}_{secrets.token_hex(4)}"
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(template)))
            migrate(make_conninfo(dsn, dbname=template), schema)
        names = sql.Identifier(name), sql.Identifier(_templates[server])
        admin.execute(sql.SQL("DROP DATABASE {}").format(names[0]))
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))


def _there(admin: psycopg.Connection, name: str) -> bool:
    """A server may have been replaced by another one at the same port."""
    return bool(admin.execute("select 1 from pg_database where datname = %s", (name,)).fetchall())
