"""What a step can be called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from idemconsumer import OutcomeKind, Saga
from idemconsumer.sagas.step import step_key
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back

NAMES: dict[str, tuple[Any, str]] = {
    "number": (7, "a step's name is 7; write a string, such as saga.tx("),
    "nothing": (None, "a step's name is None; write a string"),
    "list": (["a"], "a step's name is ['a']; write a string"),
    "empty": ("", "a step's name is ''; write a printable string of 1 to 200 characters"),
    "NUL": ("a\0", "write a printable string"),
    "surrogate": ("a\ud800", "write a printable string"),
    "line break": ("a\nb", "write a printable string"),
    "space around": (" a", "write a printable string"),
    "long": ("a" * 201, "write a printable string of 1 to 200 characters"),
    "undo": ("undo:pay", "names that start with 'undo:' are reserved"),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("how", ["tx", "call"])
async def test_a_name_that_cannot_be_one_is_refused_with_what_to_write_instead(
    bench: Bench, one: Station, remote: Remote, how: str, swallowed: bool, kind: str
) -> None:
    name, why = NAMES[kind]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        ask: Callable[..., Awaitable[object]] = saga.tx if how == "tx" else saga.call
        try:
            await ask(name, put if how == "tx" else remote.charge, "a")
        except BaseException:
            if not swallowed:
                raise

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert why in error
    assert len(error) < 500
    assert (bench.effects, remote.calls, bench.steps) == ([], [], [])


async def test_any_other_text_can_be_a_name(bench: Bench, one: Station) -> None:
    names = ["a" * 200, "née", "a b", "undo", "line_1: 50 %", "pay:undo:"]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        for name in names:
            await saga.tx(name, put, name, undo=take_back)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.steps == names


def test_the_reserved_beginning_is_that_of_the_keys_of_undos() -> None:
    assert step_key("s", b"k", "undo:pay") == step_key("s", b"k", "pay", undo=True)
