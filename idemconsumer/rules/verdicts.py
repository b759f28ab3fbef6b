"""The rules of one message, as pure functions. Time and chance come in as numbers.

Theory of operation. A claim has one of three results: the key was free (this worker has it now), a rival (another
worker) holds it uncommitted, or there is a record. `judge` turns that into a verdict; the engine acts on it and reports
an outcome; `settle` says what the worker does with the delivery. How a record moves from state to state is in
docs/protocol.md.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from idemconsumer.errors import Reject, Retry
from idemconsumer.message.message import StoredResult
from idemconsumer.redaction import error_text
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import Found, Mark, Outcome, OutcomeKind, Record, State

MAX_CONTENTION: Final = 3_600.0  # seconds of nothing but collisions, after which a person is to decide (B15)
_MOST_TEXT: Final = 4_000  # characters


class Verdict(Enum):
    """What a claim result means for a delivery."""

    RUN = "run"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    DEAD = "dead"
    BUSY = "busy"


def judge(found: Found, fingerprint: bytes | None, canonical: bytes | None = None, *, pending: bool = False) -> Verdict:
    """A final record wins; another payload under the same key is a conflict, whatever the record's state (R12).

    `pending`: this is the delivery that a PENDING record waits for. Any other one is its duplicate (D19).
    """
    if found is Mark.CLAIMED:
        return Verdict.RUN
    if not isinstance(found, Record):
        return Verdict.BUSY
    if not _same(found, fingerprint, canonical):
        return Verdict.CONFLICT
    if found.state in (State.COMPLETED, State.FAILED) or (found.state is State.PENDING and not pending):
        return Verdict.DUPLICATE
    return Verdict.DEAD if found.state is State.DEAD else Verdict.BUSY


def _same(record: Record, fingerprint: bytes | None, canonical: bytes | None) -> bool:
    """Equal bytes or an equal value, each as far as both sides know it. An unknown one counts as equal (R26)."""
    if fingerprint is None or record.fingerprint is None or fingerprint == record.fingerprint:
        return True
    return canonical is not None and canonical == record.canonical


class Settlement(Enum):
    """What the worker does with a delivery once its outcome is known."""

    FINISH = "finish"  # settle it at the broker
    WAITING_ROOM = "waiting room"  # held unsettled in the waiting room; its lane continues
    HOLD = "hold"  # held unsettled outside its lane until it is due
    DROP = "drop"  # forgotten: the broker will deliver it again


_SETTLEMENTS: Final = {
    OutcomeKind.APPLIED: Settlement.FINISH,
    OutcomeKind.DUPLICATE: Settlement.FINISH,
    OutcomeKind.CONFLICT: Settlement.FINISH,
    OutcomeKind.FAILED: Settlement.FINISH,
    OutcomeKind.DEAD: Settlement.FINISH,
    OutcomeKind.BUSY: Settlement.WAITING_ROOM,
    OutcomeKind.RETRYING: Settlement.HOLD,
    OutcomeKind.FENCED: Settlement.HOLD,
    OutcomeKind.UNKNOWN: Settlement.HOLD,
    OutcomeKind.CANCELLED: Settlement.DROP,
    OutcomeKind.ABSENT: Settlement.DROP,
}


def settle(outcome: Outcome) -> Settlement:
    """Only a commit that is known finishes a delivery (R5); nothing is ever negatively acknowledged (D4).

    A saga's message is stored with its claim, and a message whose next attempt is due later is stored with its record.
    So both are settled at the broker before they have ended.
    """
    if outcome.state in (State.PENDING, State.PROCESSING, State.UNDOING):
        return Settlement.FINISH
    return _SETTLEMENTS[outcome.kind]


def final(
    kind: OutcomeKind, state: State, result: StoredResult | None, *, attempt: int = 1, reason: str | None = None
) -> Outcome:
    """The outcome for a record that exists."""
    if result is None:
        return Outcome(kind, state=state, attempt=attempt, reason=reason)
    return Outcome(
        kind,
        result=result.body,
        content_type=result.content_type,
        state=state,
        attempt=attempt,
        reason=reason,
        status=result.status,
        headers=result.headers,
    )


def refused(error: BaseException | None, fail_on: tuple[type[Exception], ...]) -> bool:
    """Whether `error` ends the message for good. A Retry asks for another attempt, whatever `fail_on` names, also
    inside a TaskGroup's error (B1)."""
    if isinstance(error, Reject):
        return True
    again = isinstance(error, Retry) or (isinstance(error, BaseExceptionGroup) and error.subgroup(Retry) is not None)
    return isinstance(error, fail_on) and not again


def named_refusal(error: BaseException) -> tuple[str, str | None]:
    """Code and body of the rejection for an error of `fail_on`: the name of its class, and its text."""
    return type(error).__name__, error_text(error)[:_MOST_TEXT] or None


class Failure(Enum):
    """What follows from a failed run, unless the handler rejected the message itself."""

    RETRY = "retry"
    DEAD = "dead"


def after_failure(*, attempts: int, max_attempts: int) -> Failure:
    """`attempts` includes this one."""
    return Failure.RETRY if attempts < max_attempts else Failure.DEAD


def contention_pause(collisions: int, chance: float) -> float:
    """Seconds before the next run, after `collisions` in a row (from 1), up to 30. `chance` in [0, 1) separates rivals.

    Short at first, since a hot row is free again within milliseconds; a lock that is held for minutes is tried less and
    less often.
    """
    return backoff(collisions, first=0.024, factor=1.2, cap=15.0) * (1 + chance)
