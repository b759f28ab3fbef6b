"""Queries about dead letters, for the command line and for dashboards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.headers import decode_headers
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import own_session
from idemconsumer.sql.queries import load, misconfigured

_CONNECT_SECONDS = 10

_HINTS = {
    "undecodable": "The body does not fit the payload's type. Fix the producer, or widen the annotation.",
    "key_missing": "The key rule found nothing in the message. Fix the producer, or change `key=`.",
    "key_invalid": "The key rule found something that cannot be a key. Fix the producer, or change `key=`.",
    "oversized": "The body is above the limit. Send a reference instead, or raise IDEMCONSUMER_MAX_MESSAGE_BYTES.",
    "conflict": "Two payloads arrived under one key; the first one counts. If this is intended, set `fingerprint=`.",
    "attempts_exhausted": "Every attempt failed. Fix what `error` names, and publish the message under a new key.",
    "not_retryable": "The handler raised an error that `fail_on` makes final. Fix it, and publish under a new key.",
    "killed_worker": "Workers died while running it (memory, a crash in C code). Try it alone, outside production.",
    "saga_changed": "The handler no longer matches the recorded steps. `sagas show` lists them; restore the steps and "
    "`sagas resume`, or continue with the present handler by --accept-version.",
    "unknown_effect": "A call may or may not have had its effect. Look up the step's key there, then `sagas resume` "
    "or `sagas abandon`.",
    "undo_failed": "A finished step could not be undone. Fix what `error` names, then `sagas resume`.",
    "review": "Its worker was lost, and on_stale leaves it to a person: `sagas resume` or `sagas abandon`.",
}
_OTHER_HINT = "See `error`."


def hint(reason: str) -> str:
    """What a person can do about a dead letter, or a saga put aside, for this reason."""
    return _HINTS.get(reason, _OTHER_HINT)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. `arrivals` counts deliveries, the first included; times are the database's."""

    id: int
    handler: str
    source: str
    position: str
    reason: str
    error: str
    attempts: int
    arrivals: int
    first_at: datetime
    last_at: datetime

    @property
    def hint(self) -> str:
        """What a person can do about it."""
        return hint(self.reason)


class DeadLetterDetail(DeadLetter, frozen=True, kw_only=True):
    """A dead letter in full. `key` is the stored digest, None if the message had no key."""

    scope: str
    key: bytes | None
    body: bytes
    headers: Mapping[str, str | bytes]


class DeadLetterCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters a handler has for one reason, and how many times their messages arrived."""

    handler: str
    reason: str
    letters: int
    arrivals: int


class Admin:
    """Reads one schema, with a new connection for each call.

    Raises StoreUnavailable, or ConfigurationError if the schema is not migrated.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema

    async def dead_letters(
        self, *, handler: str | None = None, reason: str | None = None, limit: int = 50
    ) -> list[DeadLetter]:
        """Newest first, at most `limit`."""
        rows = await self._rows("dead_list", {"handler": handler, "reason": reason, "limit": limit})
        return [DeadLetter(**row) for row in rows]

    async def dead_letter(self, number: int) -> DeadLetterDetail | None:
        """The one with this id, or None."""
        rows = await self._rows("dead_show", {"id": number})
        return next((DeadLetterDetail(**row | {"headers": decode_headers(row["headers"])}) for row in rows), None)

    async def dead_counts(self) -> list[DeadLetterCount]:
        """By handler and reason, the most frequent first."""
        return [DeadLetterCount(**row) for row in await self._rows("dead_counts", {})]

    async def _rows(self, name: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        async with connected(self._dsn, self._schema) as connection:
            return await (await connection.execute(load(self._schema)[name], parameters)).fetchall()


@asynccontextmanager
async def connected(dsn: str, schema: str) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    """A new connection: autocommit, rows as dicts. Raises like `Admin`."""
    try:
        async with await psycopg.AsyncConnection.connect(
            **own_session(dsn), row_factory=dict_row, connect_timeout=_CONNECT_SECONDS
        ) as connection:
            yield connection
    except psycopg.Error as error:
        if (cause := misconfigured(error, schema)) is not None:
            raise cause from error
        if not isinstance(error, psycopg.OperationalError):
            raise
        raise StoreUnavailable(f"the database cannot be reached: {error_text(error)}") from error
