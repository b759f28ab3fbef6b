"""A saga is cancelled wherever it is, and ends either completed or cancelled (L50)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Retry, Saga, Step, Unknown
from idemconsumer.admin.decisions import Cancellation
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.errors import StoreUnavailable
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.sagas import (
    SCHEMA,
    Bench,
    FreeLanes,
    Remote,
    Station,
    due_sagas,
    locked,
    put,
    saga,
    take_back,
)
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

CANCELLED = '{"code":"cancelled","body":null}'


async def cancel(bench: Bench, *, undo: bool = True) -> Cancellation:
    ((key,),) = bench.run("select key from idemconsumer.record")
    return await SagaAdmin(bench.dsn, SCHEMA).cancel(key, undo=undo, by="ann")


def result(bench: Bench) -> str:
    ((body,),) = bench.run("select convert_from(body, 'utf8') from idemconsumer.result")
    return str(body)


class Gate:
    """A call that is held until `go`."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, step: Step, name: str) -> str:
        output = await self.remote.charge(step, name)
        self.begun.set()
        await self.go.wait()
        return output


@pytest.fixture
def gate(remote: Remote) -> Gate:
    return Gate(remote)


def booking(remote: Remote, gate: Gate, **options: Any) -> BoundHandler:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.call("b", gate.__call__, "b", undo=remote.refund)
        await saga.tx("c", put, "c")
        return "complete"

    return saga(book, **options)


async def in_the_call(station: Station, handler: BoundHandler, gate: Gate) -> asyncio.Task[Any]:
    running = asyncio.create_task(station.deliver(handler))
    await gate.begun.wait()
    return running


# ------------------------------------------------------------------------------------- held by a live worker
@pytest.mark.parametrize("undo", [True, False])
async def test_a_call_in_flight_is_cut_off_and_made_again_under_its_key_before_the_saga_is_cancelled(
    bench: Bench, one: Station, two: Station, remote: Remote, gate: Gate, undo: bool
) -> None:
    handler = booking(remote, gate)
    running = await in_the_call(one, handler, gate)
    assert await cancel(bench, undo=undo) == Cancellation(accepted=True, state=State.PROCESSING, undo=undo)
    session = await due_sagas(one, FreeLanes(0), one.engine.cancel)
    await session.fetch()
    async with asyncio.timeout(PATIENCE):
        assert (await running).kind is OutcomeKind.RETRYING
    gate.go.set()
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert ([name for name, _ in remote.calls].count("b"), len(remote.keys("b"))) == (2, 1)
    assert (bench.state, result(bench)) == (State.FAILED, CANCELLED)
    undone = ["b", "refund:b:charged:b"] if undo else ["b"]
    assert (remote.effects, bench.effects) == (undone, ["a", "undo:a:out:a"] if undo else ["a"])
    assert not bench.held


async def test_a_run_that_knows_it_is_to_be_cancelled_does_not_give_way_again(
    bench: Bench, one: Station, remote: Remote, gate: Gate
) -> None:
    handler = booking(remote, gate)
    running = await in_the_call(one, handler, gate)
    await cancel(bench)
    ((key,),) = bench.run("select key from idemconsumer.saga")
    one.engine.cancel([key])
    await running
    gate.begun.clear()
    cancelling = asyncio.create_task(one.resume(handler))
    await gate.begun.wait()  # the same call with the same key
    one.engine.cancel([key])
    gate.go.set()
    assert (await cancelling).kind is OutcomeKind.FAILED


async def test_a_saga_that_is_to_be_cancelled_does_not_complete(
    bench: Bench, one: Station, two: Station, remote: Remote, gate: Gate
) -> None:
    """Its run has not noticed yet."""
    handler = booking(remote, gate)
    running = await in_the_call(one, handler, gate)
    assert (await cancel(bench)).accepted
    gate.go.set()
    assert (await running).kind is OutcomeKind.RETRYING
    assert (bench.state, bench.effects) == (State.PROCESSING, ["a", "c"])
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert result(bench) == CANCELLED
    assert bench.effects == ["a", "c", "undo:a:out:a"]


