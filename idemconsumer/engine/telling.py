"""What the log says of messages that were not applied: which one, why and where (O9), and of many alike once (O10)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from idemconsumer.engine.blame import said
from idemconsumer.engine.work import Work
from idemconsumer.observe.summing import Summing


def _nobody(error: BaseException) -> None:
    return


class Telling:
    """Of one engine. With `every` each failure has a line of its own, with its traceback. `failed` is called with each
    error that a message has failed with, when its line is said or counted."""

    def __init__(self, *, every: bool = False, failed: Callable[[BaseException], None] = _nobody) -> None:
        self._summing = Summing(every=every)
        self._failed = failed

    def failed(
        self, event: str, work: Work, attempt: int, error: BaseException, kind: dict[str, object] | None = None,
        **its: object,
    ) -> None:  # fmt: skip
        """A run failed with `error`. `kind`: what else distinguishes this kind of failure; `its`: what else is known of
        this one."""
        self._failed(error)
        fields, text = _kind(work, error)
        its = (
            work.named | {"attempt": attempt} | text | {name: value for name, value in its.items() if value is not None}
        )
        self._summing.say(logging.WARNING, event, f"{event} again", fields | (kind or {}), its, error)

    def dead(
        self, work: Work, attempt: int, reason: str, letter: int | None, detail: str, error: BaseException | None
    ) -> None:
        """Its dead letter is committed. `error` is why, or, where that is no exception, `detail`."""
        if error is not None:
            self._failed(error)
        fields, text = _kind(work, error) if error is not None else ({"handler": work.handler.name}, {"detail": detail})
        its = work.named | {"attempt": attempt, "letter": letter} | text
        self._summing.say(logging.ERROR, "dead letter", "dead letters", fields | {"reason": reason}, its)

    def dead_again(self, work: Work, reason: str | None, letter: int | None) -> None:
        """O6."""
        event, fields = "duplicate of a dead message", {"handler": work.handler.name, "reason": reason}
        its = work.named | {"letter": letter}
        self._summing.say(logging.INFO, event, "duplicates of dead messages", fields, its)

    def rejected(self, work: Work, attempt: int, error: BaseException) -> None:
        """Its rejection is committed."""
        fields, text = _kind(work, error)
        self._summing.say(logging.INFO, "rejected", "rejected again", fields, work.named | {"attempt": attempt} | text)

    def close(self) -> None:
        """Say what is counted so far."""
        self._summing.close()


def _kind(work: Work, error: BaseException) -> tuple[dict[str, object], dict[str, object]]:
    """What makes failures one kind, and what the error says."""
    fields: dict[str, object] = {"handler": work.handler.name, **said(error)}
    return fields, {"text": fields.pop("text")} if "text" in fields else {}
