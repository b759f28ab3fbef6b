"""What is told of a failed attempt: which step it was, what happened, and what to write instead."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.sagas import outputs
from tests.sagas.swallowers import a_forgotten_task, a_step_that_nobody_awaits
from tests.support.logs import LogCapture, entries
from tests.support.sagas import Bench, Remote, Station, put, saga


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot even say so")


async def ok(tx: Tx) -> int:
    return 1


def plain(tx: Tx) -> int:
    return 1


async def hang(tx: Tx) -> None:
    await asyncio.Event().wait()


async def unstorable(step: Step) -> object:
    return object()


async def pays_by(step: Step, remote: Remote) -> None: ...


async def mute(step: Step) -> None:
    raise Mute


async def cancelled(step: Step) -> None:
    raise asyncio.CancelledError


async def waits_too_long(saga: Saga) -> None:
    async with asyncio.timeout(0.05):
        await saga.tx("s", hang)


WRONG: dict[str, tuple[Callable[[Any], Awaitable[object]], str]] = {
    "an argument too many": (
        lambda saga: saga.tx("s", ok, 1, 2),
        "step 's': TypeError: ok() takes 1 positional argument but 3 were given; it is called with tx, then",
    ),
    "no function": (lambda saga: saga.call("s", 42), "step 's': TypeError: 'int' object is not callable; it is called"),
    "no such resource": (
        lambda saga: saga.call("s", pays_by),
        "argument: 'remote'; it is called with step, then with the step's arguments, and by name with the "
        "app's resources (@app.resource)",
    ),
    "not async": (lambda saga: saga.tx("s", plain), "step 's': plain is not async; write async def"),
    "a lambda that is not async": (
        lambda saga: saga.tx("s", lambda tx: 1),
        "is not async, it returned int; write async def",
    ),
    "unstorable": (lambda saga: saga.tx("s", unstorable), "step 's': a result of type object cannot be stored"),
    "without words": (lambda saga: saga.call("s", mute), "step 's': tests.sagas.test_error_reports.Mute"),
    "cancelled": (
        lambda saga: saga.call("s", cancelled),
        "step 's': idemconsumer.errors.SelfCancelled: raised CancelledError though nothing cancelled it"
        " (test_error_reports.py",
    ),
    "cancelled by the handler": (
        waits_too_long,
        "step 's': asyncio.exceptions.CancelledError: the handler cancelled it, itself or by a timeout",
    ),
    "forgotten": (
        a_step_that_nobody_awaits,
        "the handler ended before step 's', which it had requested; await every step",
    ),
    "in flight": (a_forgotten_task, "the handler ended while step 's' was in flight; await every step"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("wrong", WRONG)
async def test_an_error_names_its_step_and_what_to_do(bench: Bench, one: Station, wrong: str) -> None:
    act, says = WRONG[wrong]
    raised: list[str] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("first", put, "first")
        try:
            await act(saga)
        except BaseException as error:
            raised.append(type(error).__name__)
            raise

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert says in error
    assert set(raised) <= {"SagaInterrupted", "TimeoutError"}


@pytest.mark.parametrize("place", ["fn", "undo", "reconcile", "reconcile_undo"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["def", "partial"])
async def test_a_function_that_is_not_async_is_refused_before_any_has_an_effect(
    bench: Bench, one: Station, place: str, wrapped: bool
) -> None:
    """L69: each attempt would repeat what it does before anybody sees that it returned nothing to await."""
    effects = list[str]()

    def charge(*_: object) -> None:
        effects.append("plain")

    async def charge_in_time(*_: object) -> None:
        effects.append("async")

    functions: dict[str, Any] = {"fn": charge_in_time, "undo": charge_in_time, "reconcile": charge_in_time}
    functions |= {"reconcile_undo": charge_in_time, place: functools.partial(charge) if wrapped else charge}
    fn = functions.pop("fn")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("charged", fn, **functions)

    await one.deliver(saga(book))
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "step 'charged': " in error
    assert "charge is not async; write async def" in error
    assert effects == []


def test_a_type_that_is_only_named_like_something_to_await_is_none() -> None:
    def charge(step: Step) -> "TaskResult": ...  # type: ignore[name-defined]  # noqa: F821, UP037

    assert outputs.plain(charge) is not None


async def test_a_plain_function_that_returns_something_to_await_is_a_step(bench: Bench, one: Station) -> None:
    done = list[str]()

    async def charge(step: Step, what: str) -> None:
        done.append(what)

    def passed_on(step: Step) -> Awaitable[None]:
        return charge(step, "passed on")

    @functools.wraps(charge)
    def wrapping(*args: Any) -> Any:
        return charge(*args)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", passed_on)
        await saga.call("b", wrapping, "wrapped")
        await saga.call("c", lambda step: charge(step, "lambda"))
        await saga.call("d", functools.partial(charge, what="partial"))
        await saga.call("e", AsyncMock(return_value=None))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert done == ["passed on", "wrapped", "lambda", "partial"]


async def test_a_step_that_is_cut_off_says_where_it_was(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", hang)

    await one.deliver(saga(book, timeout="50ms"))
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "step 's': TimeoutError: did not end within its timeout of 0.05 s; raise `timeout`" in error
    assert "(test_error_reports.py" in error


async def test_an_undo_that_cannot_be_called_says_with_what_it_is(bench: Bench, one: Station, remote: Remote) -> None:
    async def without_output(step: Step) -> None:
        return

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", remote.charge, "a", undo=without_output)  # type: ignore[arg-type]
        raise Reject("no")

    await one.deliver(saga(book))
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "undo of 'a': TypeError: " in error
    assert "it is called with step and the step's output, then with the step's arguments" in error


async def test_a_line_about_a_saga_says_which_step_and_why(bench: Bench, one: Station, logged: LogCapture) -> None:
    async def refused(step: Step) -> None:
        raise LookupError("no such card")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("charged", refused)

    await one.deliver(saga(book, max_attempts=1))
    (failed,), (dead,) = entries(logged, "saga failed"), entries(logged, "dead letter")
    assert (failed["step"], failed["error"], failed["text"]) == ("charged", "LookupError", "no such card")
    assert "in refused" in failed["exception"]
    assert {"handler", "source", "position", "key", "attempt", "step_key", "where"} <= failed.keys()
    assert {"handler", "source", "position", "key", "attempt", "letter", "where"} <= dead.keys()
    kept = "select id, traceback like '%in refused%' from idemconsumer.dead_letter"
    assert bench.run(kept) == [(dead["letter"], True)]
