"""What a request has in its environment that runs under a key already; and whether routers have found its endpoint.

Routers are believed only where they say that they have found none: what a framework tells of a request gets lost where
middleware hands on a copy of it, and what is taken for a router's answer is undone (H12).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

COVERED: Final = "idemconsumer.covered"


class Covered:
    """One run. `missed`: a router says that it has found no endpoint."""

    __slots__ = ("missed",)

    def __init__(self) -> None:
        self.missed = False


def covered(app: object) -> Covered:
    """For one run of an app, in which a Django app or a Flask app may be, whose routers leave no trace outside."""
    for each in inwards(app):
        name = "resolve_request" if hasattr(each, "resolve_request") else "raise_routing_exception"
        if hasattr(each, name) and name not in vars(each):
            setattr(each, name, _noting(getattr(each, name)))
    return Covered()


def inwards(app: Any) -> list[Any]:
    """An app and what is inside of its middleware, to one that has routes. `app` may be a method of the same object."""
    around = list[Any]()
    while (app := getattr(app, "__self__", app)) is not None and not any(each is app for each in around):
        around.append(app)
        last = is_flask(app) or hasattr(app, "routes")
        app = None if last else getattr(app, "wsgi_app", None) or getattr(app, "app", None)
    return around


def is_flask(app: Any) -> bool:
    return hasattr(app, "url_map") and hasattr(app, "view_functions")


def _noting(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Django and Flask call with their request, and which raises where there is no view. What answers before that,
    as middleware of theirs may, is no router, and may have had an effect."""

    def noted(request: Any) -> Any:
        try:
            return call(request)
        except Exception:
            given = getattr(request, "environ", None) or getattr(request, "scope", {})
            if (run := given.get(COVERED)) is not None:
                run.missed = True
            raise

    return noted
