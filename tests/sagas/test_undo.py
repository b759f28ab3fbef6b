"""Undo: only after a known failure, UNDOING first, from the last finished step to the first, each once (L7)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Saga, Step, Tx, Unknown
from idemconsumer.engine.work import Work
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import SagaPoint
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import _step
from idemconsumer.stores.shared_commits import BEGIN_STEPS, Write, send
from tests.support.clock import forward
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.points import Points
from tests.support.sagas import Bench, OpenStation, Remote, SagaFn, Station, order, put, saga, take_back
from tests.support.waiting import until

NO = b'{"code":"no","body":null}'


def refused(remote: Remote) -> SagaFn:
    """A tx and a call that can be undone, one that cannot, and a refusal."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first", undo=take_back)
        await saga.call("second", remote.charge, "second", undo=remote.refund)
        await saga.tx("third", put, "third")
        await saga.tx("fourth", put, "fourth", undo=take_back)
        raise Reject("no")

    return book


async def test_finished_steps_are_undone_in_reverse_and_the_rejection_is_stored(
    bench: Bench, one: Station, remote: Remote
) -> None:
    outcome = await one.deliver(saga(refused(remote)))
    assert (outcome.kind, outcome.result, bench.state) == (OutcomeKind.FAILED, NO, State.FAILED)
    assert bench.effects == ["first", "third", "fourth", "undo:fourth:out:fourth", "undo:first:out:first"]
    assert remote.effects == ["second", "refund:second:charged:second"]
    again = await one.deliver(saga(refused(remote)))
    assert (again.kind, again.result) == (OutcomeKind.DUPLICATE, NO)


async def test_steps_are_undone_whatever_the_role_makes_of_backslashes(
    bench: Bench, remote: Remote, open_station: OpenStation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c standard_conforming_strings=off")
    one = await open_station()
    await one.deliver(saga(refused(remote)))
    assert remote.effects == ["second", "refund:second:charged:second"]


async def test_the_undo_of_a_call_has_a_key_of_its_own(bench: Bench, one: Station, remote: Remote) -> None:
    await one.deliver(saga(refused(remote)))
    (charged,), (refunded,) = remote.keys("second"), remote.keys("refund:second:charged:second")
    assert charged != refunded


async def erase(tx: Tx, output: None) -> None:
    await put(tx, "undone")


async def test_a_rejection_without_finished_steps_fails_at_once(bench: Bench, one: Station) -> None:
    async def refuse(tx: Tx) -> None:
        await put(tx, "refused")
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", refuse, undo=erase)

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.result, bench.effects) == (OutcomeKind.FAILED, NO, [])


async def test_an_exception_of_fail_on_in_a_step_is_a_rejection(bench: Bench, one: Station) -> None:
    async def hopeless(tx: Tx) -> None:
        await put(tx, "hopeless")
        raise LookupError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.tx("b", hopeless)

    outcome = await one.deliver(saga(book, fail_on=(LookupError,)))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"LookupError","body":null}')
    assert bench.effects == ["a", "undo:a:out:a"]


@pytest.mark.parametrize("caught", [False, True])
async def test_an_exception_of_fail_on_in_a_call_is_a_known_end(
    bench: Bench, one: Station, remote: Remote, caught: bool
) -> None:
    async def hopeless(step: Step, name: str) -> str:
        await remote.charge(step, name)
        raise LookupError("no such card")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        try:
            await saga.call("b", hopeless, "b")
        except Reject as refusal:
            if not caught:
                raise
            return refusal.code
        return "charged"

    outcome = await one.deliver(saga(book, fail_on=(LookupError,)))
    assert len(remote.calls) == 1
    if caught:
        assert (outcome.kind, outcome.result, bench.effects) == (OutcomeKind.APPLIED, b'"LookupError"', ["a"])
    else:
        assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"LookupError","body":"no such card"}')
        assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_call_that_was_cut_off_has_no_known_end_whatever_fail_on_says(
    bench: Bench, one: Station, remote: Remote
) -> None:
    """It may go on at the remote."""

    async def slow(step: Step, name: str) -> str:
        await remote.charge(step, name)
        if len(remote.calls) == 1:
            await asyncio.Event().wait()
        return "charged"

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("b", slow, "b", undo=remote.refund)

    assert (await one.deliver(saga(book, timeout="50ms", fail_on=(TimeoutError,)))).kind is OutcomeKind.FAILED
    assert [name for name, _ in remote.calls] == ["b", "b", "refund:b:charged"]