@pytest.mark.parametrize("first", ["completion", "cancellation"])
async def test_of_a_completion_and_a_cancellation_one_wins(
    bench: Bench, one: Station, two: Station, first: str
) -> None:
    """The loser waits for the winner's lock, and then sees what it did."""
    answers: list[Cancellation] = []
    complete = one.leases.complete

    async def with_a_rival(saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        if first == "completion":
            await complete(saga, state, result)
            answers.append(await cancel(bench))
        else:
            answers.append(await cancel(bench))
            await complete(saga, state, result)

    one.leases.complete = with_a_rival  # type: ignore[method-assign]

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        return "complete"

    outcome = await one.deliver(saga(book))
    if first == "completion":
        assert outcome.kind is OutcomeKind.APPLIED
        assert answers == [Cancellation(accepted=False, state=State.COMPLETED)]
        assert bench.effects == ["a"]
    else:
        assert outcome.kind is OutcomeKind.RETRYING
        assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
        assert bench.effects == ["a", "undo:a:out:a"]


@pytest.mark.parametrize("end", ["rejected", "failed", "retried"])
async def test_no_other_end_comes_between_the_request_and_its_fulfilment(
    bench: Bench, one: Station, two: Station, remote: Remote, gate: Gate, end: str
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.call("b", gate.__call__, "b")
        raise Reject("no") if end == "rejected" else Retry(after="1h")

    handler = saga(book, max_attempts=3 if end == "retried" else 1)
    running = await in_the_call(one, handler, gate)
    assert (await cancel(bench, undo=False)).accepted
    gate.go.set()
    assert (await running).kind is OutcomeKind.RETRYING
    assert bench.letters == []
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED  # at once, and not in an hour
    assert (result(bench), bench.effects) == (CANCELLED, ["a"])


async def test_a_transaction_in_flight_is_waited_for(bench: Bench, one: Station, two: Station) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slowly(tx: Any) -> None:
        await put(tx, "s")
        begun.set()
        await go.wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", slowly)

    running = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    cancelling = asyncio.create_task(cancel(bench, undo=False))
    await until(lambda: bench.waiting() == 1)
    go.set()
    answer, outcome = await cancelling, await running
    if answer.accepted:  # else the completion came first
        assert outcome.kind is OutcomeKind.RETRYING
        assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["s"]
    assert answer.accepted == (bench.state is State.FAILED)


# ------------------------------------------------------------------------------------- held by nobody
async def test_a_saga_that_waits_for_its_next_attempt_is_cancelled_at_once(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        raise Retry(after="1h")

    await one.deliver(saga(book))
    assert await cancel(bench) == Cancellation(accepted=True, state=State.PROCESSING, undo=True)
    assert (await one.resume(saga(book))).kind is OutcomeKind.FAILED
    assert (result(bench), bench.effects) == (CANCELLED, ["a", "undo:a:out:a"])


async def test_the_first_request_decides_whether_it_is_undone(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        raise Retry(after="1h")

    await one.deliver(saga(book))
    assert (await cancel(bench, undo=False)).undo is False
    assert await cancel(bench, undo=True) == Cancellation(accepted=True, state=State.PROCESSING, undo=False)
    await one.resume(saga(book))
    assert bench.effects == ["a"]
    assert await cancel(bench) == Cancellation(accepted=True, state=State.FAILED)


@pytest.mark.parametrize("undo", [True, False])
async def test_a_saga_that_was_put_aside_is_cancelled_too(bench: Bench, one: Station, undo: bool) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        raise ValueError("never")

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert await cancel(bench, undo=undo) == Cancellation(accepted=True, state=State.DEAD, undo=undo)
    assert bench.letters == []
    assert (await one.resume(saga(book, max_attempts=1))).kind is OutcomeKind.FAILED
    assert result(bench) == CANCELLED


async def person(order: dict[str, Any]) -> Done[Any] | NotDone | Unknown:
    """Whoever is asked knows nothing."""
    return Unknown()


@pytest.mark.parametrize("knows", [False, True])
async def test_a_lost_workers_saga_is_cancelled_whoever_was_to_decide(
    bench: Bench, one: Station, two: Station, knows: bool
) -> None:
    async def done(order: dict[str, Any]) -> Done[Any] | NotDone | Unknown:
        return Done("it was done")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        raise Retry(after=0)

    handler = saga(book, reconcile=done if knows else person)
    await one.deliver(handler)
    assert await one.take(handler) is not None
    assert (await cancel(bench)).accepted
    bench.expire(one)
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert (result(bench), bench.effects) == (CANCELLED, ["a", "undo:a:out:a"])


async def test_a_worker_that_was_lost_in_a_call_leaves_nothing_for_review(
    bench: Bench, one: Station, two: Station, remote: Remote, gate: Gate
) -> None:
    handler = booking(remote, gate, reconcile=person)
    running = await in_the_call(one, handler, gate)
    await cancel(bench)
    bench.expire(one)
    one.engine.lose()
    assert (await running).kind is OutcomeKind.FENCED
    gate.go.set()
    assert (await two.resume(handler)).kind is OutcomeKind.FAILED
    assert (result(bench), bench.effects) == (CANCELLED, ["a", "undo:a:out:a"])


async def test_what_ended_undone_or_never_began_is_not_cancelled(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=broken)
        raise Reject("no")

    async def broken(tx: Any, output: str, name: str) -> None:
        raise ValueError("not now")

    assert await SagaAdmin(bench.dsn, SCHEMA).cancel(b"?" * 32, undo=True, by="ann") == Cancellation(
        accepted=False, state=None
    )
    await one.deliver(saga(book, max_attempts=2, backoff="1ms, 1ms"))
    assert await cancel(bench) == Cancellation(accepted=False, state=State.UNDOING, undo=True)
    await one.resume(saga(book, max_attempts=2))
    assert await cancel(bench) == Cancellation(accepted=False, state=State.DEAD, undo=True)
    assert bench.letters == ["undo_failed"]


# ------------------------------------------------------------------------------------- calls of unknown outcome
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("found", ["done", "not done", "unknown"])
async def test_how_an_open_call_ended_is_learnt_before_anything_is_undone(
    bench: Bench, one: Station, two: Station, remote: Remote, gate: Gate, found: str, parallel: bool
) -> None:
    async def find(step: Step, name: str) -> Done[str] | NotDone | Unknown:
        if found == "done":
            return Done("found")
        return NotDone() if found == "not done" else Unknown()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        async def branch() -> None:
            if parallel and gate.go.is_set():  # this time behind the other branch
                await asyncio.sleep(0.05)
            await saga.call("b", gate.__call__, "b", undo=remote.refund, reconcile=find)

        async def another() -> None:
            await saga.tx("a", put, "a", undo=take_back)
            await gate.go.wait()
            await saga.tx("c", put, "c")

        if parallel:
            await asyncio.gather(another(), branch())
        else:
            await saga.tx("a", put, "a", undo=take_back)
            await branch()
        return "complete"

    running = await in_the_call(one, saga(book), gate)
    await until(lambda: "a" in bench.steps)
    await cancel(bench)
    ((key,),) = bench.run("select key from idemconsumer.saga")
    one.engine.cancel([key])
    await running
    gate.go.set()
    outcome = await two.resume(saga(book))
    if found == "unknown":
        assert (outcome.kind, bench.letters) == (OutcomeKind.DEAD, ["unknown_effect"])
        assert bench.effects == ["a"]
        return
    assert (outcome.kind, result(bench)) == (OutcomeKind.FAILED, CANCELLED)
    refund = "refund:b:found" if found == "done" else "refund:b:charged:b"
    assert remote.effects == ["b", refund]
    assert len(remote.calls) == (2 if found == "done" else 3)


async def test_a_call_that_cannot_be_resolved_yet_is_tried_again_and_not_passed_over(
    bench: Bench, one: Station, remote: Remote, gate: Gate
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.call("b", fails, "b")
        return "complete"

    async def fails(step: Step, name: str) -> str:
        remote.calls.append((name, step.key))
        raise ValueError("gateway on fire")

    handler = saga(book, max_attempts=3)
    await one.deliver(handler)
    await cancel(bench, undo=False)
    outcomes = await one.to_the_end(handler, await one.resume(handler))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RETRYING] * 2 + [OutcomeKind.DEAD]
    assert (bench.letters, len(remote.keys("b"))) == (["unknown_effect"], 1)


async def test_a_row_that_stays_locked_is_said(bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise ValueError("not now")

    tuned(monkeypatch, claim_lock_patience=0.02)
    await one.deliver(saga(book))
    async with locked(bench, "select 1 from idemconsumer.saga for share"):
        with pytest.raises(StoreUnavailable, match="55P03"):
            await cancel(bench)


async def test_a_saga_that_sleeps_is_cancelled_at_once(bench: Bench, one: Station, two: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.sleep("cooling_off", "3d")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.BUSY
    assert (await cancel(bench)).accepted
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert (result(bench), bench.effects) == (CANCELLED, ["a", "undo:a:out:a"])
