"""What `check` reports of the server: what a commit there survives, how many connections it has, how it is tuned."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import NAME, OwnCursor, connect_async, is_pooled

_Connection = psycopg.AsyncConnection[Any]


@asynccontextmanager
async def _asked(dsn: str) -> AsyncIterator[_Connection]:
    """A connection for queries. Raises StoreUnavailable."""
    try:
        async with await connect_async(dsn, connect_timeout=5) as connection:
            yield connection
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database does not answer: {error_text(error)}") from error


async def _row(connection: _Connection, query: str, given: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = await (await connection.execute(query.encode(), given)).fetchone()
    assert row is not None
    return row


# ---------------------------------------------------------------------------------------------------------- standbys
# R22: if all standbys are asynchronous, a failover loses what was acknowledged last (record, effects and result), and
# the broker has deleted the message already. `check` warns of it; with `require_synchronous_standby` it is refused.
_WAITING: Final = ("on", "remote_apply")  # values of synchronous_commit: COMMIT waits until a standby has flushed it
_REMEDY: Final = (
    "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'; ALTER SYSTEM SET synchronous_commit = on; "
    "SELECT pg_reload_conf()"
)

_SETTINGS: Final = "select current_setting('synchronous_standby_names'), current_setting('synchronous_commit')"
# Standbys, also one that is disconnected but has a slot. No consumers of logical replication, and no running backups.
# Only members of pg_read_all_stats see a standby's state; other roles see only that it exists.
_STANDBYS: Final = """
select count(*), count(*) filter (where sync_state in ('sync', 'quorum')), count(*) filter (where seen)
from (
    select r.sync_state, r.state is not null as seen from pg_stat_replication r
    where r.state is distinct from 'backup'
      and not exists (select from pg_replication_slots s where s.active_pid = r.pid and s.slot_type = 'logical')
    union all
    select null, true from pg_replication_slots where slot_type = 'physical' and not active
) as standbys
"""


@dataclass(frozen=True)
class Durability:
    """What a commit survives, and what a person should know about it."""

    commits: str
    warning: str | None = None


async def refuse_unless_synchronous(connection: _Connection) -> None:
    """Raise ConfigurationError if COMMIT does not wait for a synchronous standby."""
    names, level = await _row(connection, _SETTINGS)
    if not names or level not in _WAITING:
        raise ConfigurationError(
            "database: require_synchronous_standby is set, and COMMIT waits for no synchronous standby "
            f"(synchronous_standby_names = {names!r}, synchronous_commit = {level}); run: {_REMEDY}"
        )


async def is_durable(connection: _Connection, require_standby: bool) -> bool:
    """Whether commits are durable outside of the transaction that was refused. Then its handler had changed that."""
    await connection.rollback()
    row = await (await OwnCursor(connection).execute(_SETTINGS)).fetchone()
    if row is None:
        return False
    return row[1] in _WAITING and bool(row[0]) if require_standby else row[1] != "off"


async def durability(dsn: str) -> Durability:
    """What commits on this server survive. Raises StoreUnavailable."""
    async with _asked(dsn) as connection:
        names, level = await _row(connection, _SETTINGS)
        return judged(names, level, *await _row(connection, _STANDBYS))


def judged(names: str, level: str, standbys: int, synchronous: int, seen: int) -> Durability:
    """`standbys`: how many there are. `seen`: how many of them show their state. `synchronous`: how many are that."""
    if names and level in _WAITING:
        waits = "each commit waits for a synchronous standby"
        if synchronous:
            return Durability(waits)
        if standbys > seen:
            return Durability(
                waits,
                "this role cannot see whether a synchronous standby is connected, and without one each COMMIT "
                "hangs; run: GRANT pg_read_all_stats TO this role",
            )
        return Durability(
            waits,
            f"no standby of synchronous_standby_names = {names!r} is connected, so each COMMIT hangs until one is",
        )
    if not standbys:
        return Durability("commits are durable")
    why = f"synchronous_commit is {level}" if names else "its standbys are asynchronous"
    return Durability(
        "commits survive a crash of this server",
        f"{why}: a failover loses the last acknowledged messages for good, since the broker has deleted them; "
        f"run: {_REMEDY}, and set require_synchronous_standby",
    )


# ------------------------------------------------------------------------------------------------------- connections
# -1 means no limit. Postgres 16 and newer reserve more connections for pg_use_reserved_connections.
_CONNECTIONS: Final = """
select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0),
       (select rolconnlimit from pg_roles where rolname = current_user),
       (select datconnlimit from pg_database where datname = current_database())
