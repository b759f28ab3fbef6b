"""Settings of the server, and of our tables, that decide what a claim costs beside many records, and what pruned ones
leave. What is committed, they do not change."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import psycopg
from psycopg import sql

from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import connect_async

MINUTES: Final = 30  # of checkpoint_timeout
_FEWEST_MINUTES: Final = 15
_MANY: Final = 1_000_000  # records; the index of fewer is written whole soon after each checkpoint
_SHARE: Final = 0.02  # of a large table's rows, dead ones, after which autovacuum is to come: as migration 0001 has it
_LARGEST_SHARE: Final = 0.05
_PRUNED: Final = ("record", "result", "step", "history")  # those that have rows for each message, or step

# From the catalog, which everybody may read.
_SERVER: Final = """
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
    wal_compression knows it."""

    records: float
    wal_mb: int
    minutes: int
    compression: str
    lz4: bool
    autovacuum: bool


class Table(msgspec.Struct, frozen=True):
    """`share`: of its rows, dead ones, after which autovacuum comes."""

    name: str
    rows: float
    autovacuum: bool
    share: float


async def advice(dsn: str, schema: str) -> list[str]:
    """What to change, each with its reason and the statement. Raises StoreUnavailable."""
    try:
        async with await connect_async(dsn, connect_timeout=5) as connection:
            row = await (await connection.execute(_SERVER, {"schema": schema})).fetchone()
            assert row is not None
            tables = await (await connection.execute(_TABLES, {"schema": schema})).fetchall()
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database does not answer: {error_text(error)}") from error
    return [*of_server(Server(*row)), *of_tables(schema, [Table(*each) for each in tables])]


def wal_gb(records: float) -> int:
    """What max_wal_size should be.

    A checkpoint begins when about half of it is written. Since then each entry of the index, of some 53 bytes, was
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


def of_tables(schema: str, tables: list[Table]) -> list[str]:
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
