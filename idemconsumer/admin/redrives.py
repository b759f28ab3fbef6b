"""Run the messages of dead letters again (O1 to O4, O24, O32).

A redrive creates a *ticket*: the dead letter's message, in its handler's retry queue. The DEAD record waits for the
ticket as a PENDING record waits for its next attempt (D19), so the claim lets the message through once. For a saga that
waits for a person there is no ticket: the saga has its message and its steps, and becomes due.
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

_TOGETHER: Final = 100  # dead letters per transaction
_LOOKS: Final = 5.0  # pages per second, if there is a rate

_REDRIVEN: Final = (Redriven.REDRIVES, Redriven.RESUMES)

Progress = Callable[[int], None]


class RedriveRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: the number of dead letters for each `Redriven`."""

    run: str
    counts: Mapping[Redriven, int]

    @property
    def redriven(self) -> int:
        """Messages that wait in the queue now, plus sagas that go on."""
        return sum(self.counts.get(each, 0) for each in _REDRIVEN)


class Redrives:
    """Redrives in one schema. Raises like `Admin`."""

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
        """Run the messages of these dead letters again, oldest first, each with its full number of attempts. Sagas go
        on where they stopped, as by `SagaAdmin.resume`. Raises ConfigurationError once the run is cancelled.

        All calls with the same `run` together redrive a dead letter once, so a run that was killed can be continued.
        `rate`: at most so many dead letters per second. `progress` is called with the number of dead letters read since
        the last call. Dead letters that arrive during the run are left out.
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
        """The runs of all callers, newest first: `redrive_runs` in `sql/admin.sql`."""
        return await self._sql.rows("redrive_runs", limit=limit)

    async def cancel(self, run: str, *, by: str) -> int:
        """Turn the tickets of this run that have not begun into dead letters again, and stop all calls that redrive
        under this run. Returns the number of these dead letters, without sagas that go on. Raises ConfigurationError if
        there is no such run."""
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
    """The queue for a dead letter's message, and its headers there: its original source, and its record."""
    app, _, handler = keys.parts_of(row["scope"])
    stored = Message(row["source"], b"", decode_headers(row["headers"]), position=row["position"])
    message = with_delivered(stored, row["delivered"])
    message = msgspec.structs.replace(message, order_hint=broker_order(message))
    pending = None if row["key"] is None else Pending(row["key"], row["scope"])
    headers = encode_headers(with_origin(message, pending, row["id"]).headers)
    return retry_source(app, handler).partition(":")[2], headers
