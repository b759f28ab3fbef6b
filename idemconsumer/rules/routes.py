"""Which route a request is for, from patterns such as `POST /orders/{id}`, independent of any framework."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_METHOD: Final = re.compile(r"[A-Z]+", re.ASCII)
_SEGMENT: Final = re.compile(r"\{(\w*)(?::(\w+))?\}", re.ASCII)
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})  # they have no effect that could be repeated
_EFFECTS: Final = ("POST", "PUT", "PATCH", "DELETE")
# Each stands for one segment, in whatever framework.
_TYPES: Final = frozenset(
    {"str", "string", "int", "float", "decimal", "uuid", "slug", "date", "datetime", "time", "timedelta"}
)
_FOREIGN: Final = re.compile(r"[<>{}^\\?]|\$$|/\(|/:|/\*(?:/|$)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A method and a path. `{x}` and `{x:int}` stand for one segment, and `{x:path}` for the whole rest."""

    method: str
    path: str
    expression: re.Pattern[str]

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def untyped(self) -> str:
        """The path as OpenAPI writes it."""
        return _SEGMENT.sub(r"{\1}", self.path)

    def matches(self, method: str, *spellings: str) -> bool:
        """Whether the method fits, and any of the spellings of the path."""
        return method == self.method and any(map(self.expression.fullmatch, spellings))


def alike(path: str) -> tuple[str, ...]:
    """The spellings of a path, for an app that ignores doubled and trailing slashes."""
    bare = re.sub("/+", "/", path).rstrip("/")
    return path, bare or "/", f"{bare}/"


def pattern(text: str, types: Mapping[str, str] | None = None) -> Pattern:
    """Parse a route. `types`: expressions for typed parameters, if known; otherwise `{x:int}` is the same as `{x}`.
    Raises ValueError, which says what to write, if the text does not name a route with an effect."""
    method, _, path = text.partition(" ")
    if not _METHOD.fullmatch(method) or not path.startswith("/"):
        raise ValueError(f'{text!r} names no route; write a method and a path, such as "POST /orders/{{id}}"')
    if method in SAFE:
        raise ValueError(f"{text!r}: {method} has no effect that a repetition could double; leave it out")
    if method not in _EFFECTS and (near := difflib.get_close_matches(method, _EFFECTS, 1)):
        raise ValueError(f"{text!r}: no request has the method {method}; write {near[0]} {path}")
    if foreign := _FOREIGN.search(_SEGMENT.sub("", path)):
        raise ValueError(
            f"{text!r}: {foreign[0]!r} has no meaning in a route, so no request would match it; write {{id}} "
            "for one segment, or {rest:path} for all that follows"
        )
    return Pattern(method, path, re.compile(_expression(text, path, types or {}), re.DOTALL))


def types(path: str) -> dict[str, str]:
    """The names of a path's typed parameters, and their types."""
    return {found[1]: found[2] for found in _SEGMENT.finditer(path) if found[2]}


def _expression(text: str, path: str, types: Mapping[str, str]) -> str:
    parts, at = [], 0
    for found in _SEGMENT.finditer(path):
        parts += [re.escape(path[at : found.start()]), _segment(text, found[2], types)]
        at = found.end()
    # Starlette's own expressions end with `$`, which a newline may follow.
    return "".join([*parts, re.escape(path[at:]), r"\n?"])


def _segment(text: str, type_: str | None, types: Mapping[str, str]) -> str:
    if type_ is None:
        return "[^/]+"
    if (known := types.get(type_)) is not None:
        return f"(?:{known})"
    if type_ == "path":
        return ".*"
    if type_ in _TYPES:
        return "[^/]+"
    raise ValueError(f"{text!r}: the type {type_} is unknown; write {{x}} for one segment, or {{x:path}}")
