"""Frozen values that every floor may know. No behaviour beyond what can be derived from the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum

import msgspec


class State(IntEnum):
    """What a record says. The numbers are stored in `record.state`, so they never change."""

    PENDING = 0
    PROCESSING = 1
    UNDOING = 2
    COMPLETED = 3
    FAILED = 4
    DEAD = 5


class OutcomeKind(StrEnum):
    """What happened to a delivery."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    BUSY = "busy"
    RETRYING = "retrying"
    FAILED = "failed"
    DEAD = "dead"
    FENCED = "fenced"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"


class StepKind(IntEnum):
    """How a step runs. Stored in `step.kind`."""

    TX = 1  # effect and checkpoint in one transaction
    CALL = 2  # outside any transaction, between an intent and its outcome


class StepState(IntEnum):
    """What is known of a step. Stored in `step.state`."""

    INTENT = 1  # about to be called, or called with nobody knowing how it ended
    DONE = 2
    REJECTED = 3
    UNDO_INTENT = 4
    UNDONE = 5


class Message(msgspec.Struct, frozen=True):
    """What a producer sent, as it arrived.

    `source` is `scheme:name`. `headers` holds text wherever the bytes are UTF-8. `key` and `tenant` are empty until
    the handler's specs have derived them. `attempt` counts from 1: after the failures that this process has seen, and
    after those of others where it had to look them up, as for what the broker says it delivered before. `message_id`
    is the producer's id, if the broker carries one; `order_hint` is what the broker orders by (Kafka record key, FIFO
    group), None where it does not.
    `position` says to a person where it came from, e.g. `orders.placed-3-42`.
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
class Record:
    """The key's row as a claim found it. `fingerprint` is None where the handler asked for none."""

    state: State
    fingerprint: bytes | None
    result: StoredResult | None = None


class Mark(Enum):
    """What a claim found where it found no committed record."""

    CLAIMED = "claimed"  # inserted by this transaction: the handler is ours to run
    BUSY = "busy"  # a rival holds the key, uncommitted


Found = Record | Mark


class Outcome(msgspec.Struct, frozen=True):
    """What happened to one delivery.

    `result` is the stored result of an `applied` or `duplicate`, or the rejection (`{"code":…,"body":…}`) of a
    `failed` or of a duplicate of one; `state` is the record's state where there is one. `due` is, for `retrying`,
    the seconds until the next attempt. `error` names what went wrong and never quotes the payload.
    """

    kind: OutcomeKind
    result: bytes | None = None
    content_type: str | None = None
    state: State | None = None
    attempt: int = 1
    due: float = 0.0
    reason: str | None = None
    error: str | None = None


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
