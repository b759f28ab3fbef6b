"""Brings the schema up to date: numbered SQL files, each in one transaction, remembered with a checksum.

Any number of workers may do it at once. Each migration takes one advisory lock for its transaction and, holding
it, checks again which ones were applied, so a second runner finds the work done. The lock belongs to the
transaction, not to the session: it does not outlive a crash, and it works behind a pooler. How locks are waited for
is described in `waiting_for_locks.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, LiteralString

import psycopg
from psycopg import sql

from idemconsumer.addresses import check_dsn
from idemconsumer.errors import ConfigurationError, LockNotGiven, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.answering import BlockingConnection
from idemconsumer.sql.connecting import connect as connect_own
from idemconsumer.sql.queries import check_schema, takes_no_writes
from idemconsumer.stores.waiting_for_locks import LOCKS, LockWaiting, asking_shortly

_FILE = re.compile(r"(\d{4})_(\w+)\.sql")
_CONNECT_SECONDS = 10
_SHORTLY = "set local lock_timeout = '1500ms';"  # R32: for a script that a person runs
_PATIENCE = 3600.0  # seconds: a statement of a migration may have to rewrite a table

_LOCK = "select pg_advisory_xact_lock(hashtextextended('idemconsumer.migration.' || %s, 0))"
_HAS_SCHEMA = "select to_regnamespace(quote_ident(%s)) is not null"
_HAS_TABLE = "select to_regclass(quote_ident(%s) || '.migration') is not null"
# Checked first: CREATE SCHEMA IF NOT EXISTS needs the right to create a schema even when it exists.
_SCHEMA = "create schema {schema};"
_TABLE = """create table {schema}.migration (
    version     integer primary key,
    name        text not null,
    checksum    text not null,
    applied_at  timestamptz not null default clock_timestamp(),
    oldest      integer
);
comment on table {schema}.migration is 'The files of migrations/ that were applied';
comment on column {schema}.migration.oldest is
    'A program that does not know the migration of this number is refused at its start; null: none is (R32)';"""
_NOTE = "insert into {schema}.migration (version, name, checksum) values ({version}, {name}, {checksum});"
_APPLIED = "select version, name, checksum, applied_at from {schema}.migration order by version"

_MADE = {
    "table": r"^create table \{schema\}\.(\w+)",
    "sequence": r"^create sequence \{schema\}\.(\w+)",
    # Without trigger functions, which fire without a right.
    "function": r"^create function \{schema\}\.(\w+)\([^;]*?\)\s+returns (?!trigger\b)",
}

_Applied = dict[int, "Migration"]  # by version


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file. `applied_at` is None while it is pending. `text` is None if only the database knows it: a
    later version of this package has applied it."""

    version: int
    name: str
    checksum: str
    text: str | None
    applied_at: datetime | None = None

    @property
    def pending(self) -> bool:
        return self.applied_at is None

    @property
    def known(self) -> bool:
        return self.text is not None

    def __str__(self) -> str:
        return f"{self.version:04}_{self.name}"


def migrate(
    dsn: str, schema: str, *, wait: float | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Migration]:
    """Apply the pending migrations, each in a commit of its own, and return them.

    `wait` is the seconds to wait in total, for locks and for a server that accepts no connections. Without it, locks
    get five minutes, and an unreachable server is an error at once. `say` is called with a text for each thing that is
    waited for. Raises ConfigurationError if an applied file has changed or the schema's name cannot be used,
    LockNotGiven, StoreUnavailable if the database cannot be reached, and psycopg.Error if a statement fails.
    """
    return list(apply(dsn, schema, wait=wait, say=say))


