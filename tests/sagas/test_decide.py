"""A person says how a call of unknown outcome ended (L52)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Saga, Step, Unknown
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules.values import State
from tests.support.sagas import SCHEMA, Bench, Remote, Station, put, saga


async def decide(bench: Bench, step: str, answer: Done[Any] | NotDone) -> None:
    ((key,),) = bench.run("select key from idemconsumer.record")
    await SagaAdmin(bench.dsn, SCHEMA).decide(key, step, answer, by="ann")


@pytest.fixture
def asked() -> list[str]:
    """Which reconciles were asked."""
    return []


@pytest.fixture
def booking(remote: Remote, asked: list[str]) -> BoundHandler:
    failing = [True]

    async def charge(step: Step, name: str) -> str:
        output = await remote.charge(step, name)
        if failing.pop() if failing else False:
            raise ValueError("no answer")
        return output

    async def find(step: Step, name: str) -> Done[str] | NotDone | Unknown:
        asked.append(name)
        return Unknown()

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        charged = await saga.call("b", charge, "b", reconcile=find)
        await saga.tx("c", put, charged)
        return charged

    return saga(book)


@pytest.fixture
async def parked(bench: Bench, one: Station, booking: BoundHandler, asked: list[str]) -> None:
    await one.deliver(booking)
    assert (await one.resume(booking)).kind is OutcomeKind.DEAD
    assert bench.letters == ["unknown_effect"]
    asked.clear()


@pytest.mark.usefixtures("parked")
async def test_a_call_that_was_done_is_not_made_again(
    bench: Bench, two: Station, remote: Remote, asked: list[str], booking: BoundHandler
) -> None:
    token = bench.token
    await decide(bench, "b", Done("ch_17"))
    assert (bench.letters, bench.state) == ([], State.PROCESSING)
    assert bench.token > token  # the last owner may be frozen rather than dead (L19)
    outcome = await two.resume(booking)
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'"ch_17"')
    assert (bench.effects, len(remote.calls), asked) == (["a", "ch_17"], 1, [])
    ((what, detail),) = bench.run("select what, detail from idemconsumer.history where what = 'decided'")
    assert (what, detail) == ("decided", "step b: done")


@pytest.mark.usefixtures("parked")
async def test_a_call_that_was_not_done_is_made_again_without_asking(
    bench: Bench, two: Station, remote: Remote, asked: list[str], booking: BoundHandler
) -> None:
    await decide(bench, "b", NotDone())
    assert (await two.resume(booking)).kind is OutcomeKind.APPLIED
    assert (len(remote.calls), len(remote.keys("b")), asked) == (2, 1, [])


@pytest.mark.usefixtures("parked")
async def test_what_does_not_fit_the_step_puts_the_saga_aside(
    bench: Bench, two: Station, booking: BoundHandler
) -> None:
    await decide(bench, "b", Done({"charge": 17}))
    assert (await two.resume(booking)).kind is OutcomeKind.DEAD
    assert bench.letters == ["saga_changed"]


@pytest.mark.usefixtures("parked")
@pytest.mark.parametrize("done", [True, False])
async def test_an_answer_that_does_not_fit_can_be_corrected(
    bench: Bench, two: Station, remote: Remote, booking: BoundHandler, done: bool
) -> None:
    await decide(bench, "b", Done({"charge": 17}))
    await two.resume(booking)
    await decide(bench, "b", Done("ch_17") if done else NotDone())
    assert (await two.resume(booking)).kind is OutcomeKind.APPLIED
    assert len(remote.calls) == (1 if done else 2)
    assert len(bench.effects) == 2


@pytest.mark.usefixtures("parked")
async def test_an_answer_that_a_later_step_was_given_stands(bench: Bench, two: Station, remote: Remote) -> None:
    async def further(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.tx("c", put, await saga.call("b", remote.charge, "b"))
        raise ValueError

    async def other(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("d", put, "d")

    await decide(bench, "b", Done("ch_17"))
    assert (await two.resume(saga(further))).kind is OutcomeKind.RETRYING
    assert bench.effects == ["a", "ch_17"]
    assert (await two.resume(saga(other))).kind is OutcomeKind.DEAD
    assert bench.letters == ["saga_changed"]
    with pytest.raises(ConfigurationError, match="step 'b' is not a call of unknown outcome"):
        await decide(bench, "b", NotDone())


async def test_what_a_worker_has_recorded_is_not_corrected(bench: Bench, one: Station, booking: BoundHandler) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("b", charge)
        raise ValueError

    async def other(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("c", put, "c")

    async def charge(step: Step) -> str:
        return "ch"

    await one.deliver(saga(book))
    assert (await one.resume(saga(other))).kind is OutcomeKind.DEAD
    assert bench.letters == ["saga_changed"]
    with pytest.raises(ConfigurationError, match="step 'b' is not a call of unknown outcome; these are: no step"):
        await decide(bench, "b", NotDone())


@pytest.mark.usefixtures("parked")
async def test_nothing_else_is_decided(bench: Bench, one: Station, two: Station, booking: BoundHandler) -> None:
    for name in ("a", "nothing"):
        with pytest.raises(ConfigurationError, match=f"step '{name}' is not a call of unknown outcome; these are: 'b'"):
            await decide(bench, name, Done(None))
    assert bench.letters == ["unknown_effect"]
    await SagaAdmin(bench.dsn, SCHEMA).resume(bench.run("select key from idemconsumer.saga")[0][0], by="ann")
    assert await two.take(booking) is not None
    with pytest.raises(ConfigurationError, match="is being run by test; wait for it to end"):
        await decide(bench, "b", NotDone())
    bench.expire(two)
    await decide(bench, "b", Done("ch"))
    assert (await one.resume(booking)).kind is OutcomeKind.APPLIED
    with pytest.raises(ConfigurationError, match="has ended; there is nothing to decide"):
        await decide(bench, "b", NotDone())


@pytest.mark.parametrize("answer", [Done("ch_17"), NotDone()])
async def test_an_answer_about_another_attempt_is_refused(
    bench: Bench, one: Station, two: Station, remote: Remote, answer: Done[str] | NotDone
) -> None:
    """The remote was asked about the first attempt, and meanwhile the call was made again."""

    async def charge(step: Step, name: str) -> str:
        output = await remote.charge(step, name)
        if len(remote.calls) < 3:
            raise ValueError("no answer")
        return output

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("b", charge, "b")

    handler = saga(book, max_attempts=2)
    await one.to_the_end(handler, await one.deliver(handler))
    assert bench.letters == ["unknown_effect"]
    ((key,),) = bench.run("select key from idemconsumer.saga")
    admin = SagaAdmin(bench.dsn, SCHEMA)
    assert [step.attempts for step in (await admin.saga(key)).steps] == [2]
    with pytest.raises(ConfigurationError, match="attempt 2 of step 'b' is open, not 1, so the answer is out of date"):
        await admin.decide(key, "b", answer, attempt=1, by="ann")
    assert bench.letters == ["unknown_effect"]
    await admin.decide(key, "b", answer, attempt=2, by="ann")
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED


@pytest.mark.parametrize("done", [True, False])
async def test_an_answer_about_an_undo(bench: Bench, one: Station, two: Station, remote: Remote, done: bool) -> None:
    asked: list[str] = []

    async def refund(step: Step, output: str, name: str) -> None:
        await remote.refund(step, output, name)
        if len(remote.calls) == 2:
            raise ValueError("no answer")

    async def find(step: Step, output: str, name: str) -> Done[object] | NotDone | Unknown:
        asked.append(name)
        return Unknown()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("b", remote.charge, "b", undo=refund, reconcile_undo=find)
        raise Reject("no")

    await one.to_the_end(saga(book), await one.deliver(saga(book)))
    assert (bench.letters, asked) == (["unknown_effect"], ["b"])
    with pytest.raises(ConfigurationError, match="an undo has no output; write null"):
        await decide(bench, "b", Done("refunded"))
    await decide(bench, "b", Done(None) if done else NotDone())
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert (len(remote.calls), asked) == (2 if done else 3, ["b"])
