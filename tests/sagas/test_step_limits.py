"""A step's own limits: its time, its attempts, and the pauses between them (L45)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import Backoff, OutcomeKind, Reject, Retry, Saga, Step, Tx
from idemconsumer.rules.values import State
from idemconsumer.stores.heartbeat import Heartbeat
from tests.support.sagas import SCHEMA, Bench, Remote, Station, hog, lost, order, put, saga, take_back
from tests.support.waiting import PATIENCE

LEASE = 2.0  # seconds


class Flaky:
    """Fails `times` times, then does what it is asked. Counts how often it was called."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.called = 0

    def _call(self) -> None:
        self.called += 1
        if self.called <= self.times:
            raise ValueError("flaky")

    async def tx(self, tx: Tx) -> None:
        self._call()

    async def call(self, step: Step) -> None:
        self._call()

    async def undo(self, step: Step, output: None) -> None:
        self._call()


async def idle(step: Step) -> None:
    return


@pytest.mark.parametrize("how", ["tx", "call"])
async def test_a_step_has_more_attempts_than_its_handler(bench: Bench, one: Station, how: str) -> None:
    flaky = Flaky(4)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("before", put, "a")
        await (saga.tx("s", flaky.tx, max_attempts=5) if how == "tx" else saga.call("s", flaky.call, max_attempts=5))
        await saga.tx("after", put, "b")

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RETRYING] * 4 + [OutcomeKind.APPLIED]
    assert (flaky.called, bench.effects) == (5, ["a", "b"])


@pytest.mark.parametrize("how", ["tx", "call"])
async def test_a_step_with_one_attempt_is_not_tried_again(bench: Bench, one: Station, how: str) -> None:
    flaky = Flaky(9)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await (saga.tx("s", flaky.tx, max_attempts=1) if how == "tx" else saga.call("s", flaky.call, max_attempts=1))

    outcome = await one.deliver(saga(book, max_attempts=5))
    reason = "attempts_exhausted" if how == "tx" else "unknown_effect"
    assert (outcome.kind, outcome.reason, flaky.called) == (OutcomeKind.DEAD, reason, 1)


async def test_the_next_step_begins_with_the_handlers_attempts(bench: Bench, one: Station) -> None:
    first, second = Flaky(3), Flaky(9)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", first.tx, max_attempts=4)
        await saga.tx("second", second.tx)

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcomes[-1].reason, first.called, second.called) == ("attempts_exhausted", 4, 2)


async def test_beside_others_the_limit_is_that_of_the_step_that_failed(bench: Bench, one: Station) -> None:
    patient, strict = Flaky(9), Flaky(9)
    failed = asyncio.Event()

    async def wait_and_fail(tx: Tx) -> None:
        await failed.wait()  # which is never set in the attempts of the patient one
        strict._call()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if patient.called == 3:
            failed.set()
            await saga.tx("strict", wait_and_fail, max_attempts=2)
        await asyncio.gather(
            saga.tx("patient", patient.tx, max_attempts=8), saga.tx("strict", wait_and_fail, max_attempts=2)
        )

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [outcome.attempt for outcome in outcomes] == [1, 2, 3, 4]
    assert (outcomes[-1].reason, patient.called, strict.called) == ("attempts_exhausted", 3, 1)
    assert "strict" in bench.letter


async def test_what_the_handler_does_itself_has_the_handlers_attempts(bench: Bench, one: Station) -> None:
    flaky = Flaky(9)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if flaky.called == 2:
            raise ValueError("between two steps")
        await saga.tx("s", flaky.tx, max_attempts=9)

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RETRYING] * 2 + [OutcomeKind.DEAD]


async def test_another_worker_counts_on(bench: Bench, one: Station, two: Station) -> None:
    flaky = Flaky(9)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", flaky.tx, max_attempts=3)

    handler = saga(book, max_attempts=1)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    assert (await two.resume(handler)).kind is OutcomeKind.RETRYING
    holding = await one.take(handler)
    while holding is None:
        holding = await one.take(handler)
    bench.expire(one)  # a lost worker costs none
    assert (await two.resume(handler)).reason == "attempts_exhausted"
    assert flaky.called == 3


async def test_a_saga_that_may_kill_its_workers_has_the_handlers_attempts(
    bench: Bench, one: Station, two: Station
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", put, "a", max_attempts=9)

    await lost(bench, one, saga(book))
    bench.run("update idemconsumer.saga set attempt = 4, suspicion = 3")
    outcome = await two.resume(saga(book, max_attempts=3))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "killed_worker", [])


@pytest.mark.parametrize("own", [1, 3])
async def test_an_undo_has_the_handlers_attempts_or_more(bench: Bench, one: Station, own: int) -> None:
    flaky = Flaky(9)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", idle, undo=flaky.undo, max_attempts=own)
        raise Reject("no")

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcomes[-1].reason, flaky.called) == ("undo_failed", max(own, 2))


async def test_exhausted_attempts_of_a_step_undo_what_was_done(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "a", undo=take_back)
        await saga.tx("s", Flaky(9).tx, max_attempts=1)

    assert (await one.deliver(saga(book, max_attempts=5))).kind is OutcomeKind.FAILED
    assert (bench.state, bench.effects) == (State.FAILED, ["a", "undo:a:out:a"])


