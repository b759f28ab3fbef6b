"""Which routes a Flask app has marked by `@idempotency.route(…)`. Flask is known by what its app has, in no import."""

from __future__ import annotations

import re
from typing import Any, Final

from idemconsumer.http.marked import MARK, Marked, static_first
from idemconsumer.rules.routes import SAFE

_CONVERTER: Final = re.compile(r"<(?:(\w+)(?:\([^)]*\))?:)?(\w+)>", re.ASCII)


def marked_wsgi_routes(app: object) -> list[Marked]:
    """Those of a Flask app, given as itself or as its `wsgi_app`. None of anything else."""
    flask: Any = getattr(app, "__self__", app)
    if not hasattr(flask, "url_map") or not hasattr(flask, "view_functions"):
        return []
    found = []
    for rule in flask.url_map.iter_rules():
        route = getattr(flask.view_functions.get(rule.endpoint), MARK, None)
        path = _CONVERTER.sub(_placeholder, rule.rule)
        found += [Marked(f"{method} {path}", route, tx=False) for method in sorted((rule.methods or set()) - SAFE)]
    return static_first(found)


def _placeholder(found: re.Match[str]) -> str:
    return f"{{{found[2]}:path}}" if found[1] == "path" else f"{{{found[2]}}}"
