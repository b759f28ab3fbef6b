"""A step that a replay requests with other arguments is seen before anything new happens (L73)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import attrs
import msgspec
import pydantic
import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.admin.sagas import SagaAdmin
from idemconsumer.message.arguments import OPAQUE, SIZE, digest
from idemconsumer.rules.replay import other_argument
from tests.support.families import Family
from tests.support.sagas import SCHEMA, Bench, Remote, Station, put, saga, take_back


class Shop:
    """Ships what it is given, in that order, and fails once at its second item."""

    def __init__(self, remote: Remote, *orders: Sequence[str], **options: Any) -> None:
        self.remote = remote
        self._orders = list(orders)
        self._fails = [ValueError("once")]
        self._options = options

    async def ship(self, step: Step, item: str) -> str:
        if self._fails and self.remote.calls:
            raise self._fails.pop()
        return await self.remote.charge(step, item)

    async def book(self, order: dict[str, Any], saga: Saga) -> str:
        for n, item in enumerate(self._orders.pop(0)):
            await saga.call(f"shipped_{n}", self.ship, item, **self._options)
        return "done"

    def handler(self) -> Any:
        async def book(order: dict[str, Any], saga: Saga) -> str:
            return await self.book(order, saga)

        return saga(book)


async def test_a_loop_over_a_set_ships_nothing_twice(bench: Bench, one: Station, two: Station, remote: Remote) -> None:
    """Another process has another order of it: one item was shipped twice and one never, and it was COMPLETED."""
    shop = Shop(remote, ["apple", "pear"], ["pear", "apple"])
    assert (await one.deliver(shop.handler())).kind is OutcomeKind.RETRYING
    outcome = await two.resume(shop.handler())
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "step 'shipped_0' was recorded with another `item` (its argument 1)" in str(outcome.error)
    assert remote.effects == ["apple"]


async def test_the_error_names_the_step_that_has_had_them(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    shop = Shop(remote, ["apple", "pear"], ["pear", "apple"])
    await one.deliver(shop.handler())  # the call of the second one is open
    outcome = await two.resume(shop.handler())
    assert "what it is given now was recorded for step 'shipped_1'" in str(outcome.error)


async def test_a_call_of_unknown_outcome_is_not_made_again_for_something_else(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    """Under the same key the remote would answer for the first one."""
    shop = Shop(remote, ["apple", "pear"], ["apple", "plum"])
    await one.deliver(shop.handler())
    outcome = await two.resume(shop.handler())
    assert (outcome.reason, remote.effects) == ("saga_changed", ["apple"])


async def test_it_goes_on_where_they_may_differ(bench: Bench, one: Station, two: Station, remote: Remote) -> None:
    shop = Shop(remote, ["apple", "pear"], ["pear", "apple"], args_may_differ=True)
    await one.deliver(shop.handler())
    assert (await two.resume(shop.handler())).kind is OutcomeKind.APPLIED


async def test_nothing_is_undone_with_other_arguments(bench: Bench, one: Station, two: Station) -> None:
    fails, items = [ValueError("once")], ["apple", "pear"]

    async def undo(tx: Tx, output: str, item: str) -> None:
        if fails:
            raise fails.pop()
        await take_back(tx, output, item)

    async def refuse(tx: Tx) -> None:
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("put", put, items.pop(0), undo=undo)
        await saga.tx("refused", refuse)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    assert (outcome.reason, bench.effects) == ("saga_changed", ["apple"])


async def test_a_person_may_let_it_go_on(bench: Bench, one: Station, two: Station, remote: Remote) -> None:
    shop = Shop(remote, ["apple", "pear"], ["pear", "apple"], ["pear", "apple"])
    await one.deliver(shop.handler())
    await two.resume(shop.handler())
    key = bench.run("select key from idemconsumer.saga")[0][0]
    await SagaAdmin(bench.dsn, SCHEMA).resume(key, by="ann", accept_version=True)
    assert (await two.resume(shop.handler())).kind is OutcomeKind.APPLIED


async def test_a_child_is_started_with_the_same_payload(family: Family) -> None:
    to = ["sea", "moon"]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("ride", family.handler, {"to": to.pop(0)}, key="r")
        raise ValueError("once")

    await family.begin(book)
    outcome = await family.resume()
    assert (outcome.reason, family.queued) == ("saga_changed", 1)


# --------------------------------------------------------------------------------------------------- what is compared
@dataclasses.dataclass
class Line:
    sku: str
    pieces: int = 1
    tags: list[str] = dataclasses.field(default_factory=list)


class Struct(msgspec.Struct):
    sku: str
    pieces: int = 1
    tags: list[str] = []


class Named(NamedTuple):
    sku: str
    pieces: int = 1
    tags: Any = None


@attrs.define
class Attrs:
    sku: str
    pieces: int = 1
    tags: list[str] = attrs.field(factory=list)


class Model(pydantic.BaseModel):
    sku: str
    pieces: int = 1
    tags: list[str] = []


CLASSES = [Line, Struct, Named, Attrs, Model]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_field_with_its_default_may_be_new(cls: Any) -> None:
    """Else a deployment that adds one would put all sagas of its type aside."""
    plain = digest([{"sku": "a"}])
    assert digest([cls(sku="a")]) == plain
    assert digest([[cls(sku="a")], {"x": cls(sku="a")}]) == digest([[{"sku": "a"}], {"x": {"sku": "a"}}])
    assert digest([cls(sku="a", pieces=2)]) == digest([{"sku": "a", "pieces": 2}]) != plain


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a", "b", "c"}, {"c", "b", "a"}, True),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        (100, 100.0, True),
        (Decimal("1.50"), "1.50", True),
        ("1", 1, False),
        ("", None, False),
        ([1, 2], [2, 1], False),
        (b"a", b"b", False),
        (2**70, 2**70 + 1, False),
    ],
)
def test_equal_values_have_one_digest_and_others_have_another(one: Any, other: Any, same: bool) -> None:
    assert (digest([one]) == digest([other])) is same


def test_what_is_no_value_is_not_compared() -> None:
    client = Line("a")
    assert digest([object(), float("nan"), lambda: 1]) == 3 * OPAQUE
    assert digest([client, Line("a")], opaque=[client])[:SIZE] == OPAQUE
    assert digest([client, Line("a")], opaque=[client])[SIZE:] != OPAQUE, "an equal one is a value"


def test_the_first_argument_that_differs_is_told() -> None:
    a, b = digest(["a"]), digest(["b"])
    assert other_argument(a + a, a + b, SIZE) == 1
    assert other_argument(a, a + b, SIZE) == 1, "one more is another"
    assert other_argument(a + b, a, SIZE) == 1, "and so is one less"
    assert other_argument(a + OPAQUE, a + b, SIZE) is None
    assert other_argument(None, a, SIZE) is other_argument(a, None, SIZE) is other_argument(a, a, SIZE) is None
