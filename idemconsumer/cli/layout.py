"""What is found, as people read it: tables, facts, times, and text from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

_WIDEST: Final = 100  # characters of a cell
_SHORT: Final = 12  # digits of a stored key that a person reads


def listed(columns: str, rows: Iterable[Iterable[object]], none: str = "") -> Iterator[str]:
    """A table with these columns, named between commas; or that there is none. Made when it is printed."""
    lines = [tuple(map(cell, row)) for row in rows]
    yield table([columns.split(", "), *lines]) if lines else none


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, the first one in capitals. What would make one of them wide is cut, but for the last column;
    `--json` has all of it."""
    rows = [
        [*(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…" for text in row[:-1]), row[-1]] for row in rows
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [[text.upper() for text in rows[0]], *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def cell(value: object) -> str:
    """Of a table, or one fact."""
    return "-" if value is None else time_of(value) if isinstance(value, datetime) else printable(str(value))


def facts(found: Iterable[tuple[str, object]]) -> Iterator[str]:
    """A line for each that is known, by name."""
    for name, value in found:
        if value is not None:
            yield f"{name:<11} {printable(str(value))}"


def short(key: bytes | str) -> str:
    """Of a stored key as many digits as a person reads."""
    return (key.hex() if isinstance(key, bytes) else key)[:_SHORT]


def time_of(at: datetime) -> str:
    """To the second."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def printable(text: str) -> str:
    """Text from elsewhere that cannot steer a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def multiline(text: str) -> str:
    """Lines of text from elsewhere."""
    return "\n".join(map(printable, text.split("\n")))


def in_words(value: object) -> str:
    """Text as it is, other bytes as base64."""
    if not isinstance(value, bytes):
        return str(value)
    encoding, text = readable(value)
    return text if encoding == "utf-8" else f"base64 {text}"


def either(value: str | bytes) -> dict[str, str]:
    """Text as `text`, anything else as `base64`."""
    encoding, text = ("utf-8", value) if isinstance(value, str) else readable(value)
    return {"text" if encoding == "utf-8" else "base64": text}


def readable(body: bytes) -> tuple[str, str]:
    """The encoding of what may be text, and the text."""
    try:
        return "utf-8", body.decode()
    except UnicodeDecodeError:
        return "base64", base64.b64encode(body).decode()
