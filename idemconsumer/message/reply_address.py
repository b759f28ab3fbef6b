"""Where a message asks to be answered, and how the requester recognises the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from idemconsumer.message.message import Message

# As Spring and NestJS name them.
KAFKA_TOPIC: Final = "kafka_replyTopic"
KAFKA_PARTITION: Final = "kafka_replyPartition"
KAFKA_CORRELATION: Final = "kafka_correlationId"
SQS_QUEUE: Final = "ReplyTo"
SQS_CORRELATION: Final = "CorrelationId"

# Headers of every reply; RabbitMQ carries the last two as properties.
OUTCOME: Final = "idemconsumer-outcome"
MESSAGE_ID: Final = "idemconsumer-message-id"
CONTENT_TYPE: Final = "content-type"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to send a reply.

    `to` is a RabbitMQ or SQS queue, or a Kafka topic; the message came from `source`, without its scheme. `correlation`
    is the request's correlation id, else its message id; None if it has neither. `partition`: for Kafka, if the
    requester names one.
    """

    scheme: str
    source: str
    to: str
    correlation: str | bytes | None
    partition: int | None = None


def address_of(message: Message) -> Address | None:
    """The reply address in a message; None if it asks for no answer."""
    scheme, _, source = message.source.partition(":")
    headers = message.headers
    match scheme:
        case "rabbitmq":
            to: object = message.properties.get("reply_to")
            correlation: object = message.properties.get("correlation_id")
        case "kafka":
            to, correlation = headers.get(KAFKA_TOPIC), headers.get(KAFKA_CORRELATION)
        case "sqs":
            to, correlation = headers.get(SQS_QUEUE), headers.get(SQS_CORRELATION)
        case _:
            return None
    if not isinstance(to, str) or not to:
        return None
    given = correlation if isinstance(correlation, str | bytes) and correlation else message.message_id
    partition = _partition(headers.get(KAFKA_PARTITION)) if scheme == "kafka" else None
    return Address(scheme, source, to, given, partition)


def _partition(given: str | bytes | None) -> int | None:
    """A number as text, as NestJS writes it, or in four bytes, as Spring does. Digits count as text."""
    raw = given.encode() if isinstance(given, str) else given
    if raw is None:
        return None
    if raw.isdigit() and len(raw) < 10:
        return int(raw)
    number = int.from_bytes(raw, "big", signed=True)
    return number if len(raw) == 4 and number >= 0 else None
