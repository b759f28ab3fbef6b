"""What a deployment, a rejection or a return value must not cause: a second key, a lost undo (L24 to L27)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Retry, Saga, Step, Tx, Unknown
from idemconsumer.rules.values import State
from tests.support.sagas import Bench, Remote, SagaFn, Station, put, saga, take_back
from tests.support.waiting import until


class Silent(Remote):
    """Does what it is asked. `answers`: whether it says so."""

    def __init__(self, *, answers: bool = False) -> None:
        super().__init__()
        self.answers = answers

    async def charge(self, step: Step, name: str) -> str:
        charged = await super().charge(step, name)
        if not self.answers:
            raise TimeoutError("no answer")
        return charged


def calls(remote: Remote, name: str) -> SagaFn:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first")
        await saga.call(name, remote.charge, "card")
        await saga.tx("last", put, "last")

    return book


# -------------------------------------------------------------------------------------- a call of unknown outcome (L24)
async def test_a_call_in_flight_that_was_renamed_is_not_made_under_another_key(
    bench: Bench, one: Station, two: Station
) -> None:
    remote = Silent()
    await one.deliver(saga(calls(remote, "charged")))
    remote.answers = True
    outcome = await two.resume(saga(calls(remote, "card_charged")))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert (len(remote.keys("card")), bench.effects) == (1, ["first"])
    assert "'charged'" in bench.letter


async def test_a_call_in_flight_that_was_removed_stops_the_steps_behind_it(
    bench: Bench, one: Station, two: Station
) -> None:
    async def without(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first")
        await saga.tx("last", put, "last")

    await one.deliver(saga(calls(Silent(), "charged")))
    outcome = await two.resume(saga(without))
    assert (outcome.reason, bench.effects) == ("saga_changed", ["first"])


async def test_a_name_made_anew_in_each_run_is_one_key(bench: Bench, one: Station) -> None:
    remote = Silent()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call(f"charged_{uuid.uuid4()}", remote.charge, "card")

    *_, outcome = await one.to_the_end(saga(book), await one.deliver(saga(book)))
    assert (outcome.reason, len(remote.keys("card"))) == ("saga_changed", 1)


def beside(remote: Remote, left: str, right: str, *, late: float = 0.0) -> SagaFn:
    """Two calls beside each other; the left one is asked for `late` seconds after the right one."""

    async def lefts(saga: Saga) -> None:
        await asyncio.sleep(late)
        await saga.call(left, remote.charge, "left")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await asyncio.gather(lefts(saga), saga.call(right, remote.charge, "right"))
        return "done"

    return book


async def test_a_renamed_call_that_ran_beside_another_is_not_made_again_either(
    bench: Bench, one: Station, two: Station
) -> None:
    remote = Silent()
    await one.deliver(saga(beside(remote, "left", "right")))
    remote.answers = True
    outcome = await two.resume(saga(beside(remote, "left", "renamed"), timeout="300ms"))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert (len(remote.keys("left")), len(remote.keys("right"))) == (1, 1)


async def test_a_new_step_of_a_branch_waits_for_its_siblings_open_call(
    bench: Bench, one: Station, two: Station
) -> None:
    """Its sibling only asks for it a little later: nothing has changed."""
    remote = Silent()
    await one.deliver(saga(beside(remote, "left", "right")))
    bench.run("delete from idemconsumer.step where name = 'right'")  # as if the worker had died before it
    remote.answers = True
    outcome = await two.resume(saga(beside(remote, "left", "right", late=0.2), timeout="20s"))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'"done"')
    assert (len(remote.keys("left")), len(remote.keys("right"))) == (1, 1)


# ------------------------------------------------------------------------------------------- whose undo counts (L25)
@pytest.mark.parametrize("kind", ["tx", "call"])
@pytest.mark.parametrize("end", ["rejected", "exhausted"])
async def test_an_undo_that_a_deployment_added_is_run(
    bench: Bench, one: Station, two: Station, remote: Remote, kind: str, end: str
) -> None:
    deployed = False

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if kind == "tx":
            await saga.tx("a", put, "a", undo=take_back if deployed else None)
        else:
            await saga.call("a", remote.charge, "a", undo=remote.refund if deployed else None)
        if deployed and end == "rejected":
            raise Reject("no")
        raise ValueError("before the deployment")

    handler = saga(book, max_attempts=2)
    await one.deliver(handler)
    deployed = True
    outcome = await two.resume(handler)
    assert (outcome.kind, bench.state) == (OutcomeKind.FAILED, State.FAILED)
    undone = bench.effects if kind == "tx" else remote.effects
    assert undone == ["a", "undo:a:out:a" if kind == "tx" else "refund:a:charged:a"]


async def test_a_call_that_an_older_worker_began_has_the_undo_of_the_code_that_finished_it(
    bench: Bench, one: Station, two: Station
) -> None:
    remote, deployed = Silent(), False

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", remote.charge, "a", undo=remote.refund if deployed else None)
        raise Reject("no")

    await one.deliver(saga(book))
    deployed = remote.answers = True
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert remote.effects == ["a", "refund:a:charged:a"]


async def test_an_added_undo_is_on_record_before_another_worker_goes_on_with_the_undoing(
    bench: Bench, one: Station, two: Station
) -> None:
    """A worker that lacks the undo puts the saga aside, and does not end it as FAILED."""
    deployed = False
    fails = [ValueError("once")]

    async def undo(tx: Tx, output: str, name: str) -> None:
        raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo if deployed else None)
        if not deployed and not bench.run("select 1 from idemconsumer.saga where state = 2"):
            raise ValueError
        raise Reject("no")

    await one.deliver(saga(book))
    deployed = True
    assert (await two.resume(saga(book))).state is State.UNDOING
    deployed = False
    outcome = await one.resume(saga(book))
    assert (outcome.kind, outcome.reason, bench.state) == (OutcomeKind.DEAD, "saga_changed", State.DEAD)


async def test_an_added_undo_of_a_branch_that_is_slower_than_the_rejection_is_run(
    bench: Bench, one: Station, two: Station
) -> None:
    deployed = False

    async def branch(saga: Saga) -> None:
        if deployed:
            await asyncio.sleep(0.1)
        await saga.tx("a", put, "a", undo=take_back if deployed else None)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        task = asyncio.create_task(branch(saga))
        if deployed:
            raise Reject("no")
        await task
        raise ValueError("before the deployment")

    await one.deliver(saga(book))
    deployed = True
    assert (await two.resume(saga(book, timeout="20s"))).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


# ------------------------------------------------------------------------------------------------ the end (L26)
async def test_no_step_begins_after_the_handler_was_rejected(bench: Bench, one: Station, remote: Remote) -> None:
    """A background task went on with 98 of its 100 calls."""
    tasks, called = list[asyncio.Task[None]](), list[int]()

    async def background(saga: Saga) -> None:
        for n in range(100):
            await saga.call(f"c{n}", remote.charge, f"c{n}")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        tasks.append(asyncio.create_task(background(saga)))
        await until(lambda: bool(remote.calls), "the first call is made")
        called.append(len(remote.calls))
        raise Reject("no")

    outcome = await one.deliver(saga(book))
    (ended,) = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcome.kind is OutcomeKind.FAILED
    assert type(ended).__mro__[1].__name__ == "SagaInterrupted"
    assert len(remote.calls) <= called[0] + 1, "one that had begun"


@pytest.mark.parametrize("kind", ["tx", "call"])
@pytest.mark.parametrize("where", ["in it", "in a task of it"])
async def test_a_step_inside_a_step_is_refused(
    bench: Bench, one: Station, remote: Remote, kind: str, where: str
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def outer(given: Tx | Step) -> None:
            inner = saga.call("inner", remote.charge, "inner")
            await (inner if where == "in it" else asyncio.create_task(inner))

        await (saga.tx("outer", outer) if kind == "tx" else saga.call("outer", outer))

    outcome = await one.deliver(saga(book, max_attempts=1))
    assert (outcome.kind, remote.calls) == (OutcomeKind.DEAD, [])
    assert "step 'inner' is requested inside step 'outer'" in bench.letter


# ------------------------------------------------------------------------------ what is returned, raised and counted
async def test_a_finished_saga_is_not_undone_because_of_what_it_returns(bench: Bench, one: Station) -> None:
    """L27: it was refunded once its attempts were used up."""

    async def book(order: dict[str, Any], saga: Saga) -> Any:
        await saga.tx("a", put, "a", undo=take_back)
        return object()

    handler = saga(book, max_attempts=2)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "result_unencodable", ["a"])
    assert "cannot be stored" in bench.letter


@pytest.mark.parametrize("where", ["handler", "tx", "call", "group"])
async def test_retry_is_a_retry_whatever_fail_on_names(bench: Bench, one: Station, where: str) -> None:
    asks = [Retry("busy", after=0.0)]

    async def step(given: Tx | Step) -> None:
        if asks:
            raise asks.pop()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        if where == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(step(None))  # type: ignore[arg-type]
        elif where == "handler":
            await step(None)  # type: ignore[arg-type]
        else:
            await (saga.tx("s", step) if where == "tx" else saga.call("s", step))
        return "done"

    handler = saga(book, fail_on=(Exception,))
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'"done"')


@pytest.mark.parametrize("most", [1, 3])
async def test_a_step_that_keeps_failing_behind_a_finished_one_is_run_as_often_as_there_are_attempts(
    bench: Bench, one: Station, most: int
) -> None:
    runs: list[int] = []

    async def fails(step: Step) -> None:
        runs.append(step.attempt)
        raise ValueError("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.call("b", fails)

    handler = saga(book, max_attempts=most)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, runs) == (OutcomeKind.DEAD, list(range(1, most + 1)))


# ---------------------------------------------------------------------------------------------- an undo's reconcile
async def says_done(step: Step, output: str, name: str) -> Done[None]:
    return Done(None)


async def says_not_done(step: Step, output: str, name: str) -> NotDone:
    return NotDone()


async def cannot_say(step: Step, output: str, name: str) -> Unknown:
    return Unknown()


@pytest.mark.parametrize(
    ("reconcile", "refunds", "end"),
    [(says_done, 1, OutcomeKind.FAILED), (says_not_done, 2, OutcomeKind.FAILED), (cannot_say, 1, OutcomeKind.DEAD)],
    ids=["done", "not done", "unknown"],
)
async def test_an_undo_of_unknown_outcome_is_asked_about(
    bench: Bench, one: Station, two: Station, remote: Remote,
    reconcile: Callable[..., Awaitable[Any]], refunds: int, end: OutcomeKind,
) -> None:  # fmt: skip
    silent = [TimeoutError("no answer")]

    async def refund(step: Step, output: str, name: str) -> None:
        await remote.refund(step, output, name)
        if silent:
            raise silent.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", remote.charge, "a", undo=refund, reconcile_undo=reconcile)
        raise Reject("no")

    await one.deliver(saga(book))
    outcome = await two.resume(saga(book))
    assert outcome.kind is end
    assert [name for name, _ in remote.calls].count("refund:a:charged:a") == refunds
    assert bench.letters == (["unknown_effect"] if end is OutcomeKind.DEAD else [])
