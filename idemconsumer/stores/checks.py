"""What a database must be before anything runs on it: new enough, durable, migrated, and accessible to our role."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from idemconsumer.addresses import check_dsn, is_local
from idemconsumer.errors import ConfigurationError, Denied, StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import check_schema
from idemconsumer.stores import grants
from idemconsumer.stores.migrations import files, names
from idemconsumer.stores.server import refuse_unless_synchronous
from idemconsumer.stores.session import OLDEST, SessionRules

# All from the catalogs, which every role may read: to_regclass fails without USAGE on the schema.
_SERVER: Final = """
select current_setting('synchronous_commit'), pg_is_in_recovery(),
       exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = %(schema)s and c.relname = 'migration'),
       current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int, current_user,
       current_setting('server_encoding'), current_setting('fsync'), current_setting('full_page_writes')
"""
# R16. Tables that a crash would empty; triggers of the guard that are missing; triggers of ours that do not fire: `D`
# is disabled, `R` fires on replicas only, as an interrupted restore leaves them (`pg_restore --disable-triggers`).
_UNLOGGED: Final = """
select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relpersistence <> 'p' and c.relname = any(%(tables)s)
order by c.relname
"""
_TRIGGERLESS: Final = """
select 'sealed', t.name, null
from unnest(array['record', 'step']) as t (name)
join pg_namespace n on n.nspname = %(schema)s
left join pg_class c on c.relnamespace = n.oid and c.relname = t.name
left join pg_proc f on f.pronamespace = n.oid and f.proname = 'guard'
left join pg_trigger g on g.tgrelid = c.oid and g.tgfoid = f.oid and g.tgname = 'sealed'
where g.oid is null
union all
select g.tgname, c.relname,
       format('ALTER TABLE %%I.%%I ENABLE %%sTRIGGER %%I', n.nspname, c.relname,
              case when g.tgname = 'guarded' then 'ALWAYS ' else '' end, g.tgname)
from pg_trigger g
join pg_class c on c.oid = g.tgrelid
join pg_proc f on f.oid = g.tgfoid
join pg_namespace n on n.oid = c.relnamespace and n.oid = f.pronamespace
where n.nspname = %(schema)s and g.tgenabled in ('D', 'R')
"""
# Each missing right in words. A missing object is a pending migration, not a missing right. Identity columns need no
# right.
_LACKING: Final = """
with ours as (select oid, nspname from pg_namespace where nspname = %(schema)s)
select 'USAGE on the schema' from ours where not has_schema_privilege(oid, 'usage')
union all
select privilege || ' on ' || c.relname
from ours join pg_class c on c.relnamespace = ours.oid
join unnest(%(needed)s::text[], %(rights)s::text[]) as p (name, privilege) on p.name = c.relname
where not has_table_privilege(c.oid, privilege)
union all
select 'SELECT on migration' from ours join pg_class c on c.relnamespace = ours.oid and c.relname = 'migration'
where not has_table_privilege(c.oid, 'select')
union all
select 'USAGE on ' || c.relname
from ours join pg_class c on c.relnamespace = ours.oid and c.relname = any(%(sequences)s)
where not has_sequence_privilege(c.oid, 'usage')
union all
select 'EXECUTE on ' || f.proname from ours join pg_proc f on f.pronamespace = ours.oid
where f.proname = any(%(functions)s) and not has_function_privilege(f.oid, 'execute')
"""
# R44: row-level security that hides rows. Where it is forced, functions with the owner's rights see no rows either.
_HIDDEN: Final = """
select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_roles o on o.oid = c.relowner
where n.nspname = %(schema)s and c.relname = any(%(tables)s::text[] || array['migration'])
    and (row_security_active(c.oid)
         or c.relrowsecurity and c.relforcerowsecurity and not o.rolsuper and not o.rolbypassrls)
