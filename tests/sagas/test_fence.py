"""Who has lost a saga writes nothing (L2): interleavings of two owners, made by events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from idemconsumer import Outcome, OutcomeKind, Saga, Step, StoreUnavailable, Tx
from idemconsumer.engine.dead_letter import dead_letter
from idemconsumer.engine.work import Work
from idemconsumer.errors import Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.sagas import Bench, OpenStation, Remote, Station, locked, order, put, saga
from tests.support.waiting import until


async def book(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    return "done"


class Gate:
    """Holds whoever passes first; the others go through."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def pass_through(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()


def gated(gate: Gate) -> Callable[[dict[str, Any], Saga], Awaitable[object]]:
    """A saga whose second step stops at the gate, inside its transaction."""

    async def second(tx: Tx) -> None:
        await put(tx, "second")
        await gate.pass_through()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("first", put, "first")
        await saga.tx("second", second)
        await saga.tx("third", put, "third")
        return "done"

    return book


async def ends_without_effect(zombie: asyncio.Task[Outcome]) -> None:
    """It learns of its end as a broken connection or from the record, by when it looks."""
    try:
        assert (await zombie).kind in (OutcomeKind.DUPLICATE, OutcomeKind.FENCED)
    except StoreUnavailable:
        return


async def test_a_saga_with_an_open_step_is_passed_over_though_its_lease_is_over(
    bench: Bench, one: Station, two: Station
) -> None:
    gate = Gate()
    handler = saga(gated(gate))
    zombie = asyncio.create_task(one.deliver(handler))
    await gate.reached.wait()
    bench.expire(one)
    assert await two.take(handler) is None
    gate.open.set()
    await zombie


async def test_a_zombie_in_a_step_whose_transaction_was_killed_commits_nothing(
    bench: Bench, one: Station, two: Station
) -> None:
    gate = Gate()
    handler = saga(gated(gate))
    zombie = asyncio.create_task(one.deliver(handler))
    await gate.reached.wait()
    bench.expire(one)
    bench.kill_transactions()
    outcome = await two.resume(handler)
    gate.open.set()
    await ends_without_effect(zombie)
    assert outcome.kind is OutcomeKind.APPLIED
    assert bench.effects == ["first", "second", "third"]


async def test_a_frozen_step_ends_after_the_lease_and_its_late_commit_fails(
    bench: Bench, open_station: OpenStation, two: Station
) -> None:
    """The zombie is gone for longer than idle_in_transaction_session_timeout, which is the lease at most."""
    one = await open_station(lease=0.5)
    gate = Gate()
    handler = saga(gated(gate))
    zombie = asyncio.create_task(one.deliver(handler))
    await gate.reached.wait()
    bench.expire(one)
    assert await two.take(handler) is None
    outcome = await two.resume(handler)
    gate.open.set()
    await ends_without_effect(zombie)
    assert outcome.kind is OutcomeKind.APPLIED
    assert bench.effects == ["first", "second", "third"]


@pytest.mark.parametrize("taken", ["running", "finished"])
async def test_a_zombie_between_two_steps_is_fenced(bench: Bench, one: Station, two: Station, taken: str) -> None:
    gate = Gate()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("first", put, "first")
        await gate.pass_through()
        await saga.tx("second", put, "second")
        return "done"

    handler = saga(book)
    zombie = asyncio.create_task(one.deliver(handler))
    await gate.reached.wait()
    bench.expire(one)
    if taken == "finished":
        assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
    else:
        holding = await two.take(handler)
        assert holding is not None
    gate.open.set()
    assert (await zombie).kind is OutcomeKind.FENCED
    if taken == "running":
        assert bench.effects == ["first"]
        await two.run(Work.of(handler, order(), leased=holding))
    assert bench.effects == ["first", "second"]
    assert bench.state is State.COMPLETED


