"""What branches get comes in the order in which it finished, in the first run as in every replay (L72)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.rules.values import StepKind, StepRow, StepState
from idemconsumer.sagas.order import Order
from idemconsumer.sagas.step import StepSpec
from tests.support.sagas import Bench, Remote, Station, put, saga
from tests.support.ways import in_a_gather, in_a_group

Branch = Callable[[str], Awaitable[None]]


async def in_an_all(saga: Saga, branch: Any, done: list[str]) -> None:
    async def each(name: str) -> None:
        done.append(await branch(name))

    await saga.all([each("a"), each("b"), each("c")])


async def gathered(saga: Saga, branch: Any, done: list[str]) -> None:
    async def each(name: str) -> None:
        done.append(await branch(name))

    await in_a_gather(in_a_gather(each("a"), each("b")), each("c"))


async def grouped(saga: Saga, branch: Any, done: list[str]) -> None:
    async def each(name: str) -> None:
        done.append(await branch(name))

    await in_a_group(in_a_group(each("a"), each("b")), each("c"))


async def as_completed(saga: Saga, branch: Any, done: list[str]) -> None:
    for each in asyncio.as_completed([branch("a"), branch("b"), branch("c")]):
        done.append(await each)


async def first_completed(saga: Saga, branch: Any, done: list[str]) -> None:
    """What had ended at a time is in the list as one."""
    tasks = {asyncio.create_task(branch(name)) for name in "abc"}
    while tasks:
        ended, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.append("+".join(sorted(each.result() for each in ended)))


class Branches:
    """Three branches, of which c is the first to finish its step in the first run, then b, then a."""

    def __init__(self, way: Any) -> None:
        self.way = way
        self.runs = 0
        self.fails = [ValueError("once")]
        self._over = {name: asyncio.Event() for name in "abc"}

    async def put(self, tx: Tx, name: str) -> str:
        if name != "c":
            await self._over[chr(ord(name) + 1)].wait()
        await put(tx, name)
        return name

    async def branch(self, name: str) -> str:
        output = await self._saga.tx(f"put_{name}", self.put, name)
        self._over[name].set()
        return output

    async def book(self, order: dict[str, Any], saga: Saga) -> list[str]:
        self._saga = saga
        self.runs += 1
        done: list[str] = []
        await self.way(saga, self.branch, done)
        for place, name in enumerate(done):
            await saga.call(f"sent_{place}", self.send, name)
        return done

    async def send(self, step: Step, name: str) -> str:
        if name.startswith("b") and self.fails:
            raise self.fails.pop()
        return await self.remote.charge(step, name)

    remote: Remote


WAYS = [in_an_all, gathered, grouped, as_completed, first_completed]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_list_that_branches_fill_is_the_same_in_a_replay(
    bench: Bench, one: Station, two: Station, remote: Remote, way: Any
) -> None:
    """One was sent twice and another never, and the saga was COMPLETED."""
    branches = Branches(way)
    branches.remote = remote

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        return await branches.book(order, saga)

    first = await one.deliver(saga(book))
    assert (first.kind, remote.effects) == (OutcomeKind.RETRYING, ["c"])
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'["c","b","a"]')
    assert remote.effects == ["c", "b", "a"]


async def test_a_refusal_has_its_turn_too(bench: Bench, one: Station, two: Station) -> None:
    fails, over, said = [ValueError("once")], asyncio.Event(), list[list[str]]()

    async def slow(tx: Tx) -> None:
        await over.wait()
        raise Reject("slow")

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        done: list[str] = []
        said.append(done)

        async def refused() -> None:
            try:
                await saga.tx("slow", slow)
            except Reject as error:
                done.append(error.code)

        async def put_it() -> None:
            done.append(await saga.tx("fast", put, "fast"))
            over.set()

        await saga.all([refused(), put_it()])
        await saga.tx("last", last)

    await one.deliver(saga(book))
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert said == [["out:fast", "slow"]] * 2


async def test_what_a_refusal_leads_to_comes_first_though_it_takes_long(
    bench: Bench, one: Station, two: Station
) -> None:
    """A transaction that it had cut off was not rolled back yet, and does not begin in a replay."""
    fails, refusal, seen = [ValueError("once")], asyncio.Event(), list[list[str]]()

    async def hang(tx: Tx) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)

    async def refused(tx: Tx) -> None:
        await asyncio.sleep(0.03)
        raise Reject("no")

    async def other(tx: Tx) -> None:
        await refusal.wait()

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        done: list[str] = []
        seen.append(done)

        async def refuses() -> None:
            try:
                await saga.tx("refused", refused)
            finally:
                refusal.set()

        async def caught() -> None:
            with suppress(BaseExceptionGroup):
                await in_a_group(refuses(), saga.tx("hung", hang))
            done.append("caught")

        async def beside() -> None:
            await saga.tx("other", other)
            done.append("other")

        await asyncio.gather(caught(), beside())
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert seen == [["caught", "other"]] * 2


async def test_a_branch_without_its_recorded_step_is_seen_before_anything_new(
    bench: Bench, one: Station, two: Station
) -> None:
    fails = [ValueError("once")]

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()
        await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        started = asyncio.create_task(saga.tx("early", put, "early"))
        await asyncio.sleep(0)
        await started
        await asyncio.create_task(saga.tx("late", put, "late"))
        await saga.tx("last", last)

    async def changed(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.create_task(saga.tx("late", put, "late"))
        await saga.tx("other", put, "other")

    await one.deliver(saga(book))
    outcome = await two.resume(saga(changed, timeout=0.3))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "step 'early' finished before 'late', and the handler no longer requests it" in str(outcome.error)
    assert bench.effects == ["early", "late"]


# ------------------------------------------------------------------------------------------------- the order itself
def row(name: str, position: int | None, *, overlapped: bool = True) -> StepRow:
    return StepRow(name, StepKind.TX, StepState.DONE, False, overlapped, position, 1, None)


def spec(name: str, *, overlapped: bool = True) -> StepSpec:
    return StepSpec(name, StepKind.TX, put, (), None, overlapped=overlapped)


async def give(order: Order, given: list[str], name: str) -> None:
    assert await order.turn(name) is None
    given.append(name)


async def test_a_write_whose_answer_is_out_may_have_the_earlier_position() -> None:
    order, given = Order([], 5.0), list[str]()
    with order.sending(spec("a")) as a:
        with order.sending(spec("b")) as b:
            b.position = 2
        later = asyncio.create_task(give(order, given, "b"))
        await asyncio.sleep(0.01)
        assert given == [], "a was sent before b was answered"
        with order.sending(spec("c")):
            pass  # sent later, so it comes later
        a.position = 1
    await asyncio.gather(give(order, given, "a"), later)
    assert given == ["a", "b"]


async def test_an_answer_that_takes_long_is_waited_for() -> None:
    """Beyond the handler's `timeout` the later one was given out first."""
    order, given = Order([], 0.05), list[str]()
    with order.sending(spec("a")) as a:
        with order.sending(spec("b")) as b:
            b.position = 2
        later = asyncio.create_task(give(order, given, "b"))
        await asyncio.sleep(0.2)
        a.position = 1
    await asyncio.gather(give(order, given, "a"), later)
    assert given == ["a", "b"]