async def test_a_step_has_its_own_pauses(bench: Bench, one: Station) -> None:
    flaky, seen = Flaky(9), []

    async def refund(step: Step, output: None) -> None:
        raise ValueError("flaky")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", idle, undo=refund, backoff="7s, 60s")
        await saga.tx("t", flaky.tx, max_attempts=3, backoff=Backoff(100.0, 2.0, 1_000.0))

    handler = saga(book, max_attempts=2)
    outcome = await one.deliver(handler)
    while outcome.kind is OutcomeKind.RETRYING:
        seen.append(outcome.due)
        bench.run("update idemconsumer.saga set due = clock_timestamp()")
        outcome = await one.resume(handler)
    assert seen == [100.0, 200.0, 7.0], "two pauses of the step, then one of the undo"
    assert outcome.reason == "undo_failed"


async def test_the_delay_of_a_retry_comes_before_the_pause_of_its_step(bench: Bench, one: Station) -> None:
    async def later(tx: Tx) -> None:
        raise Retry(after="42s")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", later, backoff="7s, 60s")

    assert (await one.deliver(saga(book))).due == 42.0


async def test_a_delivery_that_is_held_is_not_held_for_long_by_a_step(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", Flaky(9).tx, backoff="1h, 2h")

    assert (await one.deliver(saga(book, settle="finished"))).due == 30.0


async def test_a_call_may_take_longer_than_its_handler_says_and_a_step_less(bench: Bench, one: Station) -> None:
    never = asyncio.Event()

    async def slow(step: Step) -> str:
        await asyncio.sleep(2.5)
        return "done"

    async def hangs(tx: Tx) -> None:
        await never.wait()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("slow", slow, timeout="20s")

    async def shorter(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("hangs", hangs, timeout="50ms")

    assert (await one.deliver(saga(book, timeout="2s"))).kind is OutcomeKind.APPLIED
    assert (await one.deliver(saga(shorter, max_attempts=1), order("other"))).kind is OutcomeKind.DEAD
    assert "within its timeout of 0.05 s" in bench.letter


async def test_an_undo_and_a_reconcile_have_the_time_of_their_step(bench: Bench, one: Station, remote: Remote) -> None:
    async def slow(step: Step, output: None) -> None:
        await asyncio.sleep(2.5)
        remote.calls.append(("refund", step.key))

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", idle, undo=slow, timeout="20s")
        raise Reject("no")

    assert (await one.deliver(saga(book, timeout="2s"))).kind is OutcomeKind.FAILED
    assert remote.effects == ["refund"]


WRONG = [
    ({"timeout": 0}, "`timeout` is zero"),
    ({"timeout": "soon"}, "`timeout`; 'soon' is not a duration"),
    ({"max_attempts": 0}, "`max_attempts` is 0; write a whole number from 1"),
    ({"max_attempts": True}, "`max_attempts` is True"),
    ({"backoff": "1s"}, "`backoff` is '1s'; write the first pause and the longest"),
    ({"backoff": "2s, 1s"}, "`backoff`; Backoff(first=2.0, factor=2.0, cap=1.0) is not a backoff"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
@pytest.mark.parametrize("how", ["tx", "call"])
async def test_a_wrong_limit_is_refused_before_the_step_begins(
    bench: Bench, one: Station, wrong: dict[str, Any], said: str, how: str
) -> None:
    flaky = Flaky(0)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await (saga.tx("paid", flaky.tx, **wrong) if how == "tx" else saga.call("paid", flaky.call, **wrong))

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert f"step 'paid': {said}" in bench.letter
    assert (flaky.called, bench.steps) == (0, [])


async def test_a_step_in_a_transaction_has_no_more_time_than_its_handler(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", put, "a", timeout="31s")

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert "limited to its handler's, 30 s" in bench.letter
    assert bench.effects == []


# ---- what the lease's thread allows
async def test_how_long_a_running_saga_may_stand_still_follows_its_steps(bench: Bench, one: Station) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def waits(step: Step) -> None:
        begun.set()
        await go.wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", waits, timeout="2h")

    assert one.engine.patience() == 0, "none runs"
    running = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    assert one.engine.patience() == 7_200.0
    go.set()
    assert (await running).kind is OutcomeKind.APPLIED
    assert one.engine.patience() == 0


@pytest.mark.parametrize(("longer", "lease"), [(0.0, LEASE), (60.0, 3 * LEASE)])  # one is lost, the other must not be
async def test_the_lease_is_renewed_for_as_long_as_a_step_was_allowed(
    bench: Bench, longer: float, lease: float
) -> None:
    """No saga has got on for longer than the handlers' `timeout` allows, and then the loop stood still for as long."""
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=lease, patience=0.2)
    await heartbeat.start(lost.set, lambda: 61.0, lambda: longer)
    try:
        hog(1.2 * lease)
        with suppress(TimeoutError):  # the loop tells what the thread has found
            await asyncio.wait_for(lost.wait(), 0.1 if longer else PATIENCE)
        assert lost.is_set() is (longer == 0)
    finally:
        await heartbeat.stop()
