"""Output for people: tables, facts, times, and text from outside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

_WIDEST: Final = 100  # characters, of a cell
_SHORT: Final = 12  # digits of a stored key that are shown to people


def listed(columns: str, rows: Iterable[Iterable[object]], none: str = "") -> Iterator[str]:
    """A table with these columns, whose names are separated by commas, or the text `none`. Built when it is printed."""
    lines = [tuple(map(cell, row)) for row in rows]
    yield table([columns.split(", "), *lines]) if lines else none


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first row in capitals. Long cells are cut, except in the last column; `--json` shows all of
    it."""
    rows = [
        [*(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…" for text in row[:-1]), row[-1]] for row in rows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [[text.upper() for text in rows[0]], *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def cell(value: object) -> str:
    """The text of one cell, or of one fact."""
    return "-" if value is None else time_of(value) if isinstance(value, datetime) else printable(str(value))


def facts(found: Iterable[tuple[str, object]]) -> Iterator[str]:
    """A line with name and value for each value that is not None."""
    for name, value in found:
        if value is not None:
            yield f"{name:<11} {printable(str(value))}"


def short(key: bytes | str) -> str:
    """The first digits of a stored key, as many as are shown to people."""
    return (key.hex() if isinstance(key, bytes) else key)[:_SHORT]


def time_of(at: datetime) -> str:
    """A time, to the second."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def printable(text: str) -> str:
    """Text from outside, made unable to control a terminal: characters that are not printable are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def multiline(text: str) -> str:
    """Several lines of text from outside, made printable."""
    return "\n".join(map(printable, text.split("\n")))


def in_words(value: object) -> str:
    """Text unchanged; bytes that are not text as base64."""
    if not isinstance(value, bytes):
        return str(value)
    encoding, text = readable(value)
    return text if encoding == "utf-8" else f"base64 {text}"


def either(value: str | bytes) -> dict[str, str]:
    """Text under `text`, other bytes under `base64`."""
    encoding, text = ("utf-8", value) if isinstance(value, str) else readable(value)
    return {"text" if encoding == "utf-8" else "base64": text}


def readable(body: bytes) -> tuple[str, str]:
    """The encoding (`utf-8` or `base64`), and the body in it."""
    try:
        return "utf-8", body.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(body).decode()
