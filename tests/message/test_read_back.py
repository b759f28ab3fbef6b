"""R40: what is written of a user's value can be read back as it was, or is refused."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import sys
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, RootModel, SecretStr, create_model
from pydantic.alias_generators import to_camel
from typing_extensions import TypeAliasType, TypedDict

from idemconsumer import Key, Saga, Tx, idempotent_handler
from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import codecs, extraction, keys, models
from idemconsumer.message.fields import fields
from idemconsumer.message.forms import plain
from idemconsumer.message.message import Message
from idemconsumer.sagas import outputs

T = TypeVar("T")


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)
    order_id: int


class Choices(BaseModel):
    order_id: int = Field(validation_alias=AliasChoices("orderId", "order_id"))


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    net: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def gross(self) -> int:
        return self.net * 2


class Shown(BaseModel):
    net: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def gross(self) -> int:
        return self.net * 2


class Outer(BaseModel):
    inner: Computed
    text: pydantic.Json[list[int]] = [1]


class Secretive(BaseModel):
    token: SecretStr

    @pydantic.field_serializer("token", when_used="json")
    def kept(self, token: SecretStr) -> str:
        return token.get_secret_value()


class Private(BaseModel):
    n: int
    _made: float = pydantic.PrivateAttr(default_factory=lambda: dt.datetime.now().timestamp())


class Numbers(RootModel[list[int]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    order_id: int = Field(alias="orderId")


@dataclasses.dataclass
class Around:
    model: Aliased
    many: list[Aliased] = dataclasses.field(default_factory=list)


class AroundToo(msgspec.Struct):
    model: Aliased


@dataclasses.dataclass(eq=False)
class ById:
    n: int


@dataclasses.dataclass
class Box(Generic[T]):
    value: T


READ_BACK: list[Any] = [
    Aliased(orderId=1),
    Camel(order_id=1),
    Choices.model_validate({"orderId": 1}),
    Computed(net=1),
    Shown(net=1),
    Outer(inner=Computed(net=1)),
    Private(n=1),
    Secretive(token=SecretStr("s")),
    Numbers([1, 2]),
    Checked(orderId=1),
    Around(Aliased(orderId=1), [Aliased(orderId=2)]),
    AroundToo(Aliased(orderId=1)),
    ById(1),
    Box[Decimal](Decimal("1.10")),
]


@pytest.mark.parametrize("value", READ_BACK, ids=lambda value: type(value).__name__)
def test_what_is_written_is_what_is_read(value: Any) -> None:
    stored = codecs.encode(value)
    assert stored is not None
    back = codecs.decoder(getattr(value, "__orig_class__", type(value)))(stored.body)
    assert fields_of(back) == fields_of(value)


def test_what_a_model_computes_is_written_unless_it_could_not_be_read_then() -> None:
    written = [codecs.encode(value) for value in (Shown(net=1), Computed(net=1), Outer(inner=Computed(net=1)))]
    assert [each and each.body for each in written] == [
        b'{"net":1,"gross":2}', b'{"net":1}', b'{"inner":{"net":1},"text":"[1]"}',
    ]  # fmt: skip


def fields_of(value: Any) -> Any:
    names = fields(type(value))
    return value if names is None else {name: fields_of(getattr(value, name)) for name in names}


class ValidatedByAlias(BaseModel):
    order_id: int = Field(validation_alias="orderId")


class ValidatedByPath(BaseModel):
    order_id: int = Field(validation_alias=AliasPath("order", "id"))


class Excluded(BaseModel):
    note: str = Field(default="", exclude=True)


class Secret(BaseModel):
    token: SecretStr | None = None


class Nested(BaseModel):
    inner: list[Secret] = []


LOST = [
    (ValidatedByAlias, r"'order_id' of ValidatedByAlias is written as 'order_id' and read as 'orderId'; write Field"),
    (ValidatedByPath, r"is written as 'order_id' and read as 'order\.id'; write model_config = ConfigDict\(populate"),
    (Excluded, "'note' of Excluded is left out of what is written; remove exclude=True"),
    (Secret, "'token' of Secret is a secret, and only asterisks are written for it; leave it out, or write it"),
    (Nested, "'token' of Secret is a secret"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "why"), LOST, ids=lambda value: getattr(value, "__name__", ""))
def test_a_model_that_cannot_be_read_back_is_refused_wherever_its_value_would_be_written(
    model: type[BaseModel], why: str
) -> None:
    value = model.model_validate({"orderId": 1, "order": {"id": 1}, "note": "n"})
    for written in (value, {"within": [value]}):
        with pytest.raises(TypeError, match=why):
            codecs.encode(written)
    with pytest.raises(TypeError, match=why):
        codecs.encode_rejection("no", value)

    async def handler(order: dict[str, Any], tx: Tx) -> None: ...

    handler.__annotations__["return"] = model
    with pytest.raises(HandlerError, match=why.split("; ")[0]):
        idempotent_handler("memory:orders", key="id")(handler)


Kept = Annotated[SecretStr, pydantic.PlainSerializer(lambda secret: secret.get_secret_value(), when_used="json")]


class KeptByItsType(BaseModel):
    token: Kept
    more: list[Kept] = []


class KeptByWhoHasIt(BaseModel):
    inner: Secret

    @pydantic.field_serializer("inner", when_used="json")
    def written(self, inner: Secret) -> dict[str, str]:
        return {"token": inner.token.get_secret_value() if inner.token else ""}


@pytest.mark.parametrize(
    "value",
    [KeptByItsType(token=SecretStr("a"), more=[SecretStr("b")]), KeptByWhoHasIt(inner=Secret(token=SecretStr("a")))],
    ids=lambda value: type(value).__name__,
)
def test_a_secret_is_kept_where_it_is_said_how(value: BaseModel) -> None:
    assert models.lost(type(value)) is None
    stored = codecs.encode(value)
    assert stored is not None
    assert codecs.decoder(type(value))(stored.body) == value


def test_each_annotation_is_read_by_itself() -> None:
    """`A | B` and `B | A` are equal, and which of the two takes what both could is said by their order."""

    class A(BaseModel):
        n: int

    class B(BaseModel):
        n: int

    assert type(codecs.decoder(A | B)(b'{"n":1}')) is A
    assert type(codecs.decoder(B | A)(b'{"n":1}')) is B


@pytest.mark.parametrize(("model", "why"), LOST, ids=lambda value: getattr(value, "__name__", ""))
def test_a_step_that_returns_one_is_refused_before_its_effect(model: type[BaseModel], why: str) -> None:
    async def charge() -> None: ...

    charge.__annotations__["return"] = list[model]  # type: ignore[valid-type]
    with pytest.raises(TypeError, match=why):
        outputs.check(charge)


class ByHand(BaseModel):
    amount: int

    @pydantic.field_serializer("amount")
    def written(self, amount: int) -> str:
        return f"EUR {amount}"


class Rounded(BaseModel):
    amount: float

    @pydantic.field_serializer("amount")
    def written(self, amount: float) -> float:
        return round(amount)


@dataclasses.dataclass
class Anything:
    held: Any


class Dropping(BaseModel):
    model_config = ConfigDict(extra="allow")

    @pydantic.model_serializer
    def written(self) -> dict[str, str]:
        return {}


class Card(BaseModel):
    last4: str


class Visa(Card):
    safe: bool = True


class Gold(Card):
    pass


class Pay(BaseModel):
    card: Card


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    last4: str


class MoreOf(Closed):
    safe: bool = True


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (ByHand(amount=1), r"1 validation error\(s\), the first is int_parsing at amount; correct the types"),
        (Rounded(amount=1.5), "its field 'amount', a float, comes back as another value or type"),
        (Dropping.model_validate({"more": 1}), "it comes back as a Dropping"),
        (Pay(card=Visa(last4="1")), r"its field 'card', a Visa, comes back as another value or type \(Card\)"),
        (Pay(card=Gold(last4="1")), r"its field 'card', a Gold, comes back as another value or type \(Card\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_a_value_tells_is_found_in_each(value: Any, why: str) -> None:
    codecs.encode(Rounded(amount=1.0))  # nothing is known by these of the others
    codecs.encode(Pay(card=Card(last4="1")))
    for _ in range(2):
        with pytest.raises(TypeError, match=why):
            codecs.encode(value)


@dataclasses.dataclass
class Price:
    amount: float
    parts: Sequence[int] = ()


class PriceToo(msgspec.Struct):
    amount: float


class Page(msgspec.Struct, Generic[T]):
    item: T


@dataclasses.dataclass(slots=True)
class Slim(Generic[T]):
    item: T


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Place(BaseModel):
    at: Annotated[
        Point,
        pydantic.PlainValidator(lambda given: given if isinstance(given, Point) else Point(given)),
        pydantic.PlainSerializer(lambda point: point.x),
    ]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    known: int = 1


class Text(str):
    pass


class Renamed(msgspec.Struct, rename="camel"):
    order_id: Decimal


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


ANNOTATED: list[Any] = [
    Price(1), Price(sum([1, 2]), (1, 2)), PriceToo(1), Page[Decimal](Decimal("1.10")),
    Page[Renamed](Renamed(Decimal(1))),
    Slim[Decimal](Decimal("1.10")), codecs.decoder(Box[Decimal])(b'{"value":"1.10"}'), Place(at=Point(1)),
    Anything({"on": dt.date(2026, 1, 1), "in": (dt.timedelta(1), b"a", uuid.UUID(int=1), Color.RED)}),
    Open.model_validate({"on": dt.date(2026, 1, 1)}), Box[str](Text("a")), Anything(Price(1)),
]  # fmt: skip


@pytest.mark.parametrize("value", ANNOTATED, ids=lambda value: type(value).__name__)
def test_a_value_that_is_what_its_fields_say_is_never_refused(value: Any) -> None:
    """A charge would have been made, or a message would be dead, for code that type checkers find right."""
    stored = codecs.encode(value)
    assert stored is not None
    assert codecs.decoder(type(value))(stored.body) is not None
    assert keys.canonical_value(value) is not None


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (Card, Visa(last4="1"), Card(last4="1")),
        (Pay, Pay(card=Visa(last4="1")), Pay(card=Card(last4="1"))),
        (Closed, MoreOf(last4="1"), Closed(last4="1")),
        (list[Closed], [MoreOf(last4="1")], [Closed(last4="1")]),
        (Rounded, Rounded(amount=1.5), Rounded(amount=2)),
        (dict[str, Any], {"on": dt.date(2026, 1, 1)}, {"on": "2026-01-01"}),
        (Page[Decimal], Page(Decimal("1.10")), Page(Decimal("1.10"))),
        (Price, Price(1, (1, 2)), Price(1.0, [1, 2])),
    ],
)
def test_an_output_is_what_its_annotation_makes_of_it_in_the_first_run_too(kind: Any, value: Any, kept: Any) -> None:
    """After a call it is too late to refuse it."""

    async def charge() -> None: ...

    charge.__annotations__["return"] = kind
    stored, given = outputs.encode(charge, value)
    assert given == outputs.decode(charge, stored) == kept


class Tagged(BaseModel):
    tags: set[int]
    more: dict[str, frozenset[int]] = {}


class TaggedToo(msgspec.Struct):
    tags: set[int]


class Listed(msgspec.Struct, array_like=True):
    tags: set[int]


class Longer(BaseModel):
    of: dict[str, set[int]]

    @pydantic.field_serializer("of")
    def written(self, of: dict[str, set[int]]) -> dict[str, Any]:
        return {name: sorted(each) for name, each in of.items()} | {"y": [1]}


@pytest.mark.parametrize(
    "make",
    [
        lambda tags: {"tags": tags}, Box, TaggedToo, lambda tags: Tagged(tags=tags),
        lambda tags: Tagged(tags=set(), more={"b": frozenset(), "a": frozenset(tags)}),
        lambda tags: {"a": [Tagged(tags=tags)]},
        lambda tags: Box(Tagged(tags=tags)), lambda tags: (1.50, {"x": tags}), RootModel[set[int]], Listed,
        lambda tags: RootModel[dict[str, set[int]]]({"x": tags}),
    ],
)  # fmt: skip
def test_a_set_has_one_order(make: Callable[[set[int]], Any]) -> None:
    """R26: in another process it has another one, and what is written of it would be a conflict with itself."""
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other), "as with another hash seed"
    written = [codecs.encode(make(tags)) for tags in (one, other)]
    assert written[0] == written[1]
    assert keys.canonical_value(make(one)) == keys.canonical_value(make(other)) is not None
    fingerprint = extraction.compile_fingerprint("value", Any, handler="h")
    message = Message("memory:orders", b"{}")
    assert fingerprint(message, {"value": make(one)}) == fingerprint(message, {"value": make(other)})


def test_nothing_of_what_is_written_is_lost_in_the_order_of_a_set() -> None:
    stored = codecs.encode(Longer(of={"x": {8, 0}}), compared=False)
    assert stored is not None
    assert stored.body == b'{"of":{"x":[0,8],"y":[1]}}'


def test_what_has_only_values_of_json_in_it_is_written_without_a_step_for_each() -> None:
    """A list of a thousand rows took ten times as long."""
    rows = [{"id": n, "name": "a", "price": 1.5, "note": None, "more": {"tags": ["a"]}} for n in range(1_000)]
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    codecs.encode(rows)
    sys.setprofile(count)
    try:
        codecs.encode(rows)
    finally:
        sys.setprofile(None)
    assert calls < 100


def test_an_object_that_is_in_itself_by_what_is_not_written_is_opened_once() -> None:
    class Node(BaseModel):
        number: int
        tags: list[str]
        near: Any = None

        @pydantic.field_serializer("near")
        def written(self, near: Any) -> None:
            return None

    node = Node(number=1, tags=["a"])
    node.near = [node, node]
    stored = codecs.encode(node, compared=False)
    assert stored is not None
    assert stored.body == b'{"number":1,"tags":["a"],"near":null}'


def test_what_is_nested_too_deeply_is_refused_with_words() -> None:
    deep: Any = 1
    for _ in range(700):
        deep = [deep]
    with pytest.raises(TypeError, match="nested too deeply"):
        codecs.encode(Box(deep))


def test_a_number_of_what_decode_makes_has_one_form() -> None:
    assert keys.canonical_value(Price(1)) == keys.canonical_value(Price(1.0)) is not None
    assert keys.canonical_value(Price(1)) != keys.canonical_value(Price(1.5))


class Rate(BaseModel):
    rate: float | None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "around",
    [lambda n: n, lambda n: {"a": [n]}, lambda n: Box(n), lambda n: Rate(rate=n), lambda n: (1, n)],
)
def test_a_number_that_json_does_not_have_is_refused(around: Callable[[float], object], number: float) -> None:
    codecs.encode(around(1.5))
    codecs.encode({"none": None, "n": 1.5})
    with pytest.raises(TypeError, match="NaN or infinite, which JSON does not have; write None"):
        codecs.encode(around(number))


# --------------------------------------------------------------------------------------------------- generated types
class Size(enum.IntEnum):
    S = 1
    L = 2


class Pair(NamedTuple):
    a: int
    b: str


class Money(TypedDict):
    amount: int
    note: NotRequired[str]


_TEXTS: Any = st.text(st.characters(codec="utf-8"))
_ZONES: Any = st.sampled_from([dt.UTC, ZoneInfo("Europe/Berlin"), dt.timezone(dt.timedelta(hours=5, minutes=30))])
_SIMPLE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (bool, st.booleans()),
    (int, st.integers()),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (str, _TEXTS),
    (bytes, st.binary(max_size=20)),
    (int | str, st.integers() | _TEXTS),
    (bool | Decimal, st.booleans() | st.decimals(allow_nan=False, allow_infinity=False)),
    (Literal["a", "b"] | None, st.sampled_from(["a", "b", None])),
    (Money, st.fixed_dictionaries({"amount": st.integers()}, optional={"note": _TEXTS})),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    # Before 1900 zones had seconds, which an offset on the wire has not.
    (dt.datetime, st.datetimes(dt.datetime(1971, 1, 1), timezones=st.none() | _ZONES)),
    (dt.date, st.dates()),
    (uuid.UUID, st.uuids()),
    (Color, st.sampled_from(Color)),
    (Size, st.sampled_from(Size)),
    (Pair, st.builds(Pair, st.integers(), _TEXTS)),
]


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists: Any = list
    dicts: Any = dict
    return st.one_of(
        inner.map(lambda one: (one[0] | None, st.none() | one[1])),
        inner.map(lambda one: (lists[one[0]], st.lists(one[1], max_size=3))),
        inner.map(lambda one: (dicts[str, one[0]], st.dictionaries(st.text("abc"), one[1], max_size=3))),
    )


_TYPES = st.recursive(st.sampled_from(_SIMPLE), _grown, max_leaves=3)


def _structs(name: str, types: dict[str, Any]) -> type:
    return msgspec.defstruct(name, list(types.items()))


def _pydantics(name: str, types: dict[str, Any]) -> type:
    given: Any = {field: (annotation, ...) for field, annotation in types.items()}
    return create_model(name, __config__=ConfigDict(alias_generator=to_camel, populate_by_name=True), **given)  # type: ignore[no-any-return]


def _dataclasses(name: str, types: dict[str, Any]) -> type:
    return dataclasses.make_dataclass(name, list(types.items()))


def _attrs(name: str, types: dict[str, Any]) -> type:
    return attrs.make_class(name, {field: attrs.field(type=annotation) for field, annotation in types.items()})


@pytest.mark.parametrize("make", [_structs, _pydantics, _dataclasses, _attrs], ids=lambda make: make.__name__[1:])
@settings(max_examples=40)
@given(data=st.data())
def test_any_value_of_any_type_is_read_as_it_was_or_refused(
    make: Callable[[str, dict[str, Any]], type], data: st.DataObject
) -> None:
    drawn = data.draw(st.dictionaries(st.sampled_from(["one_a", "two_b", "three"]), _TYPES, min_size=1))
    cls = make("Made", {name: annotation for name, (annotation, _) in drawn.items()})
    for _ in range(2):
        value = cls(**{name: data.draw(values) for name, (_, values) in drawn.items()})
        try:
            stored = codecs.encode(value)
        except TypeError:
            continue
        assert stored is not None
        back = codecs.decoder(cls)(stored.body)
        assert_in_form(plain(back), json.loads(stored.body))
        for name in drawn:
            assert moments(getattr(back, name)) == moments(getattr(value, name))


def assert_in_form(form: Any, sent: Any) -> None:
    """R41: what is on the wire is found under its name and at its index; texts may be written in another way."""
    if isinstance(sent, dict):
        for name, each in sent.items():
            assert_in_form(form[name], each)
    elif isinstance(sent, list):
        assert isinstance(form, list)
        for at, each in zip(form, sent, strict=True):
            assert_in_form(at, each)
    else:
        assert form == sent or type(form) is type(sent) is str


def moments(value: Any) -> Any:
    """With datetimes as what they say: two of the hour that a clock repeats are never equal across zones (PEP 495)."""
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None), value.utcoffset()
    if isinstance(value, dict):
        return {name: moments(each) for name, each in value.items()}
    return list(map(moments, value)) if isinstance(value, list) else value


def test_a_time_of_the_hour_that_comes_twice_is_no_other_time() -> None:
    at = dt.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    for fold in (0, 1):
        stored = codecs.encode(Box[dt.datetime](at.replace(fold=fold)))
        assert stored is not None
        assert codecs.decoder(Box[dt.datetime])(stored.body) is not None


@given(st.floats(-1e20, 1e20).filter(lambda n: n == 0 or abs(n) > 1e-20), st.integers(0, 30))
def test_a_number_has_one_form_however_it_is_written(number: float, zeros: int) -> None:
    exact = Decimal(repr(number))
    plain = f"{exact:f}" if "." in f"{exact:f}" else f"{exact:f}.0"
    forms = [plain, plain + "0" * zeros, f"{exact:e}", f"{exact * 1000:f}e-3", f"{exact / 1000:f}e+3"]
    assert len({keys.canonical(b'{"n":%s}' % form.encode()) for form in forms}) == 1


# -------------------------------------------------------------------------------------------------------------- paths
class Cat(BaseModel):
    kind: Literal["cat"]
    id: str
    name: str = Field(default="", alias="catName")


class Dog(BaseModel):
    kind: Literal["dog"]
    id: str


class Owner(BaseModel):
    pet: Cat | Dog
    pets: dict[str, Cat | Dog] = {}
    maybe: Annotated[Cat | Dog | None, Field(discriminator="kind")] = None


@pydantic.dataclasses.dataclass
class Left:
    id: str


@pydantic.dataclasses.dataclass
class Right:
    id: str
    more: int


class Names(RootModel[dict[str, str]]):
    pass


# As `type Pets = Cat | Dog` makes it, from Python 3.12 on.
PETS: Any = TypeAliasType("PETS", Cat | Dog)

CAT: dict[str, Any] = {"kind": "cat", "id": "7", "catName": "Tom"}


@pytest.mark.parametrize(
    ("annotation", "path", "body"),
    [
        (PETS, "id", CAT), (list[PETS], "[0].id", [CAT]),
        (Cat | Dog, "id", CAT), (Cat | Dog | None, "id", CAT), (Cat | None, "id", CAT), (Cat | Dog, "catName", CAT),
        (Annotated[Cat | Dog, Field(discriminator="kind")], "id", CAT), (list[Cat | Dog], "[0].id", [CAT]),
        (Owner, "pet.id", {"pet": CAT}), (Owner, "pets.a.id", {"pet": CAT, "pets": {"a": CAT}}),
        (Owner, "maybe.id", {"pet": CAT, "maybe": CAT}), (dict[str, Cat | Dog], "a.id", {"a": CAT}),
        (Left | Right, "id", {"id": "7", "more": 1}), (Names, "id", {"id": "7"}), (Numbers, "[0]", [7]),
        (Choices, "orderId", {"orderId": 7}), (Choices, "order_id", {"order_id": 7}),
        (ValidatedByPath, "order.id", {"order": {"id": 7}}), (Open, "id", {"id": "7"}), (Around, "model.orderId",
        {"model": {"orderId": 7}}), (AroundToo, "model.orderId", {"model": {"orderId": 7}}),
        (Checked, "orderId", {"orderId": 7}),
    ],
    ids=str,
)  # fmt: skip
def test_a_path_finds_in_the_value_what_is_on_the_wire(annotation: Any, path: str, body: Any) -> None:
    message = Message("memory:orders", json.dumps(body).encode())
    payload = codecs.decoder(annotation)(message.body)
    assert extraction.compile_key(path, annotation, handler="h")(message, payload) in ("7", "Tom")
    fingerprint = extraction.compile_fingerprint(path, annotation, handler="h")
    assert fingerprint(message, payload) != fingerprint(Message("memory:orders", b"{}"), None)


@pytest.mark.parametrize("annotation", [Cat | Dog, Left | Right, Owner, Choices])
def test_a_path_that_no_alternative_has_is_refused_at_import(annotation: Any) -> None:
    with pytest.raises(HandlerError, match="no field 'identity'"):
        extraction.compile_key("identity", annotation, handler="h")


@pytest.mark.parametrize(
    ("annotation", "path", "sure"),
    [
        (Cat | Dog, "id", True), (Cat | Dog, "catName", False), (Owner, "pet.id", True), (Owner, "pet.catName", False),
        (Owner, "pets.a.id", True), (Open, "id", False), (Open, "known", True), (Cat | None, "id", True),
        (dict[str, Any], "id", True), (dict, "a.b", True), (Any, "id", True), (Around, "many[0].orderId", True),
    ],
    ids=str,
)  # fmt: skip
def test_a_path_that_the_type_does_not_show_is_known(annotation: Any, path: str, sure: bool) -> None:
    for spec in (path, Key.all(Key.first(path, Key.message_id()), Key.payload())):
        assert keys.unsure_paths([spec, None], annotation) == ([] if sure else [path])


# ---------------------------------------------------------------------------------------------------------- and bytes
def test_json_may_begin_with_a_byte_order_mark() -> None:
    marked = b'\xef\xbb\xbf{"orderId": 1}'
    assert codecs.decoder(dict)(marked) == {"orderId": 1}
    assert codecs.decoder(Aliased)(marked) == Aliased(orderId=1)
    assert keys.canonical(marked) == keys.canonical(b'{"orderId":1}')


@pytest.mark.parametrize(("one", "other"), [("0.1234567890123456789", "0.1234567890123456788")])
@pytest.mark.parametrize("annotation", [dict, Rate, Box[float]])
def test_numbers_that_a_float_cannot_tell_apart_have_keys_of_their_own(annotation: Any, one: str, other: str) -> None:
    read = extraction.compile_key("rate || value" if annotation is dict else "rate" if annotation is Rate else "value",
                            annotation, handler="h")  # fmt: skip

    def key(number: str) -> str:
        name = b"value" if annotation == Box[float] else b"rate"
        message = Message("memory:orders", b'{"%s":%s}' % (name, number.encode()))
        return read(message, codecs.decoder(annotation)(message.body))

    assert key(one) == one
    assert key(other) == other
    assert key("1.50") == key("1.5") == key("15e-1") == "1.5"
    assert key("1.0") == key("1") == "1"


class Sent(BaseModel):
    rate: float
    card: Secret = Secret()


def test_a_number_of_what_decode_makes_is_not_looked_for_in_the_body() -> None:
    read = extraction.compile_key("rate", Sent, handler="h")
    message = Message("memory:orders", b'{"rate": 1.5, "inside": "\\"rate\\": 2.50"}')
    assert read(message, Sent(rate=2.5)) == "2.5"
    assert read(message, Sent(rate=1.5)) == "1.5"


@dataclasses.dataclass
class Noted:
    n: float
    _note: str = ""


class Bought(msgspec.Struct, tag=True):
    sku: str


class Sold(msgspec.Struct, tag=True):
    sku: str


class Halved(BaseModel):
    n: float

    @pydantic.field_serializer("n")
    def written(self, n: float) -> int:
        return int(n)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Secret(token=SecretStr("a")), Secret(token=SecretStr("b"))),
        (Excluded(note="a"), Excluded(note="b")),
        (Noted(1.0, "a"), Noted(1.0, "b")),
        (Halved(n=1.0), Halved(n=1.5)),
        ({"n": math.nan}, {"n": None}),
        (Bought("a"), Sold("a")),
        (object(), object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_two_values_that_differ_in_what_is_not_written_are_never_the_same(one: object, other: object) -> None:
    """R26: the second would be taken for a duplicate, and its effect would be missing."""
    first, second = keys.canonical_value(one), keys.canonical_value(other)  # the type is known by the second one
    assert second is None or first != second


def test_a_fingerprint_of_what_hides_something_is_refused() -> None:
    take = extraction.compile_fingerprint("card", Sent, handler="h")
    with pytest.raises(BadMessage, match="fingerprint cannot be encoded"):
        take(Message("memory:orders", b"{}"), Sent(rate=1, card=Secret(token=SecretStr("a"))))


def test_a_saga_takes_no_secret_either() -> None:
    async def ask(saga: Saga) -> Secret:
        return Secret()

    with pytest.raises(TypeError, match="asterisks"):
        outputs.check(ask)
    assert models.lost(Secretive) is None
