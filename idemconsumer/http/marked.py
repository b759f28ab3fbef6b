"""Which routes an app has marked itself: by `@idempotency.route(…)`, or by an endpoint that asks for Tx.

Starlette, FastAPI and Litestar are known by what their routes have, and by their files in no import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from idemconsumer.http.current import GIVES_TX
from idemconsumer.http.policy import Route
from idemconsumer.rules.routes import SAFE

MARK: Final = "__idempotent_route__"
_EFFECTS: Final = ("DELETE", "PATCH", "POST", "PUT")


@dataclass(frozen=True, slots=True)
class Marked:
    """A route of an app: `POST /orders/{id}`, what it was marked with, if it was, and whether it asks for Tx."""

    name: str
    route: Route | None
    tx: bool


def mark(endpoint: Callable[..., Any], route: Route) -> None:
    """`marked_routes` finds it by this."""
    setattr(getattr(endpoint, "fn", endpoint), MARK, route)  # a handler of Litestar has its function


def marked_routes(app: object) -> list[Marked]:
    """Those of an app, or of what is inside of its middleware. None of an app that has no routes."""
    while not hasattr(app, "routes") and hasattr(app, "app"):
        app = app.app
    found = list(_walk(getattr(app, "routes", None) or (), ""))
    return static_first(found) if hasattr(app, "route_handler_method_map") else found  # Litestar, in whatever order


def static_first(routes: list[Marked]) -> list[Marked]:
    """As frameworks choose that do not go by the order: a segment that is written out before a parameter."""
    return sorted(routes, key=lambda route: ["{" in segment for segment in route.name.split("/")])


def _walk(routes: Iterable[Any], prefix: str) -> Iterator[Marked]:
    for each in routes:
        if hasattr(each, "effective_route_contexts"):  # an included router of FastAPI
            yield from _walk(each.effective_route_contexts(), prefix)
            continue
        route = getattr(each, "starlette_route", None) or each
        path = prefix + (getattr(route, "path", None) or "")
        if hasattr(route, "route_handlers"):  # Litestar
            for handler in route.route_handlers:
                yield from _endpoint(getattr(handler, "fn", None), getattr(handler, "http_methods", ()), path, None)
        elif inner := getattr(route, "routes", None):  # a mount
            yield from _walk(inner, path)
        elif (endpoint := getattr(route, "endpoint", None)) is not None:
            methods = getattr(route, "methods", None) or _methods(endpoint)
            yield from _endpoint(endpoint, methods, path, getattr(route, "dependant", None))


def _methods(endpoint: Any) -> list[str]:
    """Of a class with a method for each, such as Starlette's HTTPEndpoint; an app of its own may have any."""
    return [method for method in _EFFECTS if not isinstance(endpoint, type) or hasattr(endpoint, method.lower())]


def _endpoint(endpoint: Any, methods: Iterable[str], path: str, dependant: Any) -> Iterator[Marked]:
    for method in sorted(str(getattr(method, "value", method)) for method in methods):
        if method not in SAFE:
            its = getattr(endpoint, method.lower(), None) if isinstance(endpoint, type) else None
            route = getattr(its, MARK, None) or getattr(endpoint, MARK, None)
            yield Marked(f"{method} {path or '/'}", route, _asks(dependant))


def _asks(dependant: Any) -> bool:
    """Whether a function of GIVES_TX is among what FastAPI calls for an endpoint."""
    if dependant is None:
        return False
    return any(each.call in GIVES_TX or _asks(each) for each in dependant.dependencies)
