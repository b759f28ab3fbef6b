"""The rules of a saga's attempts and waits, as pure functions.

Theory of operation. `start` says whether an attempt may run the handler at all. When the run has failed,
`may_try_again` decides on another attempt; after the last one `after_last_attempt` decides how the saga ends. A
rejected saga is undone, beginning with the step that finished last (`to_undo`, L7). A step with an unknown outcome is
never undone on a guess: a person decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

from idemconsumer.errors import (
    CommitUnknown,
    Contention,
    Fenced,
    Interrupted,
    Reject,
    Retry,
    SagaParked,
    SelfCancelled,
    StoreUnavailable,
    Unavailable,
)
from idemconsumer.rules.values import State, StepRow, StepState
from idemconsumer.rules.verdicts import named_refusal, refused

CANCELLED: Final = "cancelled"  # the code of the rejection
MAX_DURATION: Final = "max_duration"  # the dead letter's reason, or the rejection's code, after `max_duration`
CONFLICT: Final = "conflict"  # the code of a start under a key that has begun with another payload
EXISTS: Final = "already_exists"  # the code of a start with on_existing="reject" under a key that is not new
ANY_VERSION: Final = "*"  # a person has decided that the saga may continue with the current handler
CHILD: Final = "child:"  # prefix of the name of a wait for a child saga's end (L47)
GRACE: Final = 0.1  # seconds in which a handler's own task that does not wait may ask for another step
_LONGEST_NAME: Final = 200  # characters
_UNDECIDED: Final = (Fenced, StoreUnavailable, CommitUnknown, Contention)


def undecided(error: BaseException | None) -> bool:
    """Whether the error decides nothing for the saga. If a step's function raised it, about another app or pool, it is
    a failure of that step (B12)."""
    return isinstance(error, _UNDECIDED) and not error.by_function


def parked(error: BaseException | None) -> bool:
    """Whether only a person can continue the saga."""
    return isinstance(error, SagaParked) and not error.by_function


class Start(Enum):
    """How an attempt begins."""

    RUN = "run"
    RECONCILE = "reconcile"  # its worker was lost, and the handler can say whether the saga is done
    KILLED_WORKER = "killed_worker"  # too many workers ended while it ran
    OTHER_VERSION = "other_version"


def start(
    *,
    stale: bool,
    phase: State,
    reconciles: bool,
    suspect: bool,
    attempt: int,
    max_attempts: int,
    begun_with: str | None,
    version: str | None,
    cancelled: bool = False,
) -> Start:
    """`stale`: the saga's worker was lost; a handler that `reconciles` is asked about such a saga first (L8).

    `suspect`: the saga may kill its workers, and then it has only the handler's attempts. Others may have more, by the
    step that failed (L45). `begun_with` and `version`: the handler's version when the saga began, and now. How a saga
    in UNDOING ends is decided already, so its handler is not asked to reconcile; nor is it for a saga that is to be
    `cancelled` (L50).
    """
    if suspect and attempt > max_attempts:
        return Start.KILLED_WORKER
    if begun_with not in (version, ANY_VERSION):
        return Start.OTHER_VERSION
    asked = stale and reconciles and phase is State.PROCESSING and not cancelled
    return Start.RECONCILE if asked else Start.RUN


def overdue_in(*, now: float, begun: float, max_duration: float | None) -> float | None:
    """The seconds until the saga's `max_duration` is over (L58), 0 if it is over; None: the saga has no limit."""
    return None if max_duration is None else max(0.0, begun + max_duration - now)


def may_try_again(*, attempt: int, max_attempts: int, progressed: bool = False) -> bool:
    """`attempt`: the one that failed. If it finished a step, it counts as the first one of the step that failed then
    (L10)."""
    return (1 if progressed else attempt) < max_attempts


def attempts_of_step(own: int | None, max_attempts: int) -> int:
    """How many attempts a step has since the last finished step (L45). `own`: the step's own limit. `max_attempts`:
    that of its handler."""
    return max_attempts if own is None else own


def attempts_of_undo(own: int | None, max_attempts: int) -> int:
    """The same for the step's undo, which never has fewer than the handler's: a step with one attempt must be undone
    all the same."""
    return max(attempts_of_step(own, max_attempts), max_attempts)


