"""The progress of an accepted message, as a pure function of its record (H42)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from idemconsumer.rules.values import State

NOT_IN_TIME: Final = "not_in_time"
"""The code of a rejection because of `max_age` (H44). Its HTTP status is NOT_IN_TIME_STATUS."""
NOT_IN_TIME_STATUS: Final = 504


class Progress(StrEnum):
    """How far an accepted message has come.

    * `unknown`: there is no record, because the message was never accepted, or its record is pruned.
    * `pending`: it waits to run, for the first time or once more.
    * `running`: a worker is running it.
    * `done`, `failed`: final.
    * `dead`: it waits for a person.
    """

    UNKNOWN = "unknown"
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"


_OF: Final = {
    State.PENDING: Progress.PENDING,
    State.PROCESSING: Progress.RUNNING,
    State.UNDOING: Progress.RUNNING,
    State.COMPLETED: Progress.DONE,
    State.FAILED: Progress.FAILED,
    State.DEAD: Progress.DEAD,
}


def progress(state: State | None, *, held: bool = False) -> Progress:
    """`held`: the key of a PENDING record is locked, so a worker is running it."""
    if state is None:
        return Progress.UNKNOWN
    return Progress.RUNNING if held else _OF[state]
