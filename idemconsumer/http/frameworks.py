"""What an app tells of its routes, and its routers of what they have found. Each framework is known by what its objects
have, and is in no import.

Routers are believed only where they say that they have found none: what a framework tells of a request gets lost where
middleware hands on a copy of it, and what is taken for a router's answer is undone (H12).
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
"""What a request that runs under a key already has in its environment, as `covered` has made it."""

_CONVERTER: Final = re.compile(r"<(?:(\w+)(?:\(.*?\))?:)?(\w+)>", re.ASCII)  # in Flask


@dataclass(frozen=True, slots=True)
class MarkedRoute:
    """A route of an app: `POST /orders/{id}`, what it was marked with, if it was, and whether it asks for Tx.

    `types` has the expressions of its typed parameters, where the app has its own. `rule`: what the app's router says
    of a request for it, if that can be asked.
    """

    name: str
    route: Route | None
    tx: bool
    types: Mapping[str, str] = field(default_factory=dict)
    rule: object = None


def inwards(app: Any) -> list[Any]:
    """An app and what is inside of its middleware, to one that has routes. `app` may be a method of the same object."""
    around = list[Any]()
    while (app := getattr(app, "__self__", app)) is not None and not any(each is app for each in around):
        around.append(app)
        last = _is_flask(app) or hasattr(app, "routes")
        app = None if last else getattr(app, "wsgi_app", None) or getattr(app, "app", None)
    return around


def static_first(routes: list[MarkedRoute]) -> list[MarkedRoute]:
    """As frameworks choose that do not go by the order: a segment that is written out before a parameter."""
    return sorted(routes, key=lambda route: ["{" in segment for segment in route.name.split("/")])


# ------------------------------------------------------------------------------------- Starlette, FastAPI and Litestar
class AsgiRoutes:
    """Those of the first of these apps that has any, or of what is inside of its middleware."""

    def __init__(self, *apps: object) -> None:
        self._litestar = any(hasattr(_inside(app), "route_handler_method_map") for app in apps)
        walked = (list(_walk(getattr(_inside(app), "routes", None) or (), "", {})) for app in apps)
        found = next(filter(None, walked), [])
        self.all = static_first(found) if self._litestar else found

    def read(self, request: Request) -> tuple[object, tuple[str, ...]]:
        """What the router says of a request, which cannot be asked here, and the spellings of its path."""
        return None, alike(request.path) if self._litestar else (request.path,)


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
        if hasattr(route, "route_handlers"):  # Litestar
            for handler in route.route_handlers:
                yield from _marked(getattr(handler, "fn", None), getattr(handler, "http_methods", ()), path, None, {})
        elif inner := getattr(route, "routes", None) or getattr(_inside(getattr(route, "app", None)), "routes", None):
            if not _has_door(getattr(route, "app", None)):
                yield from _walk(inner, path, types_)  # a mount
        elif (endpoint := getattr(route, "endpoint", None)) is not None and hasattr(route, "methods"):
            # Of a class with a method for each, such as Starlette's HTTPEndpoint; an app of its own may have any.
            has = [each for each in EFFECTS if not isinstance(endpoint, type) or hasattr(endpoint, each.lower())]
            yield from _marked(endpoint, route.methods or has, path, getattr(route, "dependant", None), types_)


def _has_door(app: Any) -> bool:
    """Whether what is mounted has a front door of its own, which finds its marks itself."""
    while app is not None:  # to the innermost one, also where what is around it has routes too
        added = (getattr(each, "cls", None) for each in getattr(app, "user_middleware", ()))
        if any(hasattr(each, DOOR) for each in (app, *added)):
            return True
        app = getattr(app, "app", None)
    return False


def _types(route: Any) -> dict[str, str]:
    """The expressions of Starlette's convertors, which may be an app's own, by the type that its path names."""
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
    """Whether a function of GIVES_TX is among what FastAPI calls for an endpoint."""
    return dependant is not None and any(each.call in GIVES_TX or _asks(each) for each in dependant.dependencies)


# --------------------------------------------------------------------------------------------------------------- Flask
class FlaskRoutes:
    """Those of a Flask app, given as itself, as its `wsgi_app`, or inside of middleware. None of anything else."""

    def __init__(self, app: object) -> None:
        self._flask = next((each for each in inwards(app) if _is_flask(each)), None)
        self.all = [] if self._flask is None else static_first(list(_rules(self._flask)))

    def read(self, request: Request) -> tuple[object, tuple[str, ...]]:
        """Its rule, whose converters may refuse a value. And its path, as it came and as the rule has it: Flask may
        take no notice of slashes that are first or last."""
        if self._flask is not None:
            with suppress(Exception):  # the app will meet it too, and says it
                adapter = self._flask.create_url_adapter(self._flask.request_class(request.environment))
                rule = adapter.match(return_rule=True)[0]
                return rule, (request.path, *alike(_CONVERTER.sub(_placeholder, rule.rule)))
        return None, (request.path,)


AppRoutes: TypeAlias = AsgiRoutes | FlaskRoutes
"""`all` of them, in the order in which the router tries them."""


def _rules(flask: Any) -> Iterator[MarkedRoute]:
    for rule in flask.url_map.iter_rules():
        if rule.websocket:
            continue
        path = _CONVERTER.sub(_placeholder, rule.rule)
        view = flask.view_functions.get(rule.endpoint)
        kind = getattr(view, "view_class", None)  # which it was made of, and whose methods may be marked
        for method in sorted((rule.methods or set()) - SAFE):
            its = mark_of(view) or mark_of(getattr(kind, method.lower(), None))
            yield MarkedRoute(f"{method} {path}", its, tx=False, rule=rule)


def _is_flask(app: object) -> bool:
    return hasattr(app, "url_map") and hasattr(app, "view_functions")


def _placeholder(found: re.Match[str]) -> str:
    return f"{{{found[2]}:path}}" if found[1] == "path" else f"{{{found[2]}}}"


# ---------------------------------------------------------------------------------------------------- Django and Flask
def covered(app: object) -> set[str]:
    """For one run of an app, in which a Django app or a Flask app may be, whose routers leave no trace outside. Into it
    goes the name of what was asked, when a router says that it has found no endpoint."""
    for each in inwards(app):
        name = "resolve_request" if hasattr(each, "resolve_request") else "raise_routing_exception"
        if hasattr(each, name) and name not in vars(each):
            setattr(each, name, _noting(name, getattr(each, name)))
    return set()


def _noting(name: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Django and Flask call with their request, and which raises where there is no view. What answers before that,
    as middleware of theirs may, is no router, and may have had an effect."""

    def noted(request: Any) -> Any:
        try:
            return call(request)
        except Exception:
            given = getattr(request, "environ", None) or getattr(request, "scope", {})
            if (missed := given.get(COVERED)) is not None:
                missed.add(name)
            raise

    return noted
