"""What identifies a message: where a key may come from, what it may be, and that no two keys meet."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from random import Random
from typing import Any, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.errors import BadMessage, ConfigurationError, HandlerError
from idemconsumer.message import extraction, keys, paths
from idemconsumer.message.codecs import decoder
from idemconsumer.message.keys import Key, KeySpec
from idemconsumer.message.message import Message

SECRET = "s3cret"


class Line(msgspec.Struct, rename="camel"):
    product_sku: str


class Order(msgspec.Struct, rename="camel"):
    order_id: str
    line: Line | None = None
    lines: list[Line] = []
    currency: str = "EUR"


@dataclasses.dataclass
class Ride:
    ride_id: int
    order: Order | None = None


class Paid(TypedDict):
    payment_id: str


class Card(pydantic.BaseModel):
    number: str = pydantic.Field(alias="cardNumber")


class Charge(pydantic.BaseModel):
    charge_id: str
    card: Card | None = None


class Created(msgspec.Struct, tag="created"):
    id: str


class Removed(msgspec.Struct, tag="removed"):
    gone: str


def message(
    body: bytes = b"{}", headers: Mapping[str, str | bytes] | None = None, message_id: str | None = None
) -> Message:
    return Message("kafka:t", body, headers or {}, message_id=message_id, position="t-3-42")


def key_of(spec: KeySpec, body: bytes = b"{}", payload_type: Any = dict, **more: Any) -> str:
    payload = decoder(payload_type)(body)
    return extraction.compile_key(spec, payload_type, handler="h")(message(body, **more), payload)


def refused(spec: KeySpec, body: bytes = b"{}", payload_type: Any = dict, **more: Any) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        key_of(spec, body, payload_type, **more)
    assert SECRET not in str(caught.value)
    return caught.value


# ---------------------------------------------------------------------------------------------------- paths
@pytest.mark.parametrize(
    ("path", "payload_type", "body", "key"),
    [
        ("orderId", Order, b'{"orderId":"a"}', "a"),
        ("line.productSku", Order, b'{"orderId":"a","line":{"productSku":"b"}}', "b"),
        ("lines[0].productSku", Order, b'{"orderId":"a","lines":[{"productSku":"b"}]}', "b"),
        ("join('-', [orderId, currency])", Order, b'{"orderId":"a"}', "a-EUR"),
        ("currency", Order, b'{"orderId":"a"}', "EUR"),
        ("ride_id", Ride, b'{"ride_id":7}', "7"),
        ("order.orderId", Ride, b'{"ride_id":7,"order":{"orderId":"a"}}', "a"),
        ("payment_id", Paid, b'{"payment_id":"p"}', "p"),
        ("charge_id", Charge, b'{"charge_id":"c"}', "c"),
        ("card.cardNumber", Charge, b'{"charge_id":"c","card":{"cardNumber":"4"}}', "4"),
        ("card.cardNumber || charge_id", Charge, b'{"charge_id":"c","card":{"cardNumber":"4"}}', "4"),
        ("[0].charge_id", list[Charge], b'[{"charge_id":"c"}]', "c"),
        ("id", Created | Removed, b'{"type":"created","id":"x"}', "x"),
        ("type", Created, b'{"type":"created","id":"x"}', "created"),
        ("a.b", dict, b'{"a":{"b":"x"}}', "x"),
        ('"order-id"', dict, b'{"order-id":"x"}', "x"),
        ("a.b", Any, b'{"a":{"b":"x"}}', "x"),
        ("a.b", object, b'{"a":{"b":"x"}}', "x"),
        ("a.orderId", dict[str, Order], b'{"a":{"orderId":"x"}}', "x"),
        ('"5"', dict[int, str], b'{"5":"x"}', "x"),
        ("[1]", list[str], b'["a","b"]', "b"),
    ],
)
def test_a_path_reads_the_payload_by_its_names_on_the_wire(path: str, payload_type: Any, body: bytes, key: str) -> None:
    assert key_of(path, body, payload_type) == key


@pytest.mark.parametrize(
    ("path", "payload_type", "says"),
    [
        ("order_id", Order, "Order has no field 'order_id'; did you mean 'orderId'? its fields are orderId,"),
        ("line.sku", Order, "Line has no field 'sku'"),
        ("line.productSkuu", Order, "did you mean 'productSku'?"),
        ("line.skus[0]", Order, "Line has no field 'skus'"),
        ("ride", Ride, "did you mean 'ride_id'?"),
        ("payment", Paid, "did you mean 'payment_id'?"),
        ("card.number", Charge, "did you mean 'cardNumber'?"),
        ("orderId.x", Order, "looks for 'x' in str, which has no fields; write Key.header"),
        ("lines.productSku", Order, "looks for 'productSku' in list, which has no fields"),
        ("id", bytes, "looks for 'id' in bytes, which has no fields"),
        ("id", int, "looks for 'id' in int, which has no fields"),
        ("idd", Created | Removed, "the payload's types has no field 'idd'; did you mean 'id'?"),
        ("a..b", dict, "is not a JMESPath expression"),
        ("", dict, "is not a JMESPath expression"),
        ("jion('-', [a, b])", dict, "calls 'jion', which is not a JMESPath function; did you mean 'join'?"),
    ],
)
def test_a_path_that_cannot_be_there_is_an_error_at_import(path: str, payload_type: Any, says: str) -> None:
    with pytest.raises(HandlerError) as caught:
        extraction.compile_key(path, payload_type, handler="reserve")
    assert str(caught.value).startswith("handler 'reserve': ")
    assert says in str(caught.value)


def test_what_is_no_spec_is_an_error_at_import() -> None:
    async def later(_: Message) -> str:
        return ""

    for wrong, says in ((5, "`key` is of type int"), (None, "NoneType"), (later, "an async function")):
        with pytest.raises(HandlerError, match=says):
            extraction.compile_key(wrong, dict, handler="h")  # type: ignore[arg-type]
    for combine in (Key.all, Key.first):
        with pytest.raises(ConfigurationError, match="has no arguments"):
            combine()


# --------------------------------------------------------------------------------------------------- values
class Size(int, enum.Enum):  # unlike IntEnum, its text is its name
    LARGE = 3


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("a", "a"),
        ("ü" * 512, "ü" * 512),
        (0, "0"),
        (-5, "-5"),
        (1.5, "1.5"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.5"),
        (Size.LARGE, "3"),
        (Colour.RED, "red"),
    ],
)
def test_scalars_become_text(value: object, key: str) -> None:
    assert extraction.compile_key("k", dict, handler="h")(message(), {"k": value}) == key


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "key_missing"),
        ("", "key_missing"),
        (msgspec.UNSET, "key_missing"),
        (True, "key_invalid"),
        ([SECRET], "key_invalid"),
        ({"a": SECRET}, "key_invalid"),
        (math.nan, "key_invalid"),
        (math.inf, "key_invalid"),
        (f"{SECRET}\0", "key_invalid"),
        (f"{SECRET}\ud800", "key_invalid"),
        (SECRET + "x" * 1_019, "key_invalid"),
        ("ü" * 513, "key_invalid"),
        pytest.param(10**5_000, "key_invalid", id="5,001 digits"),
        (object(), "key_invalid"),
    ],
)
def test_what_is_no_key_is_refused_with_its_reason_and_without_its_value(value: object, reason: str) -> None:
    with pytest.raises(BadMessage) as caught:
        extraction.compile_key("k", dict, handler="h")(message(), {"k": value})
    assert caught.value.reason == reason
    assert caught.value.detail.startswith("key (payload path 'k') ")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "payload_type", "body"),
    [
        ("line.productSku", Order, b'{"orderId":"a"}'),
        ("card.cardNumber", Charge, b'{"charge_id":"c"}'),
        ("a.b", dict, b"{}"),
        ("a.b", dict, b'{"a":["s3cret"]}'),
        ("a.b", dict, b'{"a":"s3cret"}'),
        ("a[0]", dict, b"{}"),
        ("a[-2]", dict, b'{"a":["x"]}'),
        ("a[1]", dict, b'{"a":["x"]}'),
        ("a[0]", dict, b'{"a":"x"}'),
        ("id", Created | Removed, b'{"type":"removed","gone":"x"}'),
    ],
)
def test_a_path_that_leads_nowhere_is_a_missing_key(path: str, payload_type: Any, body: bytes) -> None:
    assert refused(path, body, payload_type).reason == "key_missing"


def test_an_expression_that_fails_on_a_message_makes_that_message_invalid() -> None:
    assert refused("abs(a)", b'{"a":"s3cret"}').reason == "key_invalid"


_JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=12,
)


@given(_JSON, st.sampled_from(["a[0].b", "[1]", "[-1].a", "a[0][1]", "[0]", "a[-2].b[0]"]))
def test_an_index_reads_what_a_search_finds(payload: object, path: str) -> None:
    def key(spec: str) -> str:
        try:
            return extraction.compile_key(spec, Any, handler="h")(message(), payload)
        except BadMessage as error:
            return error.reason

    assert key(path) == key(f"{path} | @")


def lines(count: int) -> bytes:
    return msgspec.json.encode({"lines": [{"n": n, "sku": "x" * 16} for n in range(count)]})


LAST = "lines[?n == `%d`] | [0].sku"


def test_a_search_ends_after_a_number_of_steps() -> None:
    assert key_of(LAST % 999, lines(1_000)) == "x" * 16
    late = refused(LAST % 19_999, lines(20_000))
    assert (late.reason, "takes more than 20,000 steps" in late.detail) == ("key_invalid", True)


def test_a_large_body_is_not_searched_but_plain_paths_are_read() -> None:
    body = lines(40_000)
    assert len(body) > paths.MAX_SEARCHED_BYTES
    assert key_of("lines[39999].sku", body) == "x" * 16
    assert key_of("lines[-1].n", body) == "39999"
    large = refused("to_string(@)", body)
    assert (large.reason, "searched only in bodies up to 1,048,576 bytes" in large.detail) == ("key_invalid", True)


# --------------------------------------------------------------------------------------------- other places
def test_keys_come_from_headers_of_exactly_or_about_that_name() -> None:
    assert key_of(Key.header("Id"), headers={"id": "low", "Id": "exact"}) == "exact"
    assert key_of(Key.header("Idempotency-Key"), headers={"idempotency-key": b"k"}) == "k"
    assert refused(Key.header("Id"), headers={"Other": "x"}).reason == "key_missing"
    assert refused(Key.header("Id"), headers={"Id": b"\xff"}).reason == "key_invalid"


def test_keys_come_from_the_message_itself() -> None:
    assert key_of(Key.message_id(), message_id="m") == "m"
    assert refused(Key.message_id()).reason == "key_missing"
    assert key_of(Key.offset()) == "t-3-42"
    assert key_of(Key.payload(), b'{"a":1}') == keys.fingerprint(b'{"a":1}').hex()
    assert key_of(Key.payload(), b'{"a":1}') != key_of(Key.payload(), b'{"a": 1}')


@pytest.mark.parametrize("prefix", ["ce_", "cloudEvents:", "cloudEvents_"])
def test_a_cloudevent_is_its_source_and_id_whatever_carries_it(prefix: str) -> None:
    structured = b'{"specversion":"1.0","source":"/shop","id":"7","data":{}}'
    binary = {prefix + "source": "/shop", prefix + "id": b"7"}
    assert key_of(Key.cloudevent(), headers=binary) == key_of(Key.cloudevent(), structured) == "5:/shop1:7"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", {}),
        (b"\xff", {}),
        (b'{"source":"/shop","id":"7"}', {}),
        (b'{"specversion":"1.0","source":"","id":"7"}', {}),
        (b"{}", {"ce_source": "/shop"}),
    ],
)
def test_half_a_cloudevent_is_a_missing_key(body: bytes, headers: dict[str, str | bytes]) -> None:
    assert refused(Key.cloudevent(), body, bytes, headers=headers).reason == "key_missing"


def test_keys_come_from_what_kafka_and_rabbitmq_carry() -> None:
    def given(spec: KeySpec, **more: Any) -> str:
        found = msgspec.structs.replace(message(), **more)
        try:
            return extraction.compile_key(spec, dict, handler="h")(found, {})
        except BadMessage as error:
            return error.reason

    assert given(Key.record_key(), record_key="ü-1".encode()) == "ü-1"
    assert given(Key.record_key(), record_key=b"") == "key_missing"
    assert given(Key.record_key()) == "key_missing"
    assert given(Key.record_key(), record_key=b"\xff") == "key_invalid"
    assert given(Key.record_key(), record_key=b"\0\0\0\5") == "key_invalid"
    assert given(Key.property("correlation_id"), properties={"correlation_id": "c-1"}) == "c-1"
    assert given(Key.property("priority"), properties={"priority": 5}) == "5"
    assert given(Key.property("reply_to"), properties={"correlation_id": "c-1"}) == "key_missing"


def test_a_property_that_rabbitmq_does_not_have_is_an_error_at_import() -> None:
    with pytest.raises(HandlerError, match="did you mean 'correlation_id'"):
        extraction.compile_key(Key.property("correlationid"), dict, handler="h")
    with pytest.raises(HandlerError, match=r"the message id is Key.message_id\(\)"):
        extraction.compile_key(Key.property(""), dict, handler="h")


def test_keys_come_from_functions() -> None:
    assert key_of(lambda m: m.position) == "t-3-42"
    assert refused(lambda _: None).reason == "key_missing"


@pytest.mark.parametrize(
    ("function", "says"),
    [(lambda _: 5, "returned int instead of str"), (lambda m: m.headers[SECRET], "raised KeyError")],
)
def test_a_function_that_fails_makes_the_message_invalid_and_quotes_nothing(
    function: Callable[[Message], Any], says: str
) -> None:
    error = refused(function)
    assert error.reason == "key_invalid"
    assert says in error.detail


# --------------------------------------------------------------------------------------------- combinations
def test_first_takes_the_first_that_is_there() -> None:
    spec = Key.first(Key.header("Id"), Key.all("a", "b"), "c")
    assert key_of(spec, b'{"c":"c"}', headers={"Id": "h"}) == "h"
    assert key_of(spec, b'{"a":"1","b":2,"c":"c"}') == "1:11:2"
    assert key_of(spec, b'{"a":"1","c":"c"}') == "c"
    assert refused(spec).reason == "key_missing"


def test_first_does_not_pass_over_an_invalid_one() -> None:
    assert refused(Key.first("a", "b"), b'{"a":true,"b":"x"}').reason == "key_invalid"
    assert refused(Key.first(lambda m: str(m.headers["x"]), "b"), b'{"b":"x"}').reason == "key_invalid"


def test_all_needs_every_part() -> None:
    assert refused(Key.all("a", "b"), b'{"a":"x"}').reason == "key_missing"


def test_a_combined_key_has_the_same_limit() -> None:
    body = msgspec.json.encode({"a": "x" * 600, "b": "x" * 600})
    assert refused(Key.all("a", "b"), body).reason == "key_invalid"


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


@given(st.lists(texts, min_size=1, max_size=4), st.lists(texts, min_size=1, max_size=4))
def test_combined_keys_are_equal_only_when_all_their_parts_are(one: list[str], other: list[str]) -> None:
    def combined(parts: list[str]) -> str:
        spec = Key.all(*(f"[{i}]" for i in range(len(parts))))
        return extraction.compile_key(spec, list[str], handler="h")(message(), parts)

    assert (combined(one) == combined(other)) == (one == other)


# ------------------------------------------------------------------------------------------------- identity
names = st.text(st.sampled_from("a/-%:\0") | st.characters(codec="utf-8"), max_size=4)
scopes = st.tuples(names, st.none() | names, names)


@given(scopes, names, scopes, names)
def test_stored_keys_are_equal_only_when_app_tenant_handler_and_key_are(
    one: tuple[str, str | None, str], key: str, other: tuple[str, str | None, str], other_key: str
) -> None:
    assert (keys.digest(*one, key) == keys.digest(*other, other_key)) == ((one, key) == (other, other_key))


@given(scopes, scopes)
def test_scope_names_are_equal_only_when_the_scopes_are(
    one: tuple[str, str | None, str], other: tuple[str, str | None, str]
) -> None:
    assert (keys.scope_name(*one) == keys.scope_name(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b", "c", "d"), ("ab", "", "c", "d")),
        (("a", None, "b", "c"), ("a", "", "b", "c")),
        (("a", "b", "c", "de"), ("a", "b", "cd", "e")),
    ],
)
def test_no_concatenation_of_a_stored_key_collides(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert keys.digest(*one) != keys.digest(*other)
    assert len(keys.digest(*one)) == 32


def test_a_scope_reads_as_app_tenant_handler() -> None:
    assert keys.scope_name("shop", None, "reserve") == "shop/-/reserve"
    assert keys.scope_name("shop", "eu/1", "reserve") == "shop/eu%2F1/reserve"
    assert keys.scope_name("shop", "-", "reserve") == "shop/%2D/reserve"
    assert keys.scope_name("a%2Fb", None, "c") != keys.scope_name("a/b", None, "c")


# ---------------------------------------------------------------------------------------------- fingerprint
def test_a_fingerprint_sees_only_what_it_was_told_to() -> None:
    take = extraction.compile_fingerprint(Key.all("amount", "card"), dict, handler="h")
    first = take(message(), {"amount": 5, "card": {"n": 1, "m": 2}, "sent_at": "now"})
    assert first == take(message(), {"card": {"m": 2, "n": 1}, "amount": 5, "sent_at": "later"})
    assert first != take(message(), {"amount": 6, "card": {"n": 1, "m": 2}})
    assert take(message(), {}) == take(message(), {"amount": None})


def test_a_fingerprint_may_be_of_any_json_type() -> None:
    take = extraction.compile_fingerprint("card", Charge, handler="h")
    one, other = (Charge.model_validate({"charge_id": "c", "card": {"cardNumber": n}}) for n in "12")
    assert take(message(), one) != take(message(), other)


def test_a_fingerprint_that_cannot_be_taken_makes_the_message_invalid() -> None:
    take = extraction.compile_fingerprint("a", dict, handler="h")
    with pytest.raises(BadMessage, match="key_invalid"):
        take(message(), {"a": object()})


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES, st.randoms(use_true_random=False), st.sampled_from([None, 1, 4]), st.booleans())
def test_order_spaces_and_escapes_are_not_part_of_the_value(
    value: object, random: Random, indent: int | None, ascii_only: bool
) -> None:
    def shuffled(part: Any) -> Any:
        if isinstance(part, dict):
            items = [(name, shuffled(inner)) for name, inner in part.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffled(inner) for inner in part] if isinstance(part, list) else part

    one = json.dumps(value).encode()
    other = json.dumps(shuffled(value), indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert keys.canonical(one) == keys.canonical(other)


@given(_VALUES, _VALUES)
def test_two_values_are_two(one: object, other: object) -> None:
    texts = [json.dumps(value, sort_keys=True) for value in (one, other)]
    assert (texts[0] == texts[1]) == (keys.canonical(texts[0].encode()) == keys.canonical(texts[1].encode()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'"1"', b"1"), (b"[]", b"{}"), (b"null", b"{}"),
        (b"0.1", b"0.1000000000000000055"), (b"123456789012345678901", b"123456789012345678902"),
        (b"[1,2]", b"[2,1]"), (b'{"a":1}', b'{"a":1,"b":null}'), (b'{"a":"b"}', b'{"a":"B"}'),
    ],
)  # fmt: skip
def test_numbers_differ_in_their_last_digit_and_lists_in_their_order(one: bytes, other: bytes) -> None:
    assert None is not keys.canonical(one) != keys.canonical(other)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b'"\\ud800"', b"NaN"], ids=repr)
def test_what_is_not_json_has_no_canonical_form(body: bytes) -> None:
    assert keys.canonical(body) is None


# ------------------------------------------------------------------------------------------------- in words
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a.b", "payload path 'a.b'"),
        (Key.first(Key.header("Id"), Key.message_id()), "first of (header 'Id', message id)"),
        (Key.all("a", Key.cloudevent()), "all of (payload path 'a', CloudEvent source and id)"),
        (Key.payload(), "hash of the payload"),
        (Key.offset(), "Kafka offset"),
        (Key.record_key(), "Kafka record key"),
        (Key.property("type"), "property 'type'"),
        (message, "function message"),
    ],
)
def test_a_spec_is_described_for_people(spec: Any, words: str) -> None:
    assert keys.describe(spec) == words
