"""Where a message asks to be answered, and what it is answered."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer.message.message import Message
from idemconsumer.message.reply_address import Address, address_of
from idemconsumer.rules.replies import ReplyAnswer, answer_of, reply_id
from idemconsumer.rules.values import Outcome, OutcomeKind, State


def address(source: str, message_id: str | None = None, **given: Any) -> Address | None:
    properties = given if source.startswith("rabbitmq") else {}
    return address_of(Message(source, b"", {} if properties else given, message_id=message_id, properties=properties))


def test_the_address_is_where_its_broker_has_it() -> None:
    assert address("rabbitmq:q", reply_to="r", correlation_id="c") == Address("rabbitmq", "q", "r", "c")
    assert address("rabbitmq:q", "m", reply_to="r") == Address("rabbitmq", "q", "r", "m")
    assert address("rabbitmq:q", reply_to="") is None
    assert address("sqs:q", "m", ReplyTo="r", CorrelationId="c") == Address("sqs", "q", "r", "c")
    assert address("postgres:q", ReplyTo="r", kafka_replyTopic="r") is None
    assert address("kafka:q", kafka_replyTopic=b"\xff") is None


@pytest.mark.parametrize(
    ("given", "expected"), [("\0\0\0\2", 2), ("1234", 1234), ("0", 0), ("no", None), (b"\xff", None)]
)
def test_the_partition_is_a_number_as_spring_or_nestjs_write_it(given: str | bytes, expected: int | None) -> None:
    found = address("kafka:q", kafka_replyTopic="r", kafka_correlationId=b"\xff", kafka_replyPartition=given)
    assert found == Address("kafka", "q", "r", b"\xff", expected)


def test_only_what_is_decided_is_answered_and_a_duplicate_like_the_first() -> None:
    answered = {
        (kind, state): answer
        for kind in OutcomeKind
        for state in (None, *State)
        if (answer := answer_of(Outcome(kind, result=b"{}", content_type="text/x", state=state))) is not None
    }
    assert {(kind, state) for kind, state in answered if kind is not OutcomeKind.DUPLICATE} <= {
        (kind, state) for kind in (OutcomeKind.APPLIED, OutcomeKind.FAILED) for state in (State.COMPLETED, State.FAILED)
    }
    assert answered[OutcomeKind.APPLIED, State.COMPLETED] == answered[OutcomeKind.DUPLICATE, State.COMPLETED]
    assert answered[OutcomeKind.FAILED, State.FAILED] == answered[OutcomeKind.DUPLICATE, State.FAILED]
    assert answered[OutcomeKind.FAILED, State.FAILED].outcome == "rejected"
    assert (OutcomeKind.DUPLICATE, State.PENDING) not in answered
    assert (OutcomeKind.DUPLICATE, State.DEAD) not in answered


def test_the_id_of_a_reply_is_that_of_its_request_and_its_answer() -> None:
    to, answer = Address("rabbitmq", "q", "r", "c"), ReplyAnswer("completed", b"1", "application/json")
    first = reply_id(b"k", to, answer)
    assert first == reply_id(b"k", Address("rabbitmq", "other", "r", b"c"), answer)
    others = [
        reply_id(b"l", to, answer),
        reply_id(b"k", Address("rabbitmq", "q", "r", "d"), answer),
        reply_id(b"k", Address("rabbitmq", "q", "s", "c"), answer),
        reply_id(b"k", to, ReplyAnswer("completed", b"2", "application/json")),
        reply_id(b"k", to, ReplyAnswer("rejected", b"1", "application/json")),
    ]
    assert len({first, *others}) == 6
