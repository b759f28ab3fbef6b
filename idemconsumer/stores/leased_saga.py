"""Sagas as the store returns them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from idemconsumer.message.message import Message
from idemconsumer.rules.values import Record, State


@dataclass(frozen=True, slots=True)
class Runs:
    """A handler of sagas that a process runs, in its version."""

    app: str
    handler: str
    version: str | None


class LeasedSaga(msgspec.Struct, frozen=True):
    """A saga that this worker holds: its token, its phase, and the message that began it.

    `attempt` is the number of this attempt since the last finished step. `stale`: it was taken from a lost worker, and
    what follows from that is not decided yet; a release keeps it stale. `new`: claimed a moment ago, so that no step of
    it can be recorded yet. `suspect`: it has lost two workers in a row, and finished no step in between. `cancel`: it
    is to be cancelled, and whether its finished steps are to be undone; None if no cancellation was requested (L50).
    `begun`: when, by the database's clock, converted to this process's monotonic clock.
    """

    key: bytes
    scope: str
    handler: str
    token: int
    worker: int
    state: State
    attempt: int
    version: str | None
    rejection: bytes | None
    stale: bool
    message: Message
    new: bool = False
    suspect: bool = False
    cancel: bool | None = None
    begun: float = math.inf


@dataclass(frozen=True, slots=True)
class DueLook:
    """The result of one query for due work. `own`: as from `PostgresLeases.own`. `due`: for each handler the seconds
    until its next saga may be taken, negative if it may have been for that long; a handler without sagas that are due
    soon is missing. `cancelled`: the keys of our own that are to be cancelled. `queues`: for each Postgres queue the
    seconds until a message can be taken, at most 0 if one can be now; a queue without such messages is missing."""

    own: list[tuple[bytes, int]]
    due: dict[str, float]
    cancelled: list[bytes] = field(default_factory=list)
    queues: dict[str, float] = field(default_factory=dict)


class Kinship(NamedTuple):
    """How another saga is related to this one. `above`: it has not ended, and is this saga or has started it, directly
    or through others. `started`: this saga has started it."""

    above: bool
    started: bool


class Begun(NamedTuple):
    """What exists under the key of a saga that is being started (L80). `found`: its record. `owner`: the saga whose
    start is the first of those that have not begun. `is_new`: nothing existed."""

    found: list[Record]
    owner: bytes
    is_new: bool
