"""A step that a replay requests with other arguments is seen before anything new happens (L73)."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import msgspec
import pydantic
import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.message.arguments import OPAQUE, SIZE, digest
from idemconsumer.message.message import Message
from idemconsumer.rules.replay import other_argument
from tests.support.families import Family
from tests.support.sagas import SCHEMA, Bench, Remote, Station, put, saga, take_back

T = TypeVar("T")


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
    assert "its present arguments were recorded for step 'shipped_1'" in str(outcome.error)


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
        ({0, 8}, {8, 0}, True),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True),
        (100, 100.0, True),
        (Decimal("1.50"), Decimal("1.5"), True),
        (Decimal("1.50"), "1.5", True),
        ("1", 1, False),
        ("", None, False),
        ([1, 2], [2, 1], False),
        (b"a", b"b", False),
        (2**70, 2**70 + 1, False),
    ],
)
def test_equal_values_have_one_digest_and_others_have_another(one: Any, other: Any, same: bool) -> None:
    assert (digest([one]) == digest([other])) is same


@dataclasses.dataclass(frozen=True)
class Item:
    weight: float
    dims: Sequence[int] = ()
    held: Any = None
    either: Model | Line | None = None


class Page(msgspec.Struct, Generic[T]):
    item: T


class Special(Model):
    more: int = 1


class Hidden(pydantic.BaseModel):
    a: int = pydantic.Field(default=0, exclude=True)
    b: int = pydantic.Field(default=0, validation_alias="q")


class Text(str):
    pass


class Size(enum.Enum):
    S = 1
    L = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Item(1), Item(2)), (Item(1, (1, 2)), Item(1, (1, 3))), (Item(1, held=Path("a")), Item(1, held=Path("b"))),
        (Item(1, either=Model(sku="a")), Item(1, either=Model(sku="b"))), (Page[Decimal](Decimal(1)), Page(Decimal(2))),
        (Page(Special(sku="a")), Page(Special(sku="a", more=2))), (Hidden(a=1), Hidden(a=2)),
        (Hidden.model_validate({"q": 1}), Hidden.model_validate({"q": 2})),
        (Text("a"), Text("b")), (Path("a"), Path("b")), ({"at": [Path("a")]}, {"at": []}),
        (ip_address("1.2.3.4"), ip_address("1.2.3.5")), (deque([1]), deque([2])), (uuid.UUID(int=1), uuid.UUID(int=2)),
        (range(3), range(4)), ({(1, 2): 3}, {(1, 3): 3}), (Fraction(1, 2), Fraction(1, 3)), (Size.S, Size.L),
        (pydantic.HttpUrl("http://a.b"), pydantic.HttpUrl("http://a.c")),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_says_what_it_is_is_compared(one: Any, other: Any) -> None:
    """Though it could not be read back: of two items, one was shipped twice and the other never."""
    assert OPAQUE != digest([one]) != digest([other]) != OPAQUE


def test_a_default_that_depends_on_the_time_is_no_default() -> None:
    """It was left out of what was recorded on that day, and not of what a replay requests on the next one."""
    days = [date(2026, 1, 1), date(2026, 1, 2)]

    def order(made: date) -> Any:
        @dataclasses.dataclass
        class Order:
            day: date = dataclasses.field(default_factory=lambda: made)

        return Order(days[0])

    assert digest([order(days[0])]) == digest([order(days[1])])


def test_what_a_model_computes_is_no_argument() -> None:
    """It may depend on the time, or be new in a deployment."""
    seen = iter(range(9))

    class Order(pydantic.BaseModel):
        sku: str

        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def age(self) -> int:
            return next(seen)

    assert digest([Order(sku="a")]) == digest([Order(sku="a")]) == digest([{"sku": "a"}])


def test_of_a_secret_only_its_presence_counts() -> None:
    """The beginning of its hash would be enough to guess a short one."""

    class Login(pydantic.BaseModel):
        user: str
        password: pydantic.SecretStr | None = None

    a, other, none, b = (
        digest([Login(user=user, password=pydantic.SecretStr(password) if password else None)])
        for user, password in (("a", "p"), ("a", "q"), ("a", None), ("b", "p"))
    )
    assert a == other
    assert a not in (none, b, OPAQUE)


GOLDEN = (
    "e06060716a7e8652 099bbb44b775433f bda20f7718da9883 24c74279834561bd e4c1e80f1133daa9 4035c4eedb2f0cf0 "
    "ca978112ca1bbdca"
)


def test_another_process_makes_the_same_digest() -> None:
    """These must never change: sagas that are under way have them."""
    values = [{8, 0, 1.5}, Line("a", 2), Model(sku="é"), Decimal("1.50"), datetime(2026, 1, 1, tzinfo=UTC), 1e-7, b"a"]
    assert digest(values).hex(" ", SIZE) == GOLDEN


def test_what_is_no_value_is_not_compared() -> None:
    client = Line("a")
    assert digest([object(), float("nan"), lambda: 1]) == 3 * OPAQUE
    assert digest([{"client": object()}, Message("memory:a", b"{}")]) == 2 * OPAQUE
    assert digest([client, Line("a")], opaque=[client])[:SIZE] == OPAQUE
    assert digest([client, Line("a")], opaque=[client])[SIZE:] != OPAQUE, "an equal one is a value"


def test_the_first_argument_that_differs_is_told() -> None:
    a, b = digest(["a"]), digest(["b"])
    assert other_argument(a + a, a + b, SIZE) == 1
    assert other_argument(a, a + b, SIZE) == 1, "one more is another"
    assert other_argument(a + b, a, SIZE) == 1, "and so is one less"
    assert other_argument(a + OPAQUE, a + b, SIZE) is None
    assert other_argument(None, a, SIZE) is other_argument(a, None, SIZE) is other_argument(a, a, SIZE) is None


@pytest.mark.parametrize(
    "value", ["", "a", 'a"b\\c', "\u2028", "größe", "\ud800", 0, -5, 2**53 + 1, 2**64, 2**70, True, False, None]
)
def test_a_plain_value_has_the_digest_of_what_is_equal_to_it(value: object) -> None:
    """It is taken by a shorter way."""
    assert digest([value]) == digest([enum.Enum("Of", {"it": value}).it])  # type: ignore[attr-defined]
