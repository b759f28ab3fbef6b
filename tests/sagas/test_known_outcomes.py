"""What a refusal or the handler's end would cut off is known: each run goes on as the one before (L24, L75)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.sagas.activity import Activity as OpenWaits
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.stores.open_steps import PostgresStep
from tests.support.clock import forward
from tests.support.logs import LogCapture
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back
from tests.support.waiting import PATIENCE
from tests.support.ways import in_a_group


async def nothing() -> None:
    """Of a branch."""


class Slow:
    """A call that goes on until it is let go, or for 50 ms from its second time on."""

    def __init__(self, remote: Remote) -> None:
        self.begun = asyncio.Event()
        self._remote = remote
        self._times = 0

    async def call(self, step: Step, name: str) -> str:
        self._times += 1
        self.begun.set()
        await (asyncio.Event().wait() if self._times == 1 else asyncio.sleep(0.05))
        return await self._remote.charge(step, name)


@pytest.mark.parametrize("deep", [False, True])
async def test_a_task_group_beside_a_call_ends_though_it_is_caught(
    bench: Bench, one: Station, remote: Remote, deep: bool
) -> None:
    """In each run it cut off the call again, until the saga was put aside as an unknown effect."""
    slow, fails, caught = Slow(remote), [ValueError("once")], list[str]()

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                charge = saga.call("charged", slow.call, "card", undo=remote.refund)
                group.create_task(in_a_group(in_a_group(charge, nothing()), nothing()) if deep else charge)
                group.create_task(saga.tx("refused", refuse))
        except* Reject as refused:
            caught.extend(str(each) for each in refused.exceptions)
        await saga.tx("last", last)

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (remote.effects, bench.effects) == (["card"], ["last"])
    assert caught == ["no"] * 3, "each run has gone the same way"


async def test_what_it_has_done_is_undone_with_the_saga(bench: Bench, one: Station, remote: Remote) -> None:
    slow = Slow(remote)

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("charged", slow.call, "card", undo=remote.refund))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("put", put, "put", undo=take_back)
        raise Reject("after all")

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert bench.effects == ["put", "undo:put:out:put"]


async def test_a_call_that_the_handler_stopped_waiting_for_is_known_at_its_end(
    bench: Bench, one: Station, remote: Remote
) -> None:
    async def slow(step: Step, name: str) -> str:
        await asyncio.sleep(0.1)
        return await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            patience = PATIENCE if remote.calls else 0.02  # in its replay it is there
            return await asyncio.wait_for(asyncio.shield(saga.call("charged", slow, "card")), patience)
        except TimeoutError:
            return "too late"

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert outcomes[0].error == "SagaMisused"
    assert (outcomes[-1].result, len(remote.calls)) == (b'"charged:card"', 1)


async def hang(tx: Tx) -> None:
    await put(tx, "hung")
    await asyncio.Event().wait()


async def refused(tx: Tx) -> None:
    await asyncio.sleep(0.03)
    raise Reject("no")


CUT_OFF: dict[str, Callable[[Saga], Any]] = {
    "tx": lambda saga: saga.tx("other", hang),
    "sleep": lambda saga: saga.sleep("other", "1h"),
    "wait": lambda saga: saga.wait("other"),
    "first": lambda saga: saga.first(a=saga.wait("other"), b=saga.wait("another")),
}


@pytest.mark.parametrize("nested", [False, True], ids=["beside", "nested"])
@pytest.mark.parametrize("what", CUT_OFF)
async def test_what_has_no_effect_yet_may_be_cut_off(
    bench: Bench, one: Station, two: Station, what: str, nested: bool
) -> None:
    """Each run cut it off and failed, until the saga was undone or put aside."""
    fails = [ValueError("once")]

    async def refusing(saga: Saga) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.tx("refused", refused))
            if nested:
                group.create_task(saga.tx("hung", hang))

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(CUT_OFF[what](saga))
                group.create_task(refusing(saga))
        return await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (outcomes[0].error, bench.effects) == ("ValueError", ["last"])


async def test_what_has_finished_though_it_was_cancelled_is_given_to_its_branch_in_each_run(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """It was left out for as long as the cancellation of a replay came within ten turns of the loop."""
    begun, fails, given = asyncio.Event(), [ValueError("once")], list[str]()

    async def stubborn(step: Step, name: str) -> str:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        return await remote.charge(step, name)

    async def refuse(tx: Tx) -> None:
        await begun.wait()
        raise Reject("no")

    async def charge(saga: Saga) -> None:
        given.append(await saga.call("charged", stubborn, "card"))
        await asyncio.sleep(0)
        given.append("never")

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(charge(saga))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (outcomes[0].error, remote.effects, given) == ("ValueError", ["card"], ["charged:card"] * 2)


async def test_what_was_cut_off_does_not_begin_again_in_a_replay(bench: Bench, one: Station, two: Station) -> None:
    """It took effect in the replay, though the handler had gone on without it long ago."""
    fails, begun, started = [ValueError("once")], list[str](), asyncio.Event()

    async def slow(tx: Tx) -> None:
        begun.append("slow")
        started.set()
        if len(begun) == 1:
            await asyncio.Event().wait()
        await put(tx, "slow")

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def refuses(saga: Saga) -> None:
        await (started.wait() if fails else asyncio.sleep(0.1))
        await saga.tx("refused", refused)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.tx("slow", slow))
                group.create_task(refuses(saga))
        await saga.tx("fallback", put, "fallback")
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.APPLIED
    assert (begun, bench.effects) == (["slow"], ["fallback"])


@pytest.mark.parametrize("kind", ["tx", "call", "sleep", "first"])
async def test_a_step_that_is_cancelled_while_it_is_recorded_is_given_to_its_branch_in_each_run(
    bench: Bench, one: Station, two: Station, remote: Remote, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It was left out, and in a replay it was given out if the cancellation took some turns more of the loop."""
    fails, seen = [ValueError("once")], list[list[str]]()
    refusal, recorded = asyncio.Event(), asyncio.Event()

    def answers_late(name: str) -> None:
        write = getattr(PostgresLeases, name)

        async def late(self: PostgresLeases, key: Any, step: str, *args: Any, **more: Any) -> Any:
            answer = await write(self, key, step, *args, **more)
            if step == "other" and not isinstance(answer, float):
                recorded.set()
                if fails and refusal.is_set():
                    await asyncio.Event().wait()  # until it is cancelled
            return answer

        monkeypatch.setattr(PostgresLeases, name, late)

    async def finish_late(step: PostgresStep, *args: Any, **more: Any) -> int:
        answer = await finish(step, *args, **more)
        if refusal.is_set() and not seen[1:]:
            recorded.set()
            await asyncio.Event().wait()
        return answer

    async def rest(waits: OpenWaits, name: str, *args: Any) -> None:
        await refusal.wait()
        await asyncio.sleep(0.06)

    finish = PostgresStep.finish
    monkeypatch.setattr(OpenWaits, "rest", rest)
    answers_late("record")
    answers_late("wait")
    monkeypatch.setattr(PostgresStep, "finish", finish_late)

    async def in_time(tx: Tx) -> None:
        await refusal.wait()
        await put(tx, "other")

    async def called(step: Step) -> None:
        await refusal.wait()

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def refuses(saga: Saga) -> None:
        try:
            await saga.tx("refused", refused)
        finally:
            refusal.set()
            await recorded.wait()

    others: dict[str, Callable[[Saga], Any]] = {
        "tx": lambda saga: saga.tx("other", in_time),
        "call": lambda saga: saga.call("other", called),
        "sleep": lambda saga: saga.sleep("other", "50ms"),
        "first": lambda saga: saga.first(a=saga.sleep("other", "50ms"), b=saga.wait("another")),
    }

    async def book(order: dict[str, Any], saga: Saga) -> None:
        given: list[str] = []
        seen.append(given)

        async def other() -> None:
            await others[kind](saga)
            given.append("other")

        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(other())
                group.create_task(refuses(saga))
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert seen == [["other"], ["other"]]


