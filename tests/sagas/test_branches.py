"""Steps of parallel branches come in another order each time, which is no change of the handler (L6, L7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Tx
from idemconsumer.rules.values import State
from tests.support.sagas import Bench, Station, put, saga, take_back
from tests.support.waiting import PATIENCE
from tests.support.ways import Way, in_a_gather, in_a_group


async def refuse(tx: Tx) -> None:
    raise Reject("no")


async def beside_a_task(first: Any, second: Any) -> None:
    """The first one's steps are the handler's own."""
    task = asyncio.create_task(second)
    await first
    await task


async def beside_a_task_of_its_own(first: Any, second: Any) -> None:
    await beside_a_task(second, first)


WAYS = [in_a_gather, in_a_group, beside_a_task, beside_a_task_of_its_own]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


class Branches:
    """Two branches, of which the right one is the first to run a step in the first run, and the last one later."""

    def __init__(self, way: Way, undo: Any = take_back) -> None:
        self.way = way
        self.undo = undo
        self.runs = 0
        self._right, self._left = asyncio.Event(), asyncio.Event()

    async def right(self, saga: Saga) -> None:
        if self.runs > 1:
            await self._left.wait()
        await saga.tx("r", put, "r", undo=self.undo)
        self._right.set()

    async def left(self, saga: Saga, step: Callable[[Saga], Any]) -> None:
        if self.runs == 1:
            await self._right.wait()
        else:
            asyncio.get_running_loop().call_later(0.05, self._left.set)
        await step(saga)
        self._left.set()

    async def run(self, saga: Saga, step: Callable[[Saga], Any]) -> None:
        self.runs += 1
        await self.way(self.left(saga, step), self.right(saga))


@every_way
async def test_a_branch_may_begin_its_first_step_before_another_has_come_to_a_recorded_one(
    bench: Bench, one: Station, two: Station, way: Way
) -> None:
    branches = Branches(way)

    async def step(saga: Saga) -> None:
        if branches.runs == 1:
            raise ValueError
        await saga.tx("l", put, "l")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await branches.run(saga, step)
        return "done"

    await one.deliver(saga(book))
    assert bench.effects == ["r"]
    outcome = await two.resume(saga(book))
    assert (outcome.kind, bench.effects) == (OutcomeKind.APPLIED, ["r", "l"])


@every_way
async def test_a_step_of_a_branch_is_missed_at_completion_at_the_latest(
    bench: Bench, one: Station, two: Station, way: Way
) -> None:
    branches = Branches(way)

    async def fails(saga: Saga) -> None:
        raise ValueError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await branches.run(saga, fails)

    async def changed(order: dict[str, Any], saga: Saga) -> None:
        await way(saga.tx("l", put, "l"), saga.tx("m", put, "m"))

    await one.deliver(saga(book))
    outcome = await two.resume(saga(changed, timeout=0.3))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")


@every_way
@pytest.mark.parametrize("end", ["rejected", "unfinished"])
async def test_what_a_slower_branch_did_is_undone_in_a_replay_too(
    bench: Bench, one: Station, two: Station, way: Way, end: str
) -> None:
    """The step that ends the replay was met first, and the other branch's undo was not known yet."""
    fails = [ValueError("once")]

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    branches = Branches(way, undo)

    async def step(saga: Saga) -> None:
        if end == "rejected":
            await saga.tx("l", refuse)
        elif branches.runs == 1:
            raise Reject("no")
        else:
            await saga.tx("unfinished", put, "unfinished")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first", undo=take_back)
        await branches.run(saga, step)

    handler = saga(book, timeout="20s")
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert (bench.state, bench.letters) == (State.FAILED, [])
    assert bench.effects == ["first", "r", "undo:r:out:r", "undo:first:out:first"]


async def test_a_replay_does_not_wait_for_what_came_of_a_rejection(bench: Bench, one: Station, two: Station) -> None:
    fails = [ValueError("once")]

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    async def branch(saga: Saga) -> None:
        try:
            await saga.tx("refused", refuse)
        except Reject:
            await saga.tx("instead", put, "instead", undo=undo)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(branch(saga), saga.tx("beside", put, "beside"))
        raise Reject("no")

    handler = saga(book, timeout="1h")
    await one.deliver(handler)
    async with asyncio.timeout(PATIENCE):
        assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert bench.effects[-1] == "undo:instead:out:instead"


async def test_a_replay_waits_for_no_step_that_has_its_place_before(bench: Bench, one: Station, two: Station) -> None:
    """There is no branch that could come to it: the handler has changed."""

    async def fails(tx: Tx, output: str, name: str) -> None:
        raise ValueError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=fails)
        raise Reject("no")

    async def changed(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("new", put, "new")

    await one.deliver(saga(book))
    async with asyncio.timeout(PATIENCE):
        outcome = await two.resume(saga(changed, timeout="1h"))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "saga_changed", ["a"])
