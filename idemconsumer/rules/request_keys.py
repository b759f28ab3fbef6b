"""The stored key of an HTTP request: one derivation for the door that serves it and for whoever asks about it (H17)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import unquote

from idemconsumer.message import keys
from idemconsumer.rules.routes import alike, pattern, types

UNNAMED: Final = "*"
"""The path in the name of what stands for all routes that nobody has written down, such as `POST *`."""


def is_route(name: str) -> bool:
    """Whether what a scope is named by is a route, and no handler."""
    method, _, path = name.partition(" ")
    return method.isalpha() and method.isupper() and (path == UNNAMED or path.startswith("/"))


def is_unnamed(route: str) -> bool:
    """Whether it stands for all routes of a method that nobody has written down."""
    return is_route(route) and route.partition(" ")[2] == UNNAMED


def request_key(app: str, tenant: str | None, route: str, key: str, *, root: str, path: str) -> bytes:
    """`route` is the name of its policy, `root` where the app is mounted, and `path` what follows that. H1: the paths
    of routes that nobody has written down are many, so each is part of the key, not of the scope. So is `root`."""
    place = root + path if route.endswith(f" {UNNAMED}") else root
    return keys.digest(app, tenant, route, keys.joined([place, key]) if place else key)


def asked_keys(scopes: Iterable[str], asked: str, key: str, tenant: str | None = None) -> list[bytes]:
    """Under which the text `key` may be stored in these scopes. `asked` is the name of a handler or a route, or a
    method and a path as a client has sent them: the path may be encoded, and have a query."""
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
    """Where the app of a route may be mounted, if it is one of this request, and the path there."""
    method, _, path = asked.partition(" ")
    of, _, its = route.partition(" ")
    if of != method or not path.startswith("/"):
        return
    if its == UNNAMED:
        yield "", path
        return
    try:
        wanted = pattern(route, dict.fromkeys(types(its).values(), ".+"))  # whatever an app's own types may be
    except ValueError:
        return
    for at in (at for at, character in enumerate(path) if character == "/"):
        if wanted.matches(method, *alike(path[at:])):
            yield path[:at], path[at:]