async def test_a_replay_that_gets_on_may_take_longer_than_the_timeout(bench: Bench, one: Station, two: Station) -> None:
    """What was new was taken for a sign of another handler."""
    fails = [ValueError("once")]

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        over = asyncio.Event()

        async def many() -> None:
            for number in range(5):
                await saga.tx(f"put_{number}", put, f"{number}")
                if not fails:
                    forward(6.0)
                    await asyncio.sleep(0.01)
            over.set()

        async def fewer() -> None:
            if fails:
                await over.wait()
            await saga.tx("last", last)

        await asyncio.gather(many(), fewer())

    handler = saga(book, timeout="10s")
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    outcome = await two.resume(handler)
    assert (outcome.kind, bench.effects) == (OutcomeKind.APPLIED, [f"{number}" for number in range(5)])


async def test_a_drain_waits_for_no_turn(bench: Bench, one: Station, two: Station, logged: LogCapture) -> None:
    """The branch whose step comes first has not requested it yet."""
    fails, waits = [ValueError("once")], asyncio.Event()

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def late() -> None:
            if not fails:
                waits.set()
                await asyncio.Event().wait()
            await saga.tx("first", put, "first")

        early = asyncio.create_task(late())
        if fails:
            await early
        await asyncio.create_task(saga.tx("second", put, "second"))
        await saga.tx("last", last)

    handler = saga(book)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    running = asyncio.create_task(two.resume(handler))
    await waits.wait()
    await asyncio.sleep(0.05)
    two.engine.drain()
    assert (await running).kind is OutcomeKind.CANCELLED
    assert not [each for each in logged.entries if "abandoned" in each["event"]]


