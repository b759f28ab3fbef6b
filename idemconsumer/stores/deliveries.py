"""Rows of the delivery log as statements take them, and what is said when they cannot be written (O22)."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from idemconsumer.logs import log
from idemconsumer.ports.store import LoggedDeliveries
from idemconsumer.stores.literals import clean

T = TypeVar("T")
_LONGEST: Final = 20 * 86_400.0  # seconds, whose milliseconds are an integer of the database


def columns_of(logged: LoggedDeliveries) -> dict[str, Any]:
    """All as text, which is written into a statement ten times as fast as arrays are."""
    now = time.monotonic()
    return {
        "keep": logged.keep,
        "app": logged.app,
        "handler": logged.handler,
        "worker": logged.worker,
        "keys": _array(struct.unpack(f">{len(logged.keys)}q", b"".join([key[:8] for key in logged.keys]))),
        "sources": _lines(_alike(logged.sources)),
        "positions": _lines(logged.positions),
        "outcomes": _lines(_alike(logged.outcomes)),
        "attempts": _array(_alike(logged.attempts)),
        "ended": _array(_alike(_milliseconds(now, logged.ended))),
        "arrived": _array(_alike(_milliseconds(now, logged.arrived))),
    }


def first_bytes(key: bytes) -> int:
    """What the log has of a stored key."""
    return int.from_bytes(key[:8], signed=True)


def _alike(values: Sequence[T]) -> Sequence[T]:
    return values[:1] if values.count(values[0]) == len(values) else values


def _array(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _lines(texts: Sequence[str]) -> str:
    joined = "\n".join(texts)
    if joined.isascii() and "\0" not in joined and joined.count("\n") == len(texts) - 1:
        return joined
    return "\n".join(clean(text).replace("\n", " ") for text in texts)


def _milliseconds(now: float, times: Sequence[float]) -> list[int]:
    return [int(min(now - each, _LONGEST) * 1000) for each in times]


class Unlogged:
    """What keeps the delivery log from being written, said once."""

    def __init__(self) -> None:
        self._problem: str | None = None

    def heard(self, problem: str | None) -> None:
        """None: it was written."""
        if problem is not None and self._problem is None:
            log.warning("the delivery log cannot be written, messages run without it", error=problem)
        elif problem is None and self._problem is not None:
            log.info("the delivery log is written again")
        self._problem = problem
