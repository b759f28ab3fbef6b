"""Brings the schema up to date: numbered SQL files, each in one transaction, remembered with a checksum.

Any number of workers may do it at once. Each migration takes one advisory lock for its transaction and, holding
it, checks again what has been applied, so a second runner finds the work done. The lock belongs to the
transaction, not to the session: it does not outlive a crash, and it works behind a pooler.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from idemconsumer.addresses import check_dsn
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.answering import BlockingConnection
from idemconsumer.sql.connecting import connect as connect_own
from idemconsumer.sql.queries import check_schema

_FILE = re.compile(r"(\d{4})_(\w+)\.sql")
_CONNECT_SECONDS = 10
_PATIENCE = 3600.0  # seconds: a statement of a migration may have to rewrite a table

# For another process that migrates, or a table that somebody has locked.
_LOCK_TIMEOUT = "set local lock_timeout = '5min'"
_LOCK = "select pg_advisory_xact_lock(hashtextextended('idemconsumer.migration.' || %s, 0))"
_HAS_SCHEMA = "select to_regnamespace(quote_ident(%s)) is not null"
_HAS_TABLE = "select to_regclass(quote_ident(%s) || '.migration') is not null"
# Checked first: CREATE SCHEMA IF NOT EXISTS needs the right to create a schema even when it exists.
_SCHEMA = "create schema {schema};"
_TABLE = """create table {schema}.migration (
    version     integer primary key,
    name        text not null,
    checksum    text not null,
    applied_at  timestamptz not null default clock_timestamp()
);"""
_NOTE = "insert into {schema}.migration (version, name, checksum) values ({version}, {name}, {checksum});"
_APPLIED = "select version, checksum, applied_at from {schema}.migration"


_Applied = dict[int, tuple[str, datetime]]  # checksum and time, by version


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file. `applied_at` is None while it is pending."""

    version: int
    name: str
    checksum: str
    text: str
    applied_at: datetime | None = None


def migrate(dsn: str, schema: str) -> list[Migration]:
    """Apply the pending migrations and return them; empty when there were none, or others applied them meanwhile.

    Each migration is committed separately: if one fails, those before it stay and its own changes do not.
    Raises ConfigurationError when an applied file has changed since or the schema's name cannot be used,
    StoreUnavailable when the database cannot be reached, psycopg.Error when a statement fails.
    """
    check_schema(schema)
    done = []
    with connect(dsn) as connection, _rights(connection, schema):
        connection.patience = _PATIENCE
        while (migration := _apply_next(connection, schema)) is not None:
            done.append(migration)
    return done


def status(dsn: str, schema: str) -> list[Migration]:
    """All migrations of this version of the package, applied or pending, in order. Changes nothing.

    Raises like `migrate`.
    """
    check_schema(schema)
    with connect(dsn) as connection, _rights(connection, schema):
        return _compare(files(), _applied(connection, schema), schema)


def script(migrations: Sequence[Migration], schema: str) -> str:
    """The SQL of these migrations for a person to run, with the schema filled in; it records itself as applied."""
    check_schema(schema)
    parts = []
    for migration in migrations:
        first = (_SCHEMA.replace("schema ", "schema if not exists ", 1), _TABLE)
        texts = [*(first if migration.version == 1 else ()), migration.text]
        lines = [*(_fill(text, schema) for text in texts), _note(migration, schema)]
        body = "\n\n".join(line.as_string(None).strip() for line in lines)
        parts.append(f"-- {migration.version:04}_{migration.name}\nbegin;\n{body}\ncommit;\n")
    return "\n".join(parts)


@lru_cache(maxsize=1)
def files() -> tuple[Migration, ...]:
    """The migrations that come with the package, in order."""
    package = Path(__file__).parent.parent
    # Inside the package in a wheel; beside it in a checkout.
    folder = next((path for path in (package / "migrations", package.parent / "migrations") if path.is_dir()), None)
    found = []
    for path in sorted(folder.iterdir() if folder else ()):
        if match := _FILE.fullmatch(path.name):
            text = path.read_text("utf-8")
            found.append(Migration(int(match[1]), match[2], hashlib.sha256(text.encode()).hexdigest(), text))
    if not found:
        raise ConfigurationError(f"no migrations beside {package}; the installation is incomplete, install it again")
    return tuple(found)


def connect(dsn: str) -> BlockingConnection[tuple[Any, ...]]:
    """A connection for administration: autocommit, no prepared statements.

    Raises StoreUnavailable, or ConfigurationError for an invalid address.
    """
    check_dsn(dsn)
    try:
        return connect_own(dsn, connect_timeout=_CONNECT_SECONDS, application_name="idemconsumer")
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"the database cannot be reached: {error_text(error)}") from error


@contextmanager
def _rights(connection: psycopg.Connection, schema: str) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"role {connection.info.user!r} may not do this to schema {schema!r} ({error.diag.message_primary}); "
            "migrate as the schema's owner, who may CREATE in the database, or have that role run what "
            "`idemconsumer migrate sql` prints"
        ) from error
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"the database did not answer, or kept a lock: {error_text(error)}") from error


def _apply_next(connection: psycopg.Connection, schema: str) -> Migration | None:
    with connection.transaction():
        connection.execute(_LOCK_TIMEOUT)
        connection.execute(_LOCK, [schema])
        applied = _applied(connection, schema)
        pending = [each for each in _compare(files(), applied, schema) if each.applied_at is None]
        if not pending:
            return None
        if not applied:
            if not _ask(connection, _HAS_SCHEMA, schema):
                connection.execute(_fill(_SCHEMA, schema))
            if not _ask(connection, _HAS_TABLE, schema):
                connection.execute(_fill(_TABLE, schema))
        # Without parameters, so that a file may hold several statements.
        connection.execute(_fill(pending[0].text, schema))
        connection.execute(_note(pending[0], schema))
        return pending[0]


def _applied(connection: psycopg.Connection, schema: str) -> _Applied:
    if not _ask(connection, _HAS_TABLE, schema):
        return {}
    rows = connection.execute(_fill(_APPLIED, schema)).fetchall()
    return {version: (checksum, applied_at) for version, checksum, applied_at in rows}


def _compare(wanted: Sequence[Migration], applied: _Applied, schema: str) -> list[Migration]:
    """Pair files with what the database has applied. A newer database is fine: old workers run beside new ones."""
    result = []
    for each in wanted:
        checksum, applied_at = applied.get(each.version, (each.checksum, None))
        if checksum != each.checksum:
            raise ConfigurationError(
                f"migration {each.version:04}_{each.name} has changed since it was applied to schema "
                f"{schema!r}; restore the file, and put the change into a new migration"
            )
        result.append(Migration(each.version, each.name, checksum, each.text, applied_at))
    return result


def _ask(connection: psycopg.Connection, question: LiteralString, schema: str) -> bool:
    row = connection.execute(question, [schema]).fetchone()
    return row is not None and bool(row[0])


def _fill(text: str, schema: str) -> sql.Composed:
    # The files are part of the package, so they are as literal as a string in this module.
    return sql.SQL(text).format(schema=sql.Identifier(schema))


def _note(migration: Migration, schema: str) -> sql.Composed:
    return sql.SQL(_NOTE).format(
        schema=sql.Identifier(schema),
        version=sql.Literal(migration.version),
        name=sql.Literal(migration.name),
        checksum=sql.Literal(migration.checksum),
    )