async def test_a_zombie_in_a_call_is_fenced_and_the_remote_has_one_key(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    gate = Gate()

    async def charge(step: Step) -> str:
        await gate.pass_through()
        return await remote.charge(step, "c")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", charge)

    handler = saga(book)
    zombie = asyncio.create_task(one.deliver(handler))
    await gate.reached.wait()
    bench.expire(one)
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
    gate.open.set()
    assert (await zombie).kind is OutcomeKind.FENCED
    assert (len(remote.calls), remote.effects) == (2, ["c"])


# ------------------------------------------------------------------------------------------------------- every write
async def _step(station: Station, holding: LeasedSaga) -> None:
    async with station.leases.step(holding, "s", has_undo=False, undo=False) as step:
        await put(step.tx(), "zombie")
        await step.finish(None, overlapped=False)


async def _intend(station: Station, holding: LeasedSaga) -> None:
    await station.leases.intend(holding, "s", has_undo=False, undo=False)


async def _record(station: Station, holding: LeasedSaga) -> None:
    await station.leases.record(holding, "s", StepKind.CALL, StepState.DONE, None, has_undo=False, overlapped=False)


async def _complete(station: Station, holding: LeasedSaga) -> None:
    await station.leases.complete(holding, State.COMPLETED, None)


async def _undo(station: Station, holding: LeasedSaga) -> None:
    await station.leases.undo(holding, StoredResult(b"{}"))


async def _release(station: Station, holding: LeasedSaga) -> None:
    await station.leases.release(holding, 0.0, None, count=True)


async def _park(station: Station, holding: LeasedSaga) -> None:
    await station.leases.park(holding, dead_letter(Work.of(saga(book), order()), "review", "", 1))


Write = Callable[[Station, LeasedSaga], Coroutine[Any, Any, None]]
WRITES: list[Write] = [_step, _intend, _record, _complete, _undo, _release, _park]
every_write = pytest.mark.parametrize("write", WRITES, ids=lambda fn: fn.__name__.strip("_"))


def contents(bench: Bench) -> list[object]:
    return [
        bench.effects,
        bench.letters,
        bench.run("select * from idemconsumer.saga"),
        bench.run("select * from idemconsumer.step"),
        bench.run("select * from idemconsumer.record"),
    ]


async def begin(station: Station) -> LeasedSaga:
    call = Work.of(saga(book), order()).call
    assert call is not None
    holding = await station.leases.begin(call.claim, order(), "book", None)
    assert isinstance(holding, LeasedSaga)
    return holding


@every_write
async def test_no_write_passes_after_a_takeover(bench: Bench, one: Station, two: Station, write: Write) -> None:
    old = await begin(one)
    bench.expire(one)
    assert await two.take(saga(book)) is not None
    before = contents(bench)
    with pytest.raises(Fenced):
        await write(one, old)
    assert contents(bench) == before


@every_write
async def test_no_write_passes_with_the_token_of_before_a_takeover_from_oneself(
    bench: Bench, one: Station, write: Write
) -> None:
    """After an unknown COMMIT: same worker, same phase, and only the token tells the two owners apart."""
    old = await begin(one)
    new = await one.leases.retake(old.key, old.token)
    assert new is not None
    assert new.token > old.token
    before = contents(bench)
    with pytest.raises(Fenced):
        await write(one, old)
    assert contents(bench) == before
    await write(one, new)


@every_write
async def test_no_write_of_another_phase_passes(bench: Bench, one: Station, write: Write) -> None:
    processing = await begin(one)
    undoing = await one.leases.undo(processing, StoredResult(b"{}"))
    assert undoing is not None
    assert undoing.token == processing.token
    before = contents(bench)
    with pytest.raises(Fenced):
        await write(one, processing)
    assert contents(bench) == before


async def test_a_token_grows_with_every_owner_even_if_the_sequence_lags(
    bench: Bench, one: Station, two: Station
) -> None:
    first = await begin(one)
    bench.run("update idemconsumer.saga set token = token + 1000")
    bench.expire(one)
    second = await two.take(saga(book))
    assert second is not None
    assert second.token > first.token + 1000


# ------------------------------------------------------------------------------------------------------------ takeover
async def test_a_taker_passes_over_what_another_is_taking_and_takes_the_rest(
    bench: Bench, one: Station, two: Station
) -> None:
    await begin(one)
    bench.expire(one)
    async with locked(bench):
        other = Work.of(saga(book), order("other")).call
        assert other is not None
        await one.leases.begin(other.claim, order("other"), "book", None)
        async with asyncio.timeout(30):
            taken = await two.take(saga(book))
        assert taken is not None
        assert taken.key == other.claim.key
    assert await two.take(saga(book)) is not None


async def test_a_retake_waits_for_what_is_in_flight(bench: Bench, one: Station) -> None:
    old = await begin(one)
    bench.run("update idemconsumer.saga set attempt = 5")
    async with one.leases.step(old, "s", has_undo=False, undo=False) as step:
        await put(step.tx(), "in flight")
        retake = asyncio.create_task(one.leases.retake(old.key, old.token))
        await until(lambda: bench.waiting() == 1, "the retake waits")
        await step.finish(None, overlapped=False)
    retaken = await retake
    assert retaken is not None
    assert (retaken.token > old.token, retaken.attempt) == (True, 1), "the step has finished"
    assert [row.name for row in await one.leases.steps(old.key)] == ["s"]


@pytest.mark.parametrize(("write", "attempt"), [(_intend, 5), (_step, 1), (_record, 1)], ids=["intent", "tx", "call"])
async def test_a_retake_is_the_first_attempt_again_when_a_step_has_finished_since_the_last_one(
    bench: Bench, one: Station, write: Write, attempt: int
) -> None:
    """Else a lost COMMIT after it would make the next failure the last one."""
    holding = await begin(one)
    bench.run("update idemconsumer.saga set attempt = 5")
    await write(one, holding)
    retaken = await one.leases.retake(holding.key, holding.token)
    assert retaken is not None
    assert retaken.attempt == attempt
    again = await one.leases.retake(retaken.key, retaken.token)
    assert again is not None
    assert again.attempt == attempt


@pytest.mark.parametrize("write", [_complete, _undo, _release, _park], ids=["complete", "undo", "release", "park"])
async def test_what_changes_the_phase_waits_for_open_steps(bench: Bench, one: Station, write: Write) -> None:
    holding = await begin(one)
    async with one.leases.step(holding, "s", has_undo=False, undo=False) as step:
        changing = asyncio.create_task(write(one, holding))
        await until(lambda: bench.waiting() == 1, "it waits")
        await put(step.tx(), "open")
        await step.finish(None, overlapped=False)
    await changing
    assert bench.effects == ["open"]


async def test_a_saga_that_kills_its_workers_is_put_aside_and_not_undone(
    bench: Bench, one: Station, two: Station
) -> None:
    handler, dying, suspect = saga(book, max_attempts=2), one, list[bool]()
    await begin(one)
    for _ in range(4):  # beside others, beside others again, and twice alone
        bench.expire(dying)
        dying.register(bench)
        dying = two
        taken = await dying.take(handler)
        assert taken is not None
        suspect.append(taken.suspect)
        if taken.suspect:
            await dying.leases.count(taken)
    assert suspect == [False, True, True, True]
    outcome = await two.run(Work.of(handler, order(), leased=taken))
    assert (outcome.kind, outcome.reason, bench.state) == (OutcomeKind.DEAD, "killed_worker", State.DEAD)
    assert bench.effects == []


async def test_a_redelivery_may_be_the_first_to_notice_that_the_owner_is_gone(
    bench: Bench, one: Station, two: Station
) -> None:
    handler = saga(book)
    await begin(one)
    assert (await two.deliver(handler)).kind is OutcomeKind.BUSY
    bench.expire(one)
    assert (await two.deliver(handler)).kind is OutcomeKind.APPLIED
    assert bench.effects == ["a"]