async def test_a_late_cancellation_is_raised_at_the_next_step(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """The next step began, and was taken for one that had cancelled itself."""
    begun, fails = asyncio.Event(), [ValueError("once")]

    async def stubborn(step: Step, name: str) -> str:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await remote.charge(step, name)

    async def refuse(tx: Tx) -> None:
        await begun.wait()
        raise Reject("no")

    async def charge(saga: Saga) -> None:
        await saga.call("charged", stubborn, "card")
        await saga.tx("booked", put, "booked")

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(charge(saga))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("last", last)

    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (outcomes[0].error, remote.effects, bench.effects) == ("ValueError", ["card"], [])


async def test_a_time_limit_without_a_refusal_interrupts_the_run(bench: Bench, one: Station) -> None:
    """In a replay it would come later, or not at all."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await saga.tx("hung", hang)
        await saga.tx("last", put, "last")

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, bench.effects) == (OutcomeKind.RETRYING, [])


async def test_a_time_limit_of_a_replay_cuts_off_nothing_that_is_recorded(
    bench: Bench, one: Station, two: Station
) -> None:
    """The handler went another way than in the run before."""
    fails, over = [ValueError("once")], asyncio.Event()

    async def last(tx: Tx) -> None:
        if fails:
            raise fails.pop()

    async def second(tx: Tx) -> None:
        await over.wait()
        await put(tx, "second")

    async def late(saga: Saga) -> None:
        await asyncio.sleep(0 if fails else 0.4)
        await saga.tx("first", put, "first")
        over.set()

    async def limited(saga: Saga) -> None:
        try:
            async with asyncio.timeout(None if fails else 0.2):
                await saga.tx("second", second)
        except TimeoutError:
            await saga.tx("too_late", put, "too_late")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(Reject):
            await saga.tx("refused", refused)
        await asyncio.gather(late(saga), limited(saga))
        await saga.tx("last", last)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, bench.effects) == (OutcomeKind.APPLIED, ["first", "second"])
