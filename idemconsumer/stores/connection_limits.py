"""How many connections the database lets our role have, and a pooler before it (R45)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import NAME, connect_async, is_pooled

# -1 is none. Postgres 16 and newer keep more of them for pg_use_reserved_connections.
_SERVER: Final = """
select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0),
       (select rolconnlimit from pg_roles where rolname = current_user),
       (select datconnlimit from pg_database where datname = current_database())
"""
_CONSOLE_SECONDS: Final = 3.0


class ConnectionLimit(msgspec.Struct, frozen=True):
    """`most` connections at a time, and what says so. None: it cannot be seen."""

    most: int | None
    what: str


async def narrowest(dsn: str) -> ConnectionLimit:
    """What a process meets first. Raises StoreUnavailable."""
    try:
        async with await connect_async(dsn, connect_timeout=5) as connection:
            pooled = await is_pooled(connection)
            row = await (await connection.execute(_SERVER)).fetchone()
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database does not answer: {error_text(error)}") from error
    assert row is not None
    if pooled:
        return await _of_pooler(dsn)
    names = (
        "max_connections without the reserved ones",
        "CONNECTION LIMIT of the role",
        "CONNECTION LIMIT of the database",
    )
    return min(
        (ConnectionLimit(most, what) for most, what in zip(row, names, strict=True) if most >= 0),
        key=lambda limit: limit.most or 0,
    )


async def _of_pooler(dsn: str) -> ConnectionLimit:
    """As PgBouncer's console says to who may ask (`admin_users`, `stats_users`). A lane that waits for one of the pool
    waits; a client more than `max_client_conn` is refused."""
    with suppress(psycopg.Error, OSError, TimeoutError, KeyError, ValueError):
        async with asyncio.timeout(_CONSOLE_SECONDS):
            console = make_conninfo(dsn, dbname="pgbouncer", options="", fallback_application_name=NAME)
            async with await psycopg.AsyncConnection[Any].connect(console, autocommit=True) as connection:
                config = {row[0]: row[1] for row in await (await connection.execute("show config")).fetchall()}
                cursor = await connection.execute("show databases")
                columns = [column.name for column in cursor.description or ()]
                rows = [dict(zip(columns, row, strict=True)) for row in await cursor.fetchall()]
            name = conninfo_to_dict(dsn).get("dbname")
            size = next((row["pool_size"] for row in rows if row["name"] == name), config["default_pool_size"])
            pool = ConnectionLimit(int(size), "the pooler's pool_size")
            clients = ConnectionLimit(int(config["max_client_conn"]), "the pooler's max_client_conn")
            return min(pool, clients, key=lambda limit: limit.most or 0)
    return ConnectionLimit(None, "the pooler's default_pool_size")
