"""What a redelivery of a message would lead to now, given the record of its key (O7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from idemconsumer.rules.values import State

_SAYS: Final[Mapping[State | None, str]] = {
    None: "it would run: there is no record of its key",
    State.PENDING: "a duplicate: its message is stored in the database and runs when it is due; this one would not run",
    State.PROCESSING: "nothing would begin: its saga is stored here, and goes on by itself",
    State.UNDOING: "nothing would begin: its saga is being undone",
    State.COMPLETED: "a duplicate: it would not run, and would get the stored result",
    State.FAILED: "a duplicate: it would not run, and would get the stored rejection",
    State.DEAD: "it would not run: its key is dead, and the arrival would be counted",
}


def coming_again(
    state: State | None,
    *,
    compared: bool,
    over: bool,
    letter: int | None,
    lost: bool | None = None,
    awaited: str | None = None,
) -> str:
    """The answer in words (R12). `compared`: a different payload under the key would be a conflict. `over`: the record
    is past its retention. `letter`: the newest dead letter of the key that waits for a person. `lost`: None unless the
    record is of an HTTP request; then whether its owner was lost (H24). `awaited`: the source that will deliver the
    message that was accepted."""
    text = _SAYS[state]
    if state is State.PENDING and awaited is not None:
        text = f"it would run if it is the message that was accepted and sent to {awaited}; otherwise it is a duplicate"
    if state is State.PROCESSING and lost is not None:
        text = (
            "it would run again, unless its route says otherwise: the owner of its request was lost, and it is not "
            "known how far it got"
            if lost
            else "it would wait: its request runs"
        )
    if state is State.DEAD and letter is not None:
        text += f"; `dead redrive {letter}` runs it once more"
    if state is not None and compared:
        text += "; with another payload it would be a conflict, and a dead letter"
    if over and state in (State.COMPLETED, State.FAILED):
        text += "; its record is past its retention, and once that is pruned, it would run"
    return text
