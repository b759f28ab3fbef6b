"""What a worker tells its launcher about itself: all that it has counted, and how it stands."""

from __future__ import annotations

from collections import Counter

import msgspec

from idemconsumer.observe.counts import Counts
from idemconsumer.ports.broker import Lag
from idemconsumer.rules.health import Phase


class HandlerState(msgspec.Struct, array_like=True):
    """Of one handler, now. `waiting`: deliveries in its waiting room, the oldest for `oldest` seconds; `held_up`: by
    what it is (O34)."""

    lanes: int
    busy: int
    waiting: int
    oldest: float
    held_up: list[str] = msgspec.field(default_factory=list)


class PoolState(msgspec.Struct):
    """Connections in use, how many there may be, and who waits for one."""

    used: int
    most: int
    pending: int


class Report(msgspec.Struct, kw_only=True):
    """Of one worker. Times are seconds.

    `patience`, `stalled` and `lacking` are those of `rules.health.Standing`. `lag` and `up`, whether it has a session
    now, are by source. What is not there
    (yet) is left out.
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
    """In one line."""
    return msgspec.json.encode(report)


def decoded(line: bytes) -> Report | None:
    """None for a line of another version."""
    try:
        return msgspec.json.decode(line, type=Report, dec_hook=_counter)
    except msgspec.DecodeError:
        return None


def _counter(kind: object, value: dict[str, int]) -> Counter[str]:
    return Counter(value)
