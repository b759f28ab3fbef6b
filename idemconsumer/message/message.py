"""What a producer sent, as it arrived; what a handler returned, as it is stored; and where messages come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec


class Message(msgspec.Struct, frozen=True):
    """What a producer sent, as it arrived.

    `source` is `scheme:name`. `body` is never changed; `headers` holds text wherever the bytes are UTF-8. `key` and
    `tenant` are empty until the handler's specs have derived them. `attempt` counts from 1. It
    includes the failures that this process has seen; those of other processes only where it had to look them up, as for
    a redelivery. `message_id` is the producer's id, if the broker carries one; `order_hint` is what the broker
    orders by (Kafka record key, FIFO group), None where it does not.
    `position` shows a person where it came from, e.g. `orders.placed-3-42`.
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


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What a handler returned, as it is stored and replayed byte for byte."""

    body: bytes
    content_type: str = "application/json"


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
