"""R40: what only pydantic reads is read and written by pydantic, wherever it is."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal, NamedTuple

import attrs
import msgspec
import pydantic
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from idemconsumer import Tx, idempotent_handler
from idemconsumer.errors import BadMessage, HandlerError
from idemconsumer.message import codecs, keys


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    owner: str = Field(alias="ownerId")


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    owner: str = Field(alias="ownerId")


PET = {"kind": "dog", "ownerId": "7"}
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
class Bill:
    customer: Customer


class Kennel(NamedTuple):
    pets: dict[str, Cat | Dog]


@dataclasses.dataclass
class Given:
    n: dataclasses.InitVar[int]


class One(msgspec.Struct):
    n: int


class Hidden(BaseModel):
    secret: str = Field(exclude=True)


@dataclasses.dataclass
class HasToken:
    token: Hidden


class InStruct(msgspec.Struct):
    customer: Customer


@attrs.define
class InAttrs:
    pet: Cat | Dog


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (Order, b'{"customer":{"theId":5},"pets":[]}'), (list[Customer], b'[{"theId":5}]'),
        (dict[str, list[Customer]], b'{"a":[{"theId":5}]}'),
        (tuple[Customer, ...], b'[{"theId":5}]'), (Bill, b'{"customer":{"theId":5}}'),
        (dict[str, Order], b'{"a":{"customer":{"theId":5},"pets":[]}}'),
    ],
    ids=str,
)  # fmt: skip
def test_a_dataclass_of_pydantics_is_read_and_written_by_pydantic_wherever_it_is(annotation: Any, body: bytes) -> None:
    value: Any = codecs.decoder(annotation)(body)
    stored = codecs.encode(value)
    assert stored is not None
    assert stored.body == body
    assert msgspec.json.decode(codecs.encode_rejection("no", value).body)["body"] == msgspec.json.decode(body)
    for bad in (b"{}", body.replace(b"5", b"-5"), body.replace(b"theId", b"the_id")):
        if bad != b"{}" or not isinstance(value, dict):
            with pytest.raises(BadMessage, match="undecodable"):
                codecs.decoder(annotation)(bad)


def test_what_hides_in_a_list_is_refused_too() -> None:
    with pytest.raises(TypeError, match="'secret' of Hidden is left out"):
        codecs.encode([HasToken(Hidden(secret="a"))])


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (
            InStruct,
            r"only pydantic reads a type that contains a pydantic dataclass.*know .*InStruct.*; write a dataclass",
        ),
        (InAttrs, r"only pydantic reads .*a union with a model.*know .*InAttrs.*; write a dataclass"),
        (One | Cat, r"only pydantic reads .*know .*One.*; write a dataclass"),
        (Given, r"`InitVar` fields are not supported; make each of them a field$"),
    ],
    ids=str,
)
def test_what_neither_can_read_is_refused_with_what_to_write(annotation: Any, says: str) -> None:
    async def handler(order: Any, tx: Tx) -> None: ...

    handler.__annotations__["order"] = annotation
    with pytest.raises(HandlerError, match=says):
        idempotent_handler("memory:orders", key=keys.Key.payload())(handler)


def test_a_value_that_neither_can_write_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r"know .*InStruct.*; write a dataclass, a TypedDict or a pydantic model in its"
    ):
        codecs.encode(InStruct(Customer(theId=5)))


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (Order, {"customer": {"theId": 1}, "pets": [PET]}),
        (Sale, {"order": {"customer": {"theId": 1}}, "pet": PET}),
        (Kennel, [{"a": PET}]),
    ],
    ids=str,
)
def test_one_of_several_models_within_a_class_of_pythons_own_is_read(annotation: Any, body: Any) -> None:
    payload: Any = codecs.decoder(annotation)(json.dumps(body).encode())
    of = {Order: lambda: payload.pets[0], Sale: lambda: payload["pet"], Kennel: lambda: payload.pets["a"]}
    assert isinstance(of[annotation](), Dog)