class GatewayError(Exception):
    """What a client makes of all its troubles."""


@pytest.mark.parametrize("made", [GatewayError("gone"), Reject("gone")], ids=["fail_on", "Reject"])
@pytest.mark.parametrize("kind", ["tx", "call"])
@pytest.mark.parametrize("how", ["drain", "lose", "sibling", "timeout"])
async def test_what_a_step_makes_of_its_cancellation_is_no_refusal(
    bench: Bench, one: Station, two: Station, kind: str, how: str, made: Exception
) -> None:
    """The remote may have done it, and nobody has heard of a refusal."""
    begun, healed = asyncio.Event(), False

    async def step(given: Tx | Step) -> str:
        if healed:
            return "done"
        begun.set()
        try:
            return await asyncio.Event().wait() and ""
        except BaseException as error:
            raise made from error

    async def book(order: dict[str, Any], saga: Saga) -> str:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(saga.tx("s", step) if kind == "tx" else saga.call("s", step))
            if how == "sibling" and not healed:
                await begun.wait()
                raise ValueError("beside it")
        return task.result()

    handler = saga(book, timeout=10.0, fail_on=(GatewayError,))
    run = asyncio.create_task(one.deliver(handler))
    await begun.wait()
    if how == "timeout":
        forward(10.0)
    if how in ("drain", "lose"):
        getattr(one.engine, how)()
    expected = {"drain": OutcomeKind.CANCELLED, "lose": OutcomeKind.FENCED}
    assert (await run).kind is expected.get(how, OutcomeKind.RETRYING)
    healed = True
    bench.expire(one)
    outcome = await two.resume(handler)
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'"done"')


async def test_a_rejection_that_cannot_be_stored_fails_the_attempt(bench: Bench, one: Station) -> None:
    rejections = [Reject("no", object()), Reject("half a pair \ud800")]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        raise rejections.pop()

    handler = saga(book, max_attempts=2)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    outcome = await one.resume(handler)
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"attempts_exhausted","body":"TypeError"}')
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_attempts_that_run_out_undo_what_was_done(bench: Bench, one: Station) -> None:
    async def broken(tx: Tx) -> None:
        raise ValueError("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.tx("b", broken)

    handler = saga(book, max_attempts=2)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert outcome.kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_call_that_never_says_how_it_ended_is_never_undone(bench: Bench, one: Station) -> None:
    async def lost(step: Step) -> str:
        raise TimeoutError("no answer")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.call("b", lost)

    handler = saga(book, max_attempts=2)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "unknown_effect", ["a"])


async def test_undoing_is_committed_first_and_a_later_change_of_mind_does_not_count(
    bench: Bench, one: Station, two: Station, points: Points
) -> None:
    """Without it a resumed saga would go on over steps that are undone."""
    refuses, begun, once = [True], asyncio.Event(), [True]

    async def undo(tx: Tx, output: str, name: str) -> None:
        await take_back(tx, output, name)
        if once.pop() if once else False:
            begun.set()
            await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo)
        await saga.tx("b", put, "b", undo=undo)
        if refuses:
            raise Reject("no")
        await saga.tx("c", put, "c")

    run = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    refuses.clear()
    one.engine.drain()
    assert (await run).kind is OutcomeKind.CANCELLED
    assert bench.state is State.UNDOING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, NO)
    assert bench.effects == ["a", "b", "undo:b:out:b", "undo:a:out:a"]


async def test_an_undo_that_fails_is_tried_again_and_finished_ones_are_not(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    fails = [ValueError("once")]

    async def flaky(tx: Tx, output: str, name: str) -> None:
        await take_back(tx, output, name)
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=flaky)
        await saga.call("b", remote.charge, "b", undo=remote.refund)
        raise Reject("no")

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.state, bench.state) == (OutcomeKind.RETRYING, State.UNDOING, State.UNDOING)
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]
    assert [name for name, _ in remote.calls] == ["b", "refund:b:charged:b"]


CANCELLED_INSIDE = "idemconsumer.errors.SelfCancelled: raised CancelledError"


