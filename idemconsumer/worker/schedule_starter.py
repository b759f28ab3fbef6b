"""Starts the sagas of schedules, each slot once, whichever worker comes first (L53)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import psycopg

from idemconsumer.brokers.postgres_broker import enqueue
from idemconsumer.duty import Duty
from idemconsumer.logs import log
from idemconsumer.ports.broker import Outgoing
from idemconsumer.redaction import error_text
from idemconsumer.rules.schedules import Schedule, due
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import load

_LONGEST: Final = 30.0  # seconds between two checks, as a clock may be set
_AGAIN: Final = 5.0  # seconds until the next check after an error
_SHORTEST: Final = 0.05


class Schedules:
    """The schedules of one app. The database's clock decides what is due, and the schedule's row which worker starts
    it."""

    def __init__(
        self, dsn: str, schema: str, app: str, schedules: Sequence[Schedule], queues: Mapping[str, str]
    ) -> None:
        """`queues`: the handlers' own queues, by the names of the handlers."""
        self._dsn = dsn
        self._schema = schema
        self._queries = load(schema)
        self._app = app
        self._schedules = schedules
        self._queues = queues

    async def run(self) -> None:
        """Run until cancelled. An outage only delays it."""
        duty = Duty(
            self.look,
            again=lambda _: _AGAIN,
            failed=_say_failed,
            works=lambda: log.info("schedules are checked again"),
        )
        await duty.run()

    async def look(self) -> float:
        """Start what is due. Returns the seconds until the next slot, or until the next check."""
        async with await connect_async(
            self._dsn, {"lock_timeout": "10s"}, purpose="schedules", connect_timeout=10
        ) as connection:
            read = await self._read(connection)
            if new := [each for each in self._schedules if (each.name, each.rule) not in read]:
                async with connection.transaction():
                    for each in new:
                        await connection.execute(self._queries["begin_schedule"], self._given(each))
                read |= await self._read(connection)  # a row that became a day old in between is only in the first read
            pauses = [await self._start(connection, each, *read[each.name, each.rule]) for each in self._schedules]
        return min(pauses, default=_LONGEST)

    async def _read(self, connection: psycopg.AsyncConnection[Any]) -> dict[tuple[str, str], tuple[datetime, datetime]]:
        """By name and rule: the time up to which the slots are handled, and the database's time. One statement reads
        all of them (L61)."""
        names, rules = [each.name for each in self._schedules], [each.rule for each in self._schedules]
        given = {"app": self._app, "names": names, "rules": rules}
        cursor = await connection.execute(self._queries["read_schedules"], given)
        return {(name, rule): (last, now) for name, rule, last, now in await cursor.fetchall()}

    def _given(self, schedule: Schedule) -> dict[str, Any]:
        return {"app": self._app, "name": schedule.name, "rule": schedule.rule}

    async def _start(
        self, connection: psycopg.AsyncConnection[Any], schedule: Schedule, last: datetime, now: datetime
    ) -> float:
        given = self._given(schedule)
        slots, dealt_with = due(schedule, last, now)
        if slots:
            async with connection.transaction():
                moved = await connection.execute(
                    self._queries["advance_schedule"], given | {"seen": last, "last": dealt_with}
                )
                if moved.rowcount == 1:  # else another worker came first
                    await enqueue(connection, self._schema, self._queue(schedule), self._messages(schedule, slots))
                    log.info("schedule", schedule=schedule.name, slots=[schedule.key(slot) for slot in slots])
            if dealt_with < now:
                return _SHORTEST
        following = next(schedule.slots(now), None)
        return _LONGEST if following is None else min(_LONGEST, max(_SHORTEST, (following - now).total_seconds()))

    def _queue(self, schedule: Schedule) -> str:
        return self._queues[schedule.handler].partition(":")[2]

    def _messages(self, schedule: Schedule, slots: Sequence[Any]) -> list[Outgoing]:
        bodies = [msgspec.json.encode(schedule.payload(slot)) for slot in slots]
        return [Outgoing(body, {}, schedule.key(slot)) for body, slot in zip(bodies, slots, strict=True)]


def _say_failed(error: BaseException) -> None:
    log.warning("schedules could not be checked, will retry", error=f"{type(error).__name__}: {error_text(error)}")
