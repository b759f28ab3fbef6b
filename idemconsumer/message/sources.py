"""Sources and destinations, written `scheme:name`."""

from __future__ import annotations

import difflib
from typing import Final

SCHEMES: Final = ("kafka", "rabbitmq", "sqs", "postgres", "memory")


class BadSource(ValueError):
    """A text that names no source: what is wrong with it, and what to write instead."""

    def __init__(self, problem: str, instead: str) -> None:
        super().__init__(f"{problem}; {instead}")
        self.problem = problem
        self.instead = instead


def split_source(source: object) -> tuple[str, str]:
    """The scheme and the name of `scheme:name`. Raises BadSource."""
    if not isinstance(source, str):
        raise BadSource(f"source {source!r} is not a string", _write(""))
    scheme, colon, name = source.partition(":")
    if scheme not in SCHEMES or not colon:
        near = difflib.get_close_matches(scheme, SCHEMES, n=1)
        raise BadSource(f"{source!r} has no known scheme", _write(near[0] if near else ""))
    if not name or not name.isprintable() or name != name.strip():
        raise BadSource(f"{source!r} has no valid name", _write(scheme))
    if scheme == "sqs" and ("/" in name or ":" in name):
        raise BadSource(f"{source!r} is not a queue name", "write the queue's name, e.g. sqs:orders")
    if name.startswith("~"):
        raise BadSource(f'{source!r}: names that start with "~" are reserved', "choose another")
    return scheme, name


def _write(scheme: str) -> str:
    return f'write "{scheme}:name"' if scheme else "write one of " + ", ".join(f'"{s}:name"' for s in SCHEMES)
