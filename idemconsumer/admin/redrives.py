"""Dead letters are run once more (O1 to O4, O24, O32).

A redrive is a *ticket*: the letter's message, in the queue of its handler that also brings what is tried again later.
Its DEAD record waits for it as a PENDING one does for its next attempt (D19), so the claim lets it through once. A
letter of a saga that waits for a person gives no ticket: the saga has its message and its steps, and is due.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from idemconsumer.admin.audit import Trace
from idemconsumer.admin.dead_letters import Which
from idemconsumer.admin.sender import PATIENCE, NamedRow, Sender, Statements
from idemconsumer.errors import ConfigurationError
from idemconsumer.message import keys
from idemconsumer.message.delivered import with_delivered
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message
from idemconsumer.message.origin import Pending, broker_order, with_origin
from idemconsumer.message.sources import retry_source
from idemconsumer.rules.redriven import Redriven, redrivable

_TOGETHER: Final = 100  # letters of one transaction
_LOOKS: Final = 5.0  # in a second, where there is a rate

_REDRIVEN: Final = (Redriven.REDRIVES, Redriven.RESUMES)

Progress = Callable[[int], None]


class RedriveRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did: how many letters became what (`Redriven`)."""

    run: str
    counts: Mapping[Redriven, int]

    @property
    def redriven(self) -> int:
        """Messages that wait in the queue, and sagas that go on."""
        return sum(self.counts.get(each, 0) for each in _REDRIVEN)


class Redrives:
    """Of one schema. Raises like `Admin`."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._sql = Statements(dsn, schema, patience=PATIENCE)

    async def redrive(
        self,
        which: Which,
        *,
        by: str,
        run: str,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Progress = lambda _: None,
    ) -> RedriveRun:
        """Run the messages of these letters once more, oldest first, with all their attempts again. Sagas go on where
        they stopped, as by `SagaAdmin.resume`. Raises ConfigurationError once the run is cancelled.

        A letter is redriven once by all calls with the same `run`, so one that was killed goes on where it was. `rate`:
        letters in a second at most. `progress` is called with how many more were looked at. A letter that comes in
        meanwhile is left out.
        """
        counts, after, began, done = Counter[Redriven](), 0, time.monotonic(), 0
        trace = Trace(by, "redrive")
        together = _TOGETHER if rate is None else max(1, min(_TOGETHER, int(rate / _LOOKS)))
        async with self._sql.sending() as send:
            (row,) = await send("dead_last")
            given = which.params | {"run": run, "last": row["id"] or 0, "limit": together}
            while True:
                async with send.connection.transaction():
                    await send("share_run", run=run)
                    (row,) = await send("run_cancelled", run=run)
                    if row["cancelled"]:
                        raise ConfigurationError(f"run {run} was cancelled; redrive what is left without this --run")
                    page = await send("dead_to_redrive", **given, after=after)
                    if not page:
                        return RedriveRun(run=run, counts=counts)
                    found = [await self._redrive(send, row, run, by, dry_run=dry_run) for row in page]
                    now = sum(map(found.count, _REDRIVEN))
                    if now and not dry_run:
                        await trace.write(send, f"{which.counted(done + now)}, run {run}")
                counts.update(found)
                after, done = page[-1]["id"], done + now
                progress(len(page))
                if rate is not None and not dry_run:
                    await asyncio.sleep(max(0.0, began + done / rate - time.monotonic()))

    async def runs(self, limit: int = 50) -> list[NamedRow]:
        """The newest first, whoever began them: `redrive_runs` in `sql/admin.sql`."""
        return await self._sql.rows("redrive_runs", limit=limit)

    async def cancel(self, run: str, *, by: str) -> int:
        """What has not begun is a dead letter again, and whoever makes tickets of this run makes no more. Returns how
        many letters that were; sagas that go on are not among them. Raises ConfigurationError where there is no such
        run."""
        cancelled, after, trace = 0, 0, Trace(by, "cancel redrive")
        async with self._sql.sending() as send:
            async with send.connection.transaction():
                await send("lock_run", run=run)
                if not await send("cancel_run", run=run, by=by):
                    raise ConfigurationError(f"there is no run {run!r}; `idemconsumer dead runs` lists them")
                await trace.write(send, f"run {run}")
            while page := await send("tickets_of_run", run=run, after=after, limit=_TOGETHER):
                async with send.connection.transaction():
                    for row in page:
                        found = await send("cancel_ticket", ticket=row["id"])
                        cancelled += sum(each["cancelled"] for each in found)
                    await trace.write(send, f"run {run}, {cancelled} dead letters")
                after = page[-1]["id"]
        return cancelled

    async def _redrive(self, send: Sender, row: Mapping[str, Any], run: str, by: str, *, dry_run: bool) -> Redriven:
        statement, given = "redrive_saga", {"letter": row["id"], "run": run, "by": by}
        if row["parked"] is None:
            if not redrivable(row["reason"], row["error"], row["kept"], row["body_size"]):
                return Redriven.INCOMPLETE
            queue, headers = ticket(row)
            statement, given = "redrive_letter", given | {"queue": queue, "headers": headers}
        if dry_run:
            return {None: Redriven.REDRIVES, True: Redriven.RESUMES}.get(row["parked"], Redriven.DECIDED)
        ((verdict,),) = [each.values() for each in await send(statement, **given)]
        return Redriven(verdict)


def ticket(row: Mapping[str, Any]) -> tuple[str, bytes]:
    """The queue of a letter's message, and its headers there: where it came from, and which record waits for it."""
    app, _, handler = keys.parts_of(row["scope"])
    stored = Message(row["source"], b"", decode_headers(row["headers"]), position=row["position"])
    message = with_delivered(stored, row["delivered"])
    message = msgspec.structs.replace(message, order_hint=broker_order(message))
    pending = None if row["key"] is None else Pending(row["key"], row["scope"])
    headers = encode_headers(with_origin(message, pending, row["id"]).headers)
    return retry_source(app, handler).partition(":")[2], headers
