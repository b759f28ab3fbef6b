"""The names under which a handler is stored (L68)."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from idemconsumer.message import keys
from idemconsumer.message.sources import own_source, retry_source

Former: TypeAlias = tuple[str | None, str]  # app and handler; no app: that of the handler itself
INSTEAD: Final = (
    'write the name that the handler had, formerly="book_ride", with its app if that was another one, '
    'formerly="shop/book_ride", or several in a tuple'
)


class BadName(ValueError):
    """A text that names no former handler: what is wrong with it."""


class StoredName(NamedTuple):
    """App and handler, as they are in keys, in scopes, in the names of queues and in the rows of sagas."""

    app: str
    handler: str

    def __str__(self) -> str:
        return f"{self.app}/{self.handler}"

    def digest(self, tenant: str | None, key: str) -> bytes:
        return keys.digest(self.app, tenant, self.handler, key)

    def scope(self, tenant: str | None = None) -> str:
        return keys.scope_name(self.app, tenant, self.handler)

    @property
    def own_source(self) -> str:
        return own_source(self.app, self.handler)

    @property
    def retry_source(self) -> str:
        return retry_source(self.app, self.handler)


def parse_former(given: object) -> Former:
    """Of `handler` or `app/handler`. The last slash ends the app's name, as in `sagas move`. Raises BadName."""
    if not isinstance(given, str) or not given.isprintable() or given != given.strip():
        raise BadName(f"{given!r} is not a printable string")
    app, slash, handler = given.rpartition("/")
    if not handler or (slash and not app):
        raise BadName(f"{given!r} has no {'handler' if app else 'name'}")
    if handler.startswith("~") or app.startswith("~"):
        raise BadName(f'{given!r}: names that start with "~" are reserved')
    return app or None, handler


def stored_names(app: str, name: str, formerly: tuple[Former, ...]) -> tuple[StoredName, ...]:
    """All names of a handler. What is new is stored under the first one, its identity."""
    names = [StoredName(of or app, former) for of, former in formerly]
    return tuple(dict.fromkeys([*names, StoredName(app, name)]))