async def fails() -> None:
    raise ValueError("no")


async def cancelled_by_nobody() -> None:
    raise asyncio.CancelledError


async def cancelled_by_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.Event().wait()


async def cancelled_with_what_it_awaits() -> None:
    awaited = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(awaited.cancel)
    await awaited


@pytest.mark.parametrize("kind", ["tx", "call"])
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (fails, "ValueError: no"),
        (cancelled_by_nobody, CANCELLED_INSIDE),
        (cancelled_by_itself, CANCELLED_INSIDE),
        (cancelled_with_what_it_awaits, CANCELLED_INSIDE),
    ],
)
async def test_an_undo_that_keeps_failing_or_being_cancelled_from_inside_is_put_aside(
    bench: Bench, one: Station, remote: Remote, kind: str, act: Callable[[], Awaitable[None]], says: str
) -> None:
    """It costs an attempt each time, and not its lane."""

    async def undo(given: Tx | Step, output: str, name: str) -> None:
        await act()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if kind == "tx":
            await saga.tx("a", put, "a", undo=undo)
        else:
            await saga.call("a", remote.charge, "a", undo=undo)
        raise Reject("no")

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert len(outcomes) in (3, 4)  # the step that finished under the same token may make the first takeover free
    assert (outcomes[-1].reason, bench.letters, bench.state) == ("undo_failed", ["undo_failed"], State.DEAD)
    assert f"undo of 'a': {says}" in bench.letter


async def test_an_undo_that_asks_for_a_step_is_put_aside(bench: Bench, one: Station, remote: Remote) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        async def undo(step: Step, output: str, name: str) -> None:
            await saga.tx("inside", put, "inside")

        await saga.call("a", remote.charge, "a", undo=undo)
        raise Reject("no")

    handler = saga(book, max_attempts=1)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert (outcome.reason, bench.effects) == ("undo_failed", [])
    assert "undo of 'a': idemconsumer.sagas.run.SagaInterrupted: step 'inside' is requested after" in bench.letter


async def test_an_undo_that_kills_its_workers_is_put_aside(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    holding = await _undoing(one, remote)
    handler = saga(refused(remote), max_attempts=2)
    for _ in range(4):  # the first two deaths cost nothing, since others ran beside it
        assert await one.leases.intend(holding, "second", has_undo=True, undo=True)
        bench.expire(one)
        one.register(bench)
        taken = await one.take(handler)
        assert taken is not None
        holding = taken
        if holding.suspect:
            await one.leases.count(holding)
    outcome = await one.run(Work.of(handler, order(), leased=holding))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "killed_worker")


async def _undoing(station: Station, remote: Remote) -> LeasedSaga:
    """A saga whose UNDOING is committed and whose worker did nothing after it."""
    kept: list[LeasedSaga] = []
    undo = station.leases.undo

    async def committed(saga: LeasedSaga, rejection: StoredResult, added: Sequence[str] = ()) -> LeasedSaga | None:
        undoing = await undo(saga, rejection, added)
        assert undoing is not None
        kept.append(undoing)
        raise asyncio.CancelledError

    station.leases.undo = committed  # type: ignore[method-assign]
    station.engine._release = _stay  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await station.deliver(saga(refused(remote)))
    station.leases.undo = undo  # type: ignore[method-assign]
    del station.engine._release
    return kept[0]


async def _stay(work: Work) -> None:
    return


async def test_a_crash_between_a_refund_and_its_checkpoint_repeats_one_key(
    bench: Bench, one: Station, two: Station, points: Points
) -> None:
    remote = Remote()

    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    async def refund(step: Step, output: str, name: str) -> None:
        await remote.refund(step, output, name)
        points.on(SagaPoint.CALLED, crash)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("b", remote.charge, "b", undo=refund)
        raise Reject("no")

    with pytest.raises(Crash):
        await one.deliver(saga(book))
    bench.expire(one)
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert (len(remote.calls), remote.effects) == (3, ["b", "refund:b:charged:b"])


