"""While the database is away all that need it wait together, and go on together (R8)."""

from __future__ import annotations

import asyncio

import pytest

from idemconsumer.worker import outage
from idemconsumer.worker.outage import Outage
from tests.support.logs import LogCapture, times
from tests.support.waiting import PATIENCE, until

DOWN = OSError("it is down")


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each pause was made for; all of them are longer than any test waits."""
    made: list[int] = []

    def endless(failures: int, *, counted: bool, jitter: float) -> float:
        made.append(failures)
        return 10.0 * PATIENCE

    monkeypatch.setattr(outage, "session_pause", endless)
    return made


async def test_those_that_fail_together_have_failed_once(failures: list[int], logged: LogCapture) -> None:
    it = Outage()
    waiting = [asyncio.create_task(it.wait(DOWN)) for _ in range(40)]
    await until(lambda: bool(failures))
    assert it.lasts
    it.over()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*waiting)
    assert failures == [1], "else forty lanes are as good as a minute without the database"
    assert not it.lasts
    assert times(logged, "store unreachable, waiting") == times(logged, "store reachable again") == 1


async def test_who_has_reached_it_wakes_all_others(failures: list[int]) -> None:
    it = Outage()
    for number in (1, 2):
        waiting = [asyncio.create_task(it.wait(DOWN)) for _ in range(3)]
        await until(lambda number=number: len(failures) == number)  # type: ignore[misc]
        it.over()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*waiting)


async def test_the_pauses_grow_while_nobody_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def none(failures: int, *, counted: bool, jitter: float) -> float:
        made.append(failures)
        return 0.0

    monkeypatch.setattr(outage, "session_pause", none)
    it = Outage()
    for _ in range(3):
        await it.wait(DOWN)
    assert made == [1, 2, 3]


async def test_a_drain_ends_the_wait(failures: list[int]) -> None:
    ended = asyncio.Event()
    waiting = asyncio.create_task(Outage().wait(DOWN, ended))
    await until(lambda: bool(failures))
    ended.set()
    async with asyncio.timeout(PATIENCE):
        await waiting
