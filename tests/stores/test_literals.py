"""What is written into a statement is read by the server as it was, whichever way it was written."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from idemconsumer.stores.connection import Connection
from idemconsumer.stores.literals import clean, written

TEXTS = (
    "",
    "plain",
    "it's",
    "'",
    "''",
    "a\\b",
    "\\",
    "\\'; select 1 --",
    "%s %(it)s",
    "tab\t, line\n",
    "größe",
    "'ö'",
    "😀",
)


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    connection = await Connection.connect(database, autocommit=True)
    yield connection
    await connection.close()


async def back(connection: Connection, value: object, kind: bytes) -> bytes | None:
    (answer,) = await connection.simple(written(b"select %(it)s::" + kind, {"it": value}, connection))
    return answer.get_value(0, 0)


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
async def test_a_text_comes_back(connection: Connection, encoding: str) -> None:
    await connection.simple(f"set client_encoding = '{encoding}'".encode())
    codec = {"UTF8": "utf-8", "LATIN1": "latin-1"}[encoding]
    for text in TEXTS:
        if encoding == "UTF8" or text != "😀":
            assert await back(connection, text, b"text") == text.encode(codec)


async def test_a_text_with_nul_is_refused(connection: Connection) -> None:
    for text in ("\0", "a\0b", "ö\0"):
        with pytest.raises(psycopg.DataError):
            written(b"select %(it)s", {"it": text}, connection)
    assert clean("a\0b") == "a\ufffdb"


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        (["a", "a", "a"], b"text[]", b"{a,a,a}"),
        (["a", "b'"], b"text[]", b"{a,b'}"),
        ([None, None], b"bytea[]", b"{NULL,NULL}"),
        ([b"x", None], b"bytea[]", b'{"\\\\x78",NULL}'),
        ([b"x", b"x"], b"bytea[]", b'{"\\\\x78","\\\\x78"}'),
        ([True, True], b"boolean[]", b"{t,t}"),
        ([1, 2], b"bigint[]", b"{1,2}"),
        ([], b"bigint[]", b"{}"),
        (1.5, b"float8", b"1.5"),
    ],
)
async def test_other_values_come_back(connection: Connection, value: object, kind: bytes, read: bytes) -> None:
    assert await back(connection, value, kind) == read
