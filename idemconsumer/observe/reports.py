"""What a worker reports to its launcher: everything that it has counted, and its state."""

from __future__ import annotations

from collections import Counter

import msgspec

from idemconsumer.observe.counts import Counts
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.health import Phase


class HandlerState(msgspec.Struct, array_like=True):
    """The state of one handler now. `waiting`: deliveries in its waiting room, the oldest for `oldest` seconds;
    `held_up`: what holds it up (O34)."""

    lanes: int
    busy: int
    waiting: int
    oldest: float
    held_up: list[str] = msgspec.field(default_factory=list)


class PoolState(msgspec.Struct):
    """Connections in use, how many there may be, and how many callers wait for one."""

    used: int
    most: int
    pending: int


class Report(msgspec.Struct, kw_only=True):
    """The report of one worker. Times are seconds.

    `patience`, `stalled` and `lacking` are those of `rules.health.Standing`. By source: `lag`, and `up`, whether the
    worker has a session now. Values that do not exist (yet) are left out.
    """

    app: str
    phase: Phase
    patience: float
    counts: Counts
    stalled: dict[str, float] = msgspec.field(default_factory=dict)
    lacking: list[str] = msgspec.field(default_factory=list)
    handlers: dict[str, HandlerState] = msgspec.field(default_factory=dict)
    pools: dict[str, PoolState] = msgspec.field(default_factory=dict)
    lag: dict[str, Lag] = msgspec.field(default_factory=dict)
    up: dict[str, bool] = msgspec.field(default_factory=dict)
    in_hand: int = 0
    bytes_in_hand: int = 0


def encoded(report: Report) -> bytes:
    """The report, in one line."""
    return msgspec.json.encode(report)


def decoded(line: bytes) -> Report | None:
    """The report in this line; None for a line of another version."""
    try:
        return msgspec.json.decode(line, type=Report, dec_hook=_counter)
    except msgspec.DecodeError:
        return None


def _counter(kind: object, value: dict[str, int]) -> Counter[str]:
    return Counter(value)
