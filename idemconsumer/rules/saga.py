"""The rules of a saga, as pure functions: of its attempts and its waits.

Theory of operation. `start` says whether an attempt may run the handler at all. When the run has failed,
`may_try_again` decides on another attempt; after the last one `after_last_attempt` decides how the saga ends. A refused
saga is undone, beginning with the last step to finish (`to_undo`, L7). A step whose end is not known is never undone on
a guess: a person decides.
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
MAX_DURATION: Final = "max_duration"  # the reason, or the code, of a saga that took longer than it may
CONFLICT: Final = "conflict"  # the code of a start under a key that has begun with another payload
EXISTS: Final = "already_exists"  # the code of one with on_existing="reject" under a key that is not new
ANY_VERSION: Final = "*"  # a person has decided that the saga may go on with the handler as it is now
CHILD: Final = "child:"  # begins what a saga waits for until a child has ended (L47)
GRACE: Final = 0.1  # seconds in which a handler that does not wait itself may ask for more
_LONGEST_NAME: Final = 200  # characters
_UNDECIDED: Final = (Fenced, StoreUnavailable, CommitUnknown, Contention)


def undecided(error: BaseException | None) -> bool:
    """Whether nothing follows from this for the saga. What a function raised of another app or pool is its failure
    (B12)."""
    return isinstance(error, _UNDECIDED) and not error.by_function


def parked(error: BaseException | None) -> bool:
    """Whether only a person can continue the saga."""
    return isinstance(error, SagaParked) and not error.by_function


class Start(Enum):
    """What an attempt begins with."""

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
    """`stale`: its worker was lost; a handler that `reconciles` is asked about such a saga first (L8).

    `suspect`: it may kill its workers, and then it has the handler's attempts. Others may have more, by the step that
    failed (L45). `begun_with` and `version` are the handler's version when the saga began and now. How an undoing saga
    ends is decided already, so its handler is not asked; the same goes for one that is to be
    `cancelled` (L50).
    """
    if suspect and attempt > max_attempts:
        return Start.KILLED_WORKER
    if begun_with not in (version, ANY_VERSION):
        return Start.OTHER_VERSION
    asked = stale and reconciles and phase is State.PROCESSING and not cancelled
    return Start.RECONCILE if asked else Start.RUN


def overdue_in(*, now: float, begun: float, max_duration: float | None) -> float | None:
    """In how many seconds a saga has taken as long as it may (L58), 0 if it has already; None: it has no limit."""
    return None if max_duration is None else max(0.0, begun + max_duration - now)


def may_try_again(*, attempt: int, max_attempts: int, progressed: bool = False) -> bool:
    """`attempt` is the one that failed. If it finished a step, it was the first one for what failed then (L10)."""
    return (1 if progressed else attempt) < max_attempts


def attempts_of_step(own: int | None, max_attempts: int) -> int:
    """After how many attempts since the last finished step a failure of this step is the last one (L45). `own`: what
    the step says; `max_attempts`: what its handler says."""
    return max_attempts if own is None else own


def attempts_of_undo(own: int | None, max_attempts: int) -> int:
    """The same for the step's undo. A step that may be tried only once must still be undone."""
    return max(attempts_of_step(own, max_attempts), max_attempts)


class LastResort(Enum):
    """How a saga ends that gets no other attempt."""

    UNDO = "undo"
    EXHAUSTED = "exhausted"  # put aside: nothing is there to undo
    UNKNOWN_EFFECT = "unknown_effect"  # put aside: how a call ended is not known


def after_last_attempt(rows: Iterable[StepRow], undoable: Collection[str] = (), *, misused: bool = False) -> LastResort:
    """A call without a known outcome comes first: what is to be undone is not known either (L7). `undoable` as in
    `to_undo`. `misused`: the handler's code is at fault, which says nothing against what it did (L74)."""
    steps = list(rows)
    if unknown_calls(steps):
        return LastResort.UNKNOWN_EFFECT
    return LastResort.UNDO if to_undo(steps, undoable) and not misused else LastResort.EXHAUSTED


def unknown_calls(rows: Iterable[StepRow]) -> list[str]:
    """The calls of unknown outcome, which are never undone on a guess."""
    return [row.name for row in rows if row.state is StepState.INTENT]


def to_undo(rows: Iterable[StepRow], undoable: Collection[str] = ()) -> list[StepRow]:
    """The steps to undo, beginning with the last to finish. An undo that was begun is run again. `undoable`: the steps
    for which the handler has an undo now, whether or not they were recorded with one (L25)."""
    todo = (
        row
        for row in rows
        if row.state is StepState.UNDO_INTENT
        or (row.state is StepState.DONE and (row.has_undo or row.name in undoable))
    )
    return sorted(todo, key=lambda row: row.position or 0, reverse=True)


def refusal(error: Exception, fail_on: tuple[type[Exception], ...]) -> Reject | None:
    """An error of a step as a final refusal, None if it is not one. An error of `fail_on` becomes what a resume raises.

    An error that says nothing about the step (a server that is down, an interruption, a cancellation) is not one, even
    where `fail_on` names it.
    """
    if isinstance(error, Reject):
        return error
    if not refused(error, fail_on) or isinstance(error, (Unavailable, Interrupted, SagaParked, SelfCancelled)):
        return None
    final = Reject(*named_refusal(error))
    final.__cause__ = error
    return final


def out_of_group(error: Exception, fail_on: tuple[type[Exception], ...]) -> Exception:
    """What left a TaskGroup: the Retry, if there is one (B1); the first error if all are refusals; else the group."""
    if not isinstance(error, ExceptionGroup):
        return error
    again = error.subgroup(Retry)
    if again is None and error.split(lambda each: _refusal_itself(each, fail_on))[1] is not None:
        return error
    return out_of_group((again or error).exceptions[0], fail_on)


def _refusal_itself(error: BaseException, fail_on: tuple[type[Exception], ...]) -> bool:
    return not isinstance(error, ExceptionGroup) and refused(error, fail_on)


# ------------------------------------------------------------------------------------------------------------ its waits
def stays(*, steps: bool, branches: bool, main: bool, quiet: float, patience: float) -> float:
    """For how many seconds a run with open waits goes on, after `quiet` seconds in which no step began or ended (L41).

    `steps`: one is in flight; its end is awaited, since to cut it off would repeat it. `branches`: one is between two
    steps, or is about to begin one, for which it has `patience` (L35); else it would have to wait for what it does not
    depend on. `main`: the handler's own task does not wait itself: it awaits its branches, as far as can be seen.
    """
    if steps:
        return math.inf
    if branches:
        return max(0.0, patience - quiet)
    return max(0.0, GRACE - quiet) if main else 0.0


def wrong_name(name: object) -> str | None:
    """What is wrong with the name of a signal, and what to write. One that is named like the end of a child would make
    whoever waits for that child due again and again."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        return f"{name!r:.60}; write a printable string of up to {_LONGEST_NAME} characters"
    if name.startswith(CHILD):
        return f"{name!r:.60}, and names that begin with {CHILD!r} are for the ends of child sagas; choose another"
    return None
