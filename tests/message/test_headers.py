"""Headers at rest: whatever is written comes back, and whatever is found can be read."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.message.headers import UNREADABLE, decode_headers, encode_headers
from idemconsumer.message.message import Message
from idemconsumer.message.origin import ORIGIN, restored, with_origin

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("base64"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.binary()
                       | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))  # fmt: skip
def test_text_and_bytes_come_back_as_they_were(headers: dict[str, str | bytes]) -> None:
    assert decode_headers(encode_headers(headers)) == headers


@given(st.dictionaries(st.text(st.characters()), st.text(st.characters()) | st.binary()))
def test_any_headers_can_be_stored_and_read(headers: dict[str, str | bytes]) -> None:
    assert "\\u0000" not in encode_headers(headers).decode()
    assert len(decode_headers(encode_headers(headers))) >= len(headers) - 1


@given(st.binary() | _JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_found_in_the_table_is_read(found: bytes) -> None:
    assert {type(value) for value in decode_headers(found).values()} <= {str, bytes}


@pytest.mark.parametrize(
    ("found", "headers"),
    [
        (b'["a"]', {UNREADABLE: b'["a"]'}),
        (b"null", {UNREADABLE: b"null"}),
        (b'"x"', {UNREADABLE: b'"x"'}),
        (b"", {UNREADABLE: b""}),
        (b'{"\xff": 1}', {UNREADABLE: b'{"\xff": 1}'}),
        (b"[" * 100_000, {UNREADABLE: b"[" * 100_000}),
        (b'{"n":1e400, "m": "v"}', {"n": "1e400", "m": "v"}),
        (b'{"a":{"base64":5}}', {"a": '{"base64":5}'}),
        (b'{"a":{"base64":"?"}}', {"a": '{"base64":"?"}'}),
        (b'{"a":{"base64":"AA==","b":1}}', {"a": '{"base64":"AA==","b":1}'}),
        (b'{"a":null,"b":true,"c":[1]}', {"b": "true", "c": "[1]"}),
        (b'{"a":"\xff"}', {"a": '"�"'}),
        (b'{"a":"\\ud800"}', {UNREADABLE: b'{"a":"\\ud800"}'}),
        (b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}", None),
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_what_is_no_object_of_texts_is_kept_as_it_was_found(found: bytes, headers: dict[str, Any] | None) -> None:
    read = decode_headers(found)
    assert headers is None or read == headers


def test_bytes_are_base64_in_an_object_of_that_one_field() -> None:
    assert json.loads(encode_headers({"a": b"\xff"})) == {"a": {"base64": base64.b64encode(b"\xff").decode()}}


# ---------------------------------------------------------------------------------------------------------- taken over
@pytest.mark.parametrize("message_id", [None, "", "m-1", "a\0b", "a b", "日本 🎉"], ids=repr)
@pytest.mark.parametrize("position", ["rides#1", "q#a\0b", "a b  c"], ids=repr)
def test_a_message_that_was_taken_over_comes_back_as_its_broker_delivered_it(
    message_id: str | None, position: str
) -> None:
    message = Message(
        "rabbitmq:a queue", b"x", headers={"h": b"\xff\x00", "t": "1"}, message_id=message_id, position=position
    )
    stored = encode_headers(with_origin(message).headers)
    moved = Message(
        "postgres:~shop/handle", b"x", headers=decode_headers(stored), message_id=None, position="~shop/handle#7"
    )
    assert restored(moved) == message


@pytest.mark.parametrize(
    "origin", [None, "", "rabbitmq:q q#1", "{}", "[]", b"", b"\xff\xfe", b"rabbitmq:q q#1", "\ud800", "[" * 100_000],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_an_origin_that_somebody_else_wrote_is_none(origin: Any) -> None:
    headers = {} if origin is None else {ORIGIN: origin}
    assert restored(Message("postgres:q", b"x", headers=headers)) is None


def test_an_origin_in_bytes_is_one() -> None:
    message = Message("rabbitmq:q", b"x", message_id="m-1", position="q#1")
    origin = with_origin(message).headers[ORIGIN]
    assert isinstance(origin, str)
    assert restored(Message("postgres:~a/b", b"x", headers={ORIGIN: origin.encode()})) == message


def test_an_origin_that_a_producer_made_up_is_replaced() -> None:
    message = Message("rabbitmq:q", b"x", headers={ORIGIN: "mine"}, position="q#1")
    back = restored(with_origin(message))
    assert back is not None
    assert (back.source, back.position) == ("rabbitmq:q", "q#1")


@pytest.mark.parametrize(
    "more", ['"order": {"base64": "é"}', '"order": {"base64": 5}', '"delivered": {"headers": [["a", {"base64": "é"}]]}']
)
def test_an_origin_that_cannot_be_read_is_none_or_tells_less(more: str) -> None:
    said = f'{{"source": "kafka:t", "position": "t-0-1", "message_id": null, {more}}}'
    found = restored(Message("postgres:q", b"x", {ORIGIN: said}))
    assert found is None or (found.source, found.body, found.all_headers) == ("kafka:t", b"x", ())
