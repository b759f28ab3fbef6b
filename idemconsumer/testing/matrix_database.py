"""The database of a crash matrix: a copy of the test's, restored before each run, and the contents of its tables."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, LiteralString, Self
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.addresses import check_dsn
from idemconsumer.errors import ConfigurationError

Row = tuple[tuple[str, str | None], ...]
Contents = Mapping[str, Counter[Row]]

_ENCRYPTION: Final = ("sslmode", "ssl", "sslrootcert", "sslcert", "sslkey", "channel_binding", "gssencmode")
_LEAVING_SECONDS: Final = 1.0
# A column of a sequence differs after every rolled-back transaction.
_COLUMNS: LiteralString = """
select a.attname, a.attidentity <> '' or coalesce(pg_get_expr(d.adbin, d.adrelid) like 'nextval(%%', false)
from pg_attribute as a left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""
_KEEP: LiteralString = """
do $$
declare
    own record;
begin
    create schema crash_matrix_before;
    create table crash_matrix_before.kept (own regclass, rows regclass, columns text);
    for own in select oid::regclass as name, format('crash_matrix_before.t%s', oid) as kept from pg_class
        where relkind = 'r' and pg_relation_size(oid) > 0 and relnamespace::regnamespace::text not in
            ('pg_catalog', 'information_schema', 'crash_matrix_before')
    loop
        execute format('create table %s as table %s', own.kept, own.name);
        insert into crash_matrix_before.kept select own.name, own.kept::regclass, string_agg(quote_ident(attname), ', ')
            from pg_attribute where attrelid = own.name and attnum > 0 and not attisdropped and attgenerated = '';
    end loop;
    create table crash_matrix_before.sequences as
        select s.seqrelid as own, s.seqstart as start, pg_sequence_last_value(s.seqrelid) as last
        from pg_sequence as s;
end
$$
"""
# DELETE, since TRUNCATE creates a new file for each table, which takes longer than all the rest.
_PUT_BACK: LiteralString = """
do $$
declare
    own record;
begin
    set local session_replication_role = replica;
    for own in select oid::regclass as name from pg_class
        where relkind = 'r' and pg_relation_size(oid) > 0 and relnamespace::regnamespace::text not in
            ('pg_catalog', 'information_schema', 'crash_matrix_before')
    loop
        execute format('delete from only %s', own.name);
    end loop;
    for own in select * from crash_matrix_before.kept loop
        execute format('insert into %s (%s) overriding system value select %2$s from %s',
            own.own, own.columns, own.rows);
    end loop;
    perform setval(s.own, coalesce(s.last, s.start), s.last is not null) from crash_matrix_before.sequences as s;
end
$$
"""
_OTHERS: LiteralString = """
select string_agg(format('%%L (process %%s)', application_name, pid), ', ')
from pg_stat_activity where datname = %s and backend_type = 'client backend'
"""
_END_OTHERS: LiteralString = """
select pg_terminate_backend(pid, 5000) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""
_WAITS: LiteralString = """
select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')
"""


class MatrixDatabase:
    """A copy of the database at `dsn`. Guaranteed: nothing is written to the original. The copy must have few rows,
    since they are restored before each run. Tables that a consumer creates in the copy stay there, without rows."""

    def __init__(
        self,
        dsn: str,
        tables: Sequence[str],
        ignore: Collection[str],
        prepare: Callable[[str], object] | None = None,
    ) -> None:
        """`prepare` is called with the DSN of the copy, before its rows are saved."""
        self._prepare = prepare
        self._url = _as_url(dsn)
        parts = urlsplit(self._url)
        self._plain = urlunsplit(parts._replace(scheme="postgresql"))
        address = conninfo_to_dict(self._plain)
        self.host, self.port = str(address.get("host") or "127.0.0.1"), int(address.get("port") or 5432)
        self._source = str(address.get("dbname") or address.get("user") or "postgres")
        self._name = f"crash_matrix_{secrets.token_hex(6)}"
        self._tables, self._ignore = list(tables), set(ignore)
        self._columns: dict[str, list[str]] = {}

    async def __aenter__(self) -> Self:
        # A database can be copied only while it has no sessions, not even ours.
        beside = "template1" if self._source == "postgres" else "postgres"
        self._admin = await _connect(make_conninfo(self._plain, dbname=beside))
        try:
            await self._copy()
            if self._prepare is not None:
                await asyncio.to_thread(self._prepare, self.dsn)
            self._own = await _connect(self.dsn)
            try:
                await self._keep()
            except BaseException:
                await self._own.close()
                raise
        except BaseException:
            await self._drop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._own.close()
        await self._drop()

    async def _copy(self) -> None:
        copy = sql.SQL("create database {} template {}").format(*map(sql.Identifier, (self._name, self._source)))
        if others := await self._others():
            raise ConfigurationError(
                f"crash_matrix works in a copy of the database {self._source!r}, but Postgres cannot copy a database "
                f"with open connections: {others}; close these connections first"
            )
        try:
            await self._admin.execute(copy)
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_superuser(error) from None

    async def _others(self) -> str | None:
        """The sessions of the original, if any. One that was just closed may be listed for a moment."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            ((others,),) = await (await self._admin.execute(_OTHERS, (self._source,))).fetchall()
            if others is None or time.monotonic() > deadline:
                return None if others is None else str(others)
            await asyncio.sleep(0.02)

    async def _keep(self) -> None:
        ignored = set[str]()
        for table in self._tables:
            try:
                rows = await (await self._own.execute(_COLUMNS, (table,))).fetchall()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                raise ConfigurationError(
                    f"crash_matrix: tables={self._tables!r}: the database {self._source!r} has no table {table!r}"
                ) from None
            ignored |= {f"{table}.{name}" for name, _ in rows}
            self._columns[table] = [n for n, counted in rows if not counted and f"{table}.{n}" not in self._ignore]
        if wrong := sorted(self._ignore - ignored):
            raise ConfigurationError(
                f"crash_matrix: ignore={wrong!r} are not columns of {', '.join(self._tables)}; write 'table.column'"
            )
        try:
            await self._own.execute(_KEEP)
            await self._own.execute(_PUT_BACK)
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_superuser(error) from None

    async def _drop(self) -> None:
        await self._admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(self._name)))
        await self._admin.close()

    @property
    def dsn(self) -> str:
        """The DSN of the copy."""
        return make_conninfo(self._plain, dbname=self._name)

    async def execute(self, *statement: Any) -> None:
        """Run a statement in the copy, in a transaction of its own."""
        await self._own.execute(*statement)

    def address(self, port: int) -> str:
        """The address of the copy through this port of 127.0.0.1, in the form of the test's own address."""
        parts = urlsplit(self._url)
        account = parts.netloc.rpartition("@")[0]
        kept = [each for each in parts.query.split("&") if each.partition("=")[0] not in (*_ENCRYPTION, "host", "port")]
        return urlunsplit(
            parts._replace(
                netloc=f"{account}@127.0.0.1:{port}" if account else f"127.0.0.1:{port}",
                path=f"/{self._name}",
                query="&".join(kept),
            )
        )

    async def put_back(self) -> None:
        """Restore each table to its rows before the first run. No consumer may be connected."""
        await self.end_others()
        await self._own.execute(_PUT_BACK)

    async def end_others(self) -> None:
        """Wait until the server has ended the sessions of killed processes."""
        await self._own.execute(_END_OTHERS)

    async def somebody_waits(self) -> bool:
        """Whether a session waits for a lock of another session."""
        found = await (await self._own.execute(_WAITS)).fetchone()
        return bool(found and found[0])

    async def contents(self) -> Contents:
        """The rows of each table, without the columns that are not compared."""
        found = dict[str, Counter[Row]]()
        for table, columns in self._columns.items():
            texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(column)) for column in columns)
            cursor = await self._own.execute(
                sql.SQL("select {} from {}").format(texts, sql.Identifier(*table.split(".")))
            )
            found[table] = Counter([tuple(zip(columns, row, strict=True)) for row in await cursor.fetchall()])
        return found


async def _connect(conninfo: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None)


def _not_superuser(error: psycopg.Error) -> ConfigurationError:
    return ConfigurationError(
        f"crash_matrix copies the database and puts its rows back, which takes a superuser: {error}; use that of "
        "EmbeddedPostgres, for example"
    )


def _as_url(dsn: str) -> str:
    """The DSN as a URL, the only form that all drivers accept; `postgresql+asyncpg://` is SQLAlchemy's."""
    if "://" in dsn:
        scheme, rest = dsn.split("://", 1)
        check_dsn(f"{scheme.partition('+')[0]}://{rest}", "crash_matrix: dsn")
        return dsn
    check_dsn(dsn, "crash_matrix: dsn")
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    account = quote(parts.pop("user", ""), safe="")
    if (password := parts.pop("password", None)) is not None:
        account += f":{quote(password, safe='')}"
    host, port, name = parts.pop("host", "127.0.0.1"), parts.pop("port", "5432"), parts.pop("dbname", "postgres")
    rest = "&".join(f"{key}={quote(value, safe='')}" for key, value in parts.items())
    return f"postgresql://{account}{'@' if account else ''}{quote(host, safe='')}:{port}/{quote(name)}?{rest}"
