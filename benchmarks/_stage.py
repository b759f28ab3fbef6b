"""The servers of a run, started when the first part asks for them, and databases that all begin alike."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, LiteralString, Protocol, TypeVar
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from benchmarks._redis import Redis
from idemconsumer.embedded.postgres import EmbeddedPostgres
from idemconsumer.stores.migrations import migrate
from tests.support.servers import installed
from tests.support.servers.elasticmq import CREDENTIALS, ElasticMQ
from tests.support.servers.kafka import Kafka
from tests.support.servers.rabbitmq import RabbitMQ

SCHEMA = "idemconsumer"
PARTITIONS = 4  # of a Kafka topic

# The business data of nearly all parts, with no index, so that it costs everybody as little as it can.
# `at` is when the row was written: rates are read from it afterwards, and nothing disturbs the run.
PAYMENT = (
    "create table payment (id text not null, amount int not null, at timestamptz not null default clock_timestamp())"
)
# Per-message deduplication by hand.
SEEN = "create table seen (id text primary key)"
# The textbook's, which is committed before the work and once more after it.
CLAIM = "create table claim (id text primary key, state text not null)"
# A queue written by hand.
JOB = "create table job (id bigint generated always as identity primary key, body bytea not null)"
# Rows that many messages update.
STOCK = "create table stock (sku int primary key, qty int not null) with (fillfactor = 50)"


_VERSIONS: dict[type, Callable[[Any], str]] = {
    Kafka: lambda _: installed.KAFKA,
    RabbitMQ: lambda server: str(server.ctl("version").strip()),
    ElasticMQ: lambda _: installed.ELASTICMQ,
    Redis: lambda server: str(server.version),
}

S = TypeVar("S", bound="_Closable")


class _Closable(Protocol):
    def start(self) -> object: ...
    def close(self) -> None: ...


class Stage:
    """Closed with `with`; every server is one of our own, unless IDEMCONSUMER_DSN names another Postgres. With
    `settings`, Postgres is one of our own in any case, and has these too."""

    def __init__(self, *, quick: bool, settings: Mapping[str, str] | None = None) -> None:
        self.quick = quick
        self._settings = {"max_connections": "200", "max_wal_size": "4GB", "shared_buffers": "512MB"}
        self._settings |= settings or {}
        self._stack = ExitStack()
        self._servers: dict[type, Any] = {}
        self._dsn = os.environ.get("IDEMCONSUMER_DSN") if settings is None else None
        self._template: str | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.0f} s] {text}", file=sys.stderr, flush=True)

    # --------------------------------------------------------------------------------------------------- brokers
    @property
    def kafka(self) -> str:
        return str(self._server(Kafka).address)

    @property
    def rabbitmq(self) -> str:
        return str(self._server(RabbitMQ).address)

    @property
    def redis(self) -> str:
        return str(self._server(Redis).address)

    @property
    def sqs(self) -> str:
        os.environ.update(CREDENTIALS)
        return str(self._server(ElasticMQ).address)

    def _server(self, make: Callable[[], S]) -> S:
        key: Any = make
        if key not in self._servers:
            self.say(f"starting {getattr(make, '__name__', make)}")
            server = make()
            self._stack.callback(server.close)
            server.start()
            self._servers[key] = server
        started: S = self._servers[key]
        return started

    def versions(self) -> dict[str, str]:
        """Of the servers that have run so far."""
        with psycopg.connect(self.postgres) as connection:
            postgres = connection.info.parameter_status("server_version") or ""
        return {
            "Postgres": postgres,
            **{make.__name__: _VERSIONS[make](server) for make, server in self._servers.items()},
        }

    # -------------------------------------------------------------------------------------------------- databases
    @property
    def postgres(self) -> str:
        """The address of the server's own database; fsync and synchronous_commit are on."""
        if self._dsn is None:
            self.say("starting Postgres")
            self._dsn = self._stack.enter_context(EmbeddedPostgres(settings=self._settings)).dsn
        return self._dsn

    @contextmanager
    def database(self) -> Iterator[str]:
        """A migrated database with the tables of the parts, empty, dropped afterwards."""
        if self._template is None:
            self._template = self._make_template()
        name = f"bench_{secrets.token_hex(4)}"
        self._admin("create database {} template {}", name, self._template)
        self._admin("checkpoint")  # so that nobody pays for what was written before
        try:
            yield url(self.postgres, dbname=name)
        finally:
            self._admin("drop database {} with (force)", name)

    def _make_template(self) -> str:
        name = f"bench_template_{secrets.token_hex(4)}"
        self._admin("create database {}", name)
        self._stack.callback(lambda: self._admin("drop database {} with (force)", name))
        dsn = url(self.postgres, dbname=name)
        migrate(dsn, SCHEMA)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for table in (PAYMENT, SEEN, CLAIM, JOB, STOCK):
                connection.execute(table)
        return name

    def _admin(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def url(dsn: str, **changed: object) -> str:
    """That address with other parts, as a URL, which SQLAlchemy needs."""
    given = {"port": 5432, **conninfo_to_dict(dsn), **changed}
    parts = {name: quote(str(value), safe="") for name, value in given.items()}
    user = ":".join(parts[name] for name in ("user", "password") if name in parts)
    return f"postgresql://{user}@{parts['host']}:{parts['port']}/{parts.get('dbname', '')}"


class Meter:
    """What the server has done in one database: commits, also of reading transactions, and deadlocks; and for the whole
    server the transactions that wrote, and bytes of WAL.
    """

    # A backend tells the statistics of its last second when it ends, or when it has been idle for ten seconds.
    TELLING = 10.5

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._before: dict[str, int] = {}

    async def begin(self) -> None:
        self._before = await self._read()

    async def end(self) -> dict[str, int]:
        """Since `begin`. Commits and deadlocks are whole when the backends in question have told."""
        return {name: value - self._before[name] for name, value in (await self._read()).items()}

    async def _read(self) -> dict[str, int]:
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "select xact_commit, deadlocks, pg_snapshot_xmax(pg_current_snapshot())::text::bigint,"
                " (pg_current_wal_lsn() - '0/0')::bigint from pg_stat_database where datname = current_database()"
            )
            row = await cursor.fetchone()
        assert row is not None
        return dict(zip(("commits", "deadlocks", "writing", "wal"), row, strict=True))
