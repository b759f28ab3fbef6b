"""Which routes a Flask app has marked by `@idempotency.route(…)`. Flask is known by what its app has, in no import."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from idemconsumer.http.covered import inwards, is_flask
from idemconsumer.http.marked import Marked, mark_of, static_first
from idemconsumer.rules.routes import SAFE, alike

_CONVERTER: Final = re.compile(r"<(?:(\w+)(?:\(.*?\))?:)?(\w+)>", re.ASCII)


class FlaskRoutes:
    """Those of a Flask app, given as itself, as its `wsgi_app`, or inside of middleware. None of anything else."""

    def __init__(self, app: object) -> None:
        self._flask = next((each for each in inwards(app) if is_flask(each)), None)

    def marked(self) -> list[Marked]:
        if self._flask is None:
            return []
        found = []
        for rule in self._flask.url_map.iter_rules():
            if rule.websocket:
                continue
            path = _CONVERTER.sub(_placeholder, rule.rule)
            view = self._flask.view_functions.get(rule.endpoint)
            methods = sorted((rule.methods or set()) - SAFE)
            found += [Marked(f"{each} {path}", _mark(view, each), tx=False, rule=rule) for each in methods]
        return static_first(found)

    def rule(self, environ: Mapping[str, Any]) -> Any:
        """Which one its router takes, whose converters may refuse a value. None, if it is none."""
        if self._flask is None:
            return None
        try:
            request = self._flask.request_class(environ)
            return self._flask.create_url_adapter(request).match(return_rule=True)[0]
        except Exception:  # noqa: BLE001 - the app will meet it too, and says it
            return None

    def spellings(self, path: str, rule: Any) -> tuple[str, ...]:
        """Of a path, as it came and as its rule has it: Flask may take no notice of slashes that are first or last."""
        return (path,) if rule is None else (path, *alike(_CONVERTER.sub(_placeholder, rule.rule)))


def _mark(view: Any, method: str) -> Any:
    """Of the view, or of a method of the class that it was made of."""
    return mark_of(view) or mark_of(getattr(getattr(view, "view_class", None), method.lower(), None))


def _placeholder(found: re.Match[str]) -> str:
    return f"{{{found[2]}:path}}" if found[1] == "path" else f"{{{found[2]}}}"