async def test_a_write_that_finished_nothing_is_not_waited_for() -> None:
    order, given = Order([], 5.0), list[str]()
    with order.sending(spec("a")):
        with order.sending(spec("b")) as b:
            b.position = 2
        later = asyncio.create_task(give(order, given, "b"))
        await asyncio.sleep(0)
        assert given == []
    await later
    assert given == ["b"]


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_asks_first_each_gets_it_in_the_order_of_the_positions(seed: int) -> None:
    chosen = random.Random(seed)
    rows = [row(f"s{n}", n) for n in range(1, 12)]
    asked = chosen.sample(rows, len(rows))
    order, given = Order(chosen.sample(rows, len(rows)), 5.0), list[str]()

    async def ask(name: str) -> None:
        for _ in range(chosen.randrange(4)):
            await asyncio.sleep(0)
        await give(order, given, name)

    await asyncio.gather(*(ask(each.name) for each in asked))
    assert given == [each.name for each in rows]


async def test_the_handlers_own_steps_wait_for_branches_alone() -> None:
    """What it has left out of its own is found by the rule for those (L6)."""
    gone, own = row("gone", 1, overlapped=False), row("own", 3, overlapped=False)
    order, given = Order([gone, own], 60.0), list[str]()
    await give(order, given, "own")
    order = Order([gone, row("branch", 2), own], 60.0)
    waiting = asyncio.create_task(give(order, given, "own"))
    await asyncio.sleep(0.01)
    assert given == ["own"], "the branch comes first"
    await asyncio.gather(give(order, given, "gone"), give(order, given, "branch"), waiting)
    assert given == ["own", "gone", "branch", "own"]


async def test_a_step_that_is_being_cancelled_may_go_on() -> None:
    """A timeout inside it, as a wait has one, cancels its task, and withdraws that."""
    order, given, cancelled = Order([row("a", 1), row("b", 2)], 60.0), list[str](), True
    order.ending = lambda: cancelled
    waiting = asyncio.gather(give(order, given, "a"), give(order, given, "b"))
    await asyncio.sleep(0.01)
    assert given == ["a"], "what the end of that step leads to comes first"
    cancelled = False
    async with asyncio.timeout(5):
        await waiting


async def test_a_run_that_is_interrupted_lets_nobody_wait() -> None:
    order, given = Order([row("a", 1), row("b", 2)], 60.0), list[str]()
    waiting = asyncio.create_task(give(order, given, "b"))
    await asyncio.sleep(0)
    order.close()
    async with asyncio.timeout(5):
        await waiting
