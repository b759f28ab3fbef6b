"""Bytes become payloads or dead letters, never anything else; results become bytes."""

from __future__ import annotations

import dataclasses
import enum
from contextlib import suppress
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.errors import BadMessage
from idemconsumer.message.codecs import decoder, encode, encode_rejection
from idemconsumer.message.message import StoredResult

SECRET = "s3cret"


class Colour(enum.Enum):
    RED = "red"


class Order(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    qty: int = 0
    colour: Colour = Colour.RED
    extra: dict[str, int] = {}

    def __post_init__(self) -> None:
        if self.qty < 0:
            raise ValueError(f"{self.id} cannot have {self.qty}")
        if self.qty == 13:
            raise KeyError(self.id)


@dataclasses.dataclass
class Ride:
    id: int
    order: Order | None = None


class Paid(TypedDict):
    id: str


class Charge(pydantic.BaseModel):
    id: str
    amount: float = 0.0
    by_name: dict[str, int] = {}

    @pydantic.field_validator("id")
    @classmethod
    def known(cls, value: str) -> str:
        if value.startswith("no"):
            raise ValueError(f"{value} is unknown")
        if value.startswith("boom"):
            raise KeyError(value)
        return value


@pydantic.dataclasses.dataclass
class Checked:
    id: Annotated[str, pydantic.Field(max_length=3)]


class A(msgspec.Struct, tag="a"):
    x: int


class B(msgspec.Struct, tag="b"):
    x: int


ANNOTATIONS: list[Any] = [
    Order, Ride, Paid, Charge, Checked, A | B, dict, dict[str, int], list[Order], list[Charge],
    str, int, float, Any, object,
]  # fmt: skip


@pytest.mark.parametrize(
    ("annotation", "body", "payload"),
    [
        (Order, b'{"id":"a","qty":2}', Order("a", 2)),
        (Ride, b'{"id":1,"order":{"id":"a"}}', Ride(1, Order("a"))),
        (Paid, b'{"id":"p"}', {"id": "p"}),
        (dict, b'{"a":[1,null,"x"]}', {"a": [1, None, "x"]}),
        (list[Order], b'[{"id":"a"}]', [Order("a")]),
        (str, b'"text"', "text"),
        (int, b"5", 5),
        (Any, b"[1]", [1]),
        (object, b"[1]", [1]),
        (A | B, b'{"type":"b","x":1}', B(1)),
        (Charge, b'{"id":"c"}', Charge(id="c")),
        (list[Charge], b'[{"id":"c"}]', [Charge(id="c")]),
        (Charge | None, b"null", None),
        (bytes, b"\xff\x00", b"\xff\x00"),
        (bytes, b"", b""),
    ],
)
def test_a_body_is_decoded_by_the_annotation(annotation: Any, body: bytes, payload: object) -> None:
    assert decoder(annotation)(body) == payload


@pytest.mark.parametrize("annotation", ANNOTATIONS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"{",
        b'"\xff"',
        b"not json",
        b"NaN",
        b'{"id":NaN}',
        b'{"id":"a","amount":Infinity}',
        b"9" * 5_000,
        b"[" * 100_000,
        b'{"id":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'"\x00"',
        b"null\x00",
        b"\x00",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bad_input_is_a_bad_message_and_nothing_else(annotation: Any, body: bytes) -> None:
    with pytest.raises(BadMessage) as caught:
        decoder(annotation)(body)
    assert caught.value.reason == "undecodable"


def test_a_number_beyond_all_floats_is_refused_by_pydantic_models_too() -> None:
    with pytest.raises(BadMessage):
        decoder(Charge)(b'{"id":"a","amount":1e400}')


@pytest.mark.parametrize("annotation", ANNOTATIONS)
@given(body=st.binary(max_size=40) | st.text('{}[]":,0123456789eE+-.\\utrnflase', max_size=40).map(str.encode))
def test_no_bytes_make_a_decoder_raise_anything_else(annotation: Any, body: bytes) -> None:
    with suppress(BadMessage):
        decoder(annotation)(body)


@pytest.mark.parametrize(
    ("annotation", "body", "says"),
    [
        (Order, b'{"id":5}', "Expected `str`, got `int` - at `$.id`"),
        (Order, b'{"qty":5}', "Object missing required field `id`"),
        (Order, b'{"id":"a","colour":"s3cret"}', "Invalid enum value - at `$.colour`"),
        (Order, b'{"id":"a","colour":"s3cret - at `$.s3cret`"}', "Invalid enum value - at `$.colour`"),
        (Order, b'{"id":"a","s3cret":1}', "Object contains unknown field"),
        (Order, b'{"id":"a","s3cret - at `$.x`":1}', "Object contains unknown field"),
        (Order, b'{"id":"a","extra":{"s3cret":"x"}}', "Expected `int`, got `str` - at `$.extra[...]`"),
        (Order, b'{"id":"s3cret","qty":-1}', "the payload type's own check raised ValueError"),
        (Order, b'{"id":"s3cret","qty":13}', "the payload type's own check raised KeyError"),
        (A | B, b'{"type":"s3cret"}', "Invalid value - at `$.type`"),
        (Literal["a"], b'"s3cret - at `$.s3cret`"', "Invalid enum value"),
        (int, b'"s3cret"', "Expected `int`, got `str`"),
        (dict, b'{"a" s3cret', "JSON is malformed"),
        (Charge, b'{"id":"no s3cret"}', "1 validation error(s), the first is value_error at id"),
        (Charge, b'{"id":"boom s3cret"}', "the payload type's own check raised KeyError"),
        (Charge, b'{"id":"a","by_name":{"s3cret":"s3cret"}}', "the first is int_parsing at by_name"),
        (list[Charge], b'["s3cret"]', "validation error(s)"),
        (Checked, b'{"id":"s3cret"}', "the first is string_too_long"),
    ],
)
def test_the_detail_says_what_is_wrong_and_quotes_no_value(annotation: Any, body: bytes, says: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decoder(annotation)(body)
    assert says in caught.value.detail
    assert SECRET not in str(caught.value)


class Plain:
    pass


@dataclasses.dataclass
class HoldsPlain:
    plain: list[Plain]


@pytest.mark.parametrize("annotation", [Plain, HoldsPlain, list[Plain], lambda: None, str | Order | dict])
def test_a_type_that_cannot_be_decoded_is_found_when_the_decoder_is_built(annotation: Any) -> None:
    with pytest.raises(TypeError):
        decoder(annotation)


# -------------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize(
    ("result", "stored"),
    [
        (None, None),
        (b"\xff", StoredResult(b"\xff", "application/octet-stream")),
        ({"reserved": 5}, StoredResult(b'{"reserved":5}')),
        (0, StoredResult(b"0")),
        ("", StoredResult(b'""')),
        (Ride(1), StoredResult(b'{"id":1,"order":null}')),
        (Charge(id="c"), StoredResult(b'{"id":"c","amount":0.0,"by_name":{}}')),
        ([Charge(id="c")], StoredResult(b'[{"id":"c","amount":0.0,"by_name":{}}]')),
    ],
)
def test_results_are_stored_as_json_or_as_the_bytes_they_are(result: object, stored: StoredResult | None) -> None:
    assert encode(result) == stored


def test_a_result_that_cannot_be_stored_is_named() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for result, says in (
        (Plain(), "a result of type Plain cannot be stored as JSON"),
        ({"a": Plain()}, "Plain is not JSON"),
        (endless, "contains itself"),
        ("\ud800", "lone surrogate"),
        (10**5_000, "a result of type int"),
    ):
        with pytest.raises(TypeError) as caught:
            encode(result)
        assert says in str(caught.value)


def test_a_rejection_is_its_code_and_body() -> None:
    assert encode_rejection("sold_out", {"sku": "a"}) == StoredResult(b'{"code":"sold_out","body":{"sku":"a"}}')
    assert encode_rejection("sold_out", None) == StoredResult(b'{"code":"sold_out","body":null}')
