"""The rules of a saga's replay, as pure functions.

Theory of operation. A resumed handler runs from its start and asks for its steps by their names. `answer` says what
each one gets: its recorded result, or a run of its own. Nothing that is recorded may be skipped (L6): a handler that
skips a recorded step is not the one that recorded it. In UNDOING nothing new is run, so the first step without a record
ends the replay, after the branches beside it have asked for the steps to undo.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

from idemconsumer.rules.values import State, StepRow, StepState


class StepAnswer(Enum):
    """What a step gets when the handler asks for it."""

    OUTPUT = "output"  # it has finished: its stored output
    REJECTION = "rejection"  # it was refused: the same refusal again
    END = "end"  # there is nothing more to replay
    RUN = "run"


def answer(row: StepRow | None, phase: State) -> StepAnswer:
    """`row` is what is recorded of the step. A call without a known outcome (INTENT) is run again, and a wait that is
    not over goes on, but never in UNDOING."""
    if row is not None and row.state is StepState.REJECTED:
        return StepAnswer.REJECTION
    if row is not None and row.state is not StepState.INTENT and not row.waits:
        return StepAnswer.OUTPUT
    return StepAnswer.END if phase is State.UNDOING else StepAnswer.RUN


PATCH: Final = "patch:"  # begins the name under which it is recorded which way a saga goes at a patch (L30)


class Unasked:
    """The recorded steps that the handler has not asked for in this run. What overlapped another step has no fixed
    place before the end (L13). Each answer takes the same time, however many steps are recorded."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self._placed: dict[str, StepRow] = {}
        self._movable: dict[str, StepRow] = {}
        self._calls: set[str] = set()
        self._patches: set[str] = set()
        for row in rows:
            if row.name.startswith(PATCH):
                if row.output is None or row.output.body != b"false":  # else it goes the old way
                    self._patches.add(row.name)
                continue
            (self._movable if row.overlapped else self._placed)[row.name] = row
            if row.state is StepState.INTENT:
                self._calls.add(row.name)

    def __bool__(self) -> bool:
        return bool(self._placed or self._movable)

    def ask(self, name: str) -> None:
        self._placed.pop(name, None)
        self._movable.pop(name, None)
        self._calls.discard(name)
        self._patches.discard(name)

    def passed_over(self, *, at_end: bool) -> StepRow | None:
        """A step that the handler should have asked for by now (L6)."""
        for rows in (self._placed, self._movable if at_end else {}):
            if (
                rows
            ):  # what was removed from a dict's front is passed over one by one, so an empty one is not looked into
                return next(iter(rows.values()))
        return None

    @property
    def calls(self) -> Collection[str]:
        """Calls of unknown outcome."""
        return self._calls

    @property
    def patches(self) -> Collection[str]:
        """Patches that the saga has taken."""
        return self._patches


def other_argument(recorded: bytes | None, now: bytes | None, size: int) -> int | None:
    """The first argument of a step that is not the recorded one (L73), counted from 0; None: all may be the same. They
    are compared by digests of `size` bytes, of which zeros stand for what cannot be compared."""
    if recorded is None or now is None or recorded == now:
        return None
    opaque = bytes(size)
    for start in range(0, max(len(recorded), len(now)), size):
        was, given = recorded[start : start + size], now[start : start + size]
        if was != given and not (was and given and opaque in (was, given)):
            return start // size
    return None


def asked_by_branches(rows: Iterable[StepRow], reached: StepRow | None, *, in_branch: bool) -> set[str]:
    """The finished steps that branches of the handler may still ask for when its replay ends at `reached` (L13).

    What finished before `reached` does not depend on it, so it is asked for unless the handler has changed. Whether it
    is to be undone is known once it is asked for (L25). `reached` None: the step has no record. `in_branch`: a branch
    asked for it, and the handler's own task may be behind.
    """
    return {
        row.name
        for row in rows
        if row.state in (StepState.DONE, StepState.UNDO_INTENT) and not row.waits
        if in_branch or row.overlapped
        if reached is None or reached.position is None or (row.position or 0) < reached.position
    }


def ordered(rows: Iterable[StepRow]) -> list[StepRow]:
    """The finished steps that a handler which fits them asks for, in the order in which they finished (L72)."""
    finished = [row for row in rows if row.position is not None and not row.name.startswith(PATCH)]
    return sorted(finished, key=lambda row: row.position or 0)


def recovery_point(rows: Iterable[StepRow]) -> str | None:
    """The name of the last step to finish; None before the first."""
    return finished[-1].name if (finished := ordered(rows)) else None
