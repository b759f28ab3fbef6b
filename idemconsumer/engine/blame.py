"""Which message an error belongs to, and how the error is described to the person who can fix it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Final

from idemconsumer.errors import ConnectionLost, Reject
from idemconsumer.redaction import SHOWN, error_text, typed_text
from idemconsumer.rules.verdicts import named_refusal

_MOST_TEXT: Final = 4_000  # characters

_NOT_THEIRS = tuple(
    {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(Path(__file__).parent.parent)},
)


class HandlerFailed(Exception):
    """The handler of the group's message at `index` failed. None: the error cannot be attributed to one of several."""

    def __init__(self, index: int | None, error: Exception) -> None:
        super().__init__(index)
        self.index = index
        self.error = error

    @property
    def lost(self) -> ConnectionLost | None:
        """The error, if the connection broke: an outage, or the message's own doing (B13)."""
        lost = isinstance(self.error, ConnectionLost) and not self.error.by_function
        return self.error if lost else None  # type: ignore[return-value]


def rejection_of(error: BaseException) -> tuple[str, object, int | None]:
    """Code, body and status of a final refusal; an exception of `fail_on` gives its name and what it says."""
    return (error.code, error.body, error.status) if isinstance(error, Reject) else (*named_refusal(error), None)


def describe(error: BaseException) -> str:
    """For dead letters and histories, without the DETAIL of a database error (R13)."""
    return f"{typed_text(error)[:_MOST_TEXT]} ({where(error)})"


def said(error: BaseException) -> dict[str, object]:
    """For a line of the log: type and place, and what it says, unless the settings keep that out of logs (R13)."""
    fields: dict[str, object] = {"error": type(error).__name__, "where": where(error)}
    if SHOWN.text and (text := error_text(error)):
        fields["text"] = text[:_MOST_TEXT]
    return fields


def where(error: BaseException) -> str:
    """The innermost frame that is neither ours nor a library's: the line that the handler's author can fix."""
    if isinstance(error, ConnectionLost) and error.__cause__ is not None:
        error = error.__cause__  # what the handler was doing
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    frame = (theirs or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
