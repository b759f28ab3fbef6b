"""How long messages have done nothing but collide, kept for one process (B15)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

_MOST: Final = 10_000  # keys; those of more are forgotten, oldest first
OF_LATE: Final = 60.0  # seconds: more than a lock is waited for, and the longest pause behind that


@dataclass(slots=True)
class Streak:
    """Collisions in a row, the `last` one when. `progress`: what has changed if something else happened to it in
    between, elsewhere."""

    handler: str
    since: float
    progress: object
    collisions: int = 0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def describe(self, contention: Exception) -> str:
        """For the dead letter."""
        return (
            f"{self.collisions} runs in {self.seconds / 60:.0f} minutes, each blocked by what another transaction "
            f"held; the last one: {contention}"
        )


class Contended:
    """By key, since a delivery that its broker takes back meanwhile comes again as another one."""

    def __init__(self) -> None:
        self._streaks: dict[bytes, Streak] = {}

    def collided(self, key: bytes, handler: str, progress: object = None) -> Streak:
        """One more collision."""
        streak = self._streaks.get(key)
        if streak is None or streak.progress != progress:
            if len(self._streaks) >= _MOST:
                self._streaks.pop(next(iter(self._streaks)))
            streak = self._streaks[key] = Streak(handler, time.monotonic(), progress)
        streak.collisions, streak.last = streak.collisions + 1, time.monotonic()
        return streak

    def ended(self, *keys: bytes) -> None:
        """A run of these ended in another way."""
        if self._streaks:
            for key in keys:
                self._streaks.pop(key, None)

    def lasts(self, handler: str) -> bool:
        """Whether a key of this handler has collided of late, and not ended since."""
        late = time.monotonic() - OF_LATE
        return any(streak.handler == handler and streak.last > late for streak in self._streaks.values())
