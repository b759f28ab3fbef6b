"""A saga that takes longer than it may is put aside, or undone (L58)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Retry, Saga, Step, Tx, Unknown
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.saga import overdue_in
from idemconsumer.rules.values import State
from tests.support.clock import over_time
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back
from tests.support.waiting import PATIENCE

Answer = Done[Any] | NotDone | Unknown


def age(bench: Bench) -> None:
    """Its beginning was two days ago, by the database's clock."""
    bench.run("update idemconsumer.saga set started_at = started_at - interval '2 days'")


@pytest.mark.parametrize(
    ("now", "limit", "left"), [(100.0, None, None), (100.0, 20.0, 10.0), (120.0, 20.0, 0.0), (110.0, 20.0, 0.0)]
)
def test_how_long_a_saga_may_go_on(now: float, limit: float | None, left: float | None) -> None:
    assert overdue_in(now=now, begun=90.0, max_duration=limit) == left


async def test_no_step_begins_beyond_it_and_the_saga_is_put_aside(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first", undo=take_back)
        if len(bench.effects) < 2:
            age(bench)
            raise ValueError
        await saga.tx("second", put, "second")

    handler = saga(book, max_duration="24h")
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await one.resume(handler)).kind is OutcomeKind.DEAD
    assert bench.effects == ["first"]
    assert bench.letters == ["max_duration"]


async def test_one_without_a_limit_goes_on_for_ever(bench: Bench, one: Station) -> None:
    failed = False

    async def book(order: dict[str, Any], saga: Saga) -> None:
        nonlocal failed
        if not failed:
            failed = True
            age(bench)
            raise ValueError
        await saga.tx("first", put, "first")

    handler = saga(book)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.APPLIED


async def test_before_it_is_undone_the_outcome_of_a_call_is_learnt(bench: Bench, one: Station, remote: Remote) -> None:
    async def charge(step: Step, name: str) -> str:
        charged = await remote.charge(step, name)
        if len(remote.calls) == 1:
            age(bench)
            raise TimeoutError
        return charged

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first", undo=take_back)
        await saga.call("charged", charge, "card", undo=remote.refund)
        await saga.tx("last", put, "last")

    handler = saga(book, max_duration="24h", reconcile=Asked(NotDone()).reconcile)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert b'"max_duration"' in (outcomes[-1].result or b"")
    assert bench.effects == ["first", "undo:first:out:first"]
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert len(remote.keys("card")) == 1
    assert bench.state is State.FAILED


class Asked:
    """A reconcile that answers, or raises, as told."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)

    async def reconcile(self, order: dict[str, Any], tx: Tx) -> Answer:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def begin(self, bench: Bench, one: Station, **options: Any) -> BoundHandler:
        """A saga that has finished a step, and has then taken longer than it may."""

        async def book(order: dict[str, Any], saga: Saga) -> None:
            await saga.tx("first", put, "first", undo=take_back)
            raise ValueError

        handler = saga(book, max_duration="24h", reconcile=self.reconcile, **options)
        assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
        age(bench)
        return handler


@pytest.mark.parametrize(
    ("answer", "kind", "effects"),
    [
        (Done("was done"), OutcomeKind.APPLIED, ["first"]),
        (NotDone(), OutcomeKind.FAILED, ["first", "undo:first:out:first"]),
        (Unknown(), OutcomeKind.DEAD, ["first"]),
    ],
    ids=str,
)
async def test_its_reconcile_says_how_it_ends(
    bench: Bench, one: Station, answer: Answer, kind: OutcomeKind, effects: list[str]
) -> None:
    handler = await Asked(answer).begin(bench, one)
    *_, last = await one.to_the_end(handler, await one.resume(handler))
    assert (last.kind, bench.effects) == (kind, effects)
    assert bench.letters == (["max_duration"] if kind is OutcomeKind.DEAD else [])
    assert last.result == {"applied": b'"was done"', "failed": b'{"code":"max_duration","body":null}'}.get(kind)


async def test_a_question_that_fails_is_asked_again_after_a_pause_and_then_left_to_a_person(
    bench: Bench, one: Station
) -> None:
    asked = Asked(*[ValueError("no table")] * 2, NotDone())
    handler = await asked.begin(bench, one, max_attempts=3)
    outcome = await one.resume(handler)
    assert outcome.kind is OutcomeKind.RETRYING
    assert outcome.due, "not at once, though it has no time left"
    outcome = await one.resume(handler)
    assert (outcome.kind, bench.letters, len(asked.answers)) == (OutcomeKind.DEAD, ["max_duration"], 1)
    assert (bench.effects, "reconcile: ValueError: no table" in bench.letter) == (["first"], True)


async def test_a_saga_that_may_not_run_is_not_asked_about(bench: Bench, one: Station) -> None:
    handler = await Asked(Done("not asked")).begin(bench, one, version="1")
    bench.run("update idemconsumer.saga set version = '0'")
    assert (await one.resume(handler)).kind is OutcomeKind.DEAD
    assert bench.letters == ["max_duration"]


@pytest.mark.parametrize("place", ["in a step", "between steps"])
async def test_a_run_is_cut_off_at_the_limit(bench: Bench, one: Station, place: str) -> None:
    begun = asyncio.Event()

    async def never(*_: Step) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await (saga.call("never", never) if place == "in a step" else never())

    handler = saga(book, max_duration=20.0, timeout="10m")
    assert (await over_time(one.deliver(handler), 20.0, begun.is_set)).kind is OutcomeKind.RETRYING
    age(bench)
    assert (await one.resume(handler)).kind is OutcomeKind.DEAD
    assert bench.letters == ["max_duration"]


@pytest.mark.parametrize("error", [ValueError(), Retry(after="3d")], ids=["backoff", "Retry"])
async def test_no_pause_between_attempts_lasts_longer(bench: Bench, one: Station, error: Exception) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise error

    outcome = await one.deliver(saga(book, max_duration="20s", backoff="30s, 30s"))
    assert outcome.kind is OutcomeKind.RETRYING
    assert outcome.due is not None
    assert 0 < outcome.due <= 20


async def test_a_wait_without_an_end_lasts_no_longer(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.wait("approved")

    handler = saga(book, max_duration="24h")
    waiting = await one.deliver(handler)
    assert waiting.kind is OutcomeKind.BUSY
    assert waiting.due is not None
    assert 80_000 < waiting.due <= 86_400
    age(bench)
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await one.resume(handler)).kind is OutcomeKind.DEAD
    assert bench.letters == ["max_duration"]


async def test_it_cuts_off_a_step_of_a_task_whatever_counts_as_a_refusal(bench: Bench, one: Station) -> None:
    """The end of the handler's task counted as one, and the step was waited for."""

    begun = asyncio.Event()

    async def hangs(step: Step) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.wait([asyncio.create_task(saga.call("hangs", hangs))])

    handler = saga(book, fail_on=(Exception,), max_duration=20.0, timeout="10m")
    async with asyncio.timeout(PATIENCE):
        outcome = await over_time(one.deliver(handler), 20.0, begun.is_set)
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "_Overdue")
