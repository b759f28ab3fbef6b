"""What a person can find out afterwards: who held a saga, what disturbed it, what was decided (the history)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.admin.saga_views import SagaDetail
from idemconsumer.admin.timeline import timeline
from idemconsumer.engine.work import Work
from idemconsumer.errors import CommitUnknown, Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.worker.retention import prune_once
from tests.support.sagas import SCHEMA, Bench, Remote, SagaFn, Station, order, put, saga, take_back

NO = '{"code":"no","body":null}'


def named(bench: Bench, station: Station, name: str) -> None:
    bench.run("update idemconsumer.worker set name = %s where id = %s", (name, station.lease.worker))


@pytest.fixture(autouse=True)
def _names(bench: Bench, one: Station, two: Station) -> None:
    named(bench, one, "one")
    named(bench, two, "two")


def history(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.run("select what, owner, attempt, detail from idemconsumer.history order by id")


def tokens(bench: Bench) -> list[int]:
    return [row[0] for row in bench.run("select token from idemconsumer.history order by id")]


def failing(*errors: Exception) -> SagaFn:
    left = list(errors)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        if left:
            raise left.pop(0)

    return book


async def shown(bench: Bench) -> SagaDetail:
    ((key,),) = bench.run("select key from idemconsumer.record")
    return await SagaAdmin(bench.dsn, SCHEMA).saga(key)


# -------------------------------------------------------------------------------------------------------- what is noted
async def test_a_saga_that_is_held_again_and_again_says_so_once(bench: Bench, one: Station, two: Station) -> None:
    """D17: every half minute, perhaps for a day."""
    handler = saga(failing())

    async def taken() -> LeasedSaga:
        found = await two.take(handler)
        assert found is not None
        return found

    call = Work.of(handler, order()).call
    assert call is not None
    begun = await one.leases.begin(call.claim, order(), "book", None)
    assert isinstance(begun, LeasedSaga)
    await one.leases.release(begun, 0.0, None, count=False, held=True)
    for _ in range(3):
        await two.leases.release(await taken(), 0.0, None, count=False, held=True)
    held: list[tuple[Any, ...]] = [("held", "one", 1, None)]
    assert history(bench) == held
    for _ in range(2):
        await two.leases.release(await taken(), 0.0, "down", count=False, held=True)
        await two.leases.release(await taken(), 0.0, None, count=False, held=True)
    held += [("taken", "two", 1, None), ("held", "two", 1, "down")]
    assert history(bench) == held
    progressing = await taken()
    async with two.leases.step(progressing, "a", has_undo=False, undo=False) as step:
        await step.finish(None, overlapped=False)
    await two.leases.release(progressing, 0.0, None, count=False, held=True)
    held += [("taken", "two", 1, None), ("held", "two", 1, None)]
    assert history(bench) == held
    await two.leases.release(await taken(), 0.0, "boom", count=True)
    assert history(bench) == [*held, ("taken", "two", 1, None), ("released", "two", 1, "boom")]


async def test_an_undisturbed_saga_pays_for_no_history(bench: Bench, one: Station, remote: Remote) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.call("b", remote.charge, "b")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert history(bench) == []


async def test_a_takeover_tells_who_was_lost_and_who_took_over(bench: Bench, one: Station, two: Station) -> None:
    begun = asyncio.Event()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()

    frozen = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    before = bench.token
    bench.expire(one)
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    one.engine.lose()
    await frozen
    assert history(bench) == [("lost", "one", 1, None), ("taken", "two", 1, None)]
    old, new = tokens(bench)
    assert old == before < new


async def test_a_failed_attempt_is_told_with_its_error(bench: Bench, one: Station, two: Station) -> None:
    await one.deliver(saga(failing(ValueError("gateway on fire"))))
    ((what, owner, attempt, detail),) = history(bench)
    assert (what, owner, attempt) == ("released", "one", 1)
    assert detail.startswith("ValueError: gateway on fire")
    assert (await two.resume(saga(failing()))).kind is OutcomeKind.APPLIED
    assert history(bench)[1:] == [("taken", "two", 2, None)]


async def test_a_drain_is_told_without_an_error(bench: Bench, one: Station) -> None:
    begun = asyncio.Event()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        begun.set()
        await asyncio.Event().wait()

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.drain()
    await run
    assert history(bench) == [("released", "one", 1, None)]


async def test_a_worker_that_takes_over_from_itself_is_told(bench: Bench, one: Station) -> None:
    complete, lost = one.leases.complete, [True]

    async def losing(saga: LeasedSaga, state: State, result: StoredResult | None) -> None:
        if lost.pop() if lost else False:
            raise CommitUnknown("lost")
        await complete(saga, state, result)

    one.leases.complete = losing  # type: ignore[method-assign]
    assert (await one.deliver(saga(failing()))).kind is OutcomeKind.APPLIED
    assert history(bench) == [("retaken", "one", 1, None)]


async def test_a_rejection_and_what_is_put_aside_are_told_with_their_reasons(bench: Bench, one: Station) -> None:
    async def fails(*_: object) -> None:
        raise ValueError("no way back")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=fails)
        raise Reject("no")

    assert (await one.deliver(saga(book, max_attempts=1))).reason == "undo_failed"
    (undoing, parked) = history(bench)
    assert undoing == ("undoing", "one", None, NO)
    assert parked[:3] == ("parked", "one", 1)
    assert parked[3].startswith("undo_failed: undo of 'a': ValueError: no way back")


async def test_a_redelivery_that_meets_a_running_saga_is_told_once(bench: Bench, one: Station, two: Station) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        begun.set()
        await go_on.wait()

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    for _ in range(3):
        assert (await two.deliver(saga(book))).kind is OutcomeKind.BUSY
    go_on.set()
    assert (await run).kind is OutcomeKind.APPLIED
    assert (await two.deliver(saga(book))).kind is OutcomeKind.DUPLICATE
    assert history(bench) == [("redelivered", None, None, "memory:orders here")]


async def test_whoever_was_fenced_adds_nothing(bench: Bench, one: Station, two: Station) -> None:
    holding = await _begun(one)
    bench.expire(one)
    assert await two.take(saga(failing())) is not None
    with pytest.raises(Fenced):
        await one.leases.release(holding, 0.0, "too late", count=True)
    assert [what for what, *_ in history(bench)] == ["lost", "taken"]


async def _begun(station: Station) -> LeasedSaga:
    call = Work.of(saga(failing()), order()).call
    assert call is not None
    holding = await station.leases.begin(call.claim, order(), "book", None)
    assert isinstance(holding, LeasedSaga)
    return holding


async def test_what_a_person_decides_is_told(bench: Bench, one: Station, two: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise ValueError("odd")

    outcome = await one.deliver(saga(book, max_attempts=1))
    assert outcome.reason == "attempts_exhausted"
    ((key,),) = bench.run("select key from idemconsumer.record")
    admin = SagaAdmin(bench.dsn, SCHEMA)
    await admin.resume(key, accept_version=True, by="ann")
    await admin.abandon(key, undo=True, by="ann")
    assert [(what, detail) for what, *_, detail in history(bench)][-2:] == [
        ("resumed", "with the present handler"),
        ("abandoned", "to be undone"),
    ]
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED


# --------------------------------------------------------------------------------------------------- what is made of it
async def test_a_timeline_is_put_together_in_the_order_of_time(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    async def undo(*_: object) -> None:
        raise ValueError("no way back")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo)
        await saga.call("b", remote.charge, "b", undo=remote.refund)
        raise Reject("no")

    handler = saga(book, max_attempts=2)
    await two.to_the_end(handler, await one.deliver(handler))
    detail = await shown(bench)
    events = [(event.what, event.owner) for event in detail.timeline]
    assert events[:6] == [
        ("begun", "one"),
        ("step a done", None),
        ("step b done", None),
        ("undoing", "one"),
        ("step b undone", None),
        ("released", "one"),
    ]
    assert events[-1] == ("parked", "two")
    assert all(event.seconds is not None for event in detail.timeline if event.what.startswith("step"))
    b = detail.steps[1]
    assert b.undo_seconds is not None
    assert b.finished_at is not None
    assert b.started_at < b.finished_at < detail.timeline[4].at
    assert (detail.timeline[0].detail, detail.timeline[3].detail) == ("memory:orders here", NO)
    assert detail.timeline[0].token == detail.timeline[5].token


async def test_of_an_undisturbed_saga_that_has_ended_the_steps_are_left(bench: Bench, one: Station) -> None:
    await one.deliver(saga(failing()))
    assert [event.what for event in (await shown(bench)).timeline] == ["step a done", "completed"]


def test_calls_that_nobody_knows_the_end_of_are_told_as_such() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    step = {"name": "c", "token": 7, "attempt": 2, "started_at": at, "finished_at": None, "until": None}
    called = {**step, "state": 1, "undo_at": None, "undone_at": None}
    undo = {**step, "state": 4, "finished_at": at, "undo_at": at, "undone_at": None}
    assert [event.what for event in timeline(None, [], [called], (at, "dead"))] == [
        "dead",
        "step c called, outcome unknown",
    ]
    assert [(event.what, event.token) for event in timeline(None, [], [undo], (at, "dead"))] == [
        ("dead", None),
        ("step c done", None),
        ("step c undo called, outcome unknown", 7),
    ]


async def test_the_history_goes_with_the_steps(bench: Bench, one: Station, two: Station) -> None:
    await one.deliver(saga(failing(ValueError("once"))))
    await two.resume(saga(failing()))
    assert (await prune_once(bench.dsn, SCHEMA), bool(history(bench))) == (0, True)
    bench.run("update idemconsumer.scope set retain = '0 s'")
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert (history(bench), bench.steps) == ([], [])
