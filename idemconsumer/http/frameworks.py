"""The routes of an app, and whether its router found one for a request. Frameworks are recognised by the attributes of
their objects; none is imported.

A router's report counts only if it says that no route was found. Reports can get lost where middleware passes on a copy
of the request, and a response that is taken for the router's own is undone (H12).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from idemconsumer.http.current import GIVES_TX
from idemconsumer.http.exchanged import Request
from idemconsumer.http.marks import EFFECTS, mark_of
from idemconsumer.http.policy import Route
from idemconsumer.rules.routes import SAFE, alike, types

DOOR: Final = "__idempotent_door__"
COVERED: Final = "idemconsumer.covered"
"""Key in the environment of a request that runs under a key. The value is the set that `covered` returned."""

_CONVERTER: Final = re.compile(r"<(?:(\w+)(?:\(.*?\))?:)?(\w+)>", re.ASCII)  # a converter in a Flask rule


@dataclass(frozen=True, slots=True)
class MarkedRoute:
    """A route of an app: its name `POST /orders/{id}`, the Route that it was marked with, if any, and whether it
    requests Tx.

    `types`: the regular expressions of its typed parameters, if the app defines its own. `rule`: what the app's router
    returns for a request of this route, if the router can be called.
    """

    name: str
    route: Route | None
    tx: bool
    types: Mapping[str, str] = field(default_factory=dict)
    rule: object = None


def inwards(app: Any) -> list[Any]:
    """An app and the apps inside its middleware, down to one that has routes. `app` may be a bound method of such an
    object."""
    around = list[Any]()
    while (app := getattr(app, "__self__", app)) is not None and not any(each is app for each in around):
        around.append(app)
        last = _is_flask(app) or hasattr(app, "routes")
        app = None if last else getattr(app, "wsgi_app", None) or getattr(app, "app", None)
    return around


def static_first(routes: list[MarkedRoute]) -> list[MarkedRoute]:
    """The order in which some frameworks match, whatever the order of definition: a literal segment before a
    parameter."""
    return sorted(routes, key=lambda route: ["{" in segment for segment in route.name.split("/")])


# ------------------------------------------------------------------------------------- Starlette, FastAPI and Litestar
class AsgiRoutes:
    """The routes of the first of these apps that has any, on its own or inside its middleware."""

    def __init__(self, *apps: object) -> None:
        self._litestar = any(hasattr(_inside(app), "route_handler_method_map") for app in apps)
        walked = (list(_walk(getattr(_inside(app), "routes", None) or (), "", {})) for app in apps)
        found = next(filter(None, walked), [])
        self.all = static_first(found) if self._litestar else found

    def read(self, request: Request) -> tuple[object, tuple[str, ...]]:
        """No rule, since this router cannot be called here; and the spellings of the request's path."""
        return None, alike(request.path) if self._litestar else (request.path,)


def routed(scope: Mapping[str, Any]) -> bool:
    """Whether the request that was given this scope reached an endpoint.

    False only if the app's router reports that it found none. True for an unknown framework, if no router ran, and for
    an app that is mounted behind middleware, which may pass a copy of the scope to its router.
    """
    if "litestar_app" in scope:
        return "route_handler" in scope
    if "router" not in scope:
        return True
    endpoint = scope.get("endpoint")  # in Starlette; a mounted app has a router of its own, which may have found none
    mounted = hasattr(endpoint, "routes") and not getattr(endpoint, "user_middleware", ())
    return endpoint is not None and not mounted


def _inside(app: object) -> Any:
    return next(reversed(inwards(app)), None)


def _walk(routes: Iterable[Any], prefix: str, known: Mapping[str, str]) -> Iterator[MarkedRoute]:
    for each in routes:
        if hasattr(each, "effective_route_contexts"):  # an included router of FastAPI
            yield from _walk(each.effective_route_contexts(), prefix, known)
            continue
        route = getattr(each, "starlette_route", None) or each
        path = prefix + (getattr(route, "path", None) or "")
        types_ = {**known, **_types(route)}
        if hasattr(route, "route_handlers"):  # a route of Litestar
            for handler in route.route_handlers:
                yield from _marked(getattr(handler, "fn", None), getattr(handler, "http_methods", ()), path, None, {})
        elif inner := getattr(route, "routes", None) or getattr(_inside(getattr(route, "app", None)), "routes", None):
            if not _has_door(getattr(route, "app", None)):
                yield from _walk(inner, path, types_)  # a mount
        elif (endpoint := getattr(route, "endpoint", None)) is not None and hasattr(route, "methods"):
            # A class such as Starlette's HTTPEndpoint has a method for each HTTP method; an ASGI app as endpoint may
            # accept any.
            has = [each for each in EFFECTS if not isinstance(endpoint, type) or hasattr(endpoint, each.lower())]
            yield from _marked(endpoint, route.methods or has, path, getattr(route, "dependant", None), types_)


