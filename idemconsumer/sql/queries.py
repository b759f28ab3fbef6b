"""The statements of postgres.sql, by name, with the schema filled in."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from idemconsumer.errors import ConfigurationError

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^--.*\n?", re.MULTILINE)
_ARRAYS: Final = re.compile(rb"\bunnest\((.*?)\)(?=\s+as w \()", re.DOTALL)

_MAX_IDENTIFIER_BYTES = 63  # NAMEDATALEN - 1: Postgres cuts longer names silently

Queries = dict[str, bytes]


@lru_cache(maxsize=8)
def load(schema: str) -> Queries:
    """All named statements; those over arrays also as `name:one`.

    Raises ConfigurationError for a schema that cannot be written into them.
    """
    check_schema(schema)
    text = (Path(__file__).parent / "postgres.sql").read_text("utf-8")
    parts = _NAME.split(text)[1:]
    queries = {
        name: fill(_COMMENT.sub("", body).strip(), schema) for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    return queries | {f"{name}:one": for_one_row(query) for name, query in queries.items() if _ARRAYS.search(query)}


def for_one_row(query: bytes) -> bytes:
    """A statement over arrays, for a single row of plain values: psycopg writes an array in Python, and Postgres plans
    a statement over short ones anew each time, which together cost as much as a round trip."""
    one = _ARRAYS.sub(lambda arrays: b"(values (%s))" % arrays[1].replace(b"[]", b""), query)
    return one.replace(b"= any(array(", b"= ((")


def fill(text: str, schema: str) -> bytes:
    """SQL text of ours with `{schema}` replaced by the quoted identifier."""
    return sql.SQL(text).format(schema=sql.Identifier(schema)).as_bytes(None)


def misconfigured(error: psycopg.Error, schema: str) -> ConfigurationError | None:
    """An error that says that our tables are not there, or not for this role; None for any other."""
    if isinstance(
        error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName | psycopg.errors.UndefinedFunction
    ):
        return ConfigurationError(f"schema {schema!r} is not there; run `idemconsumer migrate up` first")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigurationError(
            f"the database's role may not work in schema {schema!r} ({error.diag.message_primary}); grant it what "
            "`idemconsumer check` names"
        )
    return None


def check_schema(schema: str) -> None:
    """Refuse a name that quoting alone cannot make safe.

    The name also stands inside function bodies ($$), string literals (') and statements with parameters (%).
    """
    wrong = next((repr(character) for character in "'$%\0" if character in schema), None)
    if wrong is None and not schema:
        wrong = "nothing"
    if wrong is not None:
        raise ConfigurationError(f"schema {schema!r} contains {wrong}; write a plain name such as idemconsumer")
    if len(schema.encode()) > _MAX_IDENTIFIER_BYTES or schema.startswith("pg_"):
        raise ConfigurationError(
            f"schema {schema!r} is not a name that Postgres takes; "
            f"write one of at most {_MAX_IDENTIFIER_BYTES} bytes that does not start with pg_"
        )
