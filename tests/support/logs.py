"""What was logged; the fixture `logged` captures it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Entry: TypeAlias = dict[str, Any]


class LogCapture(logging.Handler):
    """Each event of idemconsumer, with its level, its fields and the text of its exception."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def emit(self, record: logging.LogRecord) -> None:
        entry: Entry = {"event": getattr(record, "event", record.msg), "log_level": record.levelname.lower()}
        if isinstance(record.args, dict):
            entry |= record.args
        if record.exc_text:
            entry["exception"] = record.exc_text
        self.entries.append(entry)


@contextmanager
def capturing() -> Iterator[LogCapture]:
    """Also what is logged at debug."""
    logger, capture = logging.getLogger("idemconsumer"), LogCapture()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(capture)
    try:
        yield capture
    finally:
        logger.removeHandler(capture)
        logger.setLevel(level)


@contextmanager
def capture_logs() -> Iterator[list[Entry]]:
    """As `capturing`: the entries."""
    with capturing() as capture:
        yield capture.entries


def entries(logged: LogCapture, event: str) -> list[Entry]:
    return [entry for entry in logged.entries if entry["event"] == event]


def times(logged: LogCapture, event: str) -> int:
    return len(entries(logged, event))
