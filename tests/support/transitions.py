"""How a record moves, as a table. No engine reads it: one test compares it with what workers write, another with the
diagram in docs/protocol.md."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from idemconsumer.rules.values import ENDED, State


class Event(StrEnum):
    """What moves a record."""

    CLAIM = "claim"
    COMPLETE = "complete"
    REJECT = "reject"
    EXHAUST = "exhaust"
    RETRY = "retry"
    REJECT_UNDO = "reject, steps done"
    UNDONE = "undone"


TRANSITIONS: Final[dict[tuple[State | None, Event], State]] = {
    (None, Event.CLAIM): State.PROCESSING,
    (State.PENDING, Event.CLAIM): State.PROCESSING,
    (State.PROCESSING, Event.COMPLETE): State.COMPLETED,
    (State.PROCESSING, Event.REJECT): State.FAILED,
    (State.PROCESSING, Event.EXHAUST): State.DEAD,
    (State.PROCESSING, Event.RETRY): State.PENDING,
    (State.PROCESSING, Event.REJECT_UNDO): State.UNDOING,
    (State.UNDOING, Event.UNDONE): State.FAILED,
    (State.UNDOING, Event.EXHAUST): State.DEAD,
}


def diagram() -> str:
    """TRANSITIONS as a Mermaid state diagram; the docs hold exactly this text."""
    arrows = [
        f"    {'[*]' if state is None else state.name} --> {after.name}: {event}"
        for (state, event), after in TRANSITIONS.items()
    ]
    ends = [f"    {state.name} --> [*]" for state in ENDED]
    return "\n".join(["stateDiagram-v2", *arrows, *ends])
