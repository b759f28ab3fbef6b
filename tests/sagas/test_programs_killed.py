"""Random programs in worker processes that are killed: each comes to the end of a run that was left alone.

As `test_random_programs`, where a process loses its lease; here SIGKILL ends it, and nothing that it knew is left.
`SEED=… pytest -m long -s` begins with another program.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from tests.sagas.programs.judged import consistent, wrong
from tests.sagas.programs.killed import Killed
from tests.sagas.programs.source import make, shown
from tests.support.away import away
from tests.support.sagas import Bench
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database

pytestmark = [pytest.mark.kill, pytest.mark.slow]

SEED: Final = int(os.environ.get("SEED", "0"))


@pytest.fixture
async def killed(postgres18: PostgresServer, tmp_path: Path) -> AsyncIterator[Killed]:
    with fresh_database(postgres18.dsn) as dsn, closing(Bench(dsn)) as bench:
        async with away(dsn) as far:
            with closing(Killed(bench, far, tmp_path, random.Random(SEED))) as killed:
                yield killed


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
async def test_killed_runs_come_to_the_end_of_straight_ones(killed: Killed, count: int) -> None:
    """Each program is a saga twice."""
    programs = {seed: make(seed) for seed in range(SEED, SEED + count)}
    bound = 120.0 + count
    begun = time.monotonic()
    straight = await killed.play({f"s{seed}": its for seed, its in programs.items()}, kills=False, seconds=bound)
    between, lost = time.monotonic(), killed.takeovers
    disturbed = await killed.play({f"k{seed}": its for seed, its in programs.items()}, kills=True, seconds=bound)
    took, taken_over = time.monotonic() - between, killed.takeovers - lost
    print(f"{count} programs, {between - begun:.0f} s; {took:.0f} s, {killed.kills} kills, {taken_over} takeovers")
    found = list[str]()
    for seed, program in programs.items():
        its = [f"straight: {each}" for each in consistent(straight[f"s{seed}"])]
        if its := its or wrong(program, straight[f"s{seed}"], disturbed[f"k{seed}"]):
            found.append(f"seed {seed}, {shown(program)}: {its}")
    assert not found, "\n".join(found)
    assert killed.kills
