"""Retention: final records are deleted when their scope's `retain` is over.

It runs no handler and decides about no message: an expired record counts as long as it is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import psycopg
import structlog

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import connect_async
from idemconsumer.sql.queries import Queries, load

log = structlog.get_logger("idemconsumer")

# About 6,000 records, near 0.1 s if all have results to delete. A new claim of such a key may have to wait that long.
_BLOCKS = 64
_LETTERS = 500  # of a handler, in one transaction
# A pass reads the whole table. Resting nine times as long keeps it below a tenth of one connection's time.
_REST = 9.0
_PATIENCE = 600.0  # seconds: one statement reads a whole table, and nothing waits for this but the next pass
_LOCK_TIMEOUT = "10s"
# Of a transaction, so that it works behind a pooler (R18). A pass begins where nobody else prunes; once begun it waits
# for a turn, so that of two that began between each other's transactions neither is given up. A turn takes 0.1 s.
_TRY = "select pg_try_advisory_xact_lock(hashtextextended('idemconsumer.prune.' || %s, 0))"
_WAIT = "select pg_advisory_xact_lock(hashtextextended('idemconsumer.prune.' || %s, 0))"

Progress = Callable[[int, int], None]


async def prune_once(dsn: str, schema: str, *, dry_run: bool = False, progress: Progress | None = None) -> int | None:
    """Walk the records once, in block order, and delete final ones past their retention with their results.

    Returns how many records were deleted (with `dry_run`: would be), or None when another process is pruning
    this schema. Dead letters go when their handler says so (O5), and dead records once they have none. Each range of
    blocks is one short transaction, so a cancellation leaves whole ranges done. `progress` is called with the number of
    blocks done and of all blocks.
    Raises psycopg.Error.
    """
    queries = load(schema)
    async with await connect_async(
        dsn, {"lock_timeout": _LOCK_TIMEOUT}, application_name="idemconsumer upkeep", connect_timeout=10
    ) as connection:
        connection.patience = _PATIENCE
        blocks, total = 1, 0
        for low in count(0, _BLOCKS):
            async with connection.transaction():
                if low == 0:
                    if not await _number(await connection.execute(_TRY, [schema])):
                        return None
                    blocks = await _number(await connection.execute(queries["blocks"]))
                else:
                    await connection.execute(_WAIT, [schema])
                if low >= blocks:
                    break
                high = min(low + _BLOCKS, blocks)
                total += await _prune(connection, queries, low, high, dry_run=dry_run)
            if progress is not None:
                progress(high, blocks)
        if not dry_run:
            for statement in ("empty_letters", "prune_letters"):
                changed = _LETTERS
                while changed >= _LETTERS:
                    async with connection.transaction():
                        changed = await _number(await connection.execute(queries[statement], {"limit": _LETTERS}))
            async with connection.transaction():
                await connection.execute(queries["prune_attempts"])
                await connection.execute(queries["prune_signals"])
                await connection.execute(queries["prune_schedules"])
        return total


async def _prune(
    connection: psycopg.AsyncConnection[Any], queries: Queries, low: int, high: int, *, dry_run: bool
) -> int:
    bounds = {"low": f"({low},0)", "high": f"({high},0)"}
    if dry_run:
        return await _number(await connection.execute(queries["prunable"], bounds))
    rows = await (await connection.execute(queries["prune"], bounds)).fetchall()
    if rows:
        keys = {"keys": [key for (key,) in rows]}
        await connection.execute(queries["prune_results"], keys)
        await connection.execute(queries["prune_steps"], keys)
    return len(rows)


class Retention:
    """What one worker does beside its lanes: a pass of `prune_once` about every `every` seconds.

    All workers run it; the first one does the pass. An outage of the database is waited for, and logged once.
    """

    def __init__(self, dsn: str, schema: str, every: float, handlers: Sequence[BoundHandler] = ()) -> None:
        """`handlers`: those of this worker, which say how long dead letters are kept."""
        self._dsn = dsn
        self._schema = schema
        self._every = every
        self._handlers = handlers

    async def run(self) -> None:
        """Run until cancelled. Raises nothing but the cancellation."""
        failing, said = False, not self._handlers
        while True:
            started = time.monotonic()
            try:
                if not said:
                    await keep_letters(self._dsn, self._schema, self._handlers)
                    said = True
                pruned = await prune_once(self._dsn, self._schema)
            except (psycopg.Error, OSError) as error:
                if not failing:
                    log.warning("pruning failed, will retry", error=error_text(error), every=self._every)
                failing = True
            else:
                if failing:
                    log.info("pruning works again")
                failing = False
                if pruned:
                    log.info("pruned", records=pruned, seconds=round(time.monotonic() - started, 3))
            await asyncio.sleep(max(self._every, _REST * (time.monotonic() - started)))


async def keep_letters(dsn: str, schema: str, handlers: Sequence[BoundHandler]) -> None:
    """Note how long the letters of these handlers, of one app, are kept (O5). Raises psycopg.Error."""
    given = {
        "app": keys.scopes_of(handlers[0].app).removesuffix("/"),
        "names": [handler.name for handler in handlers],
        "letters": [handler.options.retain_dead for handler in handlers],
        "bodies": [handler.options.retain_dead_body for handler in handlers],
    }
    connecting = connect_async(
        dsn, {"lock_timeout": _LOCK_TIMEOUT}, application_name="idemconsumer upkeep", connect_timeout=10
    )
    async with await connecting as connection, connection.transaction():
        await connection.execute(load(schema)["keep_letters"], given)


async def _number(cursor: psycopg.AsyncCursor[tuple[int]]) -> int:
    row = await cursor.fetchone()
    return int(row[0]) if row is not None else 0
