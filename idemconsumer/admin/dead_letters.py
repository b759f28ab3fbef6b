"""Queries about dead letters and what is not due yet, for the command line and for dashboards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from idemconsumer.brokers.publishers import Publishers
from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers
from idemconsumer.message.message import Message
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import load, misconfigured

_CONNECT_SECONDS = 10

_HINTS = {
    "undecodable": "The body does not fit the payload's type. Fix the producer, or widen the annotation.",
    "tombstone": "A Kafka record without a value says that its key is deleted. To handle it, annotate the payload as "
    "`X | None`, and take a key that is not in the payload.",
    "unreadable": "Kafka's client could not read it, and a person skipped it. `body` is what is left of it, or of its "
    "whole batch. Have the producer send it again.",
    "key_missing": "The key rule found nothing in the message. Fix the producer, or change `key=`.",
    "key_invalid": "The key rule found something that cannot be a key. Fix the producer, or change `key=`.",
    "oversized": "Body and headers are above the limit, and only their beginning is kept. Send a reference instead, or "
    "raise IDEMCONSUMER_MAX_MESSAGE_BYTES.",
    "conflict": "Two payloads arrived under one key; the first one counts. If this is intended, set `fingerprint=`.",
    "attempts_exhausted": "Every attempt failed. Fix what `error` names, and publish the message under a new key.",
    "not_retryable": "The handler raised an error that `fail_on` makes final. Fix it, and publish under a new key.",
    "killed_worker": "Workers died while decoding or running it (memory, a crash in C code). Mend that, and publish it "
    "again, under a new key if `key` is there. Setting Kafka's offsets back does not: that copy is on record.",
    "lost_connection": "Each run ended its own connection: the handler closes it or ends its session, a timeout of the "
    "server does, or a statement crashes it (see its log). Mend that, and publish under a new key.",
    "contended": "Others held the rows or locks it needs, the whole time. Find them (pg_locks, pg_stat_activity), and "
    "publish the message under a new key; a saga: `sagas resume`.",
    "saga_changed": "The handler no longer matches the recorded steps. `sagas show` lists them; restore the steps and "
    "`sagas resume`, or continue with the present handler by --accept-version.",
    "unknown_effect": "A call may or may not have had its effect. Look up the step's key there (`sagas show`), then "
    "`sagas decide`, `sagas resume` or `sagas abandon`.",
    "result_unencodable": "All steps are done, but what the handler returned cannot be stored. Correct that, then "
    "`sagas resume`: no finished step runs again.",
    "undo_failed": "A finished step could not be undone. Fix what `error` names, then `sagas resume`.",
    "max_duration": "It has taken longer than its `max_duration`. Raise that and `sagas resume`, or `sagas abandon`.",
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
    """A dead letter in full, with all that its broker gave.

    `key` is the stored digest, None if the message had no key. `body` is the first `max_message_bytes` of a body of
    `body_size` bytes; `body_sha256` is of the whole. `headers` are in their order, repeated ones too.
    """

    scope: str
    key: bytes | None
    message_id: str | None
    record_key: bytes | None
    timestamp: datetime | None
    properties: Mapping[str, str | int]
    tombstone: bool
    headers: Sequence[tuple[str, str | bytes]]
    body: bytes
    body_size: int
    body_sha256: bytes


class DeadLetterCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters a handler has for one reason, and how many times their messages arrived."""

    handler: str
    reason: str
    letters: int
    arrivals: int


class Delayed(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages of a queue in Postgres are not due yet, and when the first one is. `name` is that of the queue;
    those of a handler that wait for their next attempt have one of their own, `~~app/handler`."""

    name: str
    messages: int
    due_at: datetime


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
        return next(map(_detail, await self._rows("dead_show", {"id": number})), None)

    async def dead_counts(self) -> list[DeadLetterCount]:
        """By handler and reason, the most frequent first."""
        return [DeadLetterCount(**row) for row in await self._rows("dead_counts", {})]

    async def delayed(self) -> list[Delayed]:
        """By queue."""
        return [Delayed(**row) for row in await self._rows("delayed", {})]

    async def _rows(self, name: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        async with connected(self._dsn, self._schema) as connection:
            return await (await connection.execute(load(self._schema)[name], parameters)).fetchall()


def _detail(row: Mapping[str, Any]) -> DeadLetterDetail:
    stored = Message(row["source"], row["body"], decode_headers(row["headers"]))
    message = with_delivered(stored, row["delivered"])
    given = {
        "message_id": message.message_id,
        "record_key": message.record_key,
        "timestamp": message.timestamp,
        "properties": dict(message.properties),
        "tombstone": message.tombstone,
        "headers": message.all_headers,
    }
    return DeadLetterDetail(**{name: value for name, value in row.items() if name != "delivered"} | given)


Readers = Publishers[psycopg.AsyncConnection[dict[str, Any]]]


def readers(dsn: str) -> Readers:
    """For any number of callers (L57)."""
    return Publishers(lambda: connect_async(dsn, row_factory=dict_row, connect_timeout=_CONNECT_SECONDS))


@asynccontextmanager
async def connected(
    dsn: str, schema: str, shared: Readers | None = None
) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    """A new connection, or one of those that are `shared`: autocommit, rows as dicts. Raises like `Admin`."""
    try:
        async with (shared or readers(dsn)).one() as connection:
            yield connection
    except psycopg.Error as error:
        if (cause := misconfigured(error, schema)) is not None:
            raise cause from error
        if not isinstance(error, psycopg.OperationalError):
            raise
        raise StoreUnavailable(f"the database cannot be reached: {error_text(error)}") from error
