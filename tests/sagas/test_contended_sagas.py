"""A saga that collides is run again at no cost, less and less often, and for an hour at most (B15)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Saga, Tx
from idemconsumer.engine import evidence
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.sagas import Bench, Station, put, saga

HOUR = 3_600.0


async def hit(tx: Tx) -> None:
    await collide(tx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


async def test_a_saga_that_collides_for_an_hour_is_left_to_a_person(
    bench: Bench, one: Station, clock: SimpleNamespace
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.tx("hit", hit)

    handler = saga(book, max_attempts=1)
    with a_lock_is_taken(bench.dsn):
        outcomes = [await one.deliver(handler)]
        for clock.now in (10.0, 20.0, HOUR - 1):
            outcomes.append(await one.resume(handler))
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.RETRYING}
        due = [outcome.due for outcome in outcomes]
        assert due == sorted(set(due)), "each pause is longer than the one before"
        clock.now = HOUR
        last = await one.resume(handler)
    assert (last.kind, last.reason, bench.effects) == (OutcomeKind.DEAD, "contended", ["a"])
    assert "5 runs in 60 minutes" in bench.letter


async def test_an_hour_in_which_another_worker_brought_it_further_does_not_count(
    bench: Bench, one: Station, two: Station, clock: SimpleNamespace
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", hit if collides[0] else put, *(() if collides[0] else ("a",)))
        await saga.tx("b", hit)

    collides, handler = [True], saga(book, max_attempts=1)
    with a_lock_is_taken(bench.dsn):
        assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
        collides[0] = False
        clock.now = HOUR
        assert (await two.resume(handler)).kind is OutcomeKind.RETRYING
        assert (await one.resume(handler)).kind is OutcomeKind.RETRYING
    assert bench.effects == ["a"]
