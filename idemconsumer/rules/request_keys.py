"""The stored key of an HTTP request: one derivation for the front door and for each query about the request (H17)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from idemconsumer.message import keys
from idemconsumer.rules.routes import alike, pattern, types

UNNAMED: Final = "*"
"""The path of the name that stands for all undeclared routes of a method, such as `POST *`."""


def is_route(name: str) -> bool:
    """Whether a scope's name is that of a route, not of a handler."""
    method, _, path = name.partition(" ")
    return method.isalpha() and method.isupper() and (path == UNNAMED or path.startswith("/"))


def is_unnamed(route: str) -> bool:
    """Whether the name stands for all undeclared routes of a method."""
    return is_route(route) and route.partition(" ")[2] == UNNAMED


def request_key(app: str, tenant: str | None, route: str, key: str, *, root: str, path: str) -> bytes:
    """`route`: the name of its policy. `root`: where the app is mounted. `path`: the rest. H1: undeclared routes can
    have any number of paths, so their path is part of the key and not of the scope. So is `root`."""
    place = root + path if route.endswith(f" {UNNAMED}") else root
    return keys.digest(app, tenant, route, keys.joined([place, key]) if place else key)


def asked_keys(scopes: Iterable[str], asked: str, key: str, tenant: str | None = None) -> list[bytes]:
    """The stored keys that the text `key` may have in these scopes. `asked`: the name of a handler or a route, or a
    method and a path as a client sends them: the path may be encoded and have a query string."""
    method, _, path = asked.partition(" ")
    requests = (asked, f"{method} {unquote(path.partition('?')[0])}")
    found = list[bytes]()
    for app, of, name in map(keys.parts_of, scopes):
        if tenant is None or of == tenant:
            if name == asked:
                found.append(keys.digest(app, of, name, key))
            places = (place for request in requests for place in _places(name, request))
            found += [request_key(app, of, name, key, root=root, path=path) for root, path in places]
    return list(dict.fromkeys(found))


def _places(route: str, asked: str) -> Iterator[tuple[str, str]]:
    """If the request is one of this route: where the route's app may be mounted, and the path below that."""
    method, _, path = asked.partition(" ")
    of, _, its = route.partition(" ")
    if of != method or not path.startswith("/"):
        return
    if its == UNNAMED:
        yield "", path
        return
    try:
        wanted = pattern(route, dict.fromkeys(types(its).values(), ".+"))  # an app's own types may match anything
    except ValueError:
        return
    for at in (at for at, character in enumerate(path) if character == "/"):
        if wanted.matches(method, *alike(path[at:])):
            yield path[:at], path[at:]
