"""Postgres for tests: 18 from the wheel, 15 from Debian, and databases in them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, LiteralString, Protocol, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.stores.migrations import migrate
from tests.support.servers.kept import entered, kept, strategy
from tests.support.servers.processes import need

_UNTOUCHED: LiteralString = """
select not exists (select from pg_class where relnamespace = 'public'::regnamespace)
    and not exists (select from pg_namespace where nspname = %s)
    and not exists (select from pg_db_role_setting as s join pg_database as d on d.oid = s.setdatabase
        where d.datname = current_database())
"""
_templates: dict[tuple[str, str, str], str] = {}  # by server and schema
# Waits for whoever still writes, as TRUNCATE would, and makes no new files, which takes a millisecond for each table.
# Scopes stay: they are never deleted, and open stores know their numbers.
_EMPTY: LiteralString = """
do $$
declare
    own record;
begin
    set local session_replication_role = replica;
    for own in
        select c.oid::regclass as name, pg_relation_size(c.oid) > 1000000 as large from pg_class as c
        where c.relkind = 'r' and pg_relation_size(c.oid) > 0
            and (c.relnamespace = 'idemconsumer'::regnamespace and c.relname not in ('migration', 'scope')
                or c.relnamespace = 'public'::regnamespace and c.relname = {})
        order by c.oid
    loop
        if own.large then
            execute format('truncate %s cascade', own.name);
        else
            execute format('lock table %s in share row exclusive mode; delete from %1$s', own.name);
        end if;
    end loop;
    insert into idemconsumer.upkeep (what) values ('records');  -- which a migration has made
end
$$
"""
# For the next test: no store that is open knows a scope's number.
_RESTARTED: LiteralString = """
delete from idemconsumer.scope;
select setval(seqrelid, seqstart, false) from pg_sequence where pg_sequence_last_value(seqrelid) is not null
"""
# What a test may have done to a database besides writing rows: each change of a catalogue is a row of a newer
# transaction.
_CHANGED: LiteralString = """
select sum(count), max(newest) from (
    select count(*), max(xmin::text::bigint) as newest from pg_class
    union all select count(*), max(xmin::text::bigint) from pg_attribute
    union all select count(*), max(xmin::text::bigint) from pg_proc
    union all select count(*), max(xmin::text::bigint) from pg_trigger
    union all select count(*), max(xmin::text::bigint) from pg_constraint
    union all select count(*), max(xmin::text::bigint) from pg_index
    union all select count(*), max(xmin::text::bigint) from pg_type
    union all select count(*), max(xmin::text::bigint) from pg_namespace
    union all select count(*), max(xmin::text::bigint) from pg_default_acl
    union all select count(*), max(xmin::text::bigint) from pg_policy
    union all select count(*), max(s.xmin::text::bigint) from pg_db_role_setting as s
        join pg_database as d on d.oid = s.setdatabase where d.datname = current_database()
    union all select count(*), max(xmin::text::bigint) from pg_database where datname = current_database()
    union all select count(*), null from pg_prepared_xacts where database = current_database()
) as catalogue
"""

_TRIGGERS: LiteralString = """
select tgrelid::regclass::text, tgname, tgfoid::regproc::text, tgenabled from pg_trigger where not tgisinternal
order by 1, 2
"""


def system_binaries() -> Path:
    """The `bin` folder of Debian's Postgres 15."""
    need("Postgres 15")
    return Path("/usr/lib/postgresql/15/bin")


def cheap_passwords(dsn: str) -> None:
    """To make each connection of a run prove with 4,096 rounds that it knows a password takes minutes."""
    with psycopg.connect(dsn, autocommit=True, options="-c default_transaction_read_only=off") as admin:
        statement = sql.SQL("alter role {} password {}")
        admin.execute(statement.format(sql.Identifier(admin.info.user), sql.Literal(_one_round(admin.info.password))))


