"""Outgoing messages that are not with their brokers yet, and what a person may do about those that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from idemconsumer.admin.audit import Trace, counted
from idemconsumer.admin.sender import PATIENCE, NamedRow, Statements
from idemconsumer.message.headers import decode_headers


class OutgoingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Those for which all that is given here holds. `error` is a part of the text with which the broker refused it;
    `since`: they were published at most so many seconds ago. `parked`: only those that wait for a person."""

    destination: str | None = None
    key: str | None = None
    error: str | None = None
    since: float | None = None
    ids: Sequence[int] | None = None
    parked: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """Of the statements that choose."""
        return msgspec.structs.asdict(self) | {"ids": None if self.ids is None else list(self.ids)}


class Outbox:
    """Of one schema, with a new connection for each call. Raises StoreUnavailable, and ConfigurationError when the
    schema is not migrated."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema, patience=PATIENCE)

    async def messages(self, which: OutgoingChoice, *, after: int = 0, limit: int = 50) -> list[NamedRow]:
        """Oldest first, behind the id `after`: `list_outgoing` in `sql/outbox.sql`."""
        return await self._sql.rows("list_outgoing", **which.params, after=after, limit=limit)

    async def message(self, id: int) -> NamedRow | None:
        """One in full, with its headers and its body. None: there is none; perhaps it has been sent."""
        for row in await self._sql.rows("show_outgoing", id=id):
            return NamedRow(row, headers=decode_headers(row.headers))
        return None

    async def count(self, which: OutgoingChoice) -> int:
        """How many `discard` would delete."""
        (row,) = await self._sql.rows("count_outgoing", **which.params)
        return int(row["changed"])

    async def retry(self, which: OutgoingChoice, *, by: str) -> int:
        """Have those that were refused sent again, at once and with all their tries. A parked one goes out behind what
        has overtaken it. Returns how many these are."""
        return await self._changed("retry_outgoing", which, by, "retry")

    async def discard(self, which: OutgoingChoice, *, by: str) -> int:
        """Delete for good, and return how many. One that is being sent right now may still get there."""
        return await self._changed("discard_outgoing", which, by, "discard")

    async def _changed(self, statement: str, which: OutgoingChoice, by: str, what: str) -> int:
        async with self._sql.changing() as send:
            (row,) = await send(statement, **which.params)
            if changed := int(row["changed"]):
                target = counted(changed, "outgoing messages", destination=which.destination)
                await Trace(by, what).write(send, target)
        return changed
