"""What a person may ask about dead letters, for the CLI and whatever else shows them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from idemconsumer import _headers
from idemconsumer._sql import load, misconfigured
from idemconsumer.errors import StoreUnavailable

_CONNECT_SECONDS = 10

_HINTS = {
    "undecodable": "The body does not fit the payload's type. Fix the producer, or widen the annotation.",
    "key_missing": "The key rule found nothing in the message. Fix the producer, or change `key=`.",
    "key_invalid": "The key rule found something that cannot be a key. Fix the producer, or change `key=`.",
    "oversized": "The body is above the limit. Send a reference instead, or raise IDEMCONSUMER_MAX_MESSAGE_BYTES.",
    "conflict": "Two payloads came under one key, and the first one counts. If that is meant, set `fingerprint=`.",
    "attempts_exhausted": "Every attempt failed. Fix what `error` names, and publish the message under a new key.",
    "not_retryable": "The handler failed in a way that it names as final. Fix it, and publish under a new key.",
    "killed_worker": "Workers died while running it (memory, a crash in C code). Try it alone, outside production.",
}
_OTHER_HINT = "See `error`."


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. `arrivals` counts deliveries since; times are the database's."""

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
        """What a person may do about it."""
        return _HINTS.get(self.reason, _OTHER_HINT)


class DeadLetterDetail(DeadLetter, frozen=True, kw_only=True):
    """All of it. `key` is the stored digest, None where the message had none."""

    scope: str
    key: bytes | None
    body: bytes
    headers: Mapping[str, str | bytes]


class DeadLetterCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters of one handler have one reason, and how often their messages came."""

    handler: str
    reason: str
    letters: int
    arrivals: int


class Admin:
    """Reads one schema, a connection each time. Raises StoreUnavailable, or ConfigurationError if not migrated."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._schema = schema

    async def dead_letters(
        self, *, handler: str | None = None, reason: str | None = None, limit: int = 50
    ) -> list[DeadLetter]:
        """The newest ones first, at most `limit`."""
        rows = await self._rows("dead_list", {"handler": handler, "reason": reason, "limit": limit})
        return [DeadLetter(**row) for row in rows]

    async def dead_letter(self, number: int) -> DeadLetterDetail | None:
        """The one with this id, or None."""
        rows = await self._rows("dead_show", {"id": number})
        return next((DeadLetterDetail(**row | {"headers": _headers.decode(row["headers"])}) for row in rows), None)

    async def dead_counts(self) -> list[DeadLetterCount]:
        """By handler and reason, the most frequent first."""
        return [DeadLetterCount(**row) for row in await self._rows("dead_counts", {})]

    async def _rows(self, name: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            async with await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, row_factory=dict_row, connect_timeout=_CONNECT_SECONDS
            ) as connection:
                return await (await connection.execute(load(self._schema)[name], parameters)).fetchall()
        except psycopg.Error as error:
            if (cause := misconfigured(error, self._schema)) is not None:
                raise cause from error
            if not isinstance(error, psycopg.OperationalError):
                raise
            raise StoreUnavailable(f"the database cannot be reached: {str(error).strip()}") from error
