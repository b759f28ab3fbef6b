"""Frozen values that every layer may import. They have no behaviour beyond what follows from their fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Final

import msgspec

from idemconsumer.message.message import StoredResult


class State(IntEnum):
    """The state of a record. The numbers are stored in `record.state`, so they never change."""

    PENDING = 0
    PROCESSING = 1
    UNDOING = 2
    COMPLETED = 3
    FAILED = 4
    DEAD = 5


ENDED: Final = (State.COMPLETED, State.FAILED, State.DEAD)
"""The final states: only a person, or the end of the retention, changes them."""


class OutcomeKind(StrEnum):
    """What happened to a delivery.

    * Decided, so it is settled: `applied` ran and is committed. `duplicate` was decided before, or is stored already
      and waits for its next attempt (its state is PENDING). `conflict` has the key of another payload, and becomes a
      dead letter. `failed` was rejected for good. `dead` is a dead letter.
    * Not decided, so it is delivered again: the key of a `busy` one is held by another worker. `retrying` failed and
      has attempts left.
    * Only for sagas, which are stored and continue by themselves: `fenced` has another owner by now. `cancelled` was
      cut off by a drain.
    * Only from `app.result`: `absent` has no record.
    * Not returned in this version: `unknown`, a COMMIT whose answer was lost. The key is claimed again.
    """

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
    ABSENT = "absent"


class StepKind(IntEnum):
    """How a step runs. Stored in `step.kind`; a SLEEP or WAIT is stored as a TX with an end (L40)."""

    TX = 1  # effect and checkpoint in one transaction
    CALL = 2  # outside any transaction, between an intent and its outcome
    SLEEP = 3  # until its end
    WAIT = 4  # for a signal, or until its end


class StepState(IntEnum):
    """The state of a step. Stored in `step.state`."""

    INTENT = 1  # about to be called, or called with an unknown outcome
    DONE = 2
    REJECTED = 3
    UNDO_INTENT = 4
    UNDONE = 5


@dataclass(frozen=True, slots=True)
class StepRow:
    """A checkpointed step. `position`: its place in the order of finishing, None before that. `overlapped`: it has no
    fixed place in that order, since another step ran at the same time, or a task other than the handler's own asked for
    it. `attempt`: how many times it was begun. `left`: the size of its output in bytes if the output was not loaded
    from the store (L55); then `output` is None. `arguments`: a digest of each argument, None where a replay may have
    others (L73)."""

    name: str
    kind: StepKind
    state: StepState
    has_undo: bool
    overlapped: bool
    position: int | None
    attempt: int
    output: StoredResult | None
    left: int = 0
    arguments: bytes | None = None

    @property
    def waits(self) -> bool:
        """Whether it is a wait that is not over yet."""
        return self.kind in (StepKind.SLEEP, StepKind.WAIT) and self.position is None


@dataclass(frozen=True, slots=True)
class Record:
    """The key's row as a claim read it. `fingerprint` and `canonical` are None where the handler compares none."""

    state: State
    fingerprint: bytes | None
    result: StoredResult | None = None
    canonical: bytes | None = None


class Mark(Enum):
    """The result of a claim that met no committed record."""

    CLAIMED = "claimed"  # inserted by this transaction: this worker runs the handler
    BUSY = "busy"  # a rival, another worker, holds the key and has not committed


Found = Record | Mark


class Signalled(StrEnum):
    """The answer to the sender of a signal. `stored`: the saga's next wait for this signal takes it. `early`: the saga
    has not begun, and the signal is kept for it. `ended`: the saga has ended or is being undone, and nothing is stored.
    """

    STORED = "stored"
    EARLY = "early"
    ENDED = "ended"


class Outcome(msgspec.Struct, frozen=True):
    """What happened to one delivery, by `kind`.

    * `result`, `content_type`: the stored result of an `applied` or `duplicate`, or the rejection
      (`{"code":…,"body":…}`) of a `failed` or of its duplicate.
    * `state`: the record's state, if there is a record.
    * `attempt`: the number of the run, from 1.
    * `due`: the seconds until the next attempt, for `retrying`.
    * `reason`: the dead letter's reason, if there is one.
    * `letter`: the dead letter's id, for a message whose key was `dead` already.
    * `error`: names the problem, and never quotes the payload.
    * `status`, `headers`: of a result that is an HTTP response; the headers keep their order.
    """

    kind: OutcomeKind
    result: bytes | None = None
    content_type: str | None = None
    state: State | None = None
    attempt: int = 1
    due: float = 0.0
    reason: str | None = None
    error: str | None = None
    letter: int | None = None
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