# --------------------------------------------------------------------------------------- against what is still running
async def test_undoing_waits_for_a_siblings_intent_that_is_being_committed_and_then_sees_it(
    bench: Bench, one: Station
) -> None:
    """With the check in the locking statement its snapshot would be that of before the wait."""
    holding = await _begin(one)
    async with one.store.transaction(group=1) as claims:
        await claims.begin()
        row = _step(holding, "s", StepKind.CALL, StepState.INTENT, False, None) | {"placed": True}
        assert await send(claims, Write(BEGIN_STEPS, row))
        undo = asyncio.create_task(one.leases.undo(holding, StoredResult(b"{}")))
        await until(lambda: bench.waiting() == 1, "UNDOING waits for the intent")
        await claims.complete([], [])
    assert await undo is None
    assert bench.state is State.PROCESSING


async def _begin(station: Station) -> LeasedSaga:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        return

    call = Work.of(saga(book), order()).call
    assert call is not None
    holding = await station.leases.begin(call.claim, order(), "book", None)
    assert isinstance(holding, LeasedSaga)
    return holding


async def test_a_reject_lets_the_calls_beside_it_come_to_their_end_and_undoes_them(
    bench: Bench, one: Station, remote: Remote
) -> None:
    begun, rejected = asyncio.Event(), asyncio.Event()

    async def slow(step: Step, name: str) -> str:
        begun.set()
        await rejected.wait()
        return await remote.charge(step, name)

    async def refuse(tx: Tx) -> None:
        await begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            await asyncio.gather(saga.call("slow", slow, "slow", undo=remote.refund), saga.tx("refused", refuse))
        finally:
            asyncio.get_running_loop().call_later(0.05, rejected.set)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert remote.effects == ["slow", "refund:slow:charged:slow"]


async def test_a_rejection_beside_a_call_of_unknown_outcome_is_put_aside_and_nothing_is_undone(
    bench: Bench, one: Station
) -> None:
    async def lost(step: Step) -> None:
        raise TimeoutError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        if saga.recovery_point == "b":
            raise Reject("no")
        await asyncio.gather(saga.call("lost", lost), saga.tx("b", put, "b"), return_exceptions=True)

    handler = saga(book, max_attempts=2, timeout="200ms")  # for so long "b" could still be asked for (L25)
    outcome = await one.deliver(handler)
    assert outcome.kind is OutcomeKind.RETRYING
    outcome = await one.resume(handler)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "unknown_effect")
    assert sorted(bench.effects) == ["a", "b"]


