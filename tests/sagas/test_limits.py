"""What takes too long inside a transaction is its own failure, which is counted, and never an outage (L5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Saga, Step, Tx, Unknown
from idemconsumer.errors import StoreUnavailable, TransactionEnded
from idemconsumer.user_code.call import call_user_code
from idemconsumer.user_code.time_limit import TimeLimit
from tests.support.sagas import Bench, OpenStation, Remote, Station, hog, locked, lost, put, saga
from tests.support.waiting import until

LEASE = 0.5
Slow = Callable[[Tx], Awaitable[object]]


async def waits(tx: Tx) -> None:
    await asyncio.Event().wait()


async def nothing(tx: Tx) -> None: ...


async def swallows() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


async def swallows_its_cancellation(tx: Tx) -> None:
    await swallows()


async def computes(tx: Tx) -> None:
    hog(1.5 * LEASE)


async def computes_and_then_asks(tx: Tx) -> None:
    hog(1.5 * LEASE)
    await tx.execute("select 1")


async def asks_all_the_time(tx: Tx) -> None:
    while True:
        await tx.execute("select 1")


SLOW: list[Slow] = [waits, swallows_its_cancellation, computes, computes_and_then_asks, asks_all_the_time]
every_slow = pytest.mark.parametrize("slow", SLOW, ids=lambda fn: fn.__name__)


async def opened(open_station: OpenStation) -> Station:
    """Of a short lease. A machine that stands still for longer ends a session that is being made ready."""
    while True:
        with suppress(StoreUnavailable):
            return await open_station(lease=LEASE)


@pytest.fixture
async def bounded(open_station: OpenStation) -> Station:
    """Of a worker with a short lease."""
    station = await opened(open_station)
    station.engine._lease = LEASE
    return station


@every_slow
async def test_a_step_that_takes_longer_than_the_lease_runs_out_of_attempts(
    bench: Bench, bounded: Station, slow: Slow
) -> None:
    runs = 0

    async def step(tx: Tx) -> None:
        nonlocal runs
        runs += 1
        rows = await tx.execute("insert into effect (name) values ('s')")
        assert rows.rowcount == 1  # if it were sent ahead, a run might be repeated, uncounted (J27)
        await slow(tx)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("slow", step)

    handler = saga(book, max_attempts=2)
    *_, last = await bounded.to_the_end(handler, await bounded.deliver(handler))
    assert (last.kind, last.reason, runs, bench.effects) == (OutcomeKind.DEAD, "attempts_exhausted", 2, [])
    assert "step 'slow': TimeoutError: did not end within 0.5 s" in bench.letter
    assert "raise `lease`" in bench.letter


@every_slow
async def test_an_undo_that_takes_longer_than_the_lease_runs_out_of_attempts(
    bench: Bench, bounded: Station, slow: Slow
) -> None:
    async def undo(tx: Tx, output: str, name: str) -> None:
        await put(tx, "undone")
        await slow(tx)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo)
        raise Reject("no")

    handler = saga(book, max_attempts=2)
    *_, last = await bounded.to_the_end(handler, await bounded.deliver(handler))
    assert (last.reason, bench.effects) == ("undo_failed", ["a"])
    assert "undo of 'a': TimeoutError: did not end within 0.5 s" in bench.letter


@every_slow
async def test_a_question_that_takes_longer_than_the_lease_is_left_to_a_person(
    bench: Bench, one: Station, bounded: Station, slow: Slow
) -> None:
    async def reconcile(order: dict[str, Any], tx: Tx) -> Done[str] | NotDone | Unknown:
        await put(tx, "asked")
        await slow(tx)
        return Done("late")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise AssertionError("it runs, and nobody knows whether it is done")

    handler = saga(book, reconcile=reconcile, max_attempts=3)
    await lost(bench, one, handler)
    *_, last = await bounded.to_the_end(handler, await bounded.resume(handler))
    assert (last.reason, bench.effects) == ("unknown_effect", [])
    assert "reconcile: TimeoutError: did not end within 0.5 s" in bench.letter


async def test_a_transaction_that_the_server_ended_for_being_idle_is_the_failure_of_its_step(
    bench: Bench, open_station: OpenStation
) -> None:
    """The server may look at its clock a moment before us."""
    station = await opened(open_station)

    async def idle(tx: Tx) -> None:
        ((pid,),) = await (await tx.execute("select pg_backend_pid()")).all()
        await until(
            lambda: not bench.run("select 1 from pg_stat_activity where pid = %s", (pid,)), "the server has ended it"
        )
        await tx.execute("select 1")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("idle", idle)

    handler = saga(book, max_attempts=1)
    assert (await station.deliver(handler)).reason == "attempts_exhausted"
    assert "step 'idle': TimeoutError" in bench.letter


async def test_a_connection_that_breaks_before_that_is_an_outage(bench: Bench, bounded: Station) -> None:
    async def broken(tx: Tx) -> None:
        bench.kill_transactions()
        await tx.execute("select 1")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("broken", broken)

    with pytest.raises(StoreUnavailable):
        await bounded.deliver(saga(book, max_attempts=1, fail_on=(Exception,)))
    assert (bench.held, bench.letters) == (True, [])


async def test_a_step_that_computes_for_longer_than_its_timeout_is_not_committed(bench: Bench, one: Station) -> None:
    async def step(tx: Tx) -> None:
        await put(tx, "s")
        hog(0.1)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("slow", step)

    assert (await one.deliver(saga(book, timeout="50ms", max_attempts=1))).reason == "attempts_exhausted"
    assert bench.effects == []
    assert "step 'slow': TimeoutError: did not end within its timeout of 0.05 s" in bench.letter


async def test_a_call_that_returns_too_late_is_recorded_since_its_end_is_known(
    bench: Bench, one: Station, remote: Remote
) -> None:
    async def late(step: Step, name: str) -> str:
        charged = await remote.charge(step, name)
        hog(0.1)
        return charged

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", late, "c")

    assert (await one.deliver(saga(book, timeout="50ms"))).kind is OutcomeKind.APPLIED
    assert len(remote.calls) == 1


async def test_what_was_cut_off_and_swallows_it_is_late_whatever_our_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop counts from the beginning of its turn, and may be a millisecond early."""
    monkeypatch.setattr("idemconsumer.user_code.time_limit.time", SimpleNamespace(monotonic=lambda: 0.0))
    limit = TimeLimit(30.0, LEASE)
    await call_user_code(swallows(), limit)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.5 s"):
        limit.check()