def _has_door(app: Any) -> bool:
    """Whether the mounted app has a front door of its own, which reads the marks itself."""
    while app is not None:  # down to the innermost app, even if an outer one has routes too
        added = (getattr(each, "cls", None) for each in getattr(app, "user_middleware", ()))
        if any(hasattr(each, DOOR) for each in (app, *added)):
            return True
        app = getattr(app, "app", None)
    return False


def _types(route: Any) -> dict[str, str]:
    """The regular expressions of Starlette's convertors, some defined by the app, by the type name in the path."""
    convertors, path = getattr(route, "param_convertors", None) or {}, getattr(route, "path", None) or ""
    return {type_: convertors[name].regex for name, type_ in types(path).items() if name in convertors}


def _marked(
    endpoint: Any, methods: Iterable[Any], path: str, dependant: Any, types_: Mapping[str, str]
) -> Iterator[MarkedRoute]:
    for method in sorted(str(getattr(method, "value", method)) for method in methods):
        if method not in SAFE:
            its = getattr(endpoint, method.lower(), None) if isinstance(endpoint, type) else endpoint
            yield MarkedRoute(f"{method} {path or '/'}", mark_of(its), _asks(dependant), types_)


def _asks(dependant: Any) -> bool:
    """Whether the functions that FastAPI calls for an endpoint include one of GIVES_TX."""
    return dependant is not None and any(each.call in GIVES_TX or _asks(each) for each in dependant.dependencies)


# --------------------------------------------------------------------------------------------------------------- Flask
class FlaskRoutes:
    """The routes of a Flask app, given as itself, as its `wsgi_app`, or inside middleware. No routes for any other
    app."""

    def __init__(self, app: object) -> None:
        self._flask = next((each for each in inwards(app) if _is_flask(each)), None)
        self.all = [] if self._flask is None else static_first(list(_rules(self._flask)))

    def read(self, request: Request) -> tuple[object, tuple[str, ...]]:
        """The rule that matches the request, whose converters may refuse a value; and the spellings of the path: as it
        came, and as the rule has it. Flask may ignore leading and trailing slashes."""
        if self._flask is not None:
            with suppress(Exception):  # the app will meet the same error and report it
                adapter = self._flask.create_url_adapter(self._flask.request_class(request.environment))
                rule = adapter.match(return_rule=True)[0]
                return rule, (request.path, *alike(_CONVERTER.sub(_placeholder, rule.rule)))
        return None, (request.path,)


AppRoutes: TypeAlias = AsgiRoutes | FlaskRoutes
"""`all`: the routes in the order in which the router tries them."""


def _rules(flask: Any) -> Iterator[MarkedRoute]:
    for rule in flask.url_map.iter_rules():
        if rule.websocket:
            continue
        path = _CONVERTER.sub(_placeholder, rule.rule)
        view = flask.view_functions.get(rule.endpoint)
        kind = getattr(view, "view_class", None)  # the class of the view, whose methods may be marked
        for method in sorted((rule.methods or set()) - SAFE):
            its = mark_of(view) or mark_of(getattr(kind, method.lower(), None))
            yield MarkedRoute(f"{method} {path}", its, tx=False, rule=rule)


def _is_flask(app: object) -> bool:
    return hasattr(app, "url_map") and hasattr(app, "view_functions")


def _placeholder(found: re.Match[str]) -> str:
    return f"{{{found[2]}:path}}" if found[1] == "path" else f"{{{found[2]}}}"


# ---------------------------------------------------------------------------------------------------- Django and Flask
def covered(app: object) -> set[str]:
    """A set for one run of an app. If the app is, or contains, a Django or Flask app, whose routers leave no trace
    outside, the set receives a name when that router reports that it found no endpoint."""
    for each in inwards(app):
        name = "resolve_request" if hasattr(each, "resolve_request") else "raise_routing_exception"
        if hasattr(each, name) and name not in vars(each):
            setattr(each, name, _noting(name, getattr(each, name)))
    return set()


def _noting(name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the function by which Django or Flask looks up the view, and which raises if there is none. Middleware that
    answers before the lookup is not noted: it is no router, and may have had an effect."""

    def noted(request: Any) -> Any:
        try:
            return call(request)
        except Exception:
            given = getattr(request, "environ", None) or getattr(request, "scope", {})
            if (missed := given.get(COVERED)) is not None:
                missed.add(name)
            raise

    return noted