def _one_round(password: str) -> str:
    """What Postgres keeps of a password (RFC 5803): before 16 it has no setting for the number of rounds."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client, server = (hmac.digest(salted, name, "sha256") for name in (b"Client Key", b"Server Key"))
    parts = (base64.b64encode(part).decode() for part in (salt, hashlib.sha256(client).digest(), server))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*parts)


@contextlib.contextmanager
def fresh_database(dsn: str, options: LiteralString = "") -> Iterator[str]:
    """An empty database on that server, dropped at the end even while connections to it are open."""
    name = f"test_{secrets.token_hex(6)}"
    server = None if options else kept(dsn)
    with _admin(dsn) as admin:
        if server and server.empty:
            _rename(admin, server.empty.pop(), name)
        else:
            how = strategy() if server else sql.SQL(options)
            admin.execute(sql.SQL("CREATE DATABASE {} {}").format(sql.Identifier(name), how))
    try:
        yield make_conninfo(dsn, dbname=name)
    finally:
        with contextlib.suppress(psycopg.OperationalError), _admin(dsn) as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def _admin(dsn: str) -> Iterator[psycopg.Connection]:
    if server := kept(dsn):
        with server.admin() as admin:
            yield admin
    else:
        with psycopg.connect(dsn, autocommit=True) as admin:
            yield admin


def _rename(admin: psycopg.Connection, name: str, to: str) -> None:
    admin.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(name), sql.Identifier(to)))


def emptied(connection: psycopg.Connection, witness: str) -> None:
    """Our tables, but for migrations and scopes, have no rows any more; nor has that in which tests count effects."""
    connection.execute(sql.SQL(_EMPTY).format(sql.Literal(witness)))


class Shared(Protocol):
    """A database that the tests of a module have one after the other."""

    def clear(self) -> None: ...

    def run(self, query: LiteralString) -> list[tuple[Any, ...]]: ...


_Database = TypeVar("_Database", bound=Shared)


@contextlib.contextmanager
def lent(database: _Database) -> Iterator[_Database]:
    """Emptied for one test, which is much faster than making one. What a test leaves on a table beside rows would fail
    the tests that happen to come after it, so that fails the test itself."""
    database.clear()
    before = database.run(_TRIGGERS)
    yield database
    assert database.run(_TRIGGERS) == before, "the test has left a trigger behind in a database that others use"


class UsedDatabases:
    """Databases that one test after the other has: emptied between them, which takes a tenth of making one.

    One to which something else was done, such as another column or a setting, is not used again.
    """

    def __init__(self, prepare: Callable[[str], None], witness: str) -> None:
        self._prepare = prepare
        self._witness = witness
        self._free: list[tuple[str, tuple[Any, ...]]] = []
        self._stack = ExitStack()

    @contextlib.contextmanager
    def one(self, dsn: str) -> Iterator[str]:
        """Of that server."""
        name, before = self._free.pop() if self._free else self._made(dsn)
        yield name
        with psycopg.connect(name, autocommit=True) as connection:
            connection.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
            )
            if connection.execute(_CHANGED).fetchall()[0] == before:
                emptied(connection, self._witness)
                connection.execute(_RESTARTED)
                self._free.append((name, before))

    def _made(self, dsn: str) -> tuple[str, tuple[Any, ...]]:
        name = self._stack.enter_context(fresh_database(dsn))
        self._prepare(name)
        with psycopg.connect(name, autocommit=True) as connection:
            return name, connection.execute(_CHANGED).fetchall()[0]

    def close(self) -> None:
        self._stack.close()


def migrated(dsn: str, schema: str) -> None:
    """As `migrate`, in a tenth of the time: a database of `fresh_database` that is as it was made becomes a copy of one
    that was migrated before on that server."""
    address = conninfo_to_dict(dsn)
    name = str(address.get("dbname", ""))
    if not name.startswith("test_"):
        migrate(dsn, schema)
        return
    server = kept(dsn)
    with _admin(make_conninfo(dsn, dbname="postgres")) as admin:
        unused = server is not None and not entered(admin, name)
        if not unused and not _untouched(dsn, schema):
            migrate(dsn, schema)
            return
        place = (str(address.get("host")), str(address.get("port")), schema)
        if place not in _templates or not _there(admin, _templates[place]):
            _templates[place] = template = f"migrated_{os.getpid()}_{secrets.token_hex(4)}"
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(template)))
            migrate(make_conninfo(dsn, dbname=template), schema)
        if server is not None and unused:
            server.empty.append(f"empty_{secrets.token_hex(6)}")
            _rename(admin, name, server.empty[-1])
        else:
            admin.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
        names = sql.Identifier(name), sql.Identifier(_templates[place]), strategy() if server else sql.SQL("")
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {} {}").format(*names))


def _untouched(dsn: str, schema: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return bool(connection.execute(_UNTOUCHED, (schema,)).fetchall()[0][0])


def _there(admin: psycopg.Connection, name: str) -> bool:
    """A server may have been replaced by another one at the same port."""
    return bool(admin.execute("select 1 from pg_database where datname = %s", (name,)).fetchall())