# -------------------------------------------------------------------------------- calls that a rejection cut off (L7)
class CutOff:
    """A call that hangs in its remote, once, beside one that is refused: a TaskGroup cancels it."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._hangs = [True]
        self._begun = asyncio.Event()
        self.then: list[Exception] = []

    async def charge(self, step: Step, name: str) -> str:
        if self._hangs.pop() if self._hangs else False:
            await self._remote.charge(step, name)
            self._begun.set()
            await asyncio.Event().wait()
        if self.then:
            raise self.then.pop(0)
        return await self._remote.charge(step, name)

    async def refuse(self, step: Step) -> None:
        await self._begun.wait()
        raise Reject("no")

    def book(self, ask: Any = None) -> SagaFn:
        async def book(order: dict[str, Any], saga: Saga) -> None:
            await saga.tx("a", put, "a", undo=take_back)
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("cut", self.charge, "cut", undo=self._remote.refund, reconcile=ask))
                group.create_task(saga.call("refused", self.refuse))

        return book


async def test_a_call_that_a_rejection_cut_off_is_called_again_with_its_key_and_undone(
    bench: Bench, one: Station, remote: Remote
) -> None:
    outcome = await one.deliver(saga(CutOff(remote).book()))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, NO)
    assert bench.effects == ["a", "undo:a:out:a"]
    assert [name for name, _ in remote.calls] == ["cut", "cut", "refund:cut:charged:cut"]
    assert len(remote.keys("cut")) == 1


async def test_a_call_that_a_rejection_cut_off_and_that_is_refused_has_nothing_to_undo(
    bench: Bench, one: Station, remote: Remote
) -> None:
    cut = CutOff(remote)
    cut.then = [Reject("no as well")]
    outcome = await one.deliver(saga(cut.book()))
    assert (outcome.kind, outcome.result, remote.effects) == (OutcomeKind.FAILED, NO, ["cut"])


@pytest.mark.parametrize(
    ("answer", "calls"), [("done", ["cut", "refund:cut:found"]), ("not done", None), ("unknown", ["cut"])]
)
async def test_the_reconcile_of_a_call_that_a_rejection_cut_off_is_asked_first(
    bench: Bench, one: Station, remote: Remote, answer: str, calls: list[str] | None
) -> None:
    answers: dict[str, Any] = {"done": Done("found"), "not done": NotDone(), "unknown": Unknown()}

    async def ask(step: Step, name: str) -> Any:
        return answers[answer]

    outcome = await one.deliver(saga(CutOff(remote).book(ask)))
    assert outcome.reason == ("unknown_effect" if answer == "unknown" else None)
    assert [name for name, _ in remote.calls] == (calls or ["cut", "cut", "refund:cut:charged:cut"])
    assert bench.effects == (["a"] if answer == "unknown" else ["a", "undo:a:out:a"])


async def test_a_call_that_a_rejection_cut_off_is_tried_until_its_end_is_known(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    cut = CutOff(remote)
    cut.then = [TimeoutError(), TimeoutError()]
    handler = saga(cut.book())
    *retries, last = await two.to_the_end(handler, await one.deliver(handler))
    assert [outcome.state for outcome in retries] == [State.PROCESSING] * 2
    assert last.kind is OutcomeKind.FAILED
    assert remote.effects == ["cut", "refund:cut:charged:cut"]


async def test_a_call_that_a_rejection_cut_off_and_that_never_ends_is_put_aside(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    cut = CutOff(remote)
    cut.then = [TimeoutError() for _ in range(9)]
    handler = saga(cut.book(), max_attempts=2)
    *_, outcome = await two.to_the_end(handler, await one.deliver(handler))
    assert (outcome.reason, bench.effects, remote.effects) == ("unknown_effect", ["a"], ["cut"])


async def test_a_step_that_a_rejection_never_let_begin_is_left_undone(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.tx("b", put, "b"))
            raise Reject("no")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


# ------------------------------------------------------------------------------------------ failures that are no undo's
async def test_a_collision_in_an_undo_costs_no_attempt(bench: Bench, one: Station, two: Station) -> None:
    collides = [True] * 4

    async def undo(tx: Tx, output: str, name: str) -> None:
        if collides and collides.pop():
            await collide(tx)
        await take_back(tx, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo)
        raise Reject("no")

    handler = saga(book, max_attempts=1)
    with a_lock_is_taken(bench.dsn):
        outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert (outcomes[-1].kind, len(outcomes)) == (OutcomeKind.FAILED, 5)
    assert bench.effects == ["a", "undo:a:out:a"]


def stumbling(*errors: Exception, undo_fails: list[Exception]) -> SagaFn:
    """Its undo fails once; then the handler does, before it has asked for the step that is to be undone."""
    left = list(errors)

    async def undo(tx: Tx, output: str, name: str) -> None:
        if undo_fails:
            raise undo_fails.pop()
        await take_back(tx, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=undo)
        if not undo_fails and left:
            raise left.pop(0)
        await saga.tx("b", put, "b", undo=undo)
        raise Reject("no")

    return book


async def test_a_handler_that_fails_on_its_way_to_an_undo_is_tried_again(
    bench: Bench, one: Station, two: Station
) -> None:
    handler = saga(stumbling(ValueError("once"), LookupError("twice"), undo_fails=[ValueError("first")]))
    *retries, last = await two.to_the_end(handler, await one.deliver(handler))
    assert {outcome.state for outcome in retries} == {State.UNDOING}
    assert (last.kind, last.result) == (OutcomeKind.FAILED, NO)
    assert bench.effects == ["a", "b", "undo:b:out:b", "undo:a:out:a"]


async def test_a_handler_that_keeps_failing_on_its_way_to_an_undo_is_put_aside(
    bench: Bench, one: Station, two: Station
) -> None:
    errors = [ValueError("again") for _ in range(9)]
    handler = saga(stumbling(*errors, undo_fails=[ValueError("first")]), max_attempts=3)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    assert (outcomes[-1].reason, bench.effects, len(outcomes) <= 4) == ("undo_failed", ["a", "b"], True)
    assert "the handler, before step 'b': ValueError: again" in bench.letter


async def test_attempts_that_run_out_before_a_finished_step_was_met_still_undo_it(
    bench: Bench, one: Station, two: Station
) -> None:
    fails = [ValueError("last step"), ValueError("before b")]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        if len(fails) == 1:
            raise fails.pop()
        await saga.tx("b", put, "b", undo=take_back)
        if fails:
            raise fails.pop(0)

    handler = saga(book, max_attempts=1)
    *_, outcome = await two.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, b'{"code":"attempts_exhausted","body":"ValueError"}')
    assert bench.effects == ["a", "b", "undo:b:out:b", "undo:a:out:a"]


async def test_an_undoing_handler_that_returns_without_a_finished_step_is_put_aside_at_once(
    bench: Bench, one: Station, two: Station
) -> None:
    undo_fails: list[Exception] = [ValueError("first")]

    async def shorter(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)

    assert (await one.deliver(saga(stumbling(undo_fails=undo_fails)))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(shorter))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "saga_changed", ["a", "b"])


# ----------------------------------------------------------------------------------------------------------- reconcile
@pytest.mark.parametrize("answer", ["done", "not done", "unknown"])
async def test_reconcile_is_asked_about_an_intent_without_outcome(
    bench: Bench, one: Station, two: Station, remote: Remote, answer: str
) -> None:
    fails = [TimeoutError()]

    async def charge(step: Step, name: str) -> str:
        if fails:
            raise fails.pop()
        return await remote.charge(step, name)

    async def ask(step: Step, name: str) -> Done[str] | NotDone | Unknown:
        answers: dict[str, Done[str] | NotDone | Unknown] = {"done": Done("found"), "not done": NotDone()}
        return answers.get(answer, Unknown())

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", charge, "c", reconcile=ask)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    expected = {
        "done": (OutcomeKind.APPLIED, b'"found"', None),
        "not done": (OutcomeKind.APPLIED, b'"charged:c"', None),
        "unknown": (OutcomeKind.DEAD, None, "unknown_effect"),
    }
    assert (outcome.kind, outcome.result, outcome.reason) == expected[answer]
    assert len(remote.calls) == (1 if answer == "not done" else 0)


@pytest.mark.parametrize("refusal", [Reject("nope"), LookupError("of fail_on")])
@pytest.mark.parametrize("caught", [False, True])
async def test_a_reconcile_that_rejects_has_not_said_how_the_call_ended(
    bench: Bench, one: Station, two: Station, refusal: Exception, caught: bool
) -> None:
    async def lost(step: Step) -> str:
        raise TimeoutError

    async def ask(step: Step) -> Done[str] | NotDone | Unknown:
        raise refusal

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a", undo=take_back)
        try:
            await saga.call("c", lost, reconcile=ask)
        except Reject:
            if not caught:
                raise
        return "complete"

    handler = saga(book, max_attempts=2, fail_on=(LookupError,))
    *_, outcome = await two.to_the_end(handler, await one.deliver(handler))
    assert (outcome.kind, outcome.reason, bench.effects) == (OutcomeKind.DEAD, "unknown_effect", ["a"])
    assert f"reconcile of step 'c' raised {type(refusal).__name__}" in bench.letter


@pytest.mark.parametrize(("answer", "said"), [(True, "bool"), (None, "NoneType"), (NotDone, "the class NotDone")])
async def test_a_wrong_answer_of_a_reconcile_is_a_failure_that_says_what_to_return(
    bench: Bench, one: Station, two: Station, answer: Any, said: str
) -> None:
    answers = [answer, Done("found")]

    async def lost(step: Step) -> str:
        raise TimeoutError

    async def ask(step: Step) -> Any:
        return answers.pop(0)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", lost, reconcile=ask)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert f"reconcile of step 'c' returned {said}; return Done(result), NotDone() or Unknown()" in error
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'"found"')


async def test_nothing_completes_over_a_call_whose_end_nobody_knows(bench: Bench, one: Station, two: Station) -> None:
    """Not even when a person has let it go on with a handler that no longer asks for that call."""

    async def lost(step: Step) -> str:
        raise TimeoutError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("c", lost)

    async def shorter(order: dict[str, Any], saga: Saga) -> None:
        return

    await one.deliver(saga(book))
    bench.run("update idemconsumer.saga set version = '*'")
    outcome = await two.resume(saga(shorter))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "unknown_effect")
    assert "step 'c'" in bench.letter
