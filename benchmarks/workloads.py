"""Rows that many messages update, and messages that fail, against the same consumer without deduplication."""

from __future__ import annotations

from benchmarks._crew import LANES, Crew, crew
from benchmarks._loads import Load
from benchmarks._measure import Result, Table, Target, side_by_side
from benchmarks._sizes import OURS
from benchmarks._stage import Stage

_PLOT = "Messages/s of ours, as a multiple of bare's"


async def hot_rows(stage: Stage) -> Result:
    """Each message takes one from the stock of one of so many articles; a run counts its deadlocks after a warm-up."""
    cells = [(rows, lanes, processes) for rows in (10, 100, 10_000) for lanes, processes in ((2, 1), (8, 1), (8, 2))]
    if stage.quick:
        cells = [(100, 8, 1)]
    async with crew(stage, processes=2) as team:
        return Result("hot_rows", [await _cell(stage, team, *cell) for cell in cells], plot=_PLOT)


async def _cell(stage: Stage, team: Crew, rows: int, lanes: int, processes: int) -> Table:
    load = Load(prefix="", count=2_000 if stage.quick else 12_000, hot=rows, seconds=8.0)
    team.deadlocks.clear()
    # A warm-up as long as the run: contention is learned in it, and the deadlocks of learning are not counted.
    subjects = {name: team.subject(name, load, lanes=lanes, processes=processes, warm=1.0) for name in ("bare", OURS)}
    where = f"{lanes} lanes" if processes == 1 else f"{processes} processes, {lanes} lanes"
    table = await side_by_side(
        f"{rows:,} hot rows, {where}", subjects, [Target(OURS, "bare", 1.0)], rounds=3, say=stage.say
    )
    table.facts["deadlocks of ours"] = team.deadlocks[OURS]
    return table


async def failures(stage: Stage) -> Result:
    """`rejected`: a rule of the business refuses a message after its write, for good (ours: `Reject`, stored).
    `failing`: the first attempt raises after its write, and the second, a millisecond later, goes through."""
    tables = []
    goals = {0.001: None, 0.01: 1.2, 0.1: 0.7}
    async with crew(stage) as team:
        for kind in ("rejected", "failing"):
            for share, goal in goals.items():
                load = Load(prefix="", count=2_000 if stage.quick else 16_000, **{kind: share})  # type: ignore[arg-type]
                subjects = {name: team.subject(name, load) for name in ("bare", OURS)}
                targets = [Target(OURS, "bare", goal)]
                title = f"{share:.1%} {kind}"
                tables.append(
                    await side_by_side(
                        title, subjects, targets, rounds=1 if stage.quick else 3, say=stage.say, facts={"lanes": LANES}
                    )
                )
    return Result("failures", tables, plot=_PLOT)
