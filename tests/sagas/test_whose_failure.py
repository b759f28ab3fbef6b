"""Whose fault it is: an error of ours that a saga's function raised came from another app, and is its failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Reject, Saga, Step, Tx, Unknown
from idemconsumer.errors import (
    CommitUnknown,
    ConfigurationError,
    Contention,
    Fenced,
    SagaChanged,
    StoreUnavailable,
    UnknownEffect,
)
from tests.support.sagas import Bench, Remote, Station, lost, put, saga
from tests.support.waiting import PATIENCE

OTHERS = [StoreUnavailable, CommitUnknown, Contention, Fenced, ConfigurationError, SagaChanged, UnknownEffect]
every_other = pytest.mark.parametrize("kind", OTHERS)


@every_other
@pytest.mark.parametrize("where", ["a tx step", "a call step", "the handler"])
async def test_it_costs_an_attempt_wherever_it_is_raised(
    bench: Bench, one: Station, kind: type[Exception], where: str
) -> None:
    async def in_tx(tx: Tx) -> None:
        await put(tx, "s")
        raise kind("of another app")

    async def in_call(step: Step) -> None:
        raise kind("of another app")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if where == "a tx step":
            await saga.tx("s", in_tx)
        if where == "a call step":
            await saga.call("s", in_call)
        raise kind("of another app")

    handler = saga(book, max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.DEAD]
    # How a call ended that raised is not known.
    assert outcomes[-1].reason == ("unknown_effect" if where == "a call step" else "attempts_exhausted")
    assert "of another app" in bench.letter
    assert bench.effects == []


async def test_a_deferred_constraint_that_a_step_violates_is_its_failure(bench: Bench, one: Station) -> None:
    bench.run(
        "create function violate() returns trigger language plpgsql as $$ begin raise foreign_key_violation; end $$"
    )
    bench.run(
        "create constraint trigger violate after insert on effect deferrable initially deferred"
        " for each row execute function violate()"
    )

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("s", put, "s")

    handler = saga(book, max_attempts=2)
    try:
        async with asyncio.timeout(PATIENCE):
            outcomes = await one.to_the_end(handler, await one.deliver(handler))
    finally:
        bench.run("drop function violate cascade")
    assert [(each.kind, each.reason) for each in outcomes[-1:]] == [(OutcomeKind.DEAD, "attempts_exhausted")]
    assert "foreign_key_violation" in bench.letter


class Panic(BaseException):
    """As an extension in Rust raises it (`pyo3_runtime.PanicException`)."""


@pytest.mark.parametrize("error", [Panic("x"), SystemExit(1)], ids=repr)
async def test_a_call_that_would_end_the_process_has_failed(bench: Bench, one: Station, error: BaseException) -> None:
    async def in_call(step: Step) -> None:
        raise error

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", in_call)

    handler = saga(book, max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.DEAD]
    assert outcomes[-1].reason == "unknown_effect"
    assert "it raised" in bench.letter


@every_other
@pytest.mark.parametrize("undone", ["a tx step", "a call step"])
async def test_an_undo_that_raises_it_has_failed(
    bench: Bench, one: Station, remote: Remote, kind: type[Exception], undone: str
) -> None:
    async def fails(tx: object, output: str, name: str) -> None:
        raise kind("of another app")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if undone == "a tx step":
            await saga.tx("a", put, "a", undo=fails)
        else:
            await saga.call("a", remote.charge, "a", undo=fails)
        raise Reject("no")

    handler = saga(book, max_attempts=2)
    async with asyncio.timeout(PATIENCE):
        *_, last = await one.to_the_end(handler, await one.deliver(handler))
    assert (last.kind, last.reason) == (OutcomeKind.DEAD, "undo_failed")
    assert f"undo of 'a': idemconsumer.errors.{kind.__name__}: of another app" in bench.letter


@every_other
async def test_a_question_that_raises_it_costs_an_attempt(
    bench: Bench, one: Station, two: Station, kind: type[Exception]
) -> None:
    async def reconcile(order: dict[str, Any], tx: Tx) -> Done[str] | NotDone | Unknown:
        raise kind("of another app")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        raise AssertionError("it runs, and nobody knows whether it is done")

    handler = saga(book, reconcile=reconcile, max_attempts=3)
    await lost(bench, one, handler)
    async with asyncio.timeout(PATIENCE):
        *_, last = await two.to_the_end(handler, await two.resume(handler))
    assert (last.kind, last.reason) == (OutcomeKind.DEAD, "unknown_effect")
    assert "of another app" in bench.letter
