"""When an event that repeats itself is said in the log (O10). Pure: times are given.

The first one of a kind is said in full. Those that follow are counted, and said together: after ten seconds, then after
twenty, and so on up to five minutes. One that comes after ten minutes without any is a first one again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

QUIET: Final = 600.0  # seconds
_FIRST, _LAST = 10.0, 300.0  # seconds between two lines about one kind; they double


@dataclass(frozen=True, slots=True)
class Repeats:
    """What is known of one kind of event. `last`: when it came last; `said`: when a line was last written about it;
    `unsaid`: how many came since."""

    last: float
    said: float
    unsaid: int = 0
    pause: float = _FIRST

    @property
    def due(self) -> float | None:
        """When those that are unsaid are to be said; None where there are none."""
        return self.said + self.pause if self.unsaid else None

    def told(self, now: float) -> Repeats:
        """A line was written about all of them."""
        return replace(self, said=now, unsaid=0, pause=min(_LAST, 2 * self.pause))


def came(before: Repeats | None, now: float) -> Repeats:
    """One more came. With none `unsaid` it is a first one."""
    if before is None or (not before.unsaid and now - before.last >= QUIET):
        return Repeats(now, now)
    return replace(before, last=now, unsaid=before.unsaid + 1)
