"""What was logged; the fixture `logged` captures it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from structlog.testing import LogCapture


def entries(logged: LogCapture, event: str) -> list[MutableMapping[str, Any]]:
    return [entry for entry in logged.entries if entry["event"] == event]


def times(logged: LogCapture, event: str) -> int:
    return len(entries(logged, event))
