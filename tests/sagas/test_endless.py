"""A handler, or a step, that does not end by itself: its saga's run ends all the same (L34, L35)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Saga, Step, Tx
from idemconsumer.sagas import activity as body
from tests.sagas.swallowers import explode
from tests.support.clock import over_time
from tests.support.sagas import Bench, Station, order, put, saga
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, function_grace=0.05)


async def never() -> None:
    """Goes on, whatever it is told."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def error_of(bench: Bench) -> str:
    ((error,),) = bench.run("select error from idemconsumer.saga")
    return str(error)


# ---------------------------------------------------------------------------------------------------- it asks for ever
async def asks_itself(saga: Saga) -> None:
    while True:
        with contextlib.suppress(BaseException):
            await saga.tx("s", explode)


async def asks_in_a_branch(saga: Saga) -> None:
    await asyncio.create_task(asks_itself(saga))


async def asks_in_a_branch_and_will_not_be_cancelled(saga: Saga) -> None:
    task = asyncio.create_task(asks_itself(saga))
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


@pytest.mark.parametrize(
    "asks", [asks_itself, asks_in_a_branch, asks_in_a_branch_and_will_not_be_cancelled], ids=lambda f: f.__name__
)
async def test_a_handler_that_asks_again_and_again_lets_others_run_and_is_ended(
    bench: Bench, one: Station, asks: Callable[[Saga], Awaitable[None]]
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asks(saga)

    async def other(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")

    handler = saga(book, max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        outcome, beside = await asyncio.gather(one.deliver(handler), one.deliver(saga(other), order("other")))
        assert beside.kind is OutcomeKind.APPLIED
        outcomes = await one.to_the_end(handler, outcome)
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.DEAD]
    assert outcomes[-1].reason == "attempts_exhausted"
    assert bench.effects == ["a"]


async def test_many_steps_that_are_refused_at_once_end_by_themselves(bench: Bench, one: Station) -> None:
    ended = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            await saga.tx("s", explode)
        except BaseException:
            steps = [saga.tx(f"step {n}", put, "never") for n in range(3 * body.MOST_REFUSED)]
            ended.append(await asyncio.gather(*steps, return_exceptions=True))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert [len(each) for each in ended] == [3 * body.MOST_REFUSED]
    assert bench.effects == []


# ------------------------------------------------------------------------------------------ it swallows its cancelling
async def test_a_transaction_that_swallows_its_cancelling_is_left_behind(bench: Bench, one: Station) -> None:
    async def stubborn(tx: Tx) -> None:
        await put(tx, "never")
        await never()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", stubborn)

    handler = saga(book, timeout="0.1s", max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.DEAD]
    assert bench.effects == []
    idle = "select count(*) from pg_stat_activity where datname = current_database() and state ~ '^idle in transaction'"
    assert bench.run(idle) == [(0,)], "it holds nothing any more"


async def test_a_call_that_swallows_its_cancelling_is_left_behind_and_its_outcome_is_unknown(
    bench: Bench, one: Station
) -> None:
    keys = []

    async def stubborn(step: Step) -> str:
        keys.append(step.key)
        if len(keys) == 1:
            await never()
        return "done"

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("s", stubborn)

    async with asyncio.timeout(PATIENCE):
        outcomes = await one.to_the_end(saga(book), await one.deliver(saga(book, timeout="0.2s")))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert len(keys) == 2
    assert len(set(keys)) == 1


@pytest.mark.parametrize("how", ["drain", "lease lost"])
async def test_a_saga_that_swallows_its_cancelling_is_given_up_all_the_same(
    bench: Bench, one: Station, two: Station, how: str
) -> None:
    begun = asyncio.Event()

    async def stubborn(step: Step) -> None:
        if not begun.is_set():
            begun.set()
            await never()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        while True:
            try:
                return await saga.call("s", stubborn)
            except BaseException:
                pass

    handler = saga(book)
    running = asyncio.create_task(one.deliver(handler))
    await begun.wait()
    (one.engine.drain if how == "drain" else one.engine.lose)()
    async with asyncio.timeout(PATIENCE):
        assert (await running).kind is (OutcomeKind.CANCELLED if how == "drain" else OutcomeKind.FENCED)
        bench.expire(one)
        assert (await two.resume(handler)).kind is OutcomeKind.APPLIED


# --------------------------------------------------------------------------------------------------- between two steps
@pytest.mark.parametrize("waits", [asyncio.Event().wait, never], ids=["waits", "swallows its cancelling"])
async def test_what_a_handler_does_between_its_steps_has_an_end(
    bench: Bench, one: Station, waits: Callable[[], Awaitable[object]]
) -> None:
    between = asyncio.Event()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        between.set()
        await waits()

    handler = saga(book, timeout="10s", max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        first = await over_time(one.deliver(handler), 10.0, between.is_set)
        assert first.kind is OutcomeKind.RETRYING
        assert "did not reach its next step or its end within 10 s" in error_of(bench)
        between.clear()
        assert (await over_time(one.resume(handler), 10.0, between.is_set)).reason == "attempts_exhausted"


async def test_steps_and_their_replay_do_not_count_as_what_is_between_them(bench: Bench, one: Station) -> None:
    async def slow(step: Step) -> None:
        await asyncio.sleep(1.0)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        for n in range(4):
            await asyncio.gather(saga.call(f"{n}a", slow), saga.call(f"{n}b", slow))
            await asyncio.sleep(0.1)

    assert (await one.deliver(saga(book, timeout="3s"))).kind is OutcomeKind.APPLIED


# ----------------------------------------------------------------------------------------------------------- elsewhere
@pytest.mark.parametrize("where", ["a thread", "another loop"])
async def test_a_saga_that_is_used_elsewhere_is_refused_at_once(bench: Bench, one: Station, where: str) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def use() -> None:
            await saga.tx("a", put, "a")

        def elsewhere() -> object:
            return saga.tx("a", put, "a") if where == "a thread" else asyncio.run(use())

        await asyncio.to_thread(elsewhere)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert "saga was used outside its handler's thread or event loop" in error_of(bench)
    assert bench.effects == []
