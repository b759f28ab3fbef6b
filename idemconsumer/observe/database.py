"""Figures that only the database has: queues, retries, sagas, dead letters, leases. Read by the launcher (O11)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import psycopg

from idemconsumer.errors import IdemConsumerError
from idemconsumer.logs import log
from idemconsumer.message.keys import parts_of
from idemconsumer.observe.texts import STORED
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import OwnCursor, connect_async
from idemconsumer.sql.queries import load
from idemconsumer.user_code.cancellation import end

AGAIN: Final = 15.0  # seconds between two measurements
_REST: Final = 19.0  # times as long as a measurement took: together a twentieth of one connection's time
DEADLINE: Final = 3.0  # seconds that a scrape waits for the database
# enable_seqscan: dead letters are counted in an index, and an empty queue not by scanning a table full of others'
# messages.
_SETTINGS: Final = {"enable_seqscan": "off", "statement_timeout": "5s", "lock_timeout": "1s"}
_PATIENCE: Final = 7.0  # seconds to wait for an answer (R20: every wait for the database has an end)
_SCHEME: Final = "postgres:"
RETRIES: Final = f"{_SCHEME}~~"  # prefix of what `message.sources.retry_source` makes
_MOST: Final = 100_000  # messages of a destination that are counted at most

Figures: TypeAlias = dict[str, dict[tuple[str, ...], float]]  # by metric and label values


class DatabaseLook:
    """Measures over one connection, opened at the first call, with a deadline for everything. For one event loop only.

    Each call checks whether the database answers (O33), independently of how long measuring takes.
    """

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self._queries = load(schema)
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._found: Figures | None = None
        self._looking: asyncio.Task[None] | None = None
        self._next = 0.0
        self._failing = False
        self._heard, self._took = -math.inf, 0.0  # when the server last answered; how long an empty statement took

    @property
    def answer(self) -> float | None:
        """How many seconds the server recently took for an empty statement; None if it is silent or unreachable."""
        return self._took if time.monotonic() - self._heard < _PATIENCE else None

    async def look(self, sources: Iterable[str]) -> Figures | None:
        """The latest figures; None when the database does not answer in time. Those of `sources` that are in Postgres
        are measured."""
        if self._looking is None:
            names = [each.removeprefix(_SCHEME) for each in sources if each.startswith(_SCHEME)]
            self._looking = asyncio.create_task(self._look(names))
        await asyncio.wait({self._looking}, timeout=DEADLINE)
        return None if self.answer is None else self._found

    async def close(self) -> None:
        if self._looking is not None:
            await end(self._looking)
        await self._leave()

    async def _look(self, names: list[str]) -> None:
        """Measure. Not cancelled when a scrape stops waiting: the server would go on, and be asked again."""
        began = time.monotonic()
        try:
            connection = await self._connected()
            asked = time.monotonic()
            await connection.execute(b"select")
            self._heard = time.monotonic()
            self._took = self._heard - asked
            if began >= self._next:
                self._next = math.inf
                self._found = await self._read(names)
        except (psycopg.Error, OSError, IdemConsumerError) as error:
            self._found = None
            await self._leave()
            if not self._failing:
                log.warning("database metrics unavailable", error=error_text(error))
            self._failing = True
            if getattr(error, "sqlstate", None) is None:
                self._heard, self._next = -math.inf, 0.0
        else:
            if self._failing and self._found is not None:
                log.info("database metrics available again")
                self._failing = False
        finally:
            if math.isinf(self._next):  # it was measured, or the server refused that
                now = time.monotonic()
                self._next = now + max(AGAIN, _REST * (now - began))
            self._looking = None

    async def _read(self, names: list[str]) -> Figures:
        """The figures of each metric in `texts.STORED`, even if it has no value. Also `lag_messages` and `lag_seconds`
        of the Postgres queues; for other sources the workers report these."""
        found: Figures = {name: {} for name in (*STORED, "lag_messages", "lag_seconds")}
        for name, number, seconds, later in await self._rows("measure_queues", {"names": names}):
            source, oldest = f"{_SCHEME}{name}", seconds if number else 0.0
            if source.startswith(RETRIES):
                app, _, handler = source.removeprefix(RETRIES).rpartition("/")
                found["retries"] |= {(app, handler, "waiting"): later, (app, handler, "due"): number}
                found["oldest_due_retry_seconds"][app, handler] = oldest
            else:
                for metric, value in (("delayed_messages", later), ("lag_messages", number), ("lag_seconds", oldest)):
                    found[metric][source,] = value
        for app, handler, state, number, oldest, due, waiting in await self._rows("measure_sagas"):
            app, *_ = parts_of(f"{app}/-/-")
            found["sagas"][app, handler, state] = number
            found["oldest_saga_seconds"][app, handler, state] = oldest
            all_due, first = found["due_sagas"], found["oldest_due_saga_seconds"]
            all_due[app, handler] = all_due.get((app, handler), 0) + due
            first[app, handler] = max(first.get((app, handler), 0.0), waiting if due else 0.0)
        for app, handler, reason, number, oldest in await self._rows("measure_letters"):
            app, _, handler = parts_of(f"{app}/-/{handler}")
            found["open_dead_letters"][app, handler, reason] = number
            found["oldest_dead_letter_seconds"][app, handler, reason] = oldest
        for app, handler, number, oldest in await self._rows("measure_forwards"):
            app, _, handler = parts_of(f"{app}/-/{handler}")
            found["unforwarded_dead_letters"][app, handler] = number
            found["oldest_unforwarded_dead_letter_seconds"][app, handler] = oldest
        ((live, lost),) = await self._rows("measure_leases")
        found["leases"] = {("live",): live, ("lost",): lost}
        for name, waiting, oldest, later, parked, *_ in await self._rows("status_outbox", {"most": _MOST}):
            states = {"waiting": waiting, "later": later, "parked": parked}
            found["outbox_messages"] |= {(name, state): number for state, number in states.items()}
            found["oldest_outbox_message_seconds"][name,] = oldest or 0.0
        ((pruned_at,),) = await self._rows("measure_pruning")
        if pruned_at is not None:
            found["last_prune_timestamp_seconds"] = {(): pruned_at}
        return found

    async def _rows(self, query: str, params: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        rows = await (await OwnCursor(await self._connected()).execute(self._queries[query], params)).fetchall()
        self._heard = time.monotonic()
        return rows

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            connection = await connect_async(
                self._dsn, _SETTINGS, connect_timeout=5, application_name="idemconsumer metrics"
            )
            connection.patience = _PATIENCE
            self._connection = connection
        return self._connection

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
