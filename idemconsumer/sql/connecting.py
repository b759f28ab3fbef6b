"""How we connect, and how our own statements are sent and read: always by psycopg's defaults, whatever a handler or
another library has set in psycopg (R14)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg import pq, sql
from psycopg._preparing import Prepare, PrepareManager
from psycopg._queries import PostgresQuery
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.postgres import register_default_adapters, register_default_types
from psycopg.rows import tuple_row
from psycopg.types import TypesRegistry
from psycopg.types.string import BytesBinaryDumper

from idemconsumer.errors import ConfigurationError
from idemconsumer.sql.answering import AnsweringConnection, BlockingConnection


class _Bytea(Dumper):
    """Sends bytes as text, as arrays of bytes are sent. In a session with `standard_conforming_strings = off`,
    psycopg's own dumper doubles the backslash, and the result matches no key."""

    oid = 17

    def dump(self, obj: bytes) -> bytes:
        return b"\\x" + obj.hex().encode()


def _defaults() -> AdaptersMap:
    """A new map: psycopg's own may hold adapters that another library registered before this was imported."""
    types = TypesRegistry()
    register_default_types(types)
    adapters = AdaptersMap(types=types)
    register_default_adapters(adapters)
    for dumper in (_Bytea, BytesBinaryDumper):  # the last one is used for single values
        adapters.register_dumper(bytes, dumper)
    return adapters


ADAPTERS: Final = _defaults()
EXACT: Final = {"default_transaction_isolation": "read committed", "array_nulls": "on"}  # read back: R15, R44
RESTING: Final = {"idle_session_timeout": "0"}  # R44: a connection that waits for work or a notice must not be closed
_ISO: Final = "set datestyle to iso"  # keeps the order of day and month, which a person's SQL may rely on
NAME: Final = "idemconsumer"  # the application_name of our connections, unless another is given
_MOST_OF_APP: Final = 27  # characters, so that place and purpose still fit
_STANDBYS: Final = ("standby", "prefer-standby", "read-only")


class OwnCursor(psycopg.AsyncCursor[tuple[Any, ...]]):
    """Plain tuples by psycopg's defaults, on a connection that handlers use as well."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return ADAPTERS

    def _get_prepared(self, pgq: PostgresQuery, prepare: bool | None = None) -> tuple[Prepare, bytes]:
        return PrepareManager.get(self._conn._prepared, pgq, prepare)  # J28 concerns only tables of others


def named(dsn: str, app: str, worker: str | None = None) -> str:
    """The DSN with an application name that shows in pg_stat_activity what its connections belong to. It does not apply
    if the DSN has an `application_name`, or PGAPPNAME is set. The server keeps 63 bytes, so a long name is cut."""
    plain = "".join(character if " " <= character <= "~" else "?" for character in app)[:_MOST_OF_APP]
    place = "" if worker is None else f" worker {worker}"
    return make_conninfo(dsn, fallback_application_name=f"{NAME} {plain}{place}")


def connect(
    dsn: str, settings: Mapping[str, str] | None = None, *, purpose: str = "looks", **more: Any
) -> BlockingConnection[Any]:
    """A connection that no handler uses: autocommit, READ COMMITTED, nothing prepared unless asked for.

    It writes only in `transaction()`: behind a pooler that takes no settings (R18) it has those of its role, which may
    be read-only outside of that. Text is UTF-8 and times are ISO, whatever role, database or environment set (R15).
    `purpose` is a word after its name (see `named`). Raises psycopg.Error, or ConfigurationError for the address of a
    standby, or if settings that the address requests are not in force (R18).
    """
    conninfo, options, asked = _own(dsn, settings, purpose, more)
    try:
        connection = BlockingConnection.connect(conninfo, **options)
    except psycopg.OperationalError as error:
        if not takes_no_settings(error):
            raise
        connection = BlockingConnection.connect(without_settings(conninfo), **options)
    try:
        if asked:
            refuse_lost(asked, connection.execute(HELD, parameters(asked)).fetchall())
        if not _reads_times(connection):
            connection.execute(_ISO)
    except BaseException:
        connection.close()
        raise
    connection.isolation_level, connection.read_only = psycopg.IsolationLevel.READ_COMMITTED, False
    return connection


async def connect_async(
    dsn: str, settings: Mapping[str, str] | None = None, *, purpose: str = "looks", **more: Any
) -> AnsweringConnection[Any]:
    """See `connect`."""
    conninfo, options, asked = _own(dsn, settings, purpose, more)
    try:
        connection = await AnsweringConnection.connect(conninfo, **options)
    except psycopg.OperationalError as error:
        if not takes_no_settings(error):
            raise
        connection = await AnsweringConnection.connect(without_settings(conninfo), **options)
    try:
        if asked:
            refuse_lost(asked, await (await OwnCursor(connection).execute(HELD, parameters(asked))).fetchall())
        if not _reads_times(connection):
            await OwnCursor(connection).execute(_ISO)
    except BaseException:
        await connection.close()
        raise
    await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
    await connection.set_read_only(False)
    return connection


def _reads_times(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Whether psycopg can read times there. A pooler reports its style too, and keeps one that is set."""
    return (connection.info.parameter_status("DateStyle") or "ISO").startswith("ISO")


