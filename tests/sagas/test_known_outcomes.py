"""A call that a refusal or the handler's end would cut off comes to its end, so that its outcome is known (L75)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back
from tests.support.ways import in_a_group


async def nothing() -> None:
    """Of a branch."""


class Slow:
    """A call that goes on until it is let go, or for 50 ms from its second time on."""

    def __init__(self, remote: Remote) -> None:
        self.begun = asyncio.Event()
        self._remote = remote
        self._times = 0

    async def call(self, step: Step, name: str) -> str:
        self._times += 1
        self.begun.set()
        await (asyncio.Event().wait() if self._times == 1 else asyncio.sleep(0.05))
        return await self._remote.charge(step, name)


@pytest.mark.parametrize("deep", [False, True])
async def test_a_task_group_beside_a_call_ends_though_it_is_caught(
    bench: Bench, one: Station, remote: Remote, deep: bool
) -> None:
    """In each run it cut off the call again, until the saga was put aside as an unknown effect."""
    slow, fails, caught = Slow(remote), [ValueError("once")], list[str]()

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                charge = saga.call("charged", slow.call, "card", undo=remote.refund)
                group.create_task(in_a_group(in_a_group(charge, nothing()), nothing()) if deep else charge)
                group.create_task(saga.tx("refused", refuse))
        except* Reject as refused:
            caught.extend(str(each) for each in refused.exceptions)
        await saga.tx("last", last)

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (remote.effects, bench.effects) == (["card"], ["last"])
    assert caught == ["no"] * 3, "each run has gone the same way"


async def test_what_it_has_done_is_undone_with_the_saga(bench: Bench, one: Station, remote: Remote) -> None:
    slow = Slow(remote)

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("charged", slow.call, "card", undo=remote.refund))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("put", put, "put", undo=take_back)
        raise Reject("after all")

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert bench.effects == ["put", "undo:put:out:put"]


async def test_a_call_that_the_handler_stopped_waiting_for_is_known_at_its_end(
    bench: Bench, one: Station, remote: Remote
) -> None:
    async def slow(step: Step, name: str) -> str:
        await asyncio.sleep(0.1)
        return await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            return await asyncio.wait_for(asyncio.shield(saga.call("charged", slow, "card")), 0.02)
        except TimeoutError:
            return "too late"

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert outcomes[0].error == "SagaMisused"
    assert (outcomes[-1].result, len(remote.calls)) == (b'"charged:card"', 1)


async def hang(tx: Tx) -> None:
    await put(tx, "hung")
    await asyncio.Event().wait()


async def refused(tx: Tx) -> None:
    await asyncio.sleep(0.03)
    raise Reject("no")


CUT_OFF: dict[str, Callable[[Saga], Any]] = {
    "tx": lambda saga: saga.tx("other", hang),
    "sleep": lambda saga: saga.sleep("other", "1h"),
    "wait": lambda saga: saga.wait("other"),
    "first": lambda saga: saga.first(a=saga.wait("other"), b=saga.wait("another")),
}


@pytest.mark.parametrize("nested", [False, True], ids=["beside", "nested"])
@pytest.mark.parametrize("what", CUT_OFF)
async def test_what_has_no_effect_yet_may_be_cut_off(
    bench: Bench, one: Station, two: Station, what: str, nested: bool
) -> None:
    """Each run cut it off and failed, until the saga was undone or put aside."""
    fails = [ValueError("once")]

    async def refusing(saga: Saga) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.tx("refused", refused))
            if nested:
                group.create_task(saga.tx("hung", hang))

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(CUT_OFF[what](saga))
                group.create_task(refusing(saga))
        return await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (outcomes[0].error, bench.effects) == ("ValueError", ["last"])


async def test_a_call_that_goes_on_though_it_is_cancelled_is_left_out(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """The run waited for it to end, and it for the run to go on. Its branch does not go on in one run alone."""
    begun, fails, given = asyncio.Event(), [ValueError("once")], list[str]()

    async def stubborn(step: Step, name: str) -> str:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        return await remote.charge(step, name)

    async def refuse(tx: Tx) -> None:
        await begun.wait()
        raise Reject("no")

    async def charge(saga: Saga) -> None:
        given.append(await saga.call("charged", stubborn, "card"))

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(charge(saga))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (outcomes[0].error, remote.effects, given) == ("ValueError", ["card"], [])


async def test_a_step_cut_off_by_a_time_limit_is_not_one_that_a_refusal_cuts_off(
    bench: Bench, one: Station, two: Station
) -> None:
    """The refusal was over, and the handler went another way than in the run before."""
    fails, over = [ValueError("once")], asyncio.Event()

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def second(tx: Tx) -> None:
        await over.wait()
        await put(tx, "second")

    async def late(saga: Saga) -> None:
        await asyncio.sleep(0 if fails else 0.4)
        await saga.tx("first", put, "first")
        over.set()

    async def limited(saga: Saga) -> None:
        try:
            async with asyncio.timeout(0.2):
                await saga.tx("second", second)
        except TimeoutError:
            await saga.tx("too_late", put, "too_late")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(Reject):
            await saga.tx("refused", refused)
        await asyncio.gather(late(saga), limited(saga))
        await saga.tx("last", last)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, bench.effects) == (OutcomeKind.RETRYING, ["first", "second"])
