"""The statements of the .sql files here, by name, with everything but their parameters filled in.

A file is a list of sections. Each starts with `-- name: X` (a statement) or `-- fragment: X` (an expression for use in
several statements, and in the fragments that come after it). Braces hold `{schema}` (as a text: `{schema_name}`),
the name of a fragment (`{held}`), or the name of a stored state, which is filled in as `2 /* undoing */`. Lines that
begin with `--` are dropped; the server gets the rest. Parameters are psycopg's, so EXPLAIN can be run on any single
statement with sample values (`tests/stores/test_plans.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from idemconsumer.errors import ConfigurationError, Denied, StoreChanged, StoreUnavailable

_FILES: Final = (
    "records", "accepting", "queue", "outbox", "kafka", "sagas", "requests", "admin", "control", "upkeep", "metrics",
)  # fmt: skip
# The stored numbers of `State` and `StepState`, which belong to a layer above. A test compares them.
STORED_STATES: Final[Mapping[str, int]] = {
    "PENDING": 0, "PROCESSING": 1, "UNDOING": 2, "COMPLETED": 3, "FAILED": 4, "DEAD": 5,
    "INTENT": 1, "DONE": 2, "REJECTED": 3, "UNDO_INTENT": 4, "UNDONE": 5,
}  # fmt: skip

_SECTION: Final = re.compile(r"^-- (name|fragment): (\w+)$", re.MULTILINE)
_COMMENT: Final = re.compile(r"^--.*\n?", re.MULTILINE)
_ARRAYS: Final = re.compile(rb"\bunnest\((.*?)\)(?=\s+as w \()", re.DOTALL)

# Tables of ours whose numbers come from a sequence, and may be in use already if that was set back.
NUMBERED: Final = (
    *("scope", "queue", "delayed", "dead_letter", "redrive", "outbox", "worker", "history", "signal", "process"),
    *("audit", "delivery_log", "low_water"),
)
_CHECKS_READ_WRITE: Final = "call_bool_check_hook"  # in the server; its text may be in any language
_UNIQUE: Final = "23505"
# No such schema; and all errors of a statement that meets other tables than it was written for.
_NOT_AS_WRITTEN: Final = ("3F000", "42")
_MAX_IDENTIFIER_BYTES = 63  # NAMEDATALEN - 1: Postgres cuts longer names silently

Queries = dict[str, bytes]


@lru_cache(maxsize=8)
def load(schema: str) -> Queries:
    """All named statements; those over arrays also as `name:one`, for a single row.

    Raises ConfigurationError for a schema name that cannot be written into them.
    """
    check_schema(schema)
    sections = {section: text for file in _FILES for section, text in _sections(file)}
    places: dict[str, sql.Composable] = {"schema": sql.Identifier(schema), "schema_name": sql.Literal(schema)}
    places |= {name: _state(name, number) for name, number in STORED_STATES.items()}
    for (kind, name), text in sections.items():
        if kind == "fragment":
            places[name] = _fill(text, places)
    queries = {name: _fill(text, places).as_bytes(None) for (kind, name), text in sections.items() if kind == "name"}
    return queries | {f"{name}:one": for_one_row(query) for name, query in queries.items() if _ARRAYS.search(query)}


def for_one_row(query: bytes) -> bytes:
    """A statement over arrays, rewritten for a single row of plain values.

    psycopg formats an array in Python, and Postgres plans a statement over short arrays again each time. Together that
    costs as much as a round trip.
    """
    one = _ARRAYS.sub(lambda arrays: b"(values (%s))" % arrays[1].replace(b"[]", b""), query)
    return one.replace(b"= any(array(", b"= ((")


def _sections(file: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Kind and name of each section, and its text without comments."""
    text = (Path(__file__).parent / f"{file}.sql").read_text("utf-8")
    parts = _SECTION.split(text)[1:]
    for kind, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        yield (kind, name), _COMMENT.sub("", body).strip()


