"""How much of a saga's recorded outputs is in memory at a time (L55)."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from idemconsumer import OutcomeKind, Reject, Retry, Saga, Step
from idemconsumer.errors import Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import State, StepKind, StepRow, StepState
from idemconsumer.sagas.outputs import WINDOW, Outputs
from idemconsumer.stores.leases import PostgresLeases as LeaseStore
from tests.support.sagas import Bench, Station, put, saga

MEGABYTE = 1 << 20


class Store:
    """Has an output of `size` bytes for each name, and says what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[list[str]] = []
        self.gone: set[str] = set()

    async def outputs(self, key: bytes, names: Sequence[str]) -> dict[str, StoredResult]:
        self.asked.append(list(names))
        await asyncio.sleep(0)
        return {name: StoredResult(name.encode().ljust(self.size), "text") for name in names if name not in self.gone}

    def rows(self, count: int) -> list[StepRow]:
        return [
            StepRow(f"s{n}", StepKind.CALL, StepState.DONE, False, False, n, 1, None, self.size) for n in range(count)
        ]

    def outputs_of(self, rows: Sequence[StepRow]) -> Outputs:
        return Outputs(cast(LeaseStore, self), b"k", rows)


async def get(outputs: Outputs, row: StepRow) -> str:
    found = await outputs.of(row)
    assert found is not None
    return found.body.decode().rstrip()


async def test_large_outputs_are_read_a_few_at_a_time() -> None:
    store = Store(MEGABYTE)
    outputs = store.outputs_of(rows := store.rows(300))
    for row in rows:
        assert await get(outputs, row) == row.name
        assert outputs.held <= WINDOW
    assert outputs.held == 0
    assert [name for names in store.asked for name in names] == [row.name for row in rows]


async def test_small_outputs_do_not_cost_a_statement_each() -> None:
    store = Store(1000)
    outputs = store.outputs_of(rows := store.rows(10_000))
    for row in rows:
        await get(outputs, row)
    assert len(store.asked) == 5


async def test_two_branches_in_different_places_read_each_output_once() -> None:
    store = Store(100_000)
    outputs = store.outputs_of(rows := store.rows(200))

    async def branch(mine: Sequence[StepRow]) -> None:
        for row in mine:
            assert await get(outputs, row) == row.name
            assert outputs.held <= WINDOW

    await asyncio.gather(branch(rows[:100]), branch(rows[100:]))
    assert sum(map(len, store.asked)) == 200


async def test_one_larger_than_the_window_is_read_alone() -> None:
    store = Store(2 * WINDOW)
    outputs = store.outputs_of(rows := store.rows(2))
    assert [await get(outputs, row) for row in rows] == ["s0", "s1"]
    assert store.asked == [["s0"], ["s1"]]


async def test_outputs_that_are_gone_end_the_run() -> None:
    store = Store(100)
    store.gone = {"s0"}
    with pytest.raises(Fenced):
        await store.outputs_of(rows := store.rows(1)).of(rows[0])


async def test_a_saga_with_large_outputs_is_resumed_and_undone_with_a_few_in_memory(bench: Bench, one: Station) -> None:
    alive: set[int] = set()
    most, retried, undone = 0, False, []

    class Large(bytes):
        """Bytes that say when they are given up."""

        def __del__(self) -> None:
            alive.discard(id(self))

    read = one.leases.outputs

    async def outputs(key: bytes, names: Sequence[str]) -> dict[str, StoredResult]:
        nonlocal most
        stored = await read(key, names)
        found = {name: StoredResult(Large(each.body), each.content_type) for name, each in stored.items()}
        alive.update(id(each.body) for each in found.values())
        most = max(most, len(alive))
        return found

    read_steps, at_once = one.leases.steps, [0]

    async def steps(key: bytes, window: int = 0) -> list[StepRow]:
        rows = await read_steps(key, window)
        at_once.append(sum(len(row.output.body) for row in rows if row.output is not None))
        return rows

    one.leases.outputs = outputs  # type: ignore[method-assign]
    one.leases.steps = steps  # type: ignore[method-assign]

    async def large(step: Step, number: int) -> bytes:
        return bytes([number]) * MEGABYTE

    async def forget(step: Step, output: bytes, number: int) -> None:
        assert output == bytes([number]) * MEGABYTE
        undone.append(number)

    async def ignore(step: Step, given: bytes) -> None: ...

    async def book(payload: dict[str, Any], saga: Saga) -> None:
        nonlocal retried
        for number in range(20):
            output = await saga.call(f"large_{number}", large, number, undo=forget)
            assert output == bytes([number]) * MEGABYTE
            await saga.call(f"used_{number}", ignore, output)
            del output
        if not retried:
            retried = True
            raise Retry
        raise Reject("enough")

    handler = saga(book)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert undone == list(reversed(range(20)))
    gc.collect()
    assert (0 < most <= 6, len(alive)) == (True, 0)
    assert 0 < max(at_once) <= WINDOW


# ------------------------------------------------------------------------------------------------- recorded rejections
@dataclass
class Why:
    reason: str


class CardDeclined(Reject):
    def __init__(self, reason: str) -> None:
        super().__init__("card_declined", Why(reason), status=402)
        self.reason = reason


class Known:
    class Declined(CardDeclined):
        pass


class MadeOtherwise(CardDeclined):
    def __new__(cls, *given: str) -> MadeOtherwise:
        assert given == ("limit",)
        return super().__new__(cls, *given)


@pytest.mark.parametrize("how", ["tx", "call"])
@pytest.mark.parametrize("kind", [CardDeclined, Known.Declined, MadeOtherwise])
async def test_the_first_run_is_given_the_rejection_that_a_replay_will_be(
    bench: Bench, one: Station, how: str, kind: type[CardDeclined]
) -> None:
    """L71: else `except CardDeclined` works until the saga is resumed, and what it reads changes then."""
    seen = list[tuple[object, ...]]()

    async def declined(_: object) -> None:
        raise kind("limit")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            await getattr(saga, how)("charge", declined)
        except CardDeclined as error:
            seen.append((type(error), error.code, error.body, error.status, str(error), hasattr(error, "reason")))
        if len(seen) < 3:
            raise Retry("1ms")
        await saga.tx("kept", put, "kept")

    handler = saga(book)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.APPLIED
    assert seen == [(kind, "card_declined", {"reason": "limit"}, 402, "card_declined", False)] * 3
    assert bench.effects == ["kept"]


class Computed(Reject):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def code(self) -> str:
        return self.reason

    @code.setter
    def code(self, code: str) -> None: ...


class InTheMainFile(Reject):
    pass


InTheMainFile.__module__ = "__main__"


@pytest.mark.parametrize("how", ["tx", "call"])
@pytest.mark.parametrize("kind", [None, Computed, InTheMainFile])
async def test_a_class_that_a_replay_could_not_find_is_not_caught_by_the_first_run_either(
    bench: Bench, one: Station, how: str, kind: type[Reject] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that computes its code from what is not stored, or of a file that another process did not start."""
    monkeypatch.setattr(sys.modules["__main__"], "InTheMainFile", InTheMainFile, raising=False)

    class Unnamed(Reject):
        pass

    hidden = kind or Unnamed

    causes = list[BaseException | None]()

    async def declined(_: object) -> None:
        raise hidden("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            await getattr(saga, how)("charge", declined)
        except hidden:
            raise AssertionError("a replay would not come here") from None
        except Reject as error:
            causes.append(error.__cause__)
            raise

    assert (await one.deliver(saga(book))).state is State.FAILED
    assert [type(cause) for cause in causes] == [hidden]