order by c.relname
"""
# As migrations/0001 and 0005 make them.
_TRIGGERS: Final[dict[str, LiteralString]] = {
    "record": "CREATE CONSTRAINT TRIGGER sealed AFTER INSERT OR UPDATE ON {} DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW WHEN (new.state >= 3) EXECUTE FUNCTION {}()",
    "step": "CREATE CONSTRAINT TRIGGER sealed AFTER INSERT OR UPDATE ON {} DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION {}()",
}
_BEHIND: Final = "select of_table, remedy from {}.sequences_behind()"
_NEEDED: Final = "14 or newer is needed"
_NAMED: Final = 4  # missing rights that are named; the statements grant all of them

Connection = psycopg.AsyncConnection[Any]


async def check_database(
    dsn: str,
    schema: str,
    *,
    longest_run: float = 30.0,
    lease: float | None = None,
    beside: float | None = None,
    require_standby: bool = False,
    kind: grants.Kind = "worker",
) -> int:
    """Refuse a database that would break the promise (R7); returns how many locks this process may take.

    It inspects a session opened with the settings of a Pool with this `longest_run`, `lease` and `beside`. `kind`: the
    kind of process, whose rights are checked. Raises StoreUnavailable, or ConfigurationError with what to do: no
    address, settings that are not in force, too old, a standby, synchronous_commit off, fsync or full_page_writes off,
    not in UTF-8, not migrated or not wholly, missing rights, hidden rows (R44), sequences behind their tables (R43),
    unlogged tables, a trigger of ours that is missing or disabled; with `require_standby` a COMMIT that waits for no
    synchronous standby (R22).
    """
    check_dsn(dsn)
    check_schema(schema)
    try:
        async with await _reached(SessionRules(dsn, longest_run, lease, beside).connect()) as connection:
            if require_standby:
                await refuse_unless_synchronous(connection)
            return await _check(connection, schema, grants.needed(kind))
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database does not answer: {error_text(error)}") from error


async def is_exposed(dsn: str) -> bool:
    """Whether traffic to the database crosses a network without TLS. Raises StoreUnavailable."""
    async with await _reached(connect_async(dsn, connect_timeout=5)) as connection:
        return not connection.pgconn.ssl_in_use and not is_local(connection.info.hostaddr or connection.info.host)


async def _reached(connecting: Awaitable[Connection]) -> Connection:
    try:
        return await connecting
    except psycopg.Error as error:
        if 'unrecognized configuration parameter "client_connection_check_interval"' in str(error):
            raise ConfigurationError(f"database: this Postgres is too old; {_NEEDED}") from error
        raise StoreUnavailable(f"no connection to the database: {error_text(error)}") from error


async def _check(connection: Connection, schema: str, needed: grants.Needed) -> int:
    version = connection.info.server_version
    row = await (await connection.execute(_SERVER, {"schema": schema})).fetchone()
    assert row is not None
    synchronous_commit, standby, migrated, locks, role, encoding, *kept = row
    if version < OLDEST:
        raise ConfigurationError(f"database: Postgres {version // 10_000} is too old; {_NEEDED}")
    if standby:
        raise ConfigurationError("database: this is a standby, which takes no writes; give the primary's address")
    if synchronous_commit == "off":
        raise ConfigurationError(
            "database: synchronous_commit is off, so a crash would lose what has been acknowledged; set it to on, "
            "for this role at least: ALTER ROLE … SET synchronous_commit = on"
        )
    for name, value in zip(("fsync", "full_page_writes"), kept, strict=True):
        if value == "off":
            raise ConfigurationError(
                f"database: {name} is off, so a crash can ruin what has been acknowledged; set it to on: "
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()"
            )
    if encoding != "UTF8":
        raise ConfigurationError(
            f"database: its encoding is {encoding}, which cannot hold every text of a message; create a UTF-8 one: "
            "CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'"
        )
    if not migrated:
        raise ConfigurationError(f"database: schema {schema!r} does not exist; run `idemconsumer migrate up` first")
    places: dict[str, Any] = {"schema": schema, "tables": names("table")}
    places |= {"sequences": list(needed.sequences), "functions": list(needed.functions)}
    places |= {"needed": [table for table, _ in needed.tables], "rights": [right for _, right in needed.tables]}
    lacking = [right for (right,) in await (await connection.execute(_LACKING, places)).fetchall()]
    if lacking:
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise Denied(
            f"database: role {role!r} lacks rights in schema {schema!r}: {', '.join(lacking[:_NAMED])}{more}; "
            f"run as the schema's owner: {'; '.join(needed.statements(schema, role))}",
            reads=not any(right.startswith(("SELECT ", "USAGE on the schema")) for right in lacking),
        )
    if hidden := [table for (table,) in await (await connection.execute(_HIDDEN, places)).fetchall()]:
        statement = sql.SQL("ALTER TABLE {} DISABLE ROW LEVEL SECURITY")
        remedies = [statement.format(sql.Identifier(schema, table)).as_string(None) for table in hidden]
        raise ConfigurationError(
            f"database: row-level security hides rows of {', '.join(hidden)} from role {role!r}, so work would be "
            f"repeated whose rows the role cannot see; run as the schema's owner: {'; '.join(remedies)}"
        )
    noted = sql.SQL("select version from {}").format(sql.Identifier(schema, "migration"))
    applied = {number for (number,) in await (await connection.execute(noted)).fetchall()}
    if pending := [str(each) for each in files() if each.version not in applied]:
        raise ConfigurationError(
            f"database: schema {schema!r} lacks {', '.join(pending)}; run `idemconsumer migrate up` first"
        )
    asked = sql.SQL("select coalesce(max(oldest), 0) from {}").format(sql.Identifier(schema, "migration"))
    ((oldest,),) = await (await connection.execute(asked)).fetchall()
    if oldest > (newest := files()[-1]).version:  # R32: a later migration has shut this version out
        raise ConfigurationError(
            f"database: schema {schema!r} needs a version of idemconsumer that knows migration {oldest:04}, and this "
            f"version ends with {newest}; run a newer version"
        )
    asked = sql.SQL(_BEHIND).format(sql.Identifier(schema))
    if found := await (await connection.execute(asked)).fetchall():  # R43: they would give numbers in use
        tables = ", ".join(dict.fromkeys(table for table, _ in found))
        raise ConfigurationError(
            f"database: sequences are behind the rows of {tables}, as after logical replication or a restore of the "
            f"rows alone, so new rows would get numbers that are in use; run as the schema's owner: "
            f"{'; '.join(remedy for _, remedy in found)}"
        )
    for (table,) in await (await connection.execute(_UNLOGGED, places)).fetchall():
        remedy = sql.SQL("ALTER TABLE {} SET LOGGED").format(sql.Identifier(schema, table)).as_string(None)
        raise ConfigurationError(f"database: table {table} is unlogged, so a crash would empty it; run: {remedy}")
    if idle := await (await connection.execute(_TRIGGERLESS, places)).fetchall():
        made = sql.Identifier(schema, "guard")
        remedies = [
            remedy or sql.SQL(_TRIGGERS[table]).format(sql.Identifier(schema, table), made).as_string(None)
            for _, table, remedy in idle
        ]
        raise ConfigurationError(
            f"database: triggers of idemconsumer are missing or disabled, so rows are not guarded and workers are not "
            f"woken: "
            f"{', '.join(f'`{trigger}` of table {table}' for trigger, table, _ in idle)}; "
            f"run: {'; '.join(remedies)}"
        )
    return int(locks) // 10