def apply(
    dsn: str, schema: str, *, wait: float | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator[Migration]:
    """Apply the pending migrations, one for each step of the iterator; none if there are none, or if others apply them
    meanwhile.

    Each migration is committed separately: if one fails, those before it stay and its own changes do not. Locks are
    requested with a short timeout, again and again (R32). Parameters and errors are as for `migrate`.
    """
    check_schema(schema)
    waiting = LockWaiting(LOCKS if wait is None else wait, say)
    while True:
        try:
            with waiting.counted(lambda: connect(dsn)) as connection, _rights(connection, schema):
                connection.patience = _PATIENCE
                while (migration := waiting.for_locks(lambda: _apply_next(connection, schema, dsn))) is not None:
                    yield migration
                return
        except LockNotGiven:
            raise
        except StoreUnavailable as error:  # the next connection sees what was committed
            if wait is None:
                raise
            waiting.for_server(error)


def status(dsn: str, schema: str) -> list[Migration]:
    """All migrations of this version of the package, applied or pending, in order, and after them those that only the
    database knows. Changes nothing.

    Raises like `migrate`.
    """
    check_schema(schema)
    with connect(dsn) as connection, _rights(connection, schema):
        applied = _applied(connection, schema)
        known = _compare(files(), applied, schema)
        return known + [each for each in applied.values() if each.version not in {its.version for its in known}]


def script(migrations: Sequence[Migration], schema: str) -> str:
    """The SQL of these migrations for a person to run, with the schema filled in. It records itself as applied."""
    check_schema(schema)
    parts = []
    for migration in migrations:
        first = (_SCHEMA.replace("schema ", "schema if not exists ", 1), _TABLE)
        assert migration.text is not None
        texts = [*(first if migration.version == 1 else ()), migration.text]
        lines = [*(_fill(text, schema) for text in texts), _note(migration, schema)]
        body = "\n\n".join(line.as_string(None).strip() for line in lines)
        parts.append(f"-- {migration}\nbegin;\n{_SHORTLY}\n{body}\ncommit;\n")
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
        raise ConfigurationError(f"no migrations next to {package}; the installation is incomplete, install it again")
    return tuple(found)


def names(of: Literal["table", "sequence", "function"]) -> list[str]:
    """The names of all objects of this kind that the migrations create and statements use."""
    return [name for each in files() for name in re.findall(_MADE[of], each.text or "", re.M)]


def connect(dsn: str) -> BlockingConnection[tuple[Any, ...]]:
    """A connection for administration: autocommit, no prepared statements.

    Raises StoreUnavailable, or ConfigurationError for an invalid address.
    """
    check_dsn(dsn)
    try:
        return connect_own(dsn, connect_timeout=_CONNECT_SECONDS, purpose="migrate")
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"the database cannot be reached: {error_text(error)}") from error


@contextmanager
def _rights(connection: psycopg.Connection, schema: str) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            f"role {connection.info.user!r} lacks the right to migrate schema {schema!r} "
            f"({error.diag.message_primary}); migrate as the schema's owner, who may CREATE in the database, or have "
            "that role run what `idemconsumer migrate sql` prints"
        ) from error
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"the database did not answer: {error_text(error)}") from error
    except psycopg.Error as error:
        if (cause := takes_no_writes(error)) is not None:
            raise cause from error
        raise


def _apply_next(connection: psycopg.Connection, schema: str, dsn: str) -> Migration | None:
    with connection.transaction(), asking_shortly(connection, lambda: connect(dsn)):
        connection.execute(_LOCK, [schema])
        applied = _applied(connection, schema)
        first = next((each for each in _compare(files(), applied, schema) if each.pending), None)
        if first is None or first.text is None:
            return None
        if not applied:
            if not _ask(connection, _HAS_SCHEMA, schema):
                connection.execute(_fill(_SCHEMA, schema))
            if not _ask(connection, _HAS_TABLE, schema):
                connection.execute(_fill(_TABLE, schema))
        # Without parameters, so that a file may hold several statements.
        connection.execute(_fill(first.text, schema))
        connection.execute(_note(first, schema))
        return first


def _applied(connection: psycopg.Connection, schema: str) -> _Applied:
    if not _ask(connection, _HAS_TABLE, schema):
        return {}
    rows = connection.execute(_fill(_APPLIED, schema)).fetchall()
    return {row[0]: Migration(row[0], row[1], row[2], None, row[3]) for row in rows}


def _compare(wanted: Sequence[Migration], applied: _Applied, schema: str) -> list[Migration]:
    """Match the files with those that the database has applied. A newer database is fine (R32)."""
    result = []
    for each in wanted:
        if (found := applied.get(each.version)) is not None and found.checksum != each.checksum:
            raise ConfigurationError(
                f"migration {each} has changed since it was applied to schema "
                f"{schema!r}; restore the file, and put the change into a new migration"
            )
        result.append(each if found is None else replace(each, applied_at=found.applied_at))
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
