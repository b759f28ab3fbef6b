"""Outgoing messages that have not reached their brokers yet, and decisions about those that a broker refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from idemconsumer.admin.audit import Trace, counted
from idemconsumer.admin.sender import PATIENCE, NamedRow, Statements
from idemconsumer.message.headers import decode_headers


class OutgoingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the outgoing messages that match everything given here. `error`: a part of the text with which the broker
    refused the message; `since`: published at most so many seconds ago; `parked`: only messages that wait for a person.
    """

    destination: str | None = None
    key: str | None = None
    error: str | None = None
    since: float | None = None
    ids: Sequence[int] | None = None
    parked: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the statements that choose messages."""
        return msgspec.structs.asdict(self) | {"ids": None if self.ids is None else list(self.ids)}


class Outbox:
    """The outbox of one schema, with a new connection for each call. Raises StoreUnavailable, and ConfigurationError if
    the schema is not migrated."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema, patience=PATIENCE)

    async def messages(self, which: OutgoingChoice, *, after: int = 0, limit: int = 50) -> list[NamedRow]:
        """Messages after the id `after`, oldest first: `list_outgoing` in `sql/outbox.sql`."""
        return await self._sql.rows("list_outgoing", **which.params, after=after, limit=limit)

    async def message(self, id: int) -> NamedRow | None:
        """One message in full, with headers and body; None if there is none, perhaps because it has been sent."""
        for row in await self._sql.rows("show_outgoing", id=id):
            return NamedRow(row, headers=decode_headers(row.headers))
        return None

    async def count(self, which: OutgoingChoice) -> int:
        """How many `discard` would delete."""
        (row,) = await self._sql.rows("count_outgoing", **which.params)
        return int(row["changed"])

    async def retry(self, which: OutgoingChoice, *, by: str) -> int:
        """Send the chosen refused messages again, at once and with their full number of tries. A parked message goes
        out after the messages of its key that have overtaken it. Returns how many there are."""
        return await self._changed("retry_outgoing", which, by, "retry")

    async def discard(self, which: OutgoingChoice, *, by: str) -> int:
        """Delete the chosen messages for good; returns their number. One that is being sent now may still arrive."""
        return await self._changed("discard_outgoing", which, by, "discard")

    async def _changed(self, statement: str, which: OutgoingChoice, by: str, what: str) -> int:
        async with self._sql.changing() as send:
            (row,) = await send(statement, **which.params)
            if changed := int(row["changed"]):
                target = counted(changed, "outgoing messages", destination=which.destination)
                await Trace(by, what).write(send, target)
        return changed
