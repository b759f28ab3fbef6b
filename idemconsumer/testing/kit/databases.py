"""Databases for tests: copies of a database that was migrated once, with a clock that can be moved.

The time functions are renamed in the template, and new functions with their names add the moved seconds. So all SQL,
column defaults included, sees the moved time. Exceptions are `current_timestamp` and `localtimestamp`, which are not
functions.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.errors import ConfigurationError
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.migrations import migrate

SCHEMA: Final = "idemconsumer"
VARIABLE: Final = "IDEMCONSUMER_TEST_DSN"
Setup = Callable[[str], object] | LiteralString | None
_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 2**30  # bytes; a server with a few databases needs a tenth of it
_COPY: Final = "create database {} template {} strategy {}"
_END: LiteralString = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s"
_TIMES: Final = {"clock_timestamp": "volatile", **dict.fromkeys(("now", "statement_timestamp"), "stable")}
_CLOCK: Final = """
create schema idem_kit;
create sequence idem_kit.moved minvalue 0;
create table idem_kit.published (
    id bigint generated always as identity, name text not null, body bytea not null, headers jsonb, key text
);
"""
_TIME: Final = """
alter function pg_catalog.{0}() rename to idem_kit_{0};
create function pg_catalog.{0}() returns timestamptz language sql {1} parallel safe as $$
    select pg_catalog.idem_kit_{0}()
        + coalesce(pg_catalog.pg_sequence_last_value('idem_kit.moved'), 0) * interval '1 microsecond'
$$;
"""
# Workers do not prune; the kit does after it has moved the time. Messages published to a Postgres queue are also
# recorded, since a row of the queue is deleted once it is settled.
_MIGRATED: Final = """
update idemconsumer.upkeep set until = 'infinity';
alter function idemconsumer.publish_bytes(text, bytea, text, jsonb, interval) set schema idem_kit;
create function idemconsumer.publish_bytes(
    queue text, payload bytea, key text default null, headers jsonb default '{}', delay interval default null
)
returns bigint language plpgsql as $$
begin
    if queue !~ '^(kafka|rabbitmq|sqs|memory):' and queue !~ '^(postgres:)?~' then
        insert into idem_kit.published (name, body, headers, key)
        values (regexp_replace(queue, '^postgres:', ''), payload, headers, key);
    end if;
    return idem_kit.publish_bytes(queue, payload, key, headers, delay);
end
$$;
"""


class Databases:
    """The databases of one test run. Not thread-safe."""

    def __init__(self) -> None:
        self._server: EmbeddedPostgres | None = None
        self._admin: psycopg.Connection | None = None
        self._dsn = ""
        self._working = ThreadPoolExecutor(1, "idem-databases")
        self._templates: dict[Setup, str] = {}
        self.locks = 0  # the number of locks of the server; the templates were checked, so their copies need no check
        self._next: dict[str, Future[str]] = {}
        self._made: set[str] = set()

    def _begin(self) -> None:
        if not (dsn := os.environ.get(VARIABLE)):
            with _in_memory():
                self._server = EmbeddedPostgres(settings={"scram_iterations": "1"})
                dsn = self._server.start()
        self._dsn = dsn
        self._admin = psycopg.connect(dsn, autocommit=True)
        if self._server is not None:  # otherwise each connection would prove its password with 4,096 rounds
            role, password = self._admin.info.user, self._admin.info.password
            change = sql.SQL("alter role {} password {}")
            self._admin.execute(change.format(sql.Identifier(role), sql.Literal(password)))

    def _template_of(self, setup: Setup) -> str:
        """The template with this setup. Raises EmbeddedUnavailable, and ConfigurationError for an unusable server."""
        if setup not in self._templates:
            try:
                if self._admin is None:
                    self._begin()
                self._templates[setup] = self._made_template(setup)
            except psycopg.Error as error:
                if self._server is not None:
                    raise
                raise ConfigurationError(
                    f"{VARIABLE}: no databases for tests can be made there: {error}; name a server of Postgres 15 or "
                    "newer that is for tests alone, with a role that is its superuser"
                ) from error
        return self._templates[setup]

    def _made_template(self, setup: Setup) -> str:
        assert self._admin is not None
        template = f"idem_template_{os.getpid()}_{secrets.token_hex(3)}"
        self._admin.execute(sql.SQL("create database {}").format(sql.Identifier(template)))
        self._made.add(template)
        address = make_conninfo(self._dsn, dbname=template)
        with psycopg.connect(address, autocommit=True) as connection:
            times = "".join(_TIME.format(name, how) for name, how in _TIMES.items())
            connection.execute((_CLOCK + times).encode())
        migrate(address, SCHEMA)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(_MIGRATED.encode())
            if isinstance(setup, str):
                connection.execute(setup)
        if callable(setup):
            setup(address)
        self.locks = asyncio.run(check_database(address, SCHEMA))
        self._admin.execute(_END, (template,))  # the setup may have left a pool open
        return template

    def one(self, setup: Setup) -> str:
        """The address of a new database; the next one is prepared meanwhile. `setup` creates the user's own tables:
        SQL, or a function that gets the address of the template."""
        template = self._template_of(setup)
        given = self._next.get(template) or self._working.submit(self._copy, template)
        self._next[template] = self._working.submit(self._copy, template)
        return given.result()

    def drop(self, dsn: str) -> None:
        """Drop a database that is not needed any more."""
        self._working.submit(self._drop, str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]))

    def close(self) -> None:
        self._working.shutdown(cancel_futures=True)
        if self._server is not None:
            self._server.stop()
        elif self._admin is not None:
            for name in list(self._made):
                self._drop(name)
        if self._admin is not None:
            self._admin.close()

    def _copy(self, template: str) -> str:
        assert self._admin is not None
        name = f"idem_{secrets.token_hex(6)}"
        # A copy of files causes two checkpoints, which are slow where an fsync takes time. Our own server is in memory.
        strategy = sql.SQL("wal_log" if self._server is None else "file_copy")
        self._admin.execute(sql.SQL(_COPY).format(sql.Identifier(name), sql.Identifier(template), strategy))
        self._made.add(name)
        return make_conninfo(self._dsn, dbname=name)

    def _drop(self, name: str) -> None:
        assert self._admin is not None
        self._admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
        self._made.discard(name)


@contextmanager
def _in_memory() -> Iterator[None]:
    """Let a server that is started here keep its files in memory, if there is room: an fsync takes no time there."""
    before, place = tempfile.tempdir, None
    if "TMPDIR" not in os.environ and before is None and os.access(_MEMORY, os.W_OK):
        room = os.statvfs(_MEMORY)
        if room.f_bavail * room.f_frsize > _ROOM and not room.f_flag & os.ST_NOEXEC:
            place = str(_MEMORY)
    tempfile.tempdir = place or before
    try:
        yield
    finally:
        tempfile.tempdir = before
