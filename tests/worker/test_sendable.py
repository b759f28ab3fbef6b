"""What no broker of its kind takes is refused when it is published, also in a transaction (X11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
import pytest

from idemconsumer import App, BadMessage, ConfigurationError
from idemconsumer.settings import Settings
from tests.support.inside import give_settings
from tests.support.workers import Bench

GROUP = "MessageGroupId"
ARN = "sqs:arn:aws:sqs:eu-west-1:123456789012:orders.fifo"


@pytest.mark.parametrize(
    ("to", "given", "why"),
    [
        ("sqs:orders.fifo", {}, r"sqs:orders.fifo: a FIFO queue .*; give headers=\{'MessageGroupId': customer_id\}"),
        (ARN, {}, "a FIFO queue keeps order within a group"),
        ("sqs:orders.fifo", {"headers": {GROUP: "a b"}}, "MessageGroupId has 1 to 128 letters"),
        ("sqs:orders", {"headers": {GROUP: ""}}, "MessageGroupId has 1 to 128 letters"),
        ("rabbitmq:orders", {"key": "k" * 256}, "longer than 255 bytes, the limit of a key; give its hash"),
        ("rabbitmq:orders", {"headers": {"é" * 65: "v"}}, "longer than 128 bytes, the limit of a header's name"),
        ("rabbitmq:orders", {"headers": {"h": "\ud800"}}, "'h' has a lone surrogate in it; give bytes"),
        ("kafka:orders", {"headers": {"h": "\ud800"}}, "'h' has a lone surrogate in it; give bytes"),
        ("kafka:orders", {"headers": {"h": 1}}, "'h' is of type int; give text or bytes"),
        ("postgres:orders", {"headers": {"h": None}}, "'h' is of type NoneType; give text or bytes, or leave it"),
        ("sqs:orders", {"headers": {1: "v"}}, "1 has a name that is not text"),
        ("kafka:orders", {"key": 5}, r"the key is not valid text .* give e.g. str\(order_id\)"),
        ("kafka:orders", {"key": "a\0"}, "the key is not valid text"),
        ("postgres:orders", {"key": "\ud800"}, "the key is not valid text"),
        ("kafka:orders", {"payload": b"x" * (4 << 20)}, "larger than 4194304 bytes, the limit for Kafka"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tx", [None, "of the handler's"])
async def test_what_no_broker_takes_is_refused_before_it_is_sent_or_stored(
    to: str, given: Mapping[str, Any], why: str, tx: Any
) -> None:
    app = App("shop")
    give_settings(app, Settings(kafka="127.0.0.1:1", rabbitmq="amqp://127.0.0.1:1", dsn="postgresql://127.0.0.1:1/x"))
    async with app:
        with pytest.raises((ConfigurationError, BadMessage), match=why):
            await app.publish(to, **{"payload": b"x", **given}, tx=tx)


@pytest.mark.parametrize(
    ("to", "key", "headers", "why"),
    [
        ("sqs:orders.fifo", None, "{}", "jsonb_build_object"),
        (ARN, None, '{"MessageGroupId": null}', "jsonb_build_object"),
        ("sqs:orders", None, '{"MessageGroupId": "a b"}', "no spaces"),
        ("rabbitmq:" + "q" * 256, None, "{}", "of 1 to 255 bytes"),
        ("rabbitmq:orders", "é" * 128, "{}", "give a hash of it"),
        ("kafka:orders/placed", None, "{}", "a topic's name"),
        ("kafka:..", None, "{}", "a topic's name"),
        ("sqs:https://user:secret@host/1/orders", None, "{}", "a queue's name"),
        ("sqs:" + "o" * 81, None, "{}", "a queue's name"),
    ],
)
def test_sql_refuses_it_too(bench: Bench, to: str, key: str | None, headers: str, why: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no broker takes a message to") as refused:
        bench.do("select idemconsumer.publish(%s, '1', %s, %s::jsonb)", to, key, headers)
    assert why in (refused.value.diag.message_hint or "")
    assert "secret" not in str(refused.value)
    bench.do("select idemconsumer.publish('sqs:orders.fifo', '1', null, '{\"MessageGroupId\": \"customer-1\"}')")
    bench.do("select idemconsumer.publish('sqs:https://sqs.eu-west-1.amazonaws.com/1/orders', '1')")
    bench.do("select idemconsumer.publish('rabbitmq:a/b', '1', %s), idemconsumer.publish('kafka:a.b', '1')", "k" * 255)
