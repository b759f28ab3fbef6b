"""R41: a path finds what is on the wire, in whatever the decoder has made of it, and finding nothing is no value."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import json
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import attrs
import msgspec
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, HttpUrl, RootModel, SecretStr
from typing_extensions import TypedDict

from idemconsumer import Message, Tx, idempotent_handler
from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import codecs, extraction, keys
from idemconsumer.message.forms import plain
from idemconsumer.message.paths import ByAttribute

T = TypeVar("T")


@dataclasses.dataclass
class Line:
    sku: str


@dataclasses.dataclass
class Tuples:
    pair: tuple[int, str]
    lines: tuple[Line, ...] = ()
    some: frozenset[str] = frozenset()


class ValidatedOnly(BaseModel):
    order_id: str = Field(validation_alias="orderId")


class ByIndex(BaseModel):
    first: int = Field(validation_alias=AliasPath("a", "b", 0))
    third: int = Field(default=0, validation_alias=AliasPath("a", "b", 2))
    last: int = Field(default=0, validation_alias=AliasChoices("last", AliasPath("c", -1)))


class Hidden(BaseModel):
    secret: str = Field(exclude=True)
    number: int = Field(alias="N", serialization_alias="NN")
    url: HttpUrl | None = None
    token: SecretStr = SecretStr("")


class One(msgspec.Struct, tag="one", tag_field="type", rename="camel"):
    the_id: str


class Two(msgspec.Struct, tag="two", tag_field="type", rename="camel"):
    the_id: str


class Row(msgspec.Struct, array_like=True, tag="row"):
    n: int
    text: str


class Around(msgspec.Struct):
    one: One | Two
    rows: list[Row] = []
    raw: msgspec.Raw = msgspec.Raw(b"null")


class Point(NamedTuple):
    x: int
    y: str


@attrs.define
class Place:
    point: Point
    at: str = attrs.field(default="", alias="where")


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    owner: str = Field(alias="ownerId")


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    owner: str = Field(alias="ownerId")


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


@pydantic.dataclasses.dataclass
class Customer:
    the_id: int = Field(alias="theId", gt=0)


@dataclasses.dataclass
class Order:
    customer: Customer
    pets: list[Pet] = dataclasses.field(default_factory=list)


class Sale(TypedDict):
    order: Order
    pet: Cat | Dog


@dataclasses.dataclass
class Box(Generic[T]):
    value: T
    more: list[T] = dataclasses.field(default_factory=list)


class Roots(RootModel[list[Pet]]):
    pass


class HasRoot(BaseModel):
    pets: Roots
    address: ipaddress.IPv4Address | None = None


class Color(enum.Enum):
    RED = "red"


class Swapped(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    a: str = Field(alias="b")
    b: str = Field(alias="a")


PET = {"kind": "dog", "ownerId": "7"}


@pytest.mark.parametrize(
    ("annotation", "path", "body"),
    [
        (Tuples, "pair[1]", {"pair": [1, "7"]}),
        (Tuples, "lines[0].sku", {"pair": [1, ""], "lines": [{"sku": "7"}]}),
        (Tuples, "some[0]", {"pair": [1, ""], "some": ["7"]}),
        (tuple[int, str], "[1]", [1, "7"]),
        (tuple[Cat, Dog], "[-1].ownerId", [{"ownerId": "1"}, PET]),
        (dict[str, tuple[int, str]], "a[1]", {"a": [1, "7"]}),
        (dict[Color, int], "red", {"red": 7}),
        (dict[int, str], '"5"', {"5": "7"}),
        (ValidatedOnly, "orderId", {"orderId": "7"}),
        (ByIndex, "a.b[0]", {"a": {"b": [7]}}),
        (ByIndex, "a.b[2]", {"a": {"b": [1, 2, 7]}}),
        (ByIndex, "last", {"a": {"b": [1]}, "last": 7}),
        (ByIndex, "c[-1]", {"a": {"b": [1]}, "c": [7]}),
        (Hidden, "secret", {"secret": "7", "N": 1}),
        (Hidden, "N", {"secret": "", "N": 7}),
        (Hidden, "url", {"secret": "", "N": 1, "url": "https://7.example/"}),
        (One, "type", {"type": "one", "theId": "7"}),
        (One | Two, "type", {"type": "two", "theId": "7"}),
        (list[One | Two], "[0].theId", [{"type": "two", "theId": "7"}]),
        (Around, "one.type", {"one": {"type": "two", "theId": ""}}),
        (Around, "rows[0][1]", {"one": {"type": "two", "theId": ""}, "rows": [["row", 7, ""]]}),
        (Around, "raw.a", {"one": {"type": "two", "theId": ""}, "raw": {"a": 7}}),
        (Place, "point[1]", {"point": [1, "7"]}),
        (Place, "at", {"point": [1, ""], "at": "7"}),
        (Order, "customer.theId", {"customer": {"theId": 7}}),
        (Order, "pets[0].ownerId", {"customer": {"theId": 1}, "pets": [PET]}),
        (Sale, "order.customer.theId", {"order": {"customer": {"theId": 7}}, "pet": PET}),
        (Sale, "pet.ownerId", {"order": {"customer": {"theId": 1}}, "pet": PET}),
        (Box[Customer], "value.theId", {"value": {"theId": 7}}),
        (Box[Customer], "more[0].theId", {"value": {"theId": 1}, "more": [{"theId": 7}]}),
        (dict[str, Customer], "a.theId", {"a": {"theId": 7}}),
        (Customer | None, "theId", {"theId": 7}),
        (HasRoot, "pets[0].ownerId", {"pets": [PET]}),
        (HasRoot, "address", {"pets": [], "address": "127.0.0.7"}),
        (Roots, "[0].ownerId", [PET]),
        (Swapped, "a", {"a": "7", "b": "1"}),
        (Cat | dict[str, str], "ownerId", {"kind": "cow", "ownerId": "7"}),
        (ByIndex | Box[dict[str, int]], "a.b[0]", {"a": {"b": [7]}}),
    ],
    ids=str,
)  # fmt: skip
def test_a_path_finds_the_same_wherever_it_stands_in_an_expression(annotation: Any, path: str, body: Any) -> None:
    message = Message("memory:orders", json.dumps(body).encode())
    payload = codecs.decoder(annotation)(message.body)
    on_the_wire = str(extraction.compile_key(path, Any, handler="h")(message, body))
    for expression in (path, f"{path} || 'none'", f"[{path}] | [0]", f"{{a: {path}}}.a", f"not_null({path})"):
        assert extraction.compile_key(expression, annotation, handler="h")(message, payload) == on_the_wire
    assert extraction.compile_fingerprint(path, annotation, handler="h")(message, payload) is not None


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (Tuples, {"pair": [1, "a"], "lines": [{"sku": "b"}], "some": ["c"]}),
        (ByIndex, {"a": {"b": [1, None, 2]}, "last": 3, "c": [3]}),
        (Around, {"one": {"type": "one", "theId": "a"}, "rows": [["row", 1, "b"]], "raw": {"a": [1]}}),
        (Sale, {"order": {"customer": {"theId": 1}, "pets": [PET]}, "pet": PET}),
        (Place, {"point": [1, "a"], "at": "b"}),
    ],
    ids=str,
)
def test_the_whole_has_the_form_that_it_has_on_the_wire(annotation: Any, body: Any) -> None:
    assert plain(codecs.decoder(annotation)(json.dumps(body).encode())) == body


@pytest.mark.parametrize(
    ("annotation", "path", "sure"),
    [
        (One | Two, "type", True), (Tuples, "pair[1]", True), (Tuples, "pair[2]", False),
        (tuple[int, str], "[0]", True), (ByIndex, "a.b[0]", True), (ByIndex, "a", False),
        (Order, "customer.theId", True), (Order, "pets[0].kind", True), (Place, "point[1]", False),
        (Around, "raw.a", False), (Cat | Line, "[sku]", False), (Cat | Dog, "[kind]", True),
        (ValidatedOnly, "a || orderId", False), (HasRoot, "pets[0].ownerId", True),
    ],
    ids=str,
)  # fmt: skip
def test_check_says_which_path_the_type_does_not_show(annotation: Any, path: str, sure: bool) -> None:
    assert keys.unsure_paths([path], annotation) == ([] if sure else [path])


@pytest.mark.parametrize("annotation", [Order, Box[Customer], list[Order], dict[str, Order]], ids=str)
def test_a_path_by_an_attribute_of_a_dataclass_of_pydantics_is_refused(annotation: Any) -> None:
    within = {"Box": "value", "list": "[0].customer", "dict": "a.customer"}.get(annotation.__name__, "customer")
    with pytest.raises(HandlerError, match="Customer has no field 'the_id'; did you mean 'theId'"):
        extraction.compile_key(f"{within}.the_id", annotation, handler="h")


# ------------------------------------------------------------------------------------------------------- fingerprints
@pytest.mark.parametrize(
    ("path", "nothing"),
    [
        ("a", {}), ("a", {"a": None}), ("a", {"a": ""}), ("[a, b]", {}), ("{a: a, b: [b]}", {}),
        ("a[*].b", {"a": [{}]}), ("a[*].b", {"a": []}), (keys.Key.all("a", "b"), {"b": None}),
        (keys.Key.header("Id"), {}),
    ],
    ids=str,
)  # fmt: skip
def test_where_a_fingerprint_finds_nothing_the_whole_is_compared(path: Any, nothing: dict[str, Any]) -> None:
    async def handler(order: dict[str, Any], tx: Tx) -> None: ...

    plan = idempotent_handler("memory:orders", key="id", fingerprint=path)(handler).plan
    whole = idempotent_handler("memory:orders", key="id")(handler).plan

    def taken(plan: Any, body: dict[str, Any]) -> Any:
        message = Message("memory:orders", json.dumps(body).encode(), {"Id": body["id"]} if "head" in body else {})
        return plan.fingerprint(message, message, body)

    one, other = {"id": "1", "x": 1, **nothing}, {"id": "1", "x": 2, **nothing}
    assert taken(plan, one) == taken(whole, one)
    assert taken(plan, one) != taken(plan, other)
    there = {"id": "1", "a": [{"b": 0}], "head": True}
    assert taken(plan, {**there, "x": 1}) == taken(plan, {**there, "x": 2})


@pytest.mark.parametrize("annotation", [dict[str, Any], Box[Any], Box[dict[str, float]]], ids=str)
def test_numbers_within_what_is_compared_have_all_their_digits_and_one_form(annotation: Any) -> None:
    def taken(number: str, path: str = "value") -> bytes | None:
        message = Message("memory:orders", b'{"value":{"v":%s}}' % number.encode())
        payload = codecs.decoder(annotation)(message.body)
        return extraction.compile_fingerprint(path, annotation, handler="h")(message, payload)

    for path in ("value", "[value]"):
        assert taken("1", path) == taken("1.0", path) == taken("10e-1", path)
        assert taken("1.00000000000000000001", path) != taken("1.00000000000000000002", path)
        assert taken("9007199254740993.0", path) != taken("9007199254740992.0", path)


def test_decimals_and_sets_are_compared_by_value() -> None:
    def taken(value: object) -> bytes | None:
        return extraction.compile_fingerprint("value", Box[Any], handler="h")(
            Message("memory:orders", b"{}"), Box(value)
        )

    assert taken([Decimal("1.10")]) == taken((Decimal("1.1"),)) != taken([Decimal("1.11")])
    assert taken({"a", "b", "c"}) == taken({"c", "b", "a"}) == taken(["a", "b", "c"])


# ----------------------------------------------------------------------------------------------------------- Protobuf
def _protobuf() -> Any:
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    customer = file.message_type.add(name="Customer")
    customer.field.add(name="id", number=1, type=kind.TYPE_INT64, label=kind.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    order.oneof_decl.add(name="_id")
    order.field.add(
        name="id", number=1, type=kind.TYPE_INT64, label=kind.LABEL_OPTIONAL, proto3_optional=True, oneof_index=0
    )
    order.field.add(
        name="customer", number=2, type=kind.TYPE_MESSAGE, type_name=".shop.Customer", label=kind.LABEL_OPTIONAL
    )
    order.field.add(name="tags", number=3, type=kind.TYPE_STRING, label=kind.LABEL_REPEATED)
    order.field.add(name="all", number=4, type=kind.TYPE_MESSAGE, type_name=".shop.Customer", label=kind.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


ORDER = _protobuf()


def test_what_was_not_sent_in_protobuf_is_absent_and_no_zero() -> None:
    def key(path: str, option: str = "key", **given: Any) -> str:
        try:
            read = extraction.compile_key(path, ByAttribute, handler="h", option=option)
            return read(Message("memory:orders", b""), ORDER(**given))
        except BadMessage as error:
            return error.reason

    for option in ("key", "tenant", "order_by"):
        assert key("id", option) == key("customer.id", option) == key("all[0].id", option) == "key_missing"
    assert (key("id", id=0), key("id", id=5)) == ("0", "5")
    assert (key("customer.id", customer={}), key("customer.id", customer={"id": 5})) == ("0", "5")
    assert key("all[-1].id", all=[{"id": 5}]) == "5"


@pytest.mark.parametrize("path", ["customer", "all", "tags", "id"])
def test_what_protobuf_nests_or_repeats_is_compared_by_value(path: str) -> None:
    def taken(n: int) -> bytes | None:
        of = {"customer": {"id": n}, "all": [{"id": 1}, {"id": n}], "tags": ["a", str(n)], "id": n}
        take = extraction.compile_fingerprint(path, ByAttribute, handler="h")
        return take(Message("memory:orders", b""), ORDER(**{path: of[path]}) if n else ORDER())

    assert taken(1) == taken(1) != taken(2) is not None
    assert taken(0) is None


def test_a_class_that_has_no_module_may_be_a_payload() -> None:
    assert ORDER.__module__ is None

    def decode(body: bytes, message: Message) -> Any:
        return ORDER.FromString(body)

    async def handler(order: Any, tx: Tx) -> None: ...

    handler.__annotations__["order"] = ORDER
    idempotent_handler("memory:orders", key="id", fingerprint="tags", decode=decode)(handler)
