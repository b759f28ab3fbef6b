"""Lanes take turns while the CPU of their process is what limits it."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer.rules.group_size import open_groups
from idemconsumer.worker.turns import Turns
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("limit", "lanes", "busy", "then"),
    [
        (8, 8, 0.9, 4),
        (64, 64, 0.75, 32),
        (4, 8, 1.0, 4),  # no fewer: a database that is close by would have to wait for us
        (2, 2, 1.0, 2),
        (4, 8, 0.6, 4),
        (4, 8, 0.4, 8),
        (32, 64, 0.0, 64),
        (8, 8, 0.0, 8),
    ],
)
def test_fewer_groups_are_open_while_the_cpu_is_busy(limit: int, lanes: int, busy: float, then: int) -> None:
    assert open_groups(limit, lanes, busy) == then


class Machine:
    """A clock and a CPU time, in seconds, as far as they have run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.used = 0.0
        self.looks = 0

    def cpu(self) -> float:
        self.looks += 1
        return self.used

    def passes(self, seconds: float, *, busy: float) -> None:
        self.now += seconds
        self.used += busy * seconds


class Bench:
    """Five groups that want a turn, of which four may be open."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.turns = Turns(8, clock=lambda: self.machine.now, cpu=self.machine.cpu)
        self.running: list[int] = []
        self.go_on = [asyncio.Event() for _ in range(8)]

    async def group(self, number: int, handler: str = "one") -> None:
        async with self.turns.of(handler):
            self.running.append(number)
            await self.go_on[number].wait()

    def begin(self, *numbers: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.group(number)) for number in numbers]

    async def until_looked(self) -> None:
        before = self.machine.looks
        await until(lambda: self.machine.looks != before)

    async def until_running(self, count: int) -> None:
        await until(lambda: len(self.running) >= count)

    async def end(self, tasks: list[asyncio.Task[None]]) -> None:
        for event in self.go_on:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    bench.machine.passes(1.0, busy=1.0)
    return bench


async def until_idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_first_who_waits_is_the_first_to_go_on(bench: Bench) -> None:
    tasks = bench.begin(0, 1, 2, 3, 4, 5)
    await until_idle()
    assert bench.running == [0, 1, 2, 3]
    bench.go_on[2].set()
    tasks += bench.begin(6)  # comes in the same moment, and goes behind those that wait
    await until_idle()
    assert bench.running == [0, 1, 2, 3, 4]
    await bench.end(tasks)
    assert bench.running == [0, 1, 2, 3, 4, 5, 6]


async def test_who_waits_is_let_in_when_the_cpu_is_idle_though_no_group_ends(bench: Bench) -> None:
    tasks = bench.begin(0, 1, 2, 3, 4, 5)
    await bench.until_looked()  # and found the CPU as busy as before
    await until_idle()
    assert bench.running == [0, 1, 2, 3]
    bench.machine.passes(1.0, busy=0.0)
    await bench.until_running(6)
    await bench.end(tasks)


async def test_who_has_waited_for_half_a_second_goes_on_however_busy_the_cpu_is(bench: Bench) -> None:
    tasks = bench.begin(0, 1, 2, 3, 4, 5)
    await until_idle()
    bench.machine.passes(0.4, busy=1.0)
    await bench.until_looked()
    await until_idle()
    assert bench.running == [0, 1, 2, 3]
    bench.machine.passes(0.2, busy=1.0)
    await bench.until_running(6)
    await bench.end(tasks)


@pytest.mark.parametrize("given", [False, True])
async def test_a_turn_that_is_cancelled_is_lost_to_nobody(bench: Bench, given: bool) -> None:
    await bench.turns._enter("one")
    tasks = bench.begin(0, 1, 2, 3, 4)
    await until_idle()
    assert bench.running == [0, 1, 2]
    if given:
        bench.turns._leave("one")  # the group 3 has a turn now, and does not know it yet
    tasks[3].cancel()
    await until_idle()
    if not given:
        bench.turns._leave("one")
    await until_idle()
    assert bench.running == [0, 1, 2, 4]
    await bench.end(tasks)
    assert bench.turns._open.total() == 0


async def test_a_handler_with_no_group_open_has_its_turn_at_once_and_the_one_with_fewest_comes_first(
    bench: Bench,
) -> None:
    tasks = bench.begin(0, 1, 2, 3, 4)
    await until_idle()
    assert bench.running == [0, 1, 2, 3]
    tasks += [asyncio.create_task(bench.group(number, "another")) for number in (5, 6)]
    await until_idle()
    assert bench.running == [0, 1, 2, 3, 5]
    for number in (0, 1):  # four are still as many as may be open, until the second one ends
        bench.go_on[number].set()
    await until_idle()
    assert bench.running == [0, 1, 2, 3, 5, 6]
    await bench.end(tasks)
    assert bench.running[-1] == 4
