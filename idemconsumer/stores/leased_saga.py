"""Sagas as their store gives them out."""

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
    is to be cancelled, and whether its finished steps are to be undone; None while nobody has requested it (L50).
    `begun`: when, by the database's clock, as a time of this process's monotonic one.
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
    """What one look at the store found: `own` as `PostgresLeases.own` has it; `due`: in how many seconds the next saga
    of a handler may be taken, negative if it could have been so long ago. A handler without sagas that are due soon is
    not there. `cancelled`: the keys of our own that are to be cancelled. `queues`: in how many seconds something of a
    Postgres queue can be taken, not more than 0 if something can be now. A queue without such messages is not there."""

    own: list[tuple[bytes, int]]
    due: dict[str, float]
    cancelled: list[bytes] = field(default_factory=list)
    queues: dict[str, float] = field(default_factory=dict)


class Kinship(NamedTuple):
    """What another saga is to this one now. `above`: it has not ended, and is this one or has started it, directly or
    through others. `started`: this one has started it."""

    above: bool
    started: bool


class Begun(NamedTuple):
    """What is there under the key of a saga that is being started (L80). `owner`: the saga whose start is the first of
    those that have not begun. `is_new`: nothing was there."""

    found: list[Record]
    owner: bytes
    is_new: bool
