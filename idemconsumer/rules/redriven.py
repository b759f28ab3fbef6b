"""Dead letters: which of them can be run once more, and the result of a redrive."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

REASONS: Final = (
    "undecodable", "tombstone", "unreadable", "key_missing", "key_invalid", "oversized", "conflict",
    "attempts_exhausted", "killed_worker", "lost_connection", "contended", "saga_changed", "unknown_effect",
    "result_unencodable", "undo_failed", "max_duration",
)  # fmt: skip
"""The reasons for which a message or a saga becomes a dead letter."""

LEFT_OUT: Final = "are left out here"
"""The end of the error text of a dead letter that lacks some headers."""


class Redriven(StrEnum):
    """The result of redriving a dead letter. The texts are those of `redrive_letter` in the database.

    `redrives`: its message waits in the queue. `resumes`: its saga is due, and continues where it stopped. With the
    others nothing was done: `incomplete`, the stored message is not whole; `saga`, the key belongs to a saga by now;
    `busy`, another client is deciding about the dead letter or its key right now; `redriven`, another client has just
    redriven it; `decided`, its key is no longer DEAD.
    """

    REDRIVES = "redrives"
    RESUMES = "resumes"
    INCOMPLETE = "incomplete"
    SAGA = "saga"
    BUSY = "busy"
    REDRIVEN = "redriven"
    DECIDED = "decided"


def redrivable(reason: str, error: str, kept: int | None, body_size: int) -> bool:
    """Whether the whole message is stored (O2): of a large message only the beginning is, and of one that Kafka's
    client could not read only the readable rest. `kept`: bytes of its body; None: the message was dropped (O5)."""
    return reason != "unreadable" and kept == body_size and not error.endswith(LEFT_OUT)
