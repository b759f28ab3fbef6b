"""A saga of three steps (transaction, call to a local stub, transaction) beside the same one in DBOS.

DBOS is run in the way that was fastest on the machine where this was written, which the last table shows: its
synchronous API in threads. Both run 64 sagas at a time on 32 connections of the same Postgres; DBOS is as fast with
fewer at a time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from benchmarks._child import Child, child
from benchmarks._measure import Figure, Result, Spread, Table, Target, side_by_side
from benchmarks._stage import Meter, Stage
from benchmarks.end_to_end import Reach

AT_ONCE = 64
CONNECTIONS = 32
OURS, THEIRS = "idemconsumer", "DBOS"


class Side:
    """One of the two in its process."""

    def __init__(self, process: Child, count: int, **more: object) -> None:
        self._process = process
        self._count = count
        self._more = more

    async def rate(self, number: int) -> float:
        """Sagas a second."""
        return self._count / await self._run(self._count)

    async def warm(self) -> None:
        await self._run(4 * AT_ONCE)

    async def costs(self, name: str, dsn: str) -> list[Figure]:
        """What one saga costs the database, on average over a run."""
        meter = Meter(dsn)
        await asyncio.sleep(Meter.TELLING)
        await meter.begin()
        await self._run(self._count)
        written = await meter.end()  # before anything of the background is added
        await asyncio.sleep(Meter.TELLING)
        units = {"commits": "commits", "writing": "commits that write", "wal": "bytes of WAL"}
        spent = {**written, "commits": (await meter.end())["commits"]}
        return [Figure(name, f"{unit} a saga", Spread.of([spent[key] / self._count])) for key, unit in units.items()]

    async def _run(self, count: int) -> float:
        seconds = await self._process.ask(prefix=secrets.token_hex(4), count=count, at_once=AT_ONCE, **self._more)
        return float(seconds)


class Sides(NamedTuple):
    ours: Side
    theirs: Side
    theirs_process: Child
    our_dsn: str
    their_dsn: str


@asynccontextmanager
async def _sides(stage: Stage, reach: Reach = lambda dsn: dsn) -> AsyncIterator[Sides]:
    """Both, warm. `reach`: where they find their databases."""
    count, waves = (400, 3) if stage.quick else (3_000, 6)
    with stage.database() as our_dsn, stage.database() as their_dsn:
        environment = {
            "IDEMCONSUMER_DSN": reach(our_dsn),
            "IDEMCONSUMER_CONCURRENCY": str(CONNECTIONS),
            "BENCH_DSN": reach(their_dsn),
        }
        async with (
            child("benchmarks.rivals.saga_ours", environment=environment) as our_process,
            child("benchmarks.rivals.saga_dbos", environment=environment) as their_process,
        ):
            ours = Side(our_process, count)
            theirs = Side(their_process, max(count // 8, waves * AT_ONCE), way="threads")
            await ours.warm()
            await theirs.warm()
            yield Sides(ours, theirs, their_process, our_dsn, their_dsn)


async def sagas(stage: Stage) -> Result:
    async with _sides(stage) as sides:
        tables = [await _compared(stage, sides, "Sagas of three steps", goal=15.0, plot=True)]
        if not stage.quick:
            costs = [
                *await sides.ours.costs(OURS, sides.our_dsn),
                *await sides.theirs.costs(THEIRS, sides.their_dsn),
            ]
            tables.append(Table("What a saga costs the database", costs))
            tables.append(await _ways(stage, sides.theirs_process))
    return Result("sagas", tables)


async def beside_dbos(stage: Stage, title: str, reach: Reach, facts: Mapping[str, object]) -> Table:
    """The same two with their database elsewhere."""
    async with _sides(stage, reach) as sides:
        return await _compared(stage, sides, title, facts=facts)


async def _compared(
    stage: Stage,
    sides: Sides,
    title: str,
    *,
    goal: float | None = None,
    plot: bool = False,
    facts: Mapping[str, object] | None = None,
) -> Table:
    return await side_by_side(
        title,
        {OURS: sides.ours.rate, THEIRS: sides.theirs.rate},
        [Target(OURS, THEIRS, goal)],
        rounds=3,
        say=stage.say,
        unit="sagas/s",
        plot=plot,
        facts={**(facts or {}), "at once": AT_ONCE, "connections": CONNECTIONS},
    )


async def _ways(stage: Stage, process: Child) -> Table:
    """Whether DBOS is run at its best."""
    sides = {way: Side(process, 4 * AT_ONCE, way=way) for way in ("direct", "start", "queue", "threads")}
    for side in sides.values():
        await side.warm()
    subjects = {way: side.rate for way, side in sides.items()}
    return await side_by_side("Ways to run the saga in DBOS", subjects, [], rounds=3, say=stage.say, unit="sagas/s")
