"""Retention: final records are deleted when their scope's `retain` is over.

It runs no handler and decides about no message: an expired record counts for as long as it exists. Of all processes
that use the schema, one prunes at a time (R27), and only where something can have expired (R28).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg

from idemconsumer.duty import Duty
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.message import keys
from idemconsumer.redaction import error_text
from idemconsumer.sql.answering import AnsweringConnection
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import Queries, load

# About 4,000 records, near 0.05 s if all have results to delete. A new claim of such a key may have to wait that long.
_BLOCKS = 64
_REST = 2.0  # times as long as each range took: a third of a connection, so that workers keep their rate
# Rows deleted in one transaction: dead letters of a handler, rows of the delivery log.
_LIMITS = {"empty_letters": 500, "prune_letters": 500, "prune_deliveries": 5_000}
_AFTERWARDS = (
    "prune_attempts", "prune_signals", "prune_requests", "prune_schedules", "prune_processes",
    "retire_scopes", "prune_scopes",
)  # fmt: skip
_LEASE = 20.0  # seconds: more than one transaction takes, which waits up to 10 s for a lock
_PATIENCE = 600.0  # seconds: one statement reads a whole table, and only the next pass waits for it
_LOCK_TIMEOUT = "10s"
_FAREWELL = 1.0  # seconds that an ending worker spends at most on a server that does not answer

Progress = Callable[[int, int], None]


class _TakenOver(Exception):
    """Another process considers this one dead, and prunes."""


async def prune_once(
    dsn: str, schema: str, *, every: float | None = None, dry_run: bool = False, progress: Progress | None = None
) -> int | None:
    """Delete final records past their retention, with their results and steps.

    Without `every`, it prunes at once and everywhere. With `every`, in seconds, it prunes as workers do: only when a
    pass is due (R27), only where something can have expired (R28), and with pauses. Dead letters are deleted when their
    handler's retention is over (O5), and dead records once they have no dead letters. Returns how many records were
    deleted (with `dry_run`: would be), or None when another process is pruning this schema, or no pass is due.

    Each range of blocks is one short transaction, so a cancellation leaves whole ranges done; a crash of the server may
    undo the last ones (R29). `progress` is called with the number of ranges done and of all ranges. Raises
    psycopg.Error; if only single statements fail, it raises the first error after all others are done (R42).
    """
    if dry_run:
        async with await _connect(dsn) as connection:
            connection.patience = _PATIENCE
            this = _Pass(connection, load(schema), every)
            async for low in this.ranges(progress):
                this.records += await this.number("prunable", **_between(low))
            return this.records
    pruned, failed = await _prune(dsn, schema, every, progress)
    if failed is not None:
        raise failed
    return pruned


async def _prune(
    dsn: str, schema: str, every: float | None, progress: Progress | None = None
) -> tuple[int | None, psycopg.Error | None]:
    """As `prune_once`, but returns the first error of a single statement that failed."""
    async with await _connect(dsn) as connection:
        connection.patience = _PATIENCE
        this = _Pass(connection, load(schema), every)
        try:
            if not await this.begin():
                return None, None
            await this.run(progress)
        except _TakenOver:
            log.warning("pruning was taken over by another process", records=this.records)
        except BaseException:
            await this.leave()
            raise
        return this.records, this.failed


class _Pass:
    """One pass over the schema; there is at most one at a time (R27)."""

    def __init__(self, connection: AnsweringConnection[Any], queries: Queries, every: float | None) -> None:
        self.records = 0
        self.failed: psycopg.Error | None = None
        self._connection = connection
        self._queries = queries
        self._every = every
        by = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        self._params = {"by": by, "lease": _LEASE, "every": every, "blocks": _BLOCKS}

    async def begin(self) -> bool:
        """Start the pass. Returns False if another process has one under way, or none is due."""
        async with self._connection.transaction():
            return await self._changed("begin_pass")

    async def run(self, progress: Progress | None) -> None:
        """Run the pass. Raises _TakenOver, with whole ranges done."""
        async for low in self.ranges(progress):
            began = time.monotonic()
            async with self._part():
                await self._connection.execute(self._queries["in_a_range"])
                self.records += await self.number("prune_range", low=low, **_between(low))
            if self._every is not None:
                await asyncio.sleep(_REST * (time.monotonic() - began))
        for each, limit in _LIMITS.items():
            more = True
            while more:
                more = False
                async with self._part():
                    more = await self.number(each, limit=limit) >= limit
        async with self._part():
            if lowered := await self.number("check_low_water"):
                log.warning("messages below the low-water mark found, processing them", lines=lowered)
        for each in _AFTERWARDS:
            async with self._part():
                await self._changed(each)
        async with self._turn():
            await self._changed("end_pass")

    async def leave(self) -> None:
        """Give up an interrupted pass, if the server still answers; otherwise it ends when its lease expires."""
        self._connection.patience = _FAREWELL
        with suppress(psycopg.Error):
            async with self._connection.transaction():
                await self._changed("leave_pass")

    async def ranges(self, progress: Progress | None) -> AsyncIterator[int]:
        """The first block of each range to prune."""
        async with self._connection.transaction():
            lows = await (await self._execute("ranges")).fetchall()
        for done, (low,) in enumerate(lows, 1):
            yield low
            if progress is not None:
                progress(done, len(lows))

    async def number(self, statement: str, **params: Any) -> int:
        row = await (await self._execute(statement, **params)).fetchone()
        return int(row[0]) if row is not None else 0

    async def _changed(self, statement: str) -> bool:
        return (await self._execute(statement)).rowcount > 0

    async def _execute(self, statement: str, **params: Any) -> psycopg.AsyncCursor[Any]:
        return await self._connection.execute(self._queries[statement], self._params | params)

    @asynccontextmanager
    async def _part(self) -> AsyncIterator[None]:
        """Run one part in its own transaction: if it fails, everything else is still pruned (R42)."""
        held = False
        try:
            async with self._turn():
                held = True
                yield
        except psycopg.Error as error:
            if self._connection.closed or not held:
                raise
            self.failed = self.failed or error

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._connection.transaction():
            if not await self._changed("hold_pass"):
                raise _TakenOver
            yield


def _between(low: int) -> dict[str, str]:
    return {"from": f"({low},0)", "to": f"({low + _BLOCKS},0)"}


class Retention:
    """The pruning of one worker, beside its lanes: a pass of `prune_once` about every `every` seconds.

    All workers try; one of them does the pass (R27). An outage of the database is waited for, and logged once.
    """

    def __init__(self, dsn: str, schema: str, every: float, handlers: Sequence[BoundHandler] = ()) -> None:
        """`handlers`: those of this worker, which define how long dead letters are kept. `pruned`: how many records it
        has deleted."""
        self._dsn = dsn
        self._schema = schema
        self._every = every
        self._handlers = handlers
        self.pruned = 0
        self._kept = not handlers

    async def run(self) -> None:
        """Run until cancelled. Raises only the cancellation."""
        duty = Duty(self._upkeep, self._every, failed=self._say_failed, works=lambda: log.info("pruning works again"))
        await duty.run()

    async def _upkeep(self) -> None:
        errors = [error for act in (self._keep, self._prune) if (error := await _error_of(act())) is not None]
        if errors:
            raise errors[0]

    def _say_failed(self, error: BaseException) -> None:
        log.warning("pruning failed, will retry", error=error_text(error), every=self._every)

    async def _keep(self) -> None:
        if not self._kept:
            await keep_letters(self._dsn, self._schema, self._handlers)
            self._kept = True

    async def _prune(self) -> None:
        started = time.monotonic()
        pruned, failed = await _prune(self._dsn, self._schema, self._every)
        if pruned:
            self.pruned += pruned
            log.info("pruned", records=pruned, seconds=round(time.monotonic() - started, 3))
        if failed is not None:
            raise failed


async def _error_of(act: Awaitable[None]) -> Exception | None:
    try:
        await act
    except (psycopg.Error, OSError) as error:
        return error
    return None


async def keep_letters(dsn: str, schema: str, handlers: Sequence[BoundHandler]) -> None:
    """Record how long the dead letters of these handlers are kept (O5). Raises psycopg.Error."""
    given = {
        "apps": [keys.scopes_of(handler.app).removesuffix("/") for handler in handlers],
        "names": [handler.name for handler in handlers],
        "letters": [handler.options.retain_dead for handler in handlers],
        "bodies": [handler.options.retain_dead_body for handler in handlers],
    }
    async with await _connect(dsn) as connection, connection.transaction():
        await connection.execute(load(schema)["keep_letters"], given)


async def _connect(dsn: str) -> AnsweringConnection[Any]:
    # A pruner that is frozen must not hold row locks, or the pass, for longer than its lease.
    settings = {"lock_timeout": _LOCK_TIMEOUT, "idle_in_transaction_session_timeout": f"{_LEASE:g}s"}
    return await connect_async(dsn, settings, purpose="upkeep", connect_timeout=10)
