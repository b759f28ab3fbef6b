"""The pauses between attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from idemconsumer.errors import ConfigurationError

MAX_UNSETTLED: Final = 30.0  # the longest pause, in seconds, for which a message stays unsettled and keeps its order
_MAX_UNSETTLED_IN_ALL: Final = 15 * 60.0  # RabbitMQ closes a channel that leaves a delivery unacked for 30 minutes


def backoff(attempt: int, *, first: float, cap: float, factor: float = 2.0, jitter: float = 0.0) -> float:
    """Seconds before the attempt after `attempt` (from 1). `jitter` in [0, 1) takes off up to a quarter."""
    return float(min(cap, first * factor ** min(attempt - 1, 64)) * (1 - jitter / 4))


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
        """Return the seconds to pause after `attempt` (from 1). `jitter`, in [0, 1), takes off up to a quarter."""
        return backoff(attempt, first=self.first, factor=self.factor, cap=self.cap, jitter=jitter)

    def stores(self, attempt: int) -> bool:
        """Return whether the pause after `attempt` is too long to leave the message unsettled at its broker, alone or
        together with the pauses before it. Then the message is stored."""
        return self.delay(attempt, 0.0) > MAX_UNSETTLED or self.longest(attempt) >= _MAX_UNSETTLED_IN_ALL

    def longest(self, pauses: int) -> float:
        """Return the longest total time, in seconds, that `pauses` pauses can take."""
        total, pause = 0.0, self.first
        for done in range(pauses):
            if pause >= self.cap:
                return total + (pauses - done) * self.cap
            total += pause
            pause *= self.factor
        return total
