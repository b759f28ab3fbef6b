"""Durations as users write them, and the pauses between attempts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import structlog

from idemconsumer.errors import ConfigurationError
from idemconsumer.rules import verdicts

log = structlog.get_logger("idemconsumer")

Duration: TypeAlias = str | float | timedelta
MAX_INLINE_DELAY = 30.0  # seconds; the lane is blocked meanwhile (D7)
MIN_LEASE = 1.0  # seconds; it is renewed three times in that time
MAX_INLINE_TOTAL = 15 * 60.0  # seconds; RabbitMQ closes a channel that leaves a delivery unacked for 30 minutes
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", re.ASCII)


def parse_duration(value: Duration) -> float:
    """Seconds of "250ms", "10s", "5m", "2h", "14d", a number of seconds, or a timedelta.

    Raises ConfigurationError for anything else, for a negative duration, and for a text without its unit.
    """
    given: object = value
    seconds = math.nan
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, int | float) and not isinstance(given, bool):
        seconds = float(given)
    elif isinstance(given, str) and (parts := _DURATION.fullmatch(given)):
        seconds = float(parts[1]) * _UNITS[parts[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(
            f"{given!r} is not a duration; write a number with its unit (250ms, 10s, 5m, 2h, 14d), "
            "seconds as a number, or a timedelta"
        )
    return seconds


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses between attempts, in seconds: `first`, then each `factor` times the last, at most `cap`."""

    first: float = 0.5
    factor: float = 2.0
    cap: float = 30.0

    def __post_init__(self) -> None:
        if not (0 < self.first <= self.cap < math.inf and 1 < self.factor < math.inf):
            raise ConfigurationError(
                f"{self!r} is not a backoff; give seconds with 0 < first <= cap and a factor above 1 "
                "(for a constant pause, first == cap)"
            )

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds to pause after `attempt` (from 1). `jitter` in [0, 1) takes off up to a quarter."""
        return verdicts.backoff(attempt, first=self.first, factor=self.factor, cap=self.cap, jitter=jitter)

    def longest(self, pauses: int) -> float:
        """The most seconds that `pauses` of them can take together."""
        total, pause = 0.0, self.first
        for done in range(pauses):
            if pause >= self.cap:
                return total + (pauses - done) * self.cap
            total += pause
            pause *= self.factor
        return total


def retry_delay(after: Duration, handler: str) -> float:
    """Seconds that Retry(after=) asks for, bounded, since the delivery is held at its lane's head meanwhile."""
    try:
        seconds = parse_duration(after)
    except (ConfigurationError, OverflowError) as error:
        log.error("Retry(after=) is not a duration, retrying at once", handler=handler, error=str(error))
        return 0.0
    if seconds > MAX_INLINE_DELAY:
        log.warning("Retry(after=) shortened", handler=handler, asked=seconds, seconds=MAX_INLINE_DELAY)
    return min(seconds, MAX_INLINE_DELAY)