def _fill(text: str, places: Mapping[str, sql.Composable]) -> sql.Composed:
    return sql.SQL(text).format(**places)


def _state(name: str, number: int) -> sql.SQL:
    return sql.SQL(f"{number} /* {name.lower().replace('_', ' ')} */")


def misconfigured(error: psycopg.Error, schema: str) -> ConfigurationError | StoreChanged | None:
    """The exception to raise when a statement of ours meets no table, column or function of ours, this role may not use
    them, or a sequence is `behind`; None for any other error. The server does not report whether the schema is missing
    or of an older version."""
    if (cause := behind(error, schema)) is not None:
        return cause
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return Denied(
            f"the database's role lacks rights in schema {schema!r} ({error.diag.message_primary}); grant what "
            "`idemconsumer check` lists"
        )
    if (error.sqlstate or "").startswith(_NOT_AS_WRITTEN):
        return ConfigurationError(
            f"schema {schema!r} does not exist, or is of an older version ({error.diag.message_primary}); run "
            "`idemconsumer migrate up` first"
        )
    return None


@contextmanager
def in_words(schema: str) -> Iterator[None]:
    """Around statements of ours whose caller can be told at once what is `misconfigured`: raises that."""
    try:
        yield
    except (psycopg.Error, StoreChanged) as error:
        cause = error.__cause__ if isinstance(error, StoreChanged) else error
        if isinstance(cause, psycopg.Error) and (known := misconfigured(cause, schema)) is not None:
            raise known from cause
        raise


def behind(error: psycopg.Error, schema: str) -> StoreChanged | None:
    """The exception to raise when a row of ours got a number that another row has: whichever statement inserted it, the
    sequence is at fault (R43). None for any other error."""
    diag = error.diag
    if error.sqlstate != _UNIQUE or diag.schema_name != schema or diag.constraint_name != f"{diag.table_name}_pkey":
        return None
    if (table := diag.table_name) not in NUMBERED:
        return None
    return StoreChanged(
        f"the sequence of table {table} returns numbers that are already in use, as after logical replication or a "
        f"restore of the rows alone; `idemconsumer check` lists all such sequences; run as the schema's owner: "
        f"{catching_up(schema, str(table))}"
    )


def catching_up(schema: str, table: str) -> str:
    """The statement after which the table's next row gets an unused number."""
    name = sql.Identifier(schema, table)
    of = sql.SQL("SELECT setval(pg_get_serial_sequence({}, 'id'), (SELECT max(id) FROM {}))")
    return of.format(sql.Literal(name.as_string(None)), name).as_string(None)


def takes_no_writes(error: psycopg.Error) -> StoreUnavailable | None:
    """The exception to raise when a server refuses to begin a writing transaction; None for any other error."""
    refused = isinstance(error, psycopg.errors.FeatureNotSupported) and error.diag.source_function == _CHECKS_READ_WRITE
    if refused or isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return StoreUnavailable(
            f"the database takes no writes ({error.diag.message_primary}); if this is a standby, give the primary's "
            "address"
        )
    return None


def check_schema(schema: str) -> None:
    """Refuse a name that quoting alone cannot make safe.

    The name also appears inside function bodies ($$), string literals ('), statements with parameters (%) and lines of
    text.
    """
    wrong = next((repr(each) for each in schema if each in "'$%" or not each.isprintable()), None)
    if wrong is None and not schema:
        wrong = "nothing"
    if wrong is not None:
        raise ConfigurationError(f"schema {schema!r} contains {wrong}; write a plain name such as idemconsumer")
    if len(schema.encode()) > _MAX_IDENTIFIER_BYTES or schema.startswith("pg_"):
        raise ConfigurationError(
            f"schema {schema!r} is not a valid Postgres name; "
            f"write one of at most {_MAX_IDENTIFIER_BYTES} bytes that does not start with pg_"
        )
