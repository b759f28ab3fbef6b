"""The pauses between attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.verdicts import backoff


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
        return backoff(attempt, first=self.first, factor=self.factor, cap=self.cap, jitter=jitter)

    def longest(self, pauses: int) -> float:
        """The most seconds that `pauses` of them can take together."""
        total, pause = 0.0, self.first
        for done in range(pauses):
            if pause >= self.cap:
                return total + (pauses - done) * self.cap
            total += pause
            pause *= self.factor
        return total