class LastResort(Enum):
    """How a saga ends that gets no further attempt."""

    UNDO = "undo"
    EXHAUSTED = "exhausted"  # a dead letter: there is nothing to undo
    UNKNOWN_EFFECT = "unknown_effect"  # a dead letter: the outcome of a call is not known


def after_last_attempt(rows: Iterable[StepRow], undoable: Collection[str] = (), *, misused: bool = False) -> LastResort:
    """A call with an unknown outcome takes precedence: what to undo is not known either (L7). `undoable` as in
    `to_undo`. `misused`: the handler's code is at fault, so the finished steps are not undone (L74)."""
    steps = list(rows)
    if unknown_calls(steps):
        return LastResort.UNKNOWN_EFFECT
    return LastResort.UNDO if to_undo(steps, undoable) and not misused else LastResort.EXHAUSTED


def unknown_calls(rows: Iterable[StepRow]) -> list[str]:
    """The names of the calls with an unknown outcome, which are never undone on a guess."""
    return [row.name for row in rows if row.state is StepState.INTENT]


def to_undo(rows: Iterable[StepRow], undoable: Collection[str] = ()) -> list[StepRow]:
    """The steps to undo, beginning with the one that finished last. An undo that was begun is run again. `undoable`:
    the steps for which the handler has an undo now, whether or not they were recorded with one (L25)."""
    todo = (
        row
        for row in rows
        if row.state is StepState.UNDO_INTENT
        or (row.state is StepState.DONE and (row.has_undo or row.name in undoable))
    )
    return sorted(todo, key=lambda row: row.position or 0, reverse=True)


def refusal(error: Exception, fail_on: tuple[type[Exception], ...]) -> Reject | None:
    """A step's error as a final rejection, None if it is not one. On resume, an error of `fail_on` is raised as this
    Reject.

    An error that says nothing about the step (an outage, an interruption, a cancellation) is not final, even where
    `fail_on` names it.
    """
    if isinstance(error, Reject):
        return error
    if not refused(error, fail_on) or isinstance(error, (Unavailable, Interrupted, SagaParked, SelfCancelled)):
        return None
    final = Reject(*named_refusal(error))
    final.__cause__ = error
    return final


def out_of_group(error: Exception, fail_on: tuple[type[Exception], ...]) -> Exception:
    """The error for a TaskGroup's: its Retry, if there is one (B1); its first error if all are rejections; else the
    group."""
    if not isinstance(error, ExceptionGroup):
        return error
    again = error.subgroup(Retry)
    if again is None and error.split(lambda each: _refusal_itself(each, fail_on))[1] is not None:
        return error
    return out_of_group((again or error).exceptions[0], fail_on)


def _refusal_itself(error: BaseException, fail_on: tuple[type[Exception], ...]) -> bool:
    return not isinstance(error, ExceptionGroup) and refused(error, fail_on)


# ----------------------------------------------------------------------------------------------------- a saga's waits
def stays(*, steps: bool, branches: bool, main: bool, quiet: float, patience: float) -> float:
    """For how many seconds a run with open waits continues, once no step began or ended for `quiet` seconds (L41).

    `steps`: a step is in flight; its end is awaited, since the saga would repeat a step that was cut off. `branches`: a
    branch is between two steps, or is about to begin one; it has `patience` seconds for that (L35), or it would have to
    wait for something that it does not depend on. `main`: the handler's own task is not in a wait: as far as can be
    seen, it awaits its branches.
    """
    if steps:
        return math.inf
    if branches:
        return max(0.0, patience - quiet)
    return max(0.0, GRACE - quiet) if main else 0.0


def wrong_name(name: object) -> str | None:
    """What is wrong with the name of a signal, and what to write. A signal named like the end of a child would make the
    saga that waits for that child due again and again."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        return f"{name!r:.60}; write a printable string of up to {_LONGEST_NAME} characters"
    if name.startswith(CHILD):
        return f"{name!r:.60}, and names that begin with {CHILD!r} are for the ends of child sagas; choose another"
    return None
