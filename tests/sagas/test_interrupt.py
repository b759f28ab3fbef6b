"""What goes wrong in a step, other than a Reject, ends the run, whatever the handler makes of the exception (L4)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.sagas.run import SagaRun
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.sagas.swallowers import SWALLOWERS, Boom, Swallower, explode, hang
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back
from tests.support.waiting import until


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("swallow", SWALLOWERS, ids=lambda fn: fn.__name__)
async def test_user_code_cannot_turn_an_interruption_into_completion(
    bench: Bench, one: Station, two: Station, swallow: Swallower
) -> None:
    healed = False

    async def book(order: dict[str, Any], saga: Saga) -> str:
        if healed:
            await saga.tx("s", put, "s")
        else:
            await swallow(saga)
        return "complete"

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (bench.state, bench.effects, bench.steps) == (State.PROCESSING, [], [])
    healed = True
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["s"]


async def test_every_later_operation_raises_again(bench: Bench, one: Station, remote: Remote) -> None:
    raised: list[str] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        for name, step in (("a", saga.tx("a", explode)), ("b", saga.tx("b", put, "b"))):
            try:
                await step
            except BaseException as error:
                raised.append(f"{name}:{type(error).__name__}")
        try:
            await saga.call("c", remote.charge, "c")
        except BaseException as error:
            raised.append(f"c:{type(error).__name__}")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert raised == ["a:SagaInterrupted", "b:SagaInterrupted", "c:SagaInterrupted"]
    assert (bench.effects, remote.calls) == ([], [])


async def test_a_task_that_outlives_its_handler_gets_no_step_any_more(bench: Bench, one: Station) -> None:
    """Also while the completion is on its way, when the fence would still let it through."""
    over = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    complete = one.leases.complete

    async def slowly(saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        over.set()
        await asyncio.wait(tasks)
        await complete(saga, state, result)

    one.leases.complete = slowly  # type: ignore[method-assign]

    async def later(saga: Saga) -> None:
        await over.wait()
        await saga.tx("late", put, "late")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        tasks.append(asyncio.create_task(later(saga)))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    (ended,) = await asyncio.gather(*tasks, return_exceptions=True)
    assert type(ended).__name__ == "SagaInterrupted"
    assert bench.effects == ["a"]


async def test_a_step_that_takes_longer_than_the_timeout_is_rolled_back_and_tried_again(
    bench: Bench, one: Station
) -> None:
    slow = [True]

    async def sometimes(tx: Tx) -> None:
        await put(tx, "s")
        if slow.pop() if slow else False:
            await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(TimeoutError):
            await saga.tx("s", sometimes)

    assert (await one.deliver(saga(book, timeout="50ms"))).kind is OutcomeKind.RETRYING
    assert (await one.resume(saga(book, timeout="10s"))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["s"]


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("finished", [["a"], []], ids=["step", "nothing"])
async def test_a_drain_releases_the_saga_at_once_and_at_no_cost(
    bench: Bench, one: Station, two: Station, swallows: bool, finished: list[str]
) -> None:
    begun, drained = asyncio.Event(), False

    async def book(order: dict[str, Any], saga: Saga) -> str:
        for name in finished:
            await saga.tx(name, put, name)
        if not drained:
            begun.set()
            try:
                await asyncio.Event().wait()
            except BaseException:
                if not swallows:
                    raise
            return "too early"
        return "done"

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.drain()
    outcome = await run
    drained = True
    assert (outcome.kind, bench.state) == (OutcomeKind.CANCELLED, State.PROCESSING)
    assert bench.run("select worker, due <= clock_timestamp() from idemconsumer.saga") == [(None, True)]
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result, outcome.attempt) == (OutcomeKind.APPLIED, b'"done"', 1)
    assert bench.effects == finished


async def test_a_lost_lease_cancels_what_runs_and_writes_nothing(bench: Bench, one: Station, two: Station) -> None:
    begun, hung = asyncio.Event(), [True]

    async def once(tx: Tx) -> None:
        await put(tx, "b")
        if hung.pop() if hung else False:
            begun.set()
            await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        with suppress(BaseException):
            await saga.tx("b", once)

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.lose()
    assert (await run).kind is OutcomeKind.FENCED
    assert (bench.effects, bench.steps) == (["a"], ["a"])
    bench.expire(one)
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["a", "b"]


class Leftover:
    """A handler that leaves a step behind which ends only when it is cancelled, or cancelled twice, and notes that."""

    def __init__(self) -> None:
        self.ended = False
        self._begun = asyncio.Event()

    async def _hang(self, tx: Tx, cancellations: int) -> None:
        await put(tx, "hung")
        self._begun.set()
        for _ in range(cancellations):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        self.ended = True
        raise asyncio.CancelledError

    async def siblings(self, order: dict[str, Any], saga: Saga) -> None:
        self.task = asyncio.create_task(saga.tx("hung", self._hang, 1))
        await self._begun.wait()
        raise Reject("no")

    async def settle(self, order: dict[str, Any], saga: Saga) -> None:
        self.task = asyncio.create_task(saga.tx("hung", self._hang, 1))
        await self._begun.wait()


@pytest.mark.parametrize("end", ["drain", "lose"])
@pytest.mark.parametrize("during", ["siblings", "settle"])
async def test_no_step_goes_on_after_an_end_that_came_while_it_was_waited_for(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch, during: str, end: str
) -> None:
    waits, waited_for, left = asyncio.Event(), getattr(SagaRun, during), Leftover()

    async def noted(run: SagaRun, **more: Any) -> None:
        waits.set()
        await waited_for(run, **more)

    monkeypatch.setattr(SagaRun, during, noted)
    run = asyncio.create_task(one.deliver(saga(getattr(left, during))))
    await waits.wait()
    getattr(one.engine, end)()
    assert (await run).kind is (OutcomeKind.CANCELLED if end == "drain" else OutcomeKind.FENCED)
    assert left.ended
    assert (bench.state, bench.effects) == (State.PROCESSING, [])


async def test_a_lease_that_is_lost_while_a_drain_waits_for_a_step_leaves_none_behind(
    bench: Bench, one: Station
) -> None:
    begun, cancelled, go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def slow_to_end(tx: Tx) -> None:
        begun.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
            cancelled.set()
        raise asyncio.CancelledError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        tasks.append(asyncio.create_task(saga.tx("s", slow_to_end)))
        await asyncio.Event().wait()

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.drain()
    await cancelled.wait()
    one.engine.lose()
    for _ in range(10):
        await asyncio.sleep(0)
    early = run.done()
    go.set()
    assert ((await run).kind, early, tasks[0].done()) == (OutcomeKind.FENCED, False, True)


async def test_a_lease_that_is_lost_while_a_drain_gives_the_saga_back_changes_nothing(
    bench: Bench, one: Station
) -> None:
    """The lane would end as one that was cancelled by the code that it ran, and the drain with an error."""
    begun, gives_back, go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    release = one.leases.release

    async def slowly(*args: Any, **more: Any) -> None:
        gives_back.set()
        await go.wait()
        await release(*args, **more)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        begun.set()
        await asyncio.Event().wait()

    one.leases.release = slowly  # type: ignore[method-assign]
    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.drain()
    await gives_back.wait()
    one.engine.lose()
    go.set()
    assert (await run).kind is OutcomeKind.CANCELLED
    assert bench.run("select worker from idemconsumer.saga") == [(None,)]


async def test_a_reject_in_a_task_group_beside_a_running_step_is_a_rejection(bench: Bench, one: Station) -> None:
    begun = asyncio.Event()

    async def hung(tx: Tx) -> None:
        begun.set()
        await hang(tx)

    async def refuse(step: Step) -> None:
        await begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.tx("hung", hung))
            group.create_task(saga.call("refused", refuse))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_cancelled_call_beside_a_reject_that_the_handler_swallows_is_no_completion(
    bench: Bench, one: Station
) -> None:
    begun = asyncio.Event()

    async def hung(step: Step) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def refuse(step: Step) -> None:
        await begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        with suppress(BaseException):
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("hung", hung))
                group.create_task(saga.call("refused", refuse))
        return "complete"

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (bench.state, bench.effects) == (State.PROCESSING, [])


async def test_steps_go_on_after_a_rejection_that_left_a_task_group(bench: Bench, one: Station, remote: Remote) -> None:
    """Before Python 3.13 such a group leaves its task's `cancelling()` raised, which must not count as a drain."""

    async def refuse(step: Step) -> None:
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("refused", refuse))
        except* Reject:
            pass
        await saga.tx("instead", put, "instead")
        return await saga.call("c", remote.charge, "c")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert (bench.effects, remote.effects) == (["instead"], ["c"])


async def test_an_interrupted_call_keeps_its_key(bench: Bench, one: Station, two: Station, remote: Remote) -> None:
    fails = [Boom()]

    async def charge(step: Step) -> str:
        charged = await remote.charge(step, "c")
        if fails:
            raise fails.pop()
        return charged

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseException):
            await saga.call("c", charge)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert (len(remote.calls), remote.effects) == (2, ["c"])
    await until(lambda: not bench.held, "the saga has ended")
