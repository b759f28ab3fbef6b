"""Servers that live as long as the tests of a process: one connection makes all their databases, none of them twice."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Final, LiteralString

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.support.servers.memory import MEMORY

# A session is counted before it leaves pg_stat_activity, so between the two none is missed.
_ENTERED: LiteralString = """
select exists (select from pg_stat_activity where datname = %(name)s)
    or (select sessions > 0 from pg_stat_database where datname = %(name)s)
    or exists (select from pg_db_role_setting as s join pg_database as d on d.oid = s.setdatabase
        where d.datname = %(name)s)
"""
_kept: dict[tuple[str, str, str], Kept] = {}


class Kept:
    """Nobody kills or restarts that server, so its counters of sessions can be trusted; it is Postgres 15 or newer."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._lock: Final = threading.Lock()
        self.empty: Final[list[str]] = []
        """Databases that nobody has entered."""

    @contextlib.contextmanager
    def admin(self) -> Iterator[psycopg.Connection]:
        """For one thread at a time."""
        with self._lock:
            try:
                self._connection.execute("select 1")
            except psycopg.OperationalError:  # a test has ended every session of the server
                self._connection = psycopg.connect(self._dsn, autocommit=True)
            yield self._connection

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def keep(dsn: str) -> Iterator[None]:
    """That server is one of them."""
    with contextlib.closing(Kept(dsn)) as _kept[_server(dsn)]:
        yield
    del _kept[_server(dsn)]


def kept(dsn: str) -> Kept | None:
    """That server, if it is one of them and its owner asks."""
    return _kept.get(_server(dsn))


def entered(admin: psycopg.Connection, name: str) -> bool:
    """Whether anybody was ever in that database, or has set something for it."""
    return bool(admin.execute(_ENTERED, {"name": name}).fetchall()[0][0])


def strategy() -> sql.SQL:
    """To copy the files takes half as long as to log each page, unless the files are on a disk."""
    return sql.SQL("strategy file_copy" if tempfile.gettempdir() == str(MEMORY) else "strategy wal_log")


def _server(dsn: str) -> tuple[str, str, str]:
    address = conninfo_to_dict(dsn)
    return str(address.get("host")), str(address.get("port")), str(address.get("user"))
