"""What may be shown of addresses and errors in logs, on the terminal, in dead letters and in histories.

Never shown: passwords in addresses, and values that Postgres quotes from rows and statements (R13).
"""

from __future__ import annotations

import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeGuard

from idemconsumer.errors import ConfigurationError, StoreUnavailable

if TYPE_CHECKING:
    import psycopg

_HIDDEN: Final = "***"
_MOST_TRACE: Final = 16_000  # characters
# A password ends at the last @, not at the first /: if it was not percent-encoded, it may contain anything. The word
# `password` is excepted because our own hints use it as a placeholder.
_PASSWORD: Final = re.compile(r"(?<=://)([^\s:@]*:)(?!password@)\S*@")
_TOKEN: Final = re.compile(r"(https?://)[^\s:@/]+@")
_QUERY: Final = re.compile(
    r"([?&;][\w.~%-]*(?:passw|pwd|secret|token|credential|sig|key)[\w.~%-]*=)[^&\s\"'#]+", re.IGNORECASE
)
_KEYWORD: Final = re.compile(r"(?<![?&;\w])((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)", re.IGNORECASE)
_QUOTED: Final = re.compile(r"'|\$(?!\d)|--|/\*")
_NUMBER: Final = re.compile(r"(?<![\w$])\d[\d.]*")
_MOST_STATEMENT: Final = 120  # characters


@dataclass(slots=True)
class Shown:
    """What this process logs of errors, by its settings: their texts too, or only their types and places."""

    text: bool = True


SHOWN: Final = Shown()

_CAUSED: Final = "\nThe above exception was the direct cause of the following exception:\n"
_DURING: Final = "\nDuring handling of the above exception, another exception occurred:\n"


def redact(text: str) -> str:
    """The text without the passwords of the addresses in it: URLs, their query parameters, and `password=…`."""
    if "://" in text:
        for pattern, shown in ((_PASSWORD, rf"\1{_HIDDEN}@"), (_TOKEN, rf"\1{_HIDDEN}@"), (_QUERY, rf"\1{_HIDDEN}")):
            text = pattern.sub(shown, text)
    return _KEYWORD.sub(rf"\1{_HIDDEN}", text) if "=" in text else text


def error_text(error: BaseException) -> str:
    """The text of an error, redacted, without its type.

    A database error becomes one line: the primary message, SQLSTATE, and the names of table, column and constraint. Its
    CONTEXT, position and DETAIL are left out, since they quote values of rows and statements. If another error quotes a
    database error, as SQLAlchemy's do, its text is cut off there. Errors of idemconsumer for operators are not cut off:
    they quote only the primary message, and then say what to do.
    """
    if is_of_database(error):
        return redact(_database_text(error))
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - user code (B18), called while a failure is being recorded
        return "its text cannot be shown"
    if isinstance(error, ConfigurationError | StoreUnavailable):
        return redact(text)
    for inner in (error.__cause__, error.__context__):
        if is_of_database(inner) and str(inner) and str(inner) in text:
            text = text.partition(str(inner))[0] + _database_text(inner)
    return redact(text)


def without_values(statement: str) -> str:
    """A statement in one line, up to its first string literal or comment, and without its numbers, which may be
    values."""
    said, *more = _QUOTED.split(statement, maxsplit=1)
    line = _NUMBER.sub("?", " ".join(said.split()))
    return f"{line[:_MOST_STATEMENT]}…" if more or len(line) > _MOST_STATEMENT else line


def is_of_database(error: object) -> TypeGuard[psycopg.Error]:
    """Whether this is an error of psycopg. False if that is not imported: a launcher starts workers without it."""
    driver = sys.modules.get("psycopg")
    return driver is not None and isinstance(error, driver.Error)


def type_name(error: BaseException) -> str:
    """The type's name as Python prints it before the text of an error."""
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def typed_text(error: BaseException) -> str:
    """`Type: text`, with the notes that were added to the error."""
    text = f"{type_name(error)}: {error_text(error)}".removesuffix(": ")
    return "\n".join([text, *(redact(str(note)) for note in getattr(error, "__notes__", ()))])


def traceback_text(error: BaseException, *, text: bool = True) -> str:
    """The traceback as Python prints it, with all causes and contexts. Each error is shown as `typed_text`, or only its
    type. A long traceback is cut in the middle."""
    whole = redact("\n".join(_traceback(error, set(), typed_text if text else type_name)))
    half = _MOST_TRACE // 2
    return whole if len(whole) <= _MOST_TRACE else f"{whole[:half]}\n[…]\n{whole[-half:]}"


def _traceback(error: BaseException, seen: set[int], say: Callable[[BaseException], str]) -> Iterator[str]:
    seen.add(id(error))
    before, link = error.__cause__, _CAUSED
    if before is None and not error.__suppress_context__:
        before, link = error.__context__, _DURING
    if before is not None and id(before) not in seen:
        yield from _traceback(before, seen, say)
        yield link
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield say(error)
    if isinstance(error, BaseExceptionGroup):
        for number, inner in enumerate(error.exceptions, 1):
            yield f"  +---------------- {number} ----------------"
            yield textwrap.indent("\n".join(_traceback(inner, seen, say)), "  | ", lambda _: True)


def _database_text(error: psycopg.Error) -> str:
    diagnosis = error.diag
    if diagnosis.message_primary is None:  # the driver's own, or of a connection not made or lost
        return " ".join(str(error).split())
    names = {
        "table": diagnosis.table_name,
        "column": diagnosis.column_name,
        "constraint": diagnosis.constraint_name,
    }
    facts = [error.sqlstate or "", *(f"{kind} {name}" for kind, name in names.items() if name)]
    return f"{diagnosis.message_primary} ({', '.join(filter(None, facts))})"
