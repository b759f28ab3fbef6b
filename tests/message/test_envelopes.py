"""What a service puts around a message is taken off; what is not in its envelope is refused."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from idemconsumer.errors import BadMessage
from idemconsumer.message.envelopes import ENVELOPES, Envelope, unwrapper
from idemconsumer.message.extraction import compile_key
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message

NOTIFICATION = {
    "Type": "Notification",
    "MessageId": "22b80b92",
    "TopicArn": "arn:aws:sns:eu-west-1:123456789012:orders",
    "Subject": "a subject",
    "Message": '{"id": "ü"}',
    "Timestamp": "2024-05-02T00:54:06.655Z",
    "SignatureVersion": "1",
    "MessageAttributes": {
        "kind": {"Type": "String", "Value": "placed"},
        "trace": {"Type": "Binary", "Value": base64.b64encode(b"\xff").decode()},
    },
}
EVENT = {
    "version": "0",
    "id": "6a7e8feb",
    "detail-type": "Order Placed",
    "source": "shop.orders",
    "account": "111122223333",
    "time": "2024-05-02T00:54:06Z",
    "region": "eu-west-1",
    "resources": [],
    "detail": {"id": "a", "qty": 1.50},
}
OF_AMAZON = [("account", "111122223333"), ("region", "eu-west-1")]
CLOUD: dict[str, Any] = {
    "specversion": "1.0",
    "type": "order.placed",
    "source": "/shop",
    "id": "A-1",
    "time": "2024-05-02T00:54:06Z",
    "sequence": 7,
    "datacontenttype": "application/json",
    "data": {"id": "a"},
}


def unwrapped(envelope: Envelope, body: object, **more: Any) -> Message:
    encoded = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return unwrapper(envelope)(Message("sqs:q", encoded, position="q#1", message_id="sqs", **more))


def test_a_notification_of_sns() -> None:
    message = unwrapped("sns", NOTIFICATION, headers={"MessageGroupId": "g"})
    assert (message.body, message.message_id) == ('{"id": "ü"}'.encode(), "22b80b92")
    assert message.headers == {"MessageGroupId": "g", "kind": "placed", "trace": b"\xff"}
    assert message.timestamp == datetime(2024, 5, 2, 0, 54, 6, 655_000, tzinfo=UTC)
    assert (message.source, message.position) == ("sqs:q", "q#1")


@pytest.mark.parametrize(
    ("envelope", "body", "said"),
    [
        ("sns", NOTIFICATION, [("kind", "placed"), ("trace", b"\xff")]),
        ("eventbridge", EVENT, [("detail-type", "Order Placed"), ("source", "shop.orders"), *OF_AMAZON]),
        ("cloudevents", CLOUD, [(f"ce_{name}", str(value)) for name, value in CLOUD.items() if name != "data"]),
    ],
)
@pytest.mark.parametrize("repeated", [(("t", "1"), ("t", "2")), ()])
def test_all_headers_have_what_the_envelope_says(
    envelope: Envelope, body: object, said: list[Any], repeated: tuple[tuple[str, str], ...]
) -> None:
    message = unwrapped(envelope, body, headers={"t": "2"}, repeated_headers=repeated)
    assert list(message.all_headers) == [*(repeated or [("t", "2")]), *said]
    assert message.headers == dict(message.all_headers)


def test_a_header_and_what_the_envelope_calls_likewise_are_both_there() -> None:
    message = unwrapped("sns", NOTIFICATION, headers={"kind": "outer", "n": "1"})
    assert message.headers["kind"] == "placed"
    assert message.all_headers == (("kind", "outer"), ("n", "1"), ("kind", "placed"), ("trace", b"\xff"))


def test_an_event_of_eventbridge() -> None:
    message = unwrapped("eventbridge", EVENT)
    assert json.loads(message.body) == {"id": "a", "qty": 1.5}
    assert (message.message_id, message.headers["detail-type"]) == ("6a7e8feb", "Order Placed")
    assert (message.headers["source"], message.headers["account"]) == ("shop.orders", "111122223333")
    assert message.timestamp == datetime(2024, 5, 2, 0, 54, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("change", "body"),
    [
        ({}, b'{"id": "a"}'),
        ({"datacontenttype": "application/vnd.shop+json; charset=utf-8", "data": "x"}, b'"x"'),
        ({"datacontenttype": "text/xml", "data": "<a/>"}, b"<a/>"),
        ({"datacontenttype": "text/xml", "data": {"not": "text"}}, b'{"not": "text"}'),
        ({"data_base64": base64.b64encode(b"\xff\x00").decode()}, b"\xff\x00"),
        ({"data": None}, b"null"),
    ],
    ids=["JSON", "a kind of JSON", "text", "an object all the same", "bytes", "none"],
)
def test_a_cloudevent_in_structured_mode(change: dict[str, Any], body: bytes) -> None:
    message = unwrapped("cloudevents", CLOUD | change | {"subject": None})
    assert message.body == body
    assert "ce_subject" not in message.headers, "what is null is not there (R41)"
    assert (message.headers["ce_type"], message.headers["ce_sequence"]) == ("order.placed", "7")
    assert message.timestamp == datetime(2024, 5, 2, 0, 54, 6, tzinfo=UTC)
    arrived = Message("sqs:q", json.dumps(CLOUD).encode())
    key = compile_key(Key.cloudevent(), Any, handler="h")
    assert key(message, None) == key(arrived, None) == "5:/shop3:A-1"


def test_a_cloudevent_in_binary_mode_is_as_it_arrived() -> None:
    headers = {"ce_id": "A-1", "ce_source": "/shop", "ce_type": "t", "ce_specversion": "1.0"}
    assert unwrapped("cloudevents", b"<a/>", headers=headers).body == b"<a/>"


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"null", b"\xff", b'{"id": "s3cret"}', b"[" * 100_000,
        {"Type": "SubscriptionConfirmation", "MessageId": "1", "Message": "s3cret"},
        NOTIFICATION | {"MessageAttributes": {"n": {"Type": "Binary", "Value": "?"}}},
        NOTIFICATION | {"MessageAttributes": {"n": {"Type": "Binary", "Value": "é"}}}, CLOUD | {"data_base64": "é"},
        EVENT | {"id": 5}, {name: value for name, value in EVENT.items() if name != "detail"},
        CLOUD | {"id": 5}, CLOUD | {"data_base64": "?"}, CLOUD | {"datacontenttype": 5}, [CLOUD],
    ],
    ids=lambda body: repr(body)[:30],
)  # fmt: skip
def test_what_is_in_no_such_envelope_is_undecodable(envelope: Envelope, body: object) -> None:
    with pytest.raises(BadMessage) as caught:
        unwrapped(envelope, body)
    assert caught.value.reason == "undecodable"
    assert "s3cret" not in str(caught.value)


def test_a_time_that_is_none_costs_nothing() -> None:
    for time in ("yesterday", 5, None, "2024-13-01T00:00:00Z"):
        assert unwrapped("eventbridge", EVENT | {"time": time}).timestamp is None
