"""Postgres for tests: 18 from the wheel, 15 from Debian, and databases in them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.support.servers.processes import ServerMissing


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
