"""saga.first: which of several waits was over first is recorded, and the others are closed (L74)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Tx
from idemconsumer.message import keys
from tests.support.families import Family
from tests.support.sagas import Bench, SagaFn, Station, put, saga, take_back

KEY = keys.digest("shop", None, "book", "k")
NO_SIGNAL = b'{"code":"signal_timeout","body":{"signal":"a"}}'
SIGNAL = "select idemconsumer.signal('shop', 'book', 'k', %s, %s::jsonb)"


def choosing(patience: str = "1h", *, fails: list[Exception] | None = None, **more: Any) -> SagaFn:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        which, value = await saga.first(
            yes=saga.wait("approved"), no=saga.wait("declined"), late=saga.sleep("patience", patience)
        )
        await saga.tx("noted", put, f"{which} {value}", **more)
        if fails:
            raise fails.pop()
        return f"{which} {value}"

    return book


def waits(bench: Bench) -> list[str]:
    return [name for (name,) in bench.run("select name from idemconsumer.step where until is not null order by name")]


@pytest.mark.parametrize(("signal", "which"), [("approved", "yes"), ("declined", "no")])
async def test_a_signal_ends_it_and_closes_the_other_waits(
    bench: Bench, one: Station, two: Station, signal: str, which: str
) -> None:
    assert (await one.deliver(saga(choosing()))).kind is OutcomeKind.BUSY
    assert waits(bench) == ["approved", "declined", "patience"]
    bench.run(SIGNAL, (signal, '"Ann"'))
    outcome = await two.resume(saga(choosing()))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, f'"{which} Ann"'.encode())
    assert waits(bench) == [signal]


async def test_what_comes_for_a_closed_wait_changes_nothing_and_stays_for_another(
    bench: Bench, one: Station, two: Station
) -> None:
    """A replay went the other way, or the saga could never end and its exhausted attempts undid what it had done."""
    fails: list[Exception] = [ValueError("once")]

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        first = await choosing(fails=fails)(order, saga)
        return [str(first), await saga.wait("again", signal="approved", into=str)]

    bench.run(SIGNAL, ("declined", '"Ann"'))
    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    bench.run(SIGNAL, ("approved", '"Bob"'))
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'["no Ann","Bob"]')
    assert bench.effects == ["no Ann"]


async def test_a_sleep_ends_it_like_any_other(bench: Bench, one: Station, two: Station) -> None:
    await one.deliver(saga(choosing("0.2s")))
    assert (await two.resume(saga(choosing()))).result == b'"late None"'


async def test_what_its_wait_raises_is_raised(bench: Bench, one: Station, two: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.first(a=saga.wait("a", timeout="0.2s"), b=saga.sleep("b", "1h"))

    await one.deliver(saga(book))
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.FAILED, NO_SIGNAL)


async def test_the_end_of_a_child_may_be_the_first(family: Family) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        first = await saga.first(done=saga.result("ride_done", child), late=saga.sleep("patience", "1h"))
        return f"{first.which} {first.value.driver}"

    await family.begin(book)
    await family.deliver()
    assert (await family.resume()).result == b'"done Ann"'


async def test_it_is_undone_the_way_that_it_went(bench: Bench, one: Station, two: Station) -> None:
    async def refuse(tx: Tx) -> None:
        raise Reject("no")

    fails: list[Exception] = [ValueError("once")]

    async def undo(tx: Tx, output: str, name: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await choosing(undo=undo)(order, saga)
        await saga.tx("refused", refuse)

    bench.run(SIGNAL, ("declined", '"Ann"'))
    outcomes = await two.to_the_end(saga(book), await one.deliver(saga(book)))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert bench.effects == ["no Ann", "undo:no Ann:out:no Ann"]


async def test_one_that_is_cancelled_while_it_waits_ends_there(bench: Bench, one: Station, two: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("put", put, "put", undo=take_back)
        await choosing()(order, saga)

    await one.deliver(saga(book))
    bench.run("update idemconsumer.saga set cancel = true, due = now()")
    assert (await two.resume(saga(book))).kind is OutcomeKind.FAILED
    assert bench.effects == ["put", "undo:put:out:put"]


async def test_beside_other_branches_it_waits_as_any_wait(bench: Bench, one: Station, two: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        first, other = await asyncio.gather(
            saga.first(a=saga.wait("a"), b=saga.wait("b")), saga.wait("other", into=str)
        )
        return [first.which, first.value, other]

    await one.deliver(saga(book))
    for name in ("b", "other"):
        bench.run(SIGNAL, (name, f'"{name}"'))
    assert (await two.resume(saga(book))).result == b'["b","b","other"]'


@pytest.mark.parametrize("what", ["call", "nothing", "another coroutine"])
async def test_what_cannot_be_closed_is_refused(bench: Bench, one: Station, what: str) -> None:
    async def other() -> None:
        """Of the user's own."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        given: dict[str, Any] = {
            "call": {"a": saga.tx("a", put, "a")},
            "nothing": {},
            "another coroutine": {"a": other()},
        }
        for kind, coroutines in given.items():
            for each in coroutines.values() if kind != what else ():
                each.close()
        try:
            await saga.first(**given[what])
        finally:
            for each in given[what].values():
                each.close()

    outcome = await one.deliver(saga(book, max_attempts=1))
    assert (outcome.kind, bench.effects) == (OutcomeKind.DEAD, [])
    assert "saga.first" in str(outcome.error)


async def test_a_handler_that_leaves_a_wait_behind_is_not_undone_for_it(
    bench: Bench, one: Station, two: Station
) -> None:
    """Its code is at fault, and what it has done is not."""
    left: list[asyncio.Task[Any]] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("put", put, "put", undo=take_back)
        tasks = [asyncio.create_task(saga.wait(name)) for name in ("a", "b")]
        left.extend(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    bench.run(SIGNAL, ("a", "1"))
    handler = saga(book, max_attempts=2)
    outcomes = await two.to_the_end(handler, await one.deliver(handler))
    await asyncio.gather(*left, return_exceptions=True)
    assert (outcomes[-1].kind, outcomes[-1].reason) == (OutcomeKind.DEAD, "attempts_exhausted")
    assert bench.effects == ["put"]
