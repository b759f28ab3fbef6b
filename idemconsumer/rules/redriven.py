"""Dead letters: which of them can be run once more, and what became of one that was to be."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

REASONS: Final = (
    "undecodable", "tombstone", "unreadable", "key_missing", "key_invalid", "oversized", "conflict",
    "attempts_exhausted", "killed_worker", "lost_connection", "contended", "saga_changed", "unknown_effect",
    "result_unencodable", "undo_failed", "max_duration",
)  # fmt: skip
"""Why a message, or a saga, is put aside."""

LEFT_OUT: Final = "are left out here"
"""What the error of a letter ends with that lacks headers."""


class Redriven(StrEnum):
    """What became of a letter that was to be redriven. The texts are those of `redrive_letter` in the database.

    `redrives`: its message waits in the queue. `resumes`: its saga is due, and goes on where it stopped. Nothing was
    done about the others: `incomplete`, its message is not whole; `saga`, it has become a saga's meanwhile; `busy`,
    somebody else decides about the letter or its key right now; `redriven`, somebody else has just redriven it;
    `decided`, its key is not DEAD any more.
    """

    REDRIVES = "redrives"
    RESUMES = "resumes"
    INCOMPLETE = "incomplete"
    SAGA = "saga"
    BUSY = "busy"
    REDRIVEN = "redriven"
    DECIDED = "decided"


def redrivable(reason: str, error: str, kept: int | None, body_size: int) -> bool:
    """Whether the letter has the whole message (O2): of a large one only the beginning is kept, and of what Kafka's
    client could not read what is left of it. `kept`: bytes of its body; None: its message was dropped (O5)."""
    return reason != "unreadable" and kept == body_size and not error.endswith(LEFT_OUT)
