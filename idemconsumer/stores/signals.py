"""Signals to sagas, on a connection of the sender (L42)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.saga import wrong_name
from idemconsumer.rules.values import Signalled
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.sql.queries import in_words, load


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal: the stored key and the scope of its saga, its name, and its payload as it is stored."""

    key: bytes
    scope: str
    name: str
    payload: StoredResult | None

    def __post_init__(self) -> None:
        if (wrong := wrong_name(self.name)) is not None:
            raise ConfigurationError(f"a signal's name is {wrong}, as in saga.wait")

    @property
    def params(self) -> dict[str, Any]:
        body, content_type = (None, None) if self.payload is None else (self.payload.body, self.payload.content_type)
        return {
            "key": self.key, "scope": self.scope, "name": self.name, "body": body, "content_type": content_type
        }  # fmt: skip


async def send(connection: psycopg.AsyncConnection[Any], schema: str, signal: Signal) -> Signalled:
    """Store it in the open transaction of the connection. Raises psycopg.Error, with SQLSTATE 25001 if the transaction
    is not READ COMMITTED, and ConfigurationError when the schema is not migrated."""
    with in_words(schema):
        cursor = await OwnCursor(connection).execute(load(schema)["send_signal"], signal.params)
        row = await cursor.fetchone()
    assert row is not None
    return Signalled(row[0])
