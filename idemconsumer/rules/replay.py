"""The rules of a saga's replay, as pure functions.

Theory of operation. A resumed handler runs from its start and asks for its steps by their names. `answer` says what
each one gets: its recorded result, or a run of its own. Nothing that is recorded may be skipped (L6): a handler that
skips a recorded step is not the one that recorded it. In UNDOING nothing new is run, so the first step without a record
ends the replay, after the branches beside it have asked for the steps to undo.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from idemconsumer.rules.values import State, StepRow, StepState


class Answer(Enum):
    """What a step gets when the handler asks for it."""

    OUTPUT = "output"  # it has finished: its stored output
    REJECTION = "rejection"  # it was refused: the same refusal again
    END = "end"  # there is nothing more to replay
    RUN = "run"


def answer(row: StepRow | None, phase: State) -> Answer:
    """`row` is what is recorded of the step. A call without a known outcome (INTENT) is run again, but never in
    UNDOING."""
    if row is not None and row.state is StepState.REJECTED:
        return Answer.REJECTION
    if row is not None and row.state is not StepState.INTENT:
        return Answer.OUTPUT
    return Answer.END if phase is State.UNDOING else Answer.RUN


def passed_over(rows: Iterable[StepRow], asked: Collection[str], *, at_end: bool) -> StepRow | None:
    """A recorded step that the handler should have asked for by now (L6).

    What overlapped another step, or has no known outcome, has no fixed place before the end (L13).
    """
    for row in rows:
        movable = row.overlapped or row.state is StepState.INTENT
        if row.name not in asked and (at_end or not movable):
            return row
    return None


def asked_by_branches(rows: Iterable[StepRow], reached: StepRow | None, *, in_branch: bool) -> set[str]:
    """The steps to undo that branches of the handler may still ask for when its replay ends at `reached` (L13).

    What finished before `reached` does not depend on it, so it is asked for unless the handler has changed. `reached`
    None: the step has no record. `in_branch`: a branch asked for it, and the handler's own task may be behind.
    """
    return {
        row.name
        for row in rows
        if row.has_undo and row.state in (StepState.DONE, StepState.UNDO_INTENT)
        if in_branch or row.overlapped
        if reached is None or (row.position or 0) < (reached.position or 0)
    }


def recovery_point(rows: Iterable[StepRow]) -> str | None:
    """The name of the last step to finish; None before the first."""
    finished = [row for row in rows if row.position is not None]
    return max(finished, key=lambda row: row.position or 0).name if finished else None
