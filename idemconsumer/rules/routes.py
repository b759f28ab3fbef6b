"""Which route a request is for, from patterns such as `POST /orders/{id}`: no framework is asked."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

_METHOD: Final = re.compile(r"[A-Z]+", re.ASCII)
_SEGMENT: Final = re.compile(r"\{(\w*)(?::(\w+))?\}", re.ASCII)
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})  # they have no effect to repeat
_EFFECTS: Final = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Of one method and a path. `{x}` stands for one segment, and `{x:path}` for all that follows."""

    method: str
    path: str
    expression: re.Pattern[str]

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def matches(self, method: str, path: str) -> bool:
        return method == self.method and self.expression.fullmatch(path) is not None


def pattern(text: str) -> Pattern:
    """Raises ValueError, saying what to write, for what names no route with an effect."""
    method, _, path = text.partition(" ")
    if not _METHOD.fullmatch(method) or not path.startswith("/"):
        raise ValueError(f'{text!r} names no route; write a method and a path, such as "POST /orders/{{id}}"')
    if method in SAFE:
        raise ValueError(f"{text!r}: {method} has no effect that a repetition could double; leave it out")
    if method not in _EFFECTS and (near := difflib.get_close_matches(method, _EFFECTS, 1)):
        raise ValueError(f"{text!r}: no request has the method {method}; write {near[0]} {path}")
    return Pattern(method, path, re.compile(_expression(path), re.DOTALL))


def _expression(path: str) -> str:
    parts, at = [], 0
    for found in _SEGMENT.finditer(path):
        parts += [re.escape(path[at : found.start()]), ".*" if found[2] == "path" else "[^/]+"]
        at = found.end()
    # Starlette's own expressions end with `$`, which a newline may follow.
    return "".join([*parts, re.escape(path[at:]), r"\n?"])
