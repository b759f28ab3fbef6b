"""How our own statements are sent and read: never as a handler, or another library, has told psycopg (R14)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.postgres import register_default_adapters, register_default_types
from psycopg.rows import tuple_row
from psycopg.types import TypesRegistry


def _defaults() -> AdaptersMap:
    """Made anew: psycopg's own map may hold what another library registered before this was imported."""
    types = TypesRegistry()
    register_default_types(types)
    adapters = AdaptersMap(types=types)
    register_default_adapters(adapters)
    return adapters


_ADAPTERS: Final = _defaults()
READ_COMMITTED: Final = {"default_transaction_isolation": "read committed"}  # R15


class OwnCursor(psycopg.AsyncCursor[tuple[Any, ...]]):
    """Plain tuples by psycopg's defaults, on a connection that handlers use as well."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


def own_session(dsn: str, settings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What psycopg's `connect` is given for a connection that no handler uses. It is in autocommit,
    and READ COMMITTED."""
    return {
        "conninfo": with_settings(dsn, READ_COMMITTED | dict(settings or {})),
        "autocommit": True,
        "context": _ADAPTERS,
    }


def with_settings(dsn: str, settings: Mapping[str, str]) -> str:
    """The DSN with settings of the session, besides those that it has."""
    given = str(conninfo_to_dict(dsn).get("options") or "")
    options = " ".join([given, *(f"-c {name}={_escaped(value)}" for name, value in settings.items())])
    return make_conninfo(dsn, options=options.strip())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