def test_only_a_function_that_had_its_transaction_to_itself_is_blamed_for_idling() -> None:
    """In a group a neighbour may have let it idle (G14)."""
    ended = TransactionEnded("the server has ended it")
    assert isinstance(TimeLimit(30.0, LEASE).blame(ended), TimeoutError)
    assert TimeLimit(30.0).blame(ended) is ended
    late = TimeLimit(30.0)
    late.cut_off = True
    assert isinstance(late.blame(ended), TimeoutError)


@pytest.mark.parametrize("what", ["a step", "an undo", "a question"])
async def test_a_timeout_while_a_lock_is_waited_for_costs_no_attempt(
    bench: Bench, one: Station, two: Station, what: str
) -> None:
    """B14."""

    async def take(tx: Tx, *of: object) -> None:
        await tx.execute("insert into effect (name) values ('taken')")

    async def ask(order: dict[str, Any], tx: Tx) -> Done[str] | NotDone | Unknown:
        await take(tx)
        return Done("done")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if what == "an undo":
            await saga.call("s", Remote().charge, "s")
            await saga.tx("a", nothing, undo=take)
            raise Reject("no")
        await saga.tx("s", take)

    options: Any = {"reconcile": ask} if what == "a question" else {}
    handler, patient = (saga(book, max_attempts=2, timeout=each, **options) for each in ("300ms", "20s"))
    async with locked(bench, "lock table effect") as rival:
        if what == "a question":
            await lost(bench, one, handler)
            outcomes = [await two.resume(handler)]
        else:
            outcomes = [await two.deliver(handler)]
        outcomes += [await two.resume(handler) for _ in range(2)]
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.RETRYING}
        await rival.rollback()
        *_, last = await two.to_the_end(patient, outcomes[-1])
    assert last.kind is (OutcomeKind.FAILED if what == "an undo" else OutcomeKind.APPLIED)
    assert bench.effects == ["taken"]
