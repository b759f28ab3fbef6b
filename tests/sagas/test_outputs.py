"""The run that made an output goes on with what a resume gets, and what could not be read again fails at once."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, NewType

import pytest

from idemconsumer import Done, NotDone, OutcomeKind, Saga, Step, Tx, Unknown
from tests.support.sagas import Bench, Remote, SagaFn, Station, saga

if TYPE_CHECKING:
    from nowhere import Client  # type: ignore[import-not-found]

Receipt = NewType("Receipt", bytes)


@dataclass
class Charge:
    id: str


CHARGE = Charge("c")


async def charge(step: Step) -> Charge:
    return CHARGE


async def of_a_client(step: Step, client: Client = None) -> Charge:
    return CHARGE


async def numbered(step: Step, n: int) -> Charge:
    return Charge(f"c{n}")


@dataclass
class Gateway:
    """Cannot be hashed."""

    name: str

    async def charge(self, step: Step) -> Charge:
        return CHARGE

    async def __call__(self, step: Step) -> Charge:
        return CHARGE


def wrapped(fn: Callable[[Step], Awaitable[Charge]]) -> Callable[[Step], Awaitable[Charge]]:
    @functools.wraps(fn)
    async def wrapper(step: Step) -> Any:
        return await fn(step)

    return wrapper


def awaitable(step: Step) -> Awaitable[Charge]:
    return charge(step)


async def octets(step: Step) -> bytes:
    return b"\x00\xff"


async def perhaps_octets(step: Step) -> bytes | None:
    return b"\x00\xff"


async def octets_or_text(step: Step) -> str | bytes:
    return b"\x00\xff"


async def text_or_octets(step: Step) -> str | bytes:
    return "text"


async def receipt(step: Step) -> Annotated[Receipt, "signed"]:
    return Receipt(b"\x00\xff")


async def when(step: Step) -> datetime:
    return datetime(2026, 1, 2, tzinfo=UTC)


async def price(step: Step) -> Decimal | None:
    return Decimal("1.50")


async def many(step: Step) -> int:
    return 2**70


async def anything(step: Step):  # type: ignore[no-untyped-def]
    return {"when": datetime(2026, 1, 2, tzinfo=UTC), "pair": (1, 2), "charge": CHARGE}


async def untyped_octets(step: Step):  # type: ignore[no-untyped-def]
    return b"\x00\xff"


AS_JSON = {"when": "2026-01-02T00:00:00Z", "pair": [1, 2], "charge": {"id": "c"}}
OUTPUTS: dict[str, tuple[Any, object]] = {
    "function": (charge, CHARGE),
    "another parameter is there for type checkers alone": (of_a_client, CHARGE),
    "partial": (functools.partial(numbered, n=2), Charge("c2")),
    "method": (Gateway("g").charge, CHARGE),
    "object": (Gateway("g"), CHARGE),
    "wrapped": (wrapped(charge), CHARGE),
    "awaitable": (awaitable, CHARGE),
    "bytes": (octets, b"\x00\xff"),
    "bytes or None": (perhaps_octets, b"\x00\xff"),
    "bytes or text": (octets_or_text, b"\x00\xff"),
    "text or bytes": (text_or_octets, "text"),
    "a kind of bytes": (receipt, b"\x00\xff"),
    "datetime": (when, datetime(2026, 1, 2, tzinfo=UTC)),
    "Decimal": (price, Decimal("1.50")),
    "large int": (many, 2**70),
    "no annotation": (anything, AS_JSON),
    "bytes without annotation": (untyped_octets, b"\x00\xff"),
    "lambda": (lambda step: charge(step), {"id": "c"}),
}


def twice(fn: Any, seen: list[object]) -> SagaFn:
    """Fails after the step in its first run."""

    async def fails_once(tx: Tx) -> None:
        if len(seen) == 1:
            raise ValueError

    async def book(order: dict[str, Any], saga: Saga) -> None:
        seen.append(await saga.call("a", fn))
        await saga.tx("b", fails_once)

    return book


@pytest.mark.parametrize("kind", OUTPUTS)
async def test_an_output_is_the_same_after_a_resume(bench: Bench, one: Station, two: Station, kind: str) -> None:
    fn, expected = OUTPUTS[kind]
    seen: list[object] = []
    handler = saga(twice(fn, seen))
    await one.deliver(handler)
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
    assert seen == [expected, expected]
    assert type(seen[0]) is type(seen[1]) is type(expected)


async def test_the_output_of_a_transaction_and_of_a_reconcile_are_those_of_a_resume_too(
    bench: Bench, one: Station, two: Station
) -> None:
    seen: list[object] = []

    async def pair(tx: Tx):  # type: ignore[no-untyped-def]
        return (1, 2)

    async def untold(step: Step):  # type: ignore[no-untyped-def]
        raise ValueError

    async def found(step: Step) -> Done[Any] | NotDone | Unknown:
        return Done((3, 4))

    async def book(order: dict[str, Any], saga: Saga) -> None:
        seen.append(await saga.tx("a", pair))
        seen.append(await saga.call("b", untold, reconcile=found))

    handler = saga(book)
    await one.deliver(handler)
    assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
    assert seen == [[1, 2], [1, 2], [3, 4]]


async def number(step: Step) -> int:
    return "seven"  # type: ignore[return-value]


async def nan(step: Step) -> float:
    return float("nan")


async def was_to_return_nothing(step: Step) -> None:
    return "something"  # type: ignore[return-value]


async def no_bytes(step: Step) -> bytes:
    return "text"  # type: ignore[return-value]


async def no_json(step: Step) -> int:
    return b"bytes"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (number, "returned a str, which a resume could not read: Expected `int`, got `str`"),
        (nan, "a result of type float contains a number that is NaN"),
        (was_to_return_nothing, "Expected `null`, got `str`"),
        (no_bytes, "Expected bytes, got JSON"),
        (no_json, "Expected JSON, got bytes"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("how", ["tx", "call"])
async def test_what_could_not_be_read_again_fails_the_step_that_returned_it(
    bench: Bench, one: Station, fn: Any, why: str, how: str
) -> None:
    """L70: a transaction is rolled back, and tried again. A call has had its effect, and is not repeated."""
    calls = list[object]()

    @functools.wraps(fn)
    async def counted(given: Any) -> Any:
        calls.append(given)
        return await fn(given)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await getattr(saga, how)("a", counted)

    outcome = await one.deliver(saga(book, max_attempts=3))
    if how == "tx":
        assert outcome.kind is OutcomeKind.RETRYING
        ((error,),) = bench.run("select error from idemconsumer.saga")
    else:
        assert (outcome.kind, outcome.reason, len(calls)) == (OutcomeKind.DEAD, "unknown_effect", 1)
        ((error,),) = bench.run("select error from idemconsumer.dead_letter")
    assert "step 'a': " in error
    assert why in error
    assert ("it returned a " in error and "correct its return annotation" in error) or fn is nan


async def test_a_transaction_whose_output_could_not_be_read_again_has_no_effect(bench: Bench, one: Station) -> None:
    async def paid(tx: Tx) -> int:
        await tx.execute("insert into effect (name) values ('paid')")
        return "seven"  # type: ignore[return-value]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", paid)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (bench.effects, bench.steps) == ([], [])


async def test_a_type_that_cannot_be_known_is_refused_before_the_remote_is_called(
    bench: Bench, one: Station, remote: Remote
) -> None:
    async def of_nowhere(step: Step) -> Client:
        await remote.charge(step, "a")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", of_nowhere)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "step 'a' returns what cannot be stored: its return annotation 'Client' cannot be resolved; define" in error
    assert (remote.calls, bench.steps) == ([], [])


async def test_bytes_that_are_json_now_are_a_change(bench: Bench, one: Station, two: Station) -> None:
    seen: list[object] = []
    await one.deliver(saga(twice(octets, seen)))
    outcome = await two.resume(saga(twice(charge, seen)))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "the stored output of step 'a' no longer decodes" in bench.letter
