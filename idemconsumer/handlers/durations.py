"""Durations as users write them."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.arguments import Duration
from idemconsumer.logs import log

MAX_RUN = 20 * 86_400.0  # seconds; Postgres and the kernel count milliseconds in 31 bits
MAX_DURATION = 36_500 * 86_400.0  # seconds; far below the last timestamp of the database, thousands of years from now
MIN_LEASE = 1.0  # seconds; a lease is renewed three times in that time
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
    if seconds > MAX_DURATION:
        raise ConfigurationError(f"{given!r} is longer than 100 years; write at most 36500d")
    return seconds


def retry_delay(after: Duration, handler: str) -> float:
    """The seconds that Retry(after=) asks for; 0 for an invalid duration."""
    try:
        return parse_duration(after)
    except (ConfigurationError, OverflowError) as error:
        log.error("Retry(after=) is not a duration, retrying at once", handler=handler, error=str(error))
        return 0.0
