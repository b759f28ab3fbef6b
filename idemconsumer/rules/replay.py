"""The rules of a saga's replay, as pure functions.

Theory of operation. A resumed handler runs from its start and asks for its steps by name. `answer` decides what each
one gets: its recorded result, or a run of its own. No recorded step may be skipped (L6): a handler that skips one is
not the handler that recorded it. In UNDOING no new step runs, so the first step without a record ends the replay, once
concurrent branches have asked for the steps to undo.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final

from idemconsumer.rules.values import State, StepRow, StepState


class StepAnswer(Enum):
    """The answer to a handler that asks for a step."""

    OUTPUT = "output"  # the step has finished: its stored output
    REJECTION = "rejection"  # the step was rejected: the same rejection again
    END = "end"  # the replay ends here
    RUN = "run"


def answer(row: StepRow | None, phase: State) -> StepAnswer:
    """`row`: the step's record. A call with an unknown outcome (INTENT) runs again, and an unfinished wait continues,
    but neither in UNDOING."""
    if row is not None and row.state is StepState.REJECTED:
        return StepAnswer.REJECTION
    if row is not None and row.state is not StepState.INTENT and not row.waits:
        return StepAnswer.OUTPUT
    return StepAnswer.END if phase is State.UNDOING else StepAnswer.RUN


PATCH: Final = "patch:"  # prefix of the record that says which branch a saga took at a patch (L30)


class Unasked:
    """The recorded steps that the handler has not asked for in this run. A step that overlapped another one has no
    fixed position, so it may be asked for at any time until the end (L13). Each answer takes constant time, however
    many steps are recorded."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self._placed: dict[str, StepRow] = {}
        self._movable: dict[str, StepRow] = {}
        self._calls: set[str] = set()
        self._patches: set[str] = set()
        for row in rows:
            if row.name.startswith(PATCH):
                if row.output is None or row.output.body != b"false":  # else the saga took the old branch
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
        """A step that the handler should have asked for by now (L6), if there is one."""
        for rows in (self._placed, self._movable if at_end else {}):
            if rows:  # `next` walks over the entries removed at a dict's front one by one, so an empty dict is skipped
                return next(iter(rows.values()))
        return None

    @property
    def calls(self) -> Collection[str]:
        """The names of the calls with an unknown outcome."""
        return self._calls

    @property
    def patches(self) -> Collection[str]:
        """The patches whose new branch the saga has taken."""
        return self._patches


def other_argument(recorded: bytes | None, now: bytes | None, size: int) -> int | None:
    """The index of the first argument of a step that differs from the recorded one (L73); None: all may be the same.
    Arguments are compared by digests of `size` bytes; a digest of zeros stands for an argument that cannot be
    compared."""
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

    A step that finished before `reached` does not depend on it, so an unchanged handler will ask for it. Whether it is
    to be undone is known once it is asked for (L25). `reached` None: the step has no record. `in_branch`: a branch
    asked for it, and the handler's own task may not be that far.
    """
    return {
        row.name
        for row in rows
        if row.state in (StepState.DONE, StepState.UNDO_INTENT) and not row.waits
        if in_branch or row.overlapped
        if reached is None or reached.position is None or (row.position or 0) < reached.position
    }


def ordered(rows: Iterable[StepRow]) -> list[StepRow]:
    """The finished steps in the order in which they finished, as an unchanged handler asks for them (L72)."""
    finished = [row for row in rows if row.position is not None and not row.name.startswith(PATCH)]
    return sorted(finished, key=lambda row: row.position or 0)


def recovery_point(rows: Iterable[StepRow]) -> str | None:
    """The name of the step that finished last; None before the first."""
    return finished[-1].name if (finished := ordered(rows)) else None
