"""Bodies, headers, ids and sizes between our messages and those of SQS."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer import Key, Message
from idemconsumer.brokers.sqs.sqs_client import Queue, limits, max_receives, retention
from idemconsumer.brokers.sqs.wire import entry_of, message_of, receives, requests
from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.message.extraction import compile_key
from idemconsumer.ports.broker import Outgoing

ORDERS, FIFO = Queue("orders", "http://q"), Queue("orders.fifo", "http://q")


def carried(queue: Queue, outgoing: Outgoing, **system: str) -> Any:
    """The message as it arrives, as SQS would carry it."""
    entry = entry_of(queue, outgoing)
    attributes = entry.get("MessageAttributes", {})
    assert entry["MessageBody"]
    assert len(attributes) <= 10
    assert all(value["StringValue"] for value in attributes.values())
    for name in ("MessageGroupId", "MessageDeduplicationId"):
        if name in entry:
            system[name] = entry[name]
    raw = {"MessageId": "m-1", "Body": entry["MessageBody"], "MessageAttributes": attributes, "Attributes": system}
    return message_of(queue, raw)


# What our stores hold as text: Postgres takes no zero in it.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


names = texts.filter(lambda name: name != "idemconsumer-message-id")  # which is the id, and no header


@given(st.binary(max_size=50) | texts.map(str.encode), st.dictionaries(names, texts, max_size=14), st.none() | texts)
def test_whatever_is_published_arrives_as_it_was(body: bytes, headers: dict[str, str], key: str | None) -> None:
    message = carried(ORDERS, Outgoing(body, headers, key))
    assert message.body == body
    assert message.headers == headers
    assert message.message_id == ("m-1" if key is None else key)
    assert message.position == "orders#m-1"


@pytest.mark.parametrize("body", [b"aGVsbG8=", b"", b"\0"])
def test_headers_named_as_our_marks_change_no_body(body: bytes) -> None:
    headers = {"idemconsumer-body": "base64", "idemconsumer-headers": "{}"}
    message = carried(ORDERS, Outgoing(body, headers, "order-1"))
    assert (message.body, message.headers, message.message_id) == (body, headers, "order-1")


def test_the_key_is_the_id_whatever_the_headers_say() -> None:
    headers = {"idemconsumer-message-id": "another"}
    assert carried(ORDERS, Outgoing(b"x", headers, "order-1")).message_id == "order-1"
    assert carried(ORDERS, Outgoing(b"x", headers)).message_id == "another"


def test_headers_that_an_attribute_can_carry_are_attributes() -> None:
    entry = entry_of(ORDERS, Outgoing(b"{}", {"Idempotency-Key": "a", "text": "ü", "empty": "", "AWS.x": "b"}))
    assert set(entry["MessageAttributes"]) == {"Idempotency-Key", "text", "idemconsumer-headers"}


def test_attributes_of_every_type_arrive_as_text_or_bytes() -> None:
    attributes = {
        "text": {"DataType": "String.json", "StringValue": "{}"},
        "number": {"DataType": "Number", "StringValue": "42"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\xff"},
        "readable": {"DataType": "Binary", "BinaryValue": "ü".encode()},
    }
    message = message_of(ORDERS, {"MessageId": "m", "Body": "x", "MessageAttributes": attributes})
    assert message.headers == {"text": "{}", "number": "42", "raw": b"\xff", "readable": "ü"}


def test_a_fifo_message_names_its_group() -> None:
    with pytest.raises(ConfigurationError, match="MessageGroupId"):
        entry_of(FIFO, Outgoing(b"{}"))
    with pytest.raises(ConfigurationError, match="no spaces"):
        entry_of(FIFO, Outgoing(b"{}", {"MessageGroupId": "two words"}))
    message = carried(FIFO, Outgoing(b"{}", {"MessageGroupId": "customer-1"}, "order-1"))
    assert (message.order_hint, message.message_id) == ("customer-1", "order-1")
    assert message.headers["MessageGroupId"] == "customer-1"


def test_a_group_orders_nothing_in_a_standard_queue() -> None:
    message = carried(ORDERS, Outgoing(b"{}", {"MessageGroupId": "tenant-1"}))
    assert message.order_hint is None
    assert message.headers == {"MessageGroupId": "tenant-1"}


def test_a_key_is_the_deduplication_id_of_a_fifo_queue() -> None:
    group = {"MessageGroupId": "g"}
    assert entry_of(FIFO, Outgoing(b"{}", group, "o-1"))["MessageDeduplicationId"] == "o-1"
    hashed = entry_of(FIFO, Outgoing(b"{}", group, "größer"))["MessageDeduplicationId"]
    assert hashed == hashlib.sha256("größer".encode()).hexdigest()
    first, second = (entry_of(FIFO, Outgoing(b"{}", group))["MessageDeduplicationId"] for _ in range(2))
    assert first != second
    content = Queue("orders.fifo", "http://q", {"ContentBasedDeduplication": "true"})
    assert "MessageDeduplicationId" not in entry_of(content, Outgoing(b"{}", group))


def test_a_deduplication_id_is_a_header_and_no_message_id() -> None:
    """A7: SQS gives it to another message after five minutes, or in another group."""

    def arrived(message_id: str, group: str, **given: str) -> Message:
        system = {"MessageGroupId": group, "MessageDeduplicationId": "daily report"}
        attributes = {name: {"DataType": "String", "StringValue": value} for name, value in given.items()}
        raw = {"MessageId": message_id, "Body": "{}", "Attributes": system, "MessageAttributes": attributes}
        return message_of(FIFO, raw)

    messages = [arrived("m1", "g"), arrived("m2", "h"), arrived("m3", "g")]
    read = compile_key(Key.message_id(), dict, handler="h")
    assert [read(message, {}) for message in messages] == ["m1", "m2", "m3"]
    assert messages[0].headers == {"MessageGroupId": "g", "MessageDeduplicationId": "daily report"}
    both = Key.all(Key.header("MessageGroupId"), Key.header("MessageDeduplicationId"))
    assert len({compile_key(both, dict, handler="h")(message, {}) for message in messages}) == 2
    again = entry_of(FIFO, Outgoing(b"{}", messages[0].headers, "key"))
    assert again["MessageDeduplicationId"] == "key"
    assert "MessageDeduplicationId" not in again["MessageAttributes"]


def test_a_message_larger_than_the_queue_takes_is_refused_with_its_headers_counted() -> None:
    small = Queue("orders", "http://q", {"MaximumMessageSize": "1024"})
    headers = {"n": "v" * 10}
    entry_of(small, Outgoing(b"x" * (1024 - len("nString") - 10), headers))
    with pytest.raises(BadMessage, match="oversized: 1025 bytes with its headers, but queue 'orders' accepts 1024"):
        entry_of(small, Outgoing(b"x" * (1025 - len("nString") - 10), headers))
    entry_of(Queue("orders", "http://q", {"MaximumMessageSize": "1048576"}), Outgoing(b"x" * 1_048_576))


def test_a_request_has_at_most_ten_messages_and_no_more_bytes_than_one_may_have() -> None:
    small = [entry_of(ORDERS, Outgoing(b"%d" % number)) for number in range(23)]
    assert [len(batch) for batch in requests(ORDERS, small)] == [10, 10, 3]
    large = [entry_of(ORDERS, Outgoing(b"x" * 100_000)) for _ in range(5)]
    batches = list(requests(ORDERS, large))
    assert [[entry["Id"] for entry in batch] for batch in batches] == [["0", "1"], ["0", "1"], ["0"]]


@pytest.mark.parametrize(("said", "count"), [("3", 3), ("0", 1), ("many", 1)])
def test_a_receive_count_is_a_hint(said: str, count: int) -> None:
    assert receives({"Attributes": {"ApproximateReceiveCount": said}}) == count
    assert receives({}) == 1


@pytest.mark.parametrize(
    ("attributes", "level", "says"),
    [
        ({"VisibilityTimeout": "30"}, "ok", "visibility timeout 30 s, extended"),
        ({"VisibilityTimeout": "0"}, "ok", "workers request 10 s"),
        ({"VisibilityTimeout": "43200"}, "warning", "30 s is enough"),
        ({"ContentBasedDeduplication": "true"}, "warning", "if an equal body arrived"),
    ],
)
def test_a_queues_settings_are_told(attributes: dict[str, str], level: str, says: str) -> None:
    found = limits("sqs:orders", Queue("orders", "http://q", attributes))
    assert any(finding.level == level and says in finding.text for finding in found)


def test_redrive_and_retention_are_read_where_they_are_said() -> None:
    policy = '{"deadLetterTargetArn": "arn:aws:sqs:x", "maxReceiveCount": "5"}'
    queue = Queue("orders", "http://q", {"RedrivePolicy": policy, "MessageRetentionPeriod": "345600"})
    assert (max_receives(queue), retention(queue)) == (5, 345_600.0)
    assert (max_receives(ORDERS), retention(ORDERS)) == (None, None)