async def is_pooled(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether a pooler is between us and the server: then the pids that it reports differ from the server's (R18)."""
    pids = {str(connection.info.backend_pid)}
    for _ in range(2):
        async with connection.transaction():
            cursor = await OwnCursor(connection).execute("select pg_catalog.pg_backend_pid()::text")
            pids |= {pid for (pid,) in await cursor.fetchall()}
    return len(pids) > 1


def _own(
    dsn: str, settings: Mapping[str, str] | None, purpose: str, more: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The address, the arguments, and the settings to read back."""
    # row_security off: if a policy would hide rows of ours, there is an error instead of missing rows (R44).
    ours = {"default_transaction_read_only": "off", "row_security": "off"}
    wanted = EXACT | RESTING | ours | dict(settings or {})
    name = f"{conninfo_to_dict(dsn).get('fallback_application_name', NAME)} {purpose}"
    arguments = {
        "autocommit": True, "context": ADAPTERS, "prepare_threshold": None, "fallback_application_name": name
    }  # fmt: skip
    conninfo = make_conninfo(with_settings(dsn, wanted), client_encoding="UTF8")
    return conninfo, arguments | dict(more), asked_for(dsn, wanted)


def takes_no_settings(error: psycopg.OperationalError) -> bool:
    """Whether a pooler refused the startup options, as PgBouncer does; libpq gives only its text."""
    return "unsupported startup parameter" in str(error)


def nobody_listens(error: psycopg.OperationalError) -> bool:
    """Whether no server listens, at one address at least; libpq gives only the system's text."""
    return any(os.strerror(each) in str(error) for each in (errno.ECONNREFUSED, errno.ENOENT))


def without_settings(conninfo: str) -> str:
    """With empty options, since without any libpq would use those of PGOPTIONS."""
    return make_conninfo(conninfo, options="")


def with_settings(dsn: str, settings: Mapping[str, str]) -> str:
    """The DSN with these session settings added to its own, and leading to a primary (R19)."""
    options = " ".join([given_options(dsn), *(f"-c {name}={_escaped(value)}" for name, value in settings.items())])
    return make_conninfo(dsn, options=options.strip(), **_to_primary(dsn))


def _to_primary(dsn: str) -> dict[str, str]:
    """R19. `read-write` would fail on every server, as sessions are read-only by default; it is meant as `primary`.

    If several servers are named, the primary is chosen. The same with a service file, which may name several: its
    content cannot be seen here.
    """
    given = conninfo_to_dict(dsn)
    defaults = {each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val}
    known = defaults | {name: str(value) for name, value in given.items()}
    wanted = known.get("target_session_attrs", "any")
    if wanted in _STANDBYS:
        raise ConfigurationError(
            f"database: target_session_attrs={wanted} leads to a server that takes no writes; "
            "write target_session_attrs=primary"
        )
    several = "," in known.get("host", "") + known.get("hostaddr", "") or "service" in known
    return {"target_session_attrs": "primary"} if wanted == "read-write" or several else {}


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


# ---------------------------------------------------------------------------------------- the settings of an address
# The settings that it requests itself, in `options` or PGOPTIONS, and whether a session has them (R18). A pooler drops
# them, as it drops ours. Without its search_path, a session would write into tables of another schema.

# The value in force, and the wanted value in the server's form; that is set for this statement alone. A setting that
# only a new session accepts is compared as it was written.
HELD: Final = """
select w.name, pg_catalog.current_setting(w.name, true),
    case when s.context operator(pg_catalog.=) any (array['backend', 'superuser-backend']) then w.value
        else pg_catalog.set_config(w.name, w.value, true) end,
    session_user::text, pg_catalog.current_database()::text
from rows from (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(values)s::text[])) as w (name, value)
left join pg_catalog.pg_settings as s on pg_catalog.lower(s.name) operator(pg_catalog.=) w.name
"""

_WORD: Final = re.compile(r"(?:\\.|[^\s\\])+", re.DOTALL)
_ELEMENT: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,"]+)')
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_KEYWORDS: Final = ("application_name", "client_encoding")  # the address's own, or ours, override those of `options`
_LISTS: Final = ("search_path", "temp_tablespaces", "local_preload_libraries", "session_preload_libraries")


def given_options(dsn: str) -> str:
    """The options as libpq takes them: those of PGOPTIONS if the address has none."""
    given = conninfo_to_dict(dsn).get("options")
    if given is None:
        found = {each.keyword: each.val for each in pq.Conninfo.get_defaults()}
        given = (found.get(b"options") or b"").decode()
    return str(given)


def asked_for(dsn: str, ours: Iterable[str]) -> dict[str, str]:
    """The settings to read back, without `ours`, which override them. Raises ConfigurationError for an invalid one."""
    settings: dict[str, str] = {}
    words = iter([re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in _WORD.findall(given_options(dsn))])
    for word in words:
        setting = next(words, "") if word == "-c" else word[2:] if word.startswith(("-c", "--")) else ""
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigurationError(f"database: {word!r} in `options`, or in PGOPTIONS; write -c name=value")
        settings[name.lower().replace("-", "_")] = value
    return {name: value for name, value in settings.items() if name not in {*ours, *_KEYWORDS}}


def parameters(asked: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of HELD."""
    return {"names": list(asked), "values": list(asked.values())}


def lost(rows: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    """The settings that the session does not have according to the rows of HELD, each with the value it has."""
    return {name: found or "" for name, found, wanted, *_ in rows if not _same(name, found, wanted)}


def refuse_lost(asked: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Raises ConfigurationError, with the statements to run, unless the session has all requested settings."""
    if found := lost(rows):
        role, database = rows[0][3:]
        raise refusal(role, database, {name: asked[name] for name in found}, found, pooled=True)


def refusal(
    role: str, database: str, wanted: Mapping[str, str], found: Mapping[str, str], *, pooled: bool
) -> ConfigurationError:
    """The error for settings that are not as `wanted`, with the statements that give them to the role."""
    remedy = "; ".join(_alter(role, database, name, value) for name, value in wanted.items())
    are = ", ".join(f"{name} is {found[name]!r}" for name in wanted)
    why = (
        "a pooler does not forward settings, so the role must have them"
        if pooled
        else "idemconsumer needs other values"
    )
    more = "; then have the pooler reconnect (RECONNECT in PgBouncer's console)" if pooled else ""
    return ConfigurationError(f"database: {are}; {why}; run: {remedy}{more}")


def _same(name: str, found: str | None, wanted: str) -> bool:
    if found is None or name not in _LISTS:
        return found == wanted
    return _elements(found) == _elements(wanted)


def _alter(role: str, database: str, name: str, value: str) -> str:
    if name in _LISTS:
        written = ", ".join(map(_quoted, _elements(value))) or "''"
    else:
        written = sql.Literal(value).as_string(None)
    setting = ".".join(part if _PLAIN.fullmatch(part) else _quoted(part) for part in name.split("."))
    return f"ALTER ROLE {_quoted(role)} IN DATABASE {_quoted(database)} SET {setting} = {written}"


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _elements(value: str) -> list[str]:
    return [quoted.replace('""', '"') if quoted else plain.lower() for quoted, plain in _ELEMENT.findall(value)]
