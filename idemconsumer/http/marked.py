"""Which routes an app has marked itself: by `@idempotency.route(…)`, or by an endpoint that asks for Tx.

Starlette, FastAPI and Litestar are known by what their routes have, and by their files in no import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.http.current import GIVES_TX
from idemconsumer.http.guarding import guarded
from idemconsumer.http.policy import Route
from idemconsumer.rules.routes import SAFE, Pattern, pattern, types

MARK: Final = "__idempotent_route__"
DOOR: Final = "__idempotent_door__"
_EFFECTS: Final = ("DELETE", "PATCH", "POST", "PUT")


@dataclass(frozen=True, slots=True)
class Marked:
    """A route of an app: `POST /orders/{id}`, what it was marked with, if it was, and whether it asks for Tx.

    `types` has the expressions of its typed parameters, where the app has its own. `rule`: what the app's router says
    of a request for it, if that can be asked.
    """

    name: str
    route: Route | None
    tx: bool
    types: Mapping[str, str] = field(default_factory=dict)
    rule: object = None

    @property
    def pattern(self) -> Pattern:
        """Raises ValueError, as `rules.routes.pattern`."""
        return pattern(self.name, self.types)


def mark(endpoint: Any, route: Route) -> Any:
    """What is to be the endpoint instead: the same, guarded, and `marked_routes` finds the mark. Raises
    ConfigurationError."""
    if inspect.isclass(endpoint):
        its = [name for name in map(str.lower, _EFFECTS) if callable(getattr(endpoint, name, None))]
        if not its:
            raise _unmarkable(endpoint)
        for name in its:
            if mark_of(method := getattr(endpoint, name)) is None:
                setattr(endpoint, name, mark(method, route))
        return endpoint
    if hasattr(endpoint, "_fn"):  # a handler of Litestar has its function
        endpoint._fn = mark(endpoint.fn, route)
        return endpoint
    if not (inspect.isroutine(endpoint) or isinstance(endpoint, functools.partial)):
        raise _unmarkable(endpoint)
    made = guarded(endpoint, route)
    setattr(made, MARK, route)
    with suppress(AttributeError):  # a bound method takes none
        setattr(endpoint, MARK, route)  # an app may have been given it before it was marked
    return made


def _unmarkable(endpoint: object) -> ConfigurationError:
    return ConfigurationError(
        f"@idempotency.route: {endpoint!r} is neither a function nor a class with post, put, patch or delete; write "
        "routes={'POST /orders': Route(…)}"
    )


def mark_of(endpoint: Any) -> Route | None:
    """Also of a function that another one has wrapped."""
    while endpoint is not None:
        if (route := getattr(endpoint, MARK, None)) is not None:
            return route if isinstance(route, Route) else None
        endpoint = getattr(endpoint, "__wrapped__", None) or getattr(endpoint, "func", None)
    return None


def marked_routes(app: object) -> list[Marked]:
    """Those of an app, or of what is inside of its middleware. None of an app that has no routes."""
    found = list(_walk(getattr(_inside(app), "routes", None) or (), "", {}))
    return static_first(found) if is_litestar(app) else found  # Litestar, in whatever order


def is_litestar(app: object) -> bool:
    """Or what is inside of its middleware is."""
    return hasattr(_inside(app), "route_handler_method_map")


def routed(scope: Mapping[str, Any]) -> bool:
    """False: the router of an app says that it has found no endpoint for the request that it was given with this scope.
    True of a framework that nobody knows, where no router was asked, and of an app that is mounted behind middleware,
    which may give its router a copy of the scope."""
    if "litestar_app" in scope:
        return "route_handler" in scope
    if "router" not in scope:
        return True
    endpoint = scope.get("endpoint")  # Starlette's: what is mounted has a router of its own, which may have found none
    mounted = hasattr(endpoint, "routes") and not getattr(endpoint, "user_middleware", ())
    return endpoint is not None and not mounted


def static_first(routes: list[Marked]) -> list[Marked]:
    """As frameworks choose that do not go by the order: a segment that is written out before a parameter."""
    return sorted(routes, key=lambda route: ["{" in segment for segment in route.name.split("/")])


def _inside(app: Any) -> Any:
    while not hasattr(app, "routes") and hasattr(app, "app"):
        app = app.app
    return app


def _walk(routes: Iterable[Any], prefix: str, known: Mapping[str, str]) -> Iterator[Marked]:
    for each in routes:
        if hasattr(each, "effective_route_contexts"):  # an included router of FastAPI
            yield from _walk(each.effective_route_contexts(), prefix, known)
            continue
        route = getattr(each, "starlette_route", None) or each
        path = prefix + (getattr(route, "path", None) or "")
        types_ = {**known, **_types(route)}
        if hasattr(route, "route_handlers"):  # Litestar
            for handler in route.route_handlers:
                methods = getattr(handler, "http_methods", ())
                for name, its, _ in _endpoint(getattr(handler, "fn", None), methods, path, None):
                    yield Marked(name, its, tx=False)
        elif inner := getattr(route, "routes", None) or getattr(_inside(getattr(route, "app", None)), "routes", None):
            if not _has_door(getattr(route, "app", None)):
                yield from _walk(inner, path, types_)  # a mount
        elif (endpoint := getattr(route, "endpoint", None)) is not None and hasattr(route, "methods"):
            methods, dependant = route.methods or _methods(endpoint), getattr(route, "dependant", None)
            for found in _endpoint(endpoint, methods, path, dependant):
                yield Marked(*found, types_)


def _has_door(app: Any) -> bool:
    """Whether what is mounted has a front door of its own, which finds its marks itself."""
    while app is not None:
        added = (getattr(each, "cls", None) for each in getattr(app, "user_middleware", ()))
        if any(hasattr(each, DOOR) for each in (app, *added)):
            return True
        app = getattr(app, "app", None)
    return False


def _types(route: Any) -> dict[str, str]:
    """The expressions of Starlette's convertors, which may be an app's own, by the type that its path names."""
    convertors, path = getattr(route, "param_convertors", None) or {}, getattr(route, "path", None) or ""
    return {type_: convertors[name].regex for name, type_ in types(path).items() if name in convertors}


def _methods(endpoint: Any) -> list[str]:
    """Of a class with a method for each, such as Starlette's HTTPEndpoint; an app of its own may have any."""
    return [method for method in _EFFECTS if not isinstance(endpoint, type) or hasattr(endpoint, method.lower())]


def _endpoint(
    endpoint: Any, methods: Iterable[str], path: str, dependant: Any
) -> Iterator[tuple[str, Route | None, bool]]:
    for method in sorted(str(getattr(method, "value", method)) for method in methods):
        if method not in SAFE:
            its = getattr(endpoint, method.lower(), None) if isinstance(endpoint, type) else endpoint
            yield f"{method} {path or '/'}", mark_of(its), _asks(dependant)


def _asks(dependant: Any) -> bool:
    """Whether a function of GIVES_TX is among what FastAPI calls for an endpoint."""
    if dependant is None:
        return False
    return any(each.call in GIVES_TX or _asks(each) for each in dependant.dependencies)
