"""Literals for statements that are sent as text, several in one round trip.

psycopg's own literals take four to ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        case str() if value.isascii() and "'" not in value and "\\" not in value and "\0" not in value:
            return b"'%s'" % value.encode()  # as most are: the same in all encodings, and nothing to escape
        case str():
            text = value.encode(connection.info.encoding)
            if b"\0" in text:  # libpq would cut it off there
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


def bytea_array(values: Sequence[bytes | None]) -> bytes:
    items = ["null" if value is None else '"\\\\\\\\x' + value.hex() + '"' for value in values]
    return b"E'{%s}'" % ",".join(items).encode()


def float8_array(values: Sequence[float | None]) -> bytes:
    """Null where all are None, as in most claims."""
    if all(value is None for value in values):
        return b"null"
    return b"'{%s}'" % b",".join(b"null" if value is None else repr(value).encode() for value in values)


def clean(text: str) -> str:
    """Text that a text column accepts: no NUL, no lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\x00", "�").encode("utf-8", "replace").decode("utf-8")
