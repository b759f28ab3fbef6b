"""A message as it arrived, a handler's result as it is stored, and the subscription to a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Final

import msgspec

PROPERTIES: Final = (
    "routing_key", "exchange", "correlation_id", "reply_to", "content_type", "content_encoding", "type", "app_id",
    "priority", "user_id", "expiration", "delivery_mode",
)  # fmt: skip
"""What RabbitMQ carries beside headers, message id and timestamp."""

NO_PROPERTIES: Final[Mapping[str, str | int]] = MappingProxyType({})


class Whole(msgspec.Struct, frozen=True):
    """A body of which only the beginning is held: the size of the whole in bytes, and its SHA-256."""

    size: int
    sha256: bytes


class Message(msgspec.Struct, frozen=True):
    """A producer's message, as it arrived.

    * `source`: `scheme:name`.
    * `body`: never changed. It is empty for a `tombstone`, a Kafka record without a value.
    * `headers`: text wherever the bytes are UTF-8, and the last value of a repeated name. `repeated_headers` then has
      all headers in order; otherwise it is empty.
    * `key`, `tenant`: empty until the handler's rules have derived them.
    * `attempt`: counts from 1, and includes the failures that this process has seen. Failures in other processes are
      included only if this process had to look them up, as for a redelivery.
    * `message_id`: the producer's id, if the broker carries one.
    * `order_hint`: the broker's own ordering key (Kafka record key, FIFO group), or None if it has none.
    * `position`: shows people where the message came from, e.g. `orders.placed-3-42`.
    * `timestamp`: the time of sending, as the broker or the producer gives it.
    * `partition`, `offset`, `record_key`: Kafka's.
    * `properties`: RabbitMQ's, under the names that `Key.property` takes, if the message has them.
    * `whole`: describes a body above `max_message_bytes`, of which only a part was kept. No handler gets such a
      message.
    """

    source: str
    body: bytes
    headers: Mapping[str, str | bytes] = msgspec.field(default_factory=dict)
    key: str = ""
    tenant: str | None = None
    attempt: int = 1
    message_id: str | None = None
    order_hint: str | bytes | None = None
    position: str = ""
    timestamp: datetime | None = None
    partition: int | None = None
    offset: int | None = None
    record_key: bytes | None = None
    properties: Mapping[str, str | int] = NO_PROPERTIES
    repeated_headers: tuple[tuple[str, str | bytes], ...] = ()
    tombstone: bool = False
    whole: Whole | None = None

    @property
    def all_headers(self) -> tuple[tuple[str, str | bytes], ...]:
        """Every header with its name, in order, repeated ones too."""
        return self.repeated_headers or tuple(self.headers.items())


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What a handler returned, as it is stored and replayed byte for byte (R36). `status` and `headers` are those of an
    HTTP response, the headers in order and without the content type; None and empty for any other result."""

    body: bytes
    content_type: str = "application/json"
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Result(msgspec.Struct, frozen=True):
    """A return value for handlers whose result is requested by HTTP: a `body` with a `status` and `headers`.

    The `body` is stored as any result: bytes as they are, None as nothing, anything else as JSON. `headers` keep their
    order. `content_type` is the body's type unless given. Where HTTP plays no part, such as in a reply, only the body
    counts.
    """

    body: object = None
    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class Subscription:
    """One source that a worker consumes, for one handler. `group` is the Kafka consumer group."""

    source: str
    handler: str
    group: str

    @property
    def scheme(self) -> str:
        return self.source.partition(":")[0]

    @property
    def name(self) -> str:
        return self.source.partition(":")[2]
