"""How a source may name an SQS queue."""

from __future__ import annotations

import pytest

from idemconsumer.message.queues import QueueAddress, queue_address
from idemconsumer.message.sources import BadSource, split_source

AWS = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders.fifo"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("orders.fifo", QueueAddress("orders.fifo", "orders.fifo")),
        (
            "arn:aws-cn:sqs:cn-north-1:123456789012:orders",
            QueueAddress("arn:aws-cn:sqs:cn-north-1:123456789012:orders", "orders", "123456789012", "cn-north-1"),
        ),
        (AWS, QueueAddress(AWS, "orders.fifo", region="eu-west-1", url=AWS)),
        (
            "https://us-east-1.queue.amazonaws.com/1/orders",
            QueueAddress("https://us-east-1.queue.amazonaws.com/1/orders", "orders", region="us-east-1",
                         url="https://us-east-1.queue.amazonaws.com/1/orders"),
        ),
        (
            "http://localhost:9324/000000000000/orders",
            QueueAddress("http://localhost:9324/000000000000/orders", "orders",
                         url="http://localhost:9324/000000000000/orders", endpoint="http://localhost:9324"),
        ),
        ("1/orders", None),
        ("o" * 81, None),
        ("bestellungen für alle", None),
        ("arn:aws:sqs:eu-west-1:12:orders", None),
        ("arn:aws:sns:eu-west-1:123456789012:orders", None),
        ("ftp://host/orders", None),
        ("https://host/", None),
    ],
)  # fmt: skip
def test_a_name_an_arn_and_a_url_are_told_apart(given: str, read: QueueAddress | None) -> None:
    assert queue_address(given) == read


def test_a_url_with_a_password_is_refused_and_not_quoted() -> None:
    with pytest.raises(BadSource) as caught:
        split_source("sqs:https://user:s3cret@host/1/orders")
    assert "s3cret" not in str(caught.value)
