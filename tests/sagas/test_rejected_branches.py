"""A rejection that one branch raises is one whatever the others do just then (L7, L26)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest

from idemconsumer import OutcomeKind, Reject, Retry, Saga, Step
from idemconsumer.rules.values import State
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back
from tests.support.waiting import PATIENCE
from tests.support.ways import Way, in_a_gather, in_a_group


class Refused(Exception):
    """Listed in `fail_on`."""


def _error(kind: str) -> Exception:
    return Reject("no") if kind == "Reject" else Refused("no")


@pytest.mark.parametrize("way", [in_a_gather, in_a_group])
@pytest.mark.parametrize("kind", ["Reject", "fail_on"])
async def test_a_refusal_between_the_steps_of_a_branch_is_one_beside_a_call_in_flight(
    bench: Bench, one: Station, remote: Remote, way: Way, kind: str
) -> None:
    """It counted as a failure: the saga was tried again, and after the last attempt put aside."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def charge(step: Step, name: str) -> str:
        begun.set()
        await go.wait()
        return await remote.charge(step, name)

    async def refuses() -> None:
        await begun.wait()
        raise _error(kind)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first", undo=take_back)
        try:
            await way(refuses(), saga.call("charged", charge, "card", undo=remote.refund))
        finally:
            go.set()

    outcome = await one.deliver(saga(book, fail_on=(Refused,), max_attempts=1))
    assert (outcome.kind, bench.letters) == (OutcomeKind.FAILED, [])
    assert b"attempts_exhausted" not in (outcome.result or b"")
    assert bench.effects == ["first", "undo:first:out:first"]
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert len(remote.keys("card")) == 1


@pytest.mark.parametrize(("way", "error"), [(in_a_gather, "Refused"), (in_a_group, "ExceptionGroup")])
@pytest.mark.parametrize("beside", ["call", "wait"])
async def test_a_failure_between_the_steps_of_a_branch_is_the_one_that_counts(
    bench: Bench, one: Station, way: Way, error: str, beside: str
) -> None:
    """What came of the step beside it hid it."""
    begun = asyncio.Event()

    async def hangs(step: Step) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def fails(saga: Saga) -> None:
        if beside == "call":
            await begun.wait()
        else:
            await saga.tx("first", put, "first")
        raise Refused("not yet")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await way(fails(saga), saga.call("hangs", hangs) if beside == "call" else saga.wait("approved"))

    handler = saga(book)
    outcome = await one.deliver(handler)
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, error)


async def test_a_retry_that_leaves_a_task_group_is_one_after_its_delay(bench: Bench, one: Station) -> None:
    """What it says is not lost in the group, nor behind a refusal."""

    async def again(error: Exception) -> None:
        raise error

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as group:
            outer.create_task(again(Refused()))
            group.create_task(again(Retry(after="1h")))

    outcome = await one.deliver(saga(book, fail_on=(Refused,)))
    assert (outcome.kind, outcome.error, outcome.due) == (OutcomeKind.RETRYING, "Retry", 3600.0)


@pytest.mark.parametrize("kind", ["tx", "call"])
async def test_a_refusal_stands_though_the_step_beside_it_fails_then(
    bench: Bench, one: Station, remote: Remote, kind: str
) -> None:
    """A dead letter lay there for a saga that was refused, since a step beside that kept failing."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def fails(given: Any, name: str) -> str:
        begun.set()
        await go.wait()
        if kind == "tx" or not remote.calls:
            remote.calls.append((name, uuid4() if kind == "tx" else given.key))
            raise ValueError("not now")
        return await remote.charge(given, name)

    async def refuses() -> None:
        await begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        beside = saga.tx("beside", fails, "card") if kind == "tx" else saga.call("beside", fails, "card")
        try:
            await asyncio.gather(refuses(), beside)
        finally:
            go.set()

    outcome = await one.deliver(saga(book, max_attempts=1))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"no","body":null}')
    assert (len(remote.keys("card")), bench.letters) == (1, [])


async def test_a_time_limit_around_a_call_is_no_refusal_of_it(bench: Bench, one: Station) -> None:
    """Its outcome is unknown, whatever `fail_on` lists."""

    async def hangs(step: Step) -> None:
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async with asyncio.timeout(0.05):
            await saga.call("hangs", hangs)

    handler = saga(book, fail_on=(TimeoutError,))
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert bench.state is State.PROCESSING


async def test_a_rejection_waits_for_the_steps_in_flight_and_not_for_what_their_tasks_do_then(
    bench: Bench, one: Station, remote: Remote
) -> None:
    """It hung, with the saga and its lane, for as long as the task went on."""
    begun, go = asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def charge(step: Step, name: str) -> str:
        begun.set()
        await go.wait()
        return await remote.charge(step, name)

    async def goes_on(saga: Saga) -> None:
        await saga.call("charged", charge, "card", undo=remote.refund)
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        tasks.append(asyncio.create_task(goes_on(saga)))
        await begun.wait()
        asyncio.get_running_loop().call_later(0.05, go.set)
        raise Reject("no")

    async with asyncio.timeout(PATIENCE):
        outcome = await one.deliver(saga(book))
    assert outcome.kind is OutcomeKind.FAILED
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert not tasks[0].done()
    tasks[0].cancel()


@pytest.mark.parametrize("added", [False, True])
async def test_a_refusal_of_a_run_that_was_cut_off_leaves_its_undo_to_a_replay(
    bench: Bench, one: Station, remote: Remote, added: bool
) -> None:
    """A branch had not asked again for what has to be undone: it was put aside as changed, or if a deployment has
    `added` the undo (L25), passed over."""
    runs, ended, called = 0, asyncio.Event(), asyncio.Event()

    async def charge(step: Step, name: str) -> str:
        called.set()
        if runs < 3:
            await asyncio.Event().wait()
        return await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        nonlocal runs
        runs += 1
        cut_off, booked = asyncio.Event(), asyncio.Event()

        async def late() -> None:
            if runs == 2:
                await ended.wait()
            await saga.tx("booked", put, "booked", undo=None if added and runs == 1 else take_back)
            booked.set()

        async def cut() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05 if runs == 2 else None):
                    await saga.call("charged", charge, "card", undo=remote.refund)
            cut_off.set()

        async def refuses() -> None:
            await (cut_off if runs == 2 else booked).wait()
            await called.wait()
            raise Retry if runs == 1 else Reject("no")

        await asyncio.gather(late(), cut(), refuses())

    handler = saga(book, timeout="1s")
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    ended.set()
    assert (outcomes[-1].kind, bench.letters) == (OutcomeKind.FAILED, [])
    assert bench.effects == ["booked", "undo:booked:out:booked"]
    assert (remote.effects, runs) == (["card", "refund:card:charged:card"], 3)
