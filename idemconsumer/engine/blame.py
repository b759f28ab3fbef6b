"""Which message an error belongs to, how the error is described to the person who can fix it, and what is logged about
messages that were not applied: which one, why and where (O9), and many similar ones once (O10)."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from idemconsumer.engine.work import Work
from idemconsumer.errors import ConnectionLost, Reject
from idemconsumer.observe.summing import Summing
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
        """The error, if the connection broke: an outage, or caused by the message (B13)."""
        lost = isinstance(self.error, ConnectionLost) and not self.error.by_function
        return self.error if lost else None  # type: ignore[return-value]


def rejection_of(error: BaseException) -> tuple[str, object, int | None]:
    """Code, body and status of a final rejection; an exception of `fail_on` gives the name of its class and its
    text."""
    return (error.code, error.body, error.status) if isinstance(error, Reject) else (*named_refusal(error), None)


def describe(error: BaseException) -> str:
    """The error's text for dead letters and histories, without the DETAIL of a database error (R13)."""
    return f"{typed_text(error)[:_MOST_TEXT]} ({where(error)})"


def said(error: BaseException) -> dict[str, object]:
    """The error's fields of a log line: type and place, and its text unless the settings keep it out of logs (R13)."""
    fields: dict[str, object] = {"error": type(error).__name__, "where": where(error)}
    if SHOWN.text and (text := error_text(error)):
        fields["text"] = text[:_MOST_TEXT]
    return fields


def where(error: BaseException) -> str:
    """The innermost frame that is neither ours nor a library's: the line that the handler's author can fix."""
    if isinstance(error, ConnectionLost) and error.__cause__ is not None:
        error = error.__cause__  # raised in the handler, by the statement that met the loss
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown"
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    frame = (theirs or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"


def _nobody(error: BaseException) -> None:
    return


class Telling:
    """Logs the failures of one engine. With `every` each failure has a line of its own, with its traceback. `failed` is
    called with each error with which a message has failed, when it is logged or counted."""

    def __init__(self, *, every: bool = False, failed: Callable[[BaseException], None] = _nobody) -> None:
        self._summing = Summing(every=every)
        self._failed = failed

    def failed(
        self, event: str, work: Work, attempt: int, error: BaseException, kind: dict[str, object] | None = None,
        **its: object,
    ) -> None:  # fmt: skip
        """A run failed with `error`. `kind`: further fields that distinguish this kind of failure. `its`: further
        fields of this one failure."""
        self._failed(error)
        fields, text = _kind(work, error)
        its = (
            work.named | {"attempt": attempt} | text | {name: value for name, value in its.items() if value is not None}
        )
        self._summing.say(logging.WARNING, event, f"{event} again", fields | (kind or {}), its, error)

    def dead(
        self, work: Work, attempt: int, reason: str, letter: int | None, detail: str, error: BaseException | None
    ) -> None:
        """The message's dead letter is committed. `error` is the cause; if that is not an exception, `detail` is."""
        if error is not None:
            self._failed(error)
        fields, text = _kind(work, error) if error is not None else ({"handler": work.handler.name}, {"detail": detail})
        its = work.named | {"attempt": attempt, "letter": letter} | text
        self._summing.say(logging.ERROR, "dead letter", "dead letters", fields | {"reason": reason}, its)

    def dead_again(self, work: Work, reason: str | None, letter: int | None) -> None:
        """A duplicate of a dead message arrived; it is logged (O6)."""
        event, fields = "duplicate of a dead message", {"handler": work.handler.name, "reason": reason}
        its = work.named | {"letter": letter}
        self._summing.say(logging.INFO, event, "duplicates of dead messages", fields, its)

    def rejected(self, work: Work, attempt: int, error: BaseException) -> None:
        """The message's rejection is committed."""
        fields, text = _kind(work, error)
        self._summing.say(logging.INFO, "rejected", "rejected again", fields, work.named | {"attempt": attempt} | text)

    def close(self) -> None:
        """Log what is counted so far."""
        self._summing.close()


def _kind(work: Work, error: BaseException) -> tuple[dict[str, object], dict[str, object]]:
    """The fields that make failures one kind, and the error's text."""
    fields: dict[str, object] = {"handler": work.handler.name, **said(error)}
    return fields, {"text": fields.pop("text")} if "text" in fields else {}
