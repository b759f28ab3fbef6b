"""Literals for statements that are sent as text, several in one round trip.

psycopg's own literals take four to ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

import psycopg
from psycopg import pq

from idemconsumer.stores.connection import Connection


def written(query: bytes, params: Mapping[str, object], connection: Connection) -> bytes:
    """A statement with its named parameters filled in."""
    return query % {name.encode(): literal(value, connection) for name, value in params.items()}


def literal(value: object, connection: Connection) -> bytes:
    match value:
        case None:
            return b"null"
        case str() if value.isascii() and "'" not in value and "\0" not in value:  # most are; the same in each encoding
            return b"'%s'" % value.encode() if "\\" not in value else b"E'%s'" % value.replace("\\", r"\\").encode()
        case str():
            text = value.encode(connection.info.encoding)
            if b"\0" in text:  # libpq would cut the text off there
                raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
            return bytes(pq.Escaping(connection.pgconn).escape_literal(text))
        case bytes():
            return b"E'\\\\x%s'" % value.hex().encode()
        case bool() | int():
            return str(value).encode()
        case list() if len(value) > 1 and value.count(value[0]) == len(value):  # as most columns of a shared commit
            return b"array[%s]" % b",".join([literal(value[0], connection)] * len(value))
        case list():
            return b"array[%s]" % b",".join([literal(item, connection) for item in value])
        case float():
            return b"'%r'::pg_catalog.float8" % value
        case datetime():
            return b"'%s'::pg_catalog.timestamptz" % value.isoformat().encode()
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be written into a statement")


def rows_text(rows: Iterable[Iterable[object]]) -> str:
    """The text of an array of rows of a composite type, with numbers and bytes as fields."""
    # The backslash of bytes is escaped once for the row and once for the array.
    fields = (
        ["" if it is None else rf"\\\\x{it.hex()}" if type(it) is bytes else repr(it) for it in row] for row in rows
    )
    return "{" + ",".join([f'"({",".join(each)})"' for each in fields]) + "}"


def clean(text: str) -> str:
    """Text that a text column accepts: no NUL, no lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\x00", "�").encode("utf-8", "replace").decode("utf-8")
