"""The settings that an address asks for by itself, in `options` or PGOPTIONS, and whether a session has them (R18).

A pooler drops them, as it drops ours. Writes of a session without its search_path land in tables of another schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from psycopg import pq, sql
from psycopg.conninfo import conninfo_to_dict

from idemconsumer.errors import ConfigurationError

# What is, and what the server makes of the wanted value; that lasts for this statement alone. A setting that only a new
# session takes is compared as it was written.
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
_KEYWORDS: Final = ("application_name", "client_encoding")  # those of the address, or ours, come after `options`
_LISTS: Final = ("search_path", "temp_tablespaces", "local_preload_libraries", "session_preload_libraries")


def given_options(dsn: str) -> str:
    """As libpq finds them: PGOPTIONS counts where the address has none."""
    given = conninfo_to_dict(dsn).get("options")
    if given is None:
        found = {each.keyword: each.val for each in pq.Conninfo.get_defaults()}
        given = (found.get(b"options") or b"").decode()
    return str(given)


def asked_for(dsn: str, ours: Iterable[str]) -> dict[str, str]:
    """What to read back; not `ours`, which come after them. Raises ConfigurationError for what is no setting."""
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
    """Of HELD."""
    return {"names": list(asked), "values": list(asked.values())}


def lost(rows: Iterable[tuple[Any, ...]]) -> dict[str, str]:
    """What the rows of HELD say that the session does not have, with what it has."""
    return {name: found or "" for name, found, wanted, *_ in rows if not _same(name, found, wanted)}


def refuse_lost(asked: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Raises ConfigurationError, with what to run, unless the session has all that was asked for."""
    if found := lost(rows):
        role, database = rows[0][3:]
        raise refusal(role, database, {name: asked[name] for name in found}, found, pooled=True)


def refusal(
    role: str, database: str, wanted: Mapping[str, str], found: Mapping[str, str], *, pooled: bool
) -> ConfigurationError:
    """What is not as it is `wanted`, and the statements with which the role carries it."""
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