"""
_CONSOLE_SECONDS: Final = 3.0


class ConnectionLimit(msgspec.Struct, frozen=True):
    """`most` connections at a time, and the setting that limits them. None: it cannot be read."""

    most: int | None
    what: str


async def narrowest(dsn: str) -> ConnectionLimit:
    """The lowest limit for a process, of the server or of a pooler in front of it (R45). Raises StoreUnavailable."""
    async with _asked(dsn) as connection:
        pooled = await is_pooled(connection)
        row = await _row(connection, _CONNECTIONS)
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
    """The limit from PgBouncer's console, if this role may ask it (`admin_users`, `stats_users`). A lane waits for a
    connection of the pool; a client beyond `max_client_conn` is refused."""
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


# ---------------------------------------------------------------------------------------------------------- settings
# Settings, also of our tables, that decide what a claim costs among many records, and what pruned records leave behind.
# They do not change what is committed.
MINUTES: Final = 30  # of checkpoint_timeout
_FEWEST_MINUTES: Final = 15
_MANY: Final = 1_000_000  # records; with fewer, the whole index is written soon after each checkpoint anyway
_SHARE: Final = 0.02  # of a large table's rows: dead rows after which autovacuum should run; as in migration 0001
_LARGEST_SHARE: Final = 0.05
_PRUNED: Final = ("record", "result", "step", "history")  # tables with rows for each message, or step

# From the catalog, which every role may read.
_TUNED: Final = """
select coalesce((select reltuples::float8 from pg_class c join pg_namespace n on n.oid = c.relnamespace
                 where n.nspname = %(schema)s and c.relname = 'record'), 0),
       (select setting::int from pg_settings where name = 'max_wal_size'),
       (select setting::int / 60 from pg_settings where name = 'checkpoint_timeout'),
       (select setting from pg_settings where name = 'wal_compression'),
       (select 'lz4' = any(enumvals) from pg_settings where name = 'wal_compression'),
       current_setting('autovacuum')::boolean
"""
_TABLES: Final = """
select c.relname::text, c.reltuples::float8,
       coalesce((select option_value::boolean from pg_options_to_table(c.reloptions)
                 where option_name = 'autovacuum_enabled'), true),
       coalesce((select option_value from pg_options_to_table(c.reloptions)
                 where option_name = 'autovacuum_vacuum_scale_factor'),
                current_setting('autovacuum_vacuum_scale_factor'))::float8
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind = 'r'
order by c.relname
"""


class Server(msgspec.Struct, frozen=True):
    """`records`: about how many there are. `wal_mb` is max_wal_size, `minutes` checkpoint_timeout; `lz4`: whether
    wal_compression supports it."""

    records: float
    wal_mb: int
    minutes: int
    compression: str
    lz4: bool
    autovacuum: bool


class TunedTable(msgspec.Struct, frozen=True):
    """`share`: the share of dead rows after which autovacuum runs."""

    name: str
    rows: float
    autovacuum: bool
    share: float


async def advice(dsn: str, schema: str) -> list[str]:
    """Settings to change, each with its reason and the statement. Raises StoreUnavailable."""
    async with _asked(dsn) as connection:
        row = await _row(connection, _TUNED, {"schema": schema})
        tables = await (await connection.execute(_TABLES, {"schema": schema})).fetchall()
    return [*of_server(Server(*row)), *of_tables(schema, [TunedTable(*each) for each in tables])]


def wal_gb(records: float) -> int:
    """The max_wal_size to recommend, in GB.

    A checkpoint begins when about half of it is written. By then each entry of the index, of some 53 bytes, has been
    written once more with its page; the rest is the messages' own, 440 bytes each.
    """
    return 16 * max(1, math.ceil(records / 50e6))


def of_server(server: Server) -> list[str]:
    found = []
    beside = f"for {server.records / 1e6:,.0f} million records"
    if not server.autovacuum:
        found.append(
            "autovacuum is off, so the space that pruning frees is never reused, and tables and indexes only grow; "
            f"{_system('autovacuum', 'on')}"
        )
    if server.records < _MANY:
        return found
    if server.wal_mb < (better := wal_gb(server.records)) * 1024 / 2:
        found.append(
            f"max_wal_size is {server.wal_mb:,} MB {beside}: a checkpoint begins when half of it is written, and the "
            "first change of an index page after each checkpoint writes the whole page to the WAL; "
            f"{_system('max_wal_size', f'{better}GB')}"
        )
    if server.minutes < _FEWEST_MINUTES:
        found.append(
            f"checkpoint_timeout is {server.minutes} min {beside}: after each checkpoint nearly the whole index is "
            "written to the WAL again, so make checkpoints rare; a restart after a crash then takes longer; "
            f"{_system('checkpoint_timeout', f'{MINUTES}min')}"
        )
    if server.compression in ("on", "pglz"):
        found.append(
            f"wal_compression is {server.compression} {beside}: keys are hashes, so pglz makes their pages no smaller "
            f"and costs time for each; {_system('wal_compression', 'lz4' if server.lz4 else 'off')}"
        )
    return found


def of_tables(schema: str, tables: list[TunedTable]) -> list[str]:
    found = []
    for table in tables:
        name = sql.Identifier(schema, table.name).as_string(None)
        if not table.autovacuum:
            found.append(
                f"autovacuum of table {table.name} is off, so the space of deleted rows is never reused, and the table "
                f"only grows; run: ALTER TABLE {name} RESET (autovacuum_enabled)"
            )
        elif table.name in _PRUNED and table.rows >= _MANY and table.share > _LARGEST_SHARE:
            found.append(
                f"autovacuum of table {table.name} starts once {table.share:.0%} of its {table.rows / 1e6:,.0f} "
                f"million rows are dead, which is late: until then the table only grows; "
                f"run: ALTER TABLE {name} SET (autovacuum_vacuum_scale_factor = {_SHARE})"
            )
    return found


def _system(name: str, value: str) -> str:
    return f"run: ALTER SYSTEM SET {name} = '{value}'; SELECT pg_reload_conf()"
