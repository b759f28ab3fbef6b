"""The pieces of the benchmarks run: a few messages through each consumer that needs nothing but what the tests have."""

from __future__ import annotations

import psycopg
import pytest

from benchmarks import report
from benchmarks._child import child
from benchmarks._measure import Figure, Ratio, Result, Spread, Table, Target, side_by_side
from benchmarks._stage import CLAIM, PAYMENT, SEEN
from idemconsumer.stores.migrations import migrate


@pytest.mark.parametrize("name", ["bare", "by hand", "textbook", "group 32"])
async def test_a_consumer_of_the_store_path_applies_its_load(name: str, database: str) -> None:
    migrate(database, "idemconsumer")
    with psycopg.connect(database, autocommit=True) as connection:
        for table in (PAYMENT, SEEN, CLAIM):
            connection.execute(table)
        async with child("benchmarks.rivals.store") as running:
            load = {"prefix": "p", "count": 50}
            answer = await running.ask(dsn=database, name=name, lanes=2, load=load)
            await running.ask(close=True)
        assert answer["seconds"] > 0
        assert connection.execute("select count(*), count(distinct id) from payment").fetchone() == (50, 50)


async def test_rounds_are_compared_with_their_neighbours_and_the_median_counts() -> None:
    ours, theirs = [30.0, 10.0, 40.0], [10.0, 10.0, 20.0]

    async def measure(values: list[float], number: int) -> float:
        return values[number]

    table = await side_by_side(
        "pace",
        {"ours": lambda n: measure(ours, n), "theirs": lambda n: measure(theirs, n)},
        [Target("ours", "theirs", 2.0), Target("ours", "nobody", 1.0)],
        rounds=3,
        say=lambda _: None,
    )
    assert [ratio.values for ratio in table.ratios] == [Spread(1.0, 2.0, 3.0)]
    assert table.ratios[0].met


def test_a_result_becomes_tables() -> None:
    ratio = Ratio(Target("ours", "theirs", 1.2, "at most"), Spread(1.0, 1.3, 1.4))
    table = Table("Cost", [Figure("ours", "ms", Spread(1.0, 2.0, 3.0), goal=2.5)], [ratio], {"lanes": 4})
    text = report.text(Result("part", [table], machine="2 cores", when="today"))
    assert "| ours | **2** (1 to 3) | ms | ≤ 2.5: met |" in text
    assert "| ours | theirs | **1.3** (1 to 1.4) | ≤ 1.2: missed |" in text


def test_what_has_a_goal_is_in_one_table() -> None:
    met, aimless = Figure("ours", "ms", Spread(1.0, 2.0, 3.0), goal=2.5), Figure("theirs", "ms", Spread(1.0, 2.0, 3.0))
    missed = Ratio(Target("ours", "theirs", 1.5), Spread(1.0, 1.3, 1.6))
    lines = report.targets([Result("part", [Table("Cost", [met, aimless], [missed])])]).splitlines()
    assert lines[2:] == [
        "| Cost | ours to theirs | ≥ 1.5 | 1.3 | **missed** |",
        "| Cost | ours, ms | ≤ 2.5 | 2 | met |",
    ]
