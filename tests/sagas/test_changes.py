"""A handler that no longer fits what is recorded is stopped before any new effect (L6, L8)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Saga, Step, Tx, Unknown, idempotent_handler
from idemconsumer.errors import CommitUnknown
from idemconsumer.rules.values import State
from idemconsumer.stores.columns import NewDeadLetter
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.sagas import Bench, Remote, SagaFn, Station, put, saga, take_back


@dataclass
class Numbered:
    id: int


async def number(tx: Tx) -> int:
    return 7


async def listed(tx: Tx) -> list[str]:
    raise AssertionError("a finished step is run again")


async def _charge(step: Step) -> int:
    raise AssertionError("a finished step is run again")


async def old(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    await saga.tx("b", number)
    raise ValueError("the code is changed now")


async def misses_a_step(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    await saga.tx("new", put, "new")


async def misses_a_step_and_has_no_new_one(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")


async def puts_a_new_one_before_a_recorded_one(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    await saga.tx("new", put, "new")
    await saga.tx("b", number)


async def has_another_kind(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    await saga.call("b", _charge)
    await saga.tx("new", put, "new")


async def has_another_output(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("a", put, "a")
    await saga.tx("b", listed)
    await saga.tx("new", put, "new")


async def renames_a_step(order: dict[str, Any], saga: Saga) -> None:
    await saga.tx("renamed", put, "a")
    await saga.tx("b", number)


CHANGES: list[SagaFn] = [
    misses_a_step,
    misses_a_step_and_has_no_new_one,
    puts_a_new_one_before_a_recorded_one,
    has_another_kind,
    has_another_output,
    renames_a_step,
]


@pytest.mark.parametrize("changed", CHANGES, ids=lambda fn: fn.__name__)
async def test_a_changed_handler_is_put_aside_before_any_new_effect(
    bench: Bench, one: Station, two: Station, changed: SagaFn
) -> None:
    await one.deliver(saga(old))
    outcome = await two.resume(saga(changed))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert (bench.effects, bench.letters, bench.state) == (["a"], ["saga_changed"], State.DEAD)
    assert await two.take(saga(changed)) is None


@pytest.mark.parametrize(
    ("changed", "asked_for"),
    [
        (misses_a_step, "a, new"),
        (misses_a_step_and_has_no_new_one, "a"),
        (has_another_kind, "a, b"),
        (has_another_output, "a, b"),
        (renames_a_step, "renamed"),
    ],
)
async def test_both_lists_of_steps_are_told(
    bench: Bench, one: Station, two: Station, changed: SagaFn, asked_for: str
) -> None:
    await one.deliver(saga(old))
    await two.resume(saga(changed))
    assert f"; recorded: a, b; requested: {asked_for}" in bench.letter


async def test_long_lists_of_steps_are_cut(bench: Bench, one: Station, two: Station) -> None:
    async def many(order: dict[str, Any], saga: Saga) -> None:
        for number in range(53):
            await saga.tx(f"line_{number}", put, "line")
        raise ValueError

    async def none(order: dict[str, Any], saga: Saga) -> None:
        return

    await one.deliver(saga(many))
    await two.resume(saga(none))
    assert "; recorded: line_0, line_1, " in bench.letter
    assert "line_49 and 3 more; requested: no step" in bench.letter


@pytest.mark.parametrize("changed", CHANGES, ids=lambda fn: fn.__name__)
async def test_the_handler_cannot_swallow_that_it_has_changed(
    bench: Bench, one: Station, two: Station, changed: SagaFn
) -> None:
    async def swallows(order: dict[str, Any], saga: Saga) -> str:
        try:
            await changed(order, saga)
        finally:
            return "complete"  # noqa: B012 - the mistake under test

    await one.deliver(saga(old))
    outcome = await two.resume(saga(swallows))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "saga_changed", ["a"])


async def test_another_version_is_put_aside_before_the_handler_runs(bench: Bench, one: Station, two: Station) -> None:
    ran: list[object] = []

    async def newer(order: dict[str, Any], saga: Saga) -> None:
        ran.append(order)

    await one.deliver(saga(old, version="1"))
    outcome = await two.resume(saga(newer, version="2"))
    assert (outcome.kind, outcome.reason, ran) == (OutcomeKind.DEAD, "saga_changed", [])
    assert "'1'" in bench.letter
    assert "'2'" in bench.letter
    assert "recorded: a, b; requested: nothing, it did not run" in bench.letter


async def test_new_steps_after_the_recorded_ones_are_allowed(bench: Bench, one: Station, two: Station) -> None:
    async def longer(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.tx("b", number)
        await saga.tx("new", put, "new")

    await one.deliver(saga(old))
    assert (await two.resume(saga(longer))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["a", "new"]


async def test_parallel_steps_are_missed_at_completion_at_the_latest(bench: Bench, one: Station, two: Station) -> None:
    """They have no fixed place, so a new step may come before them; but none may be passed over."""
    both = asyncio.Barrier(2)

    async def meet(tx: Tx, name: str) -> None:
        await both.wait()
        await put(tx, name)

    async def parallel(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.tx("a", meet, "a"), saga.tx("b", meet, "b"))
        raise ValueError

    async def only_one(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", meet, "a")

    await one.deliver(saga(parallel))
    outcome = await two.resume(saga(only_one, timeout=0.3))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert sorted(bench.effects) == ["a", "b"]


@pytest.mark.parametrize("change", ["not asked for", "no undo any more"])
async def test_a_step_that_can_no_longer_be_undone_stops_the_undo_before_it_begins(
    bench: Bench, one: Station, two: Station, change: str
) -> None:
    changed = False

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if not changed:
            await saga.tx("a", put, "a", undo=take_back)
        elif change == "no undo any more":
            await saga.tx("a", put, "a")
        await saga.tx("b", put, "b", undo=take_back)
        if not changed:
            raise ValueError
        raise Reject("no")

    await one.deliver(saga(book))
    changed = True
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert (bench.effects, bench.state) == (["a", "b"], State.DEAD)


async def test_a_message_that_no_longer_decodes_is_put_aside(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    async def typed(order: Numbered, saga: Saga) -> None:
        await saga.call("c", remote.charge, "c")

    handler = idempotent_handler("memory:orders", key="id", name="book")(typed).plan.bind("shop")
    await one.deliver(saga(old))
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.reason, remote.calls) == (OutcomeKind.DEAD, "saga_changed", [])


async def test_a_lost_answer_when_an_unreadable_message_is_put_aside_is_found_out(
    bench: Bench, one: Station, two: Station
) -> None:
    async def typed(order: Numbered, saga: Saga) -> None:
        return

    park = two.leases.park

    async def losing(saga: LeasedSaga, letter: NewDeadLetter) -> int:
        await park(saga, letter)
        raise CommitUnknown("lost")

    two.leases.park = losing  # type: ignore[method-assign]
    handler = idempotent_handler("memory:orders", key="id", name="book")(typed).plan.bind("shop")
    await one.deliver(saga(old))
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.state, bench.letters) == (OutcomeKind.DEAD, State.DEAD, ["saga_changed"])


# ------------------------------------------------------------------------------------------------------ stale (L8)
async def person(order: dict[str, Any]) -> Done[Any] | NotDone | Unknown:
    """Whoever is asked knows nothing."""
    return Unknown()


async def test_who_cannot_tell_leaves_a_stale_saga_to_a_person(bench: Bench, one: Station, two: Station) -> None:
    begun = asyncio.Event()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        await saga.tx("b", put, "b")

    handler = saga(book, reconcile=person)
    frozen = asyncio.create_task(one.deliver(handler))
    await begun.wait()
    bench.expire(one)
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "unknown_effect", ["a"])
    assert bench.state is State.DEAD
    one.engine.lose()
    assert (await frozen).kind is OutcomeKind.FENCED


async def test_nobody_is_asked_after_a_retry(bench: Bench, one: Station, two: Station) -> None:
    fails = [ValueError()]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        if fails:
            raise fails.pop()

    handler = saga(book, reconcile=person)
    await one.deliver(handler)
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
