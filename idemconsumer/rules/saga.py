"""The rules of a saga's attempts, as pure functions.

Theory of operation. `start` says whether an attempt may run the handler at all. When the run has failed,
`may_try_again` decides on another attempt; after the last one `after_last_attempt` decides how the saga ends. A refused
saga is undone, beginning with the last step to finish (`to_undo`, L7). A step whose end is not known is never undone on
a guess: a person decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from idemconsumer.errors import (
    CommitUnknown,
    Contention,
    Fenced,
    Interrupted,
    Reject,
    SagaParked,
    SelfCancelled,
    StoreUnavailable,
    Unavailable,
)
from idemconsumer.rules.values import State, StepRow, StepState

ANY_VERSION: Final = "*"  # a person has decided that the saga may go on with the handler as it is now
UNDECIDED: Final = (Fenced, StoreUnavailable, CommitUnknown, Contention)  # after these, nothing follows for the saga


class Start(Enum):
    """What an attempt begins with."""

    RUN = "run"
    RECONCILE = "reconcile"  # its worker was lost, and the handler can say whether the saga is done
    REVIEW = "review"  # its worker was lost, and a person is to decide
    KILLED_WORKER = "killed_worker"  # too many workers ended while it ran
    OTHER_VERSION = "other_version"


def start(
    *,
    stale: bool,
    phase: State,
    reconciles: bool,
    review: bool,
    attempt: int,
    max_attempts: int,
    begun_with: str | None,
    version: str | None,
) -> Start:
    """`stale`: its worker was lost; `review`: a person decides about such a saga, unless its handler `reconciles` (L8).

    `begun_with` and `version` are the handler's version when the saga began and now. How an undoing saga ends is
    decided already, so its handler is not asked.
    """
    reconcile = stale and reconciles and phase is State.PROCESSING
    if stale and review and not reconcile:
        return Start.REVIEW
    if attempt > max_attempts:
        return Start.KILLED_WORKER
    if begun_with not in (version, ANY_VERSION):
        return Start.OTHER_VERSION
    return Start.RECONCILE if reconcile else Start.RUN


def may_try_again(*, attempt: int, max_attempts: int, progressed: bool = False) -> bool:
    """`attempt` is the one that failed. If it finished a step, the next attempt is the first again (L10)."""
    return progressed or attempt < max_attempts


class LastResort(Enum):
    """How a saga ends that gets no other attempt."""

    UNDO = "undo"
    EXHAUSTED = "exhausted"  # put aside: nothing is there to undo
    UNKNOWN_EFFECT = "unknown_effect"  # put aside: how a call ended is not known


def after_last_attempt(rows: Iterable[StepRow]) -> LastResort:
    """A call without a known outcome comes first: what is to be undone is not known either (L7)."""
    steps = list(rows)
    if any(row.state is StepState.INTENT for row in steps):
        return LastResort.UNKNOWN_EFFECT
    if any(row.has_undo and row.state is StepState.DONE for row in steps):
        return LastResort.UNDO
    return LastResort.EXHAUSTED


def to_undo(rows: Iterable[StepRow]) -> list[StepRow]:
    """The steps to undo, beginning with the last to finish. An undo that was begun is run again."""
    todo = (row for row in rows if row.has_undo and row.state in (StepState.DONE, StepState.UNDO_INTENT))
    return sorted(todo, key=lambda row: row.position or 0, reverse=True)


def refusal(error: Exception, fail_on: tuple[type[Exception], ...]) -> Reject | None:
    """An error of a step as a final refusal, None if it is not one. An error of `fail_on` becomes what a resume raises.

    An error that says nothing about the step (a server that is down, an interruption, a cancellation) is not one, even
    where `fail_on` names it.
    """
    if isinstance(error, Reject):
        return error
    if not isinstance(error, fail_on) or isinstance(error, (Unavailable, Interrupted, SagaParked, SelfCancelled)):
        return None
    final = Reject(type(error).__name__)
    final.__cause__ = error
    return final


def sole_refusal(error: Exception, kinds: tuple[type[Exception], ...]) -> Exception:
    """The first error of a TaskGroup if all that left it are of `kinds`; else `error` as it is."""
    if not isinstance(error, ExceptionGroup) or error.split(kinds)[1] is not None:
        return error
    return sole_refusal(error.exceptions[0], kinds)
