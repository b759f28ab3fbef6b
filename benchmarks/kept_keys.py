"""What a new message costs beside many kept keys, over a whole checkpoint cycle, as `check` wants the server.

A cycle begins with a checkpoint and ends where Postgres begins the next one by itself. Just after a checkpoint nearly
every key is the first to change its page of the index, which is then written whole to the WAL; late in the cycle few
are. In turns with it, the same worker runs beside no keys, in another database of the same server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from typing import LiteralString

import msgspec
import psycopg

from benchmarks._crew import LANES, Crew, crew
from benchmarks._loads import Load
from benchmarks._measure import Figure, Result, Spread, Table
from benchmarks._sizes import OURS
from benchmarks._stage import Stage
from benchmarks.long_runs import fitting, make_records
from idemconsumer.stores.server import MINUTES, wal_gb

_MOST = 100_000_000
_BESIDE, _NONE = 20.0, 6.0  # seconds of load, in turn
_TOO_LONG = 1.2 * 60.0 * MINUTES


class Slice(msgspec.Struct, frozen=True):
    """One turn: how many messages, in how many seconds, with how many bytes of WAL."""

    count: int
    seconds: float
    wal: int

    @property
    def cost(self) -> float:
        """µs a message."""
        return self.seconds / self.count * 1e6


async def kept_keys(stage: Stage) -> Result:
    """As many as the disk has room for."""
    wanted = [_MOST // 10] if stage.quick else [_MOST // 10, _MOST // 2, _MOST]
    sizes, skipped = fitting(wanted, shutil.disk_usage("/tmp").free)
    keys = max(sizes, default=_MOST // 100)
    settings = settings_for(keys)
    with Stage(quick=stage.quick, settings=settings) as own, own.database() as kept, own.database() as none:
        began = time.monotonic()
        stage.say(f"Kept keys: making {keys:,}")
        await make_records(kept, keys)
        stage.say(f"Kept keys: made in {time.monotonic() - began:.0f} s")
        heap, index = _bytes(kept)
        async with crew(own) as team:
            cycle = _Cycle(stage, team, kept, none)
            began = time.monotonic()
            await cycle.run()
            lasted = time.monotonic() - began
    name = f"{keys:,} keys"
    beside, alone = _whole(cycle.beside), _whole(cycle.none)
    by_turn = [turn.wal / turn.count for turn in cycle.beside]
    figures = [
        Figure("0 keys", "µs a message", Spread.of(each.cost for each in cycle.none)),
        Figure(name, "µs a message", Spread.of(each.cost for each in cycle.beside)),
        Figure(f"{name} to 0 keys", "times, of the whole cycle", Spread.of([beside.cost / alone.cost]), 1.1),
        Figure("0 keys", "bytes of WAL a message", Spread.of([alone.wal / alone.count])),
        Figure(name, "bytes of WAL a message", Spread.of([beside.wal / beside.count]), 1_000.0),
        Figure(f"{name}, the first {_BESIDE:g} s", "bytes of WAL a message", Spread.of(by_turn[:1])),
        Figure(f"{name}, later, the least", "bytes of WAL a message", Spread.of([min(by_turn)])),
        Figure(name, "bytes a key, of the table", Spread.of([heap / keys])),
        Figure(name, "bytes a key, of its index", Spread.of([index / keys])),
    ]
    facts = {"lanes": LANES, **settings, "messages": beside.count, "minutes": round(lasted / 60, 1), **skipped}
    return Result("kept_keys", [Table("A message's cost over a checkpoint cycle", figures, facts=facts)])


class _Cycle:
    """From one checkpoint to the next."""

    def __init__(self, stage: Stage, team: Crew, kept: str, none: str) -> None:
        self.beside: list[Slice] = []
        self.none: list[Slice] = []
        self._stage = stage
        self._team = team
        self._kept = kept
        self._none = none

    async def run(self) -> None:
        with psycopg.connect(self._kept, autocommit=True) as connection:
            for dsn in (self._kept, self._none):
                await self._team.ask(OURS, _load(2.0), dsn)
            connection.execute("checkpoint")
            begun = _asked(connection, _CHECKPOINTS)
            deadline = time.monotonic() + _TOO_LONG
            while _asked(connection, _CHECKPOINTS) == begun and time.monotonic() < deadline:
                self.beside.append(await self._slice(connection, self._kept, _BESIDE))
                self._empty()
                self.none.append(await self._slice(connection, self._none, _NONE))
            await self._team.close()

    async def _slice(self, connection: psycopg.Connection, dsn: str, seconds: float) -> Slice:
        before = _asked(connection, _WAL)
        (answer,) = await self._team.ask(OURS, _load(seconds), dsn)
        done = Slice(int(answer["count"]), float(answer["seconds"]), _asked(connection, _WAL) - before)
        where = "beside the keys" if dsn == self._kept else "beside none"
        self._stage.say(f"Kept keys: {where}: {done.cost:.1f} µs, {done.wal / done.count:,.0f} bytes of WAL a message")
        return done

    def _empty(self) -> None:
        """What the last turn has left would be kept keys, too."""
        with psycopg.connect(self._none, autocommit=True) as connection:
            connection.execute("truncate idemconsumer.record")


_WAL: LiteralString = "select (pg_current_wal_lsn() - '0/0')::bigint"
_CHECKPOINTS: LiteralString = "select num_timed + num_requested from pg_stat_checkpointer"


def _asked(connection: psycopg.Connection, question: LiteralString) -> int:
    row = connection.execute(question).fetchone()
    assert row is not None
    return int(row[0])


def _load(seconds: float) -> Load:
    return Load(prefix=secrets.token_hex(6), count=10_000_000, seconds=seconds)


def _whole(slices: list[Slice]) -> Slice:
    return Slice(sum(s.count for s in slices), sum(s.seconds for s in slices), sum(s.wal for s in slices))


def _bytes(dsn: str) -> tuple[int, int]:
    """Of the records' table, and of its index."""
    with psycopg.connect(dsn) as connection:
        heap = _asked(connection, "select pg_table_size('idemconsumer.record')")
        return heap, _asked(connection, "select pg_indexes_size('idemconsumer.record')")


def settings_for(keys: int) -> dict[str, str]:
    """What the most keys should have, with a quarter of the memory for buffers, as is usual. Fewer keys have as much
    less of both: a page of the index is as often changed in a cycle, and as often not in the buffers.
    """
    share = keys / _MOST
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4 / 1024**2
    return {
        "max_wal_size": f"{wal_gb(_MOST) * 1024 * share:.0f}MB",
        "checkpoint_timeout": f"{MINUTES}min",
        "shared_buffers": f"{memory * share:.0f}MB",
    }
