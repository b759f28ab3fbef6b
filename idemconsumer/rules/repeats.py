"""When a repeated event is logged (O10). Pure: times are given.

The first event of a kind is logged in full. The following ones are counted and logged together: after ten seconds, then
after twenty, and so on up to five minutes. An event after ten minutes without one counts as a first one again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

QUIET: Final = 600.0  # seconds
_FIRST, _LAST = 10.0, 300.0  # seconds between two lines about one kind; the pause doubles each time


@dataclass(frozen=True, slots=True)
class Repeats:
    """One kind of event. `last`: when it last occurred. `said`: when it was last logged. `unsaid`: how many events were
    not logged since."""

    last: float
    said: float
    unsaid: int = 0
    pause: float = _FIRST

    @property
    def due(self) -> float | None:
        """When the events not logged yet are due to be logged; None if there are none."""
        return self.said + self.pause if self.unsaid else None

    def told(self, now: float) -> Repeats:
        """All events so far were logged."""
        return replace(self, said=now, unsaid=0, pause=min(_LAST, 2 * self.pause))


def came(before: Repeats | None, now: float) -> Repeats:
    """One more event occurred. If `unsaid` is 0, it counts as a first one, to be logged in full."""
    if before is None or (not before.unsaid and now - before.last >= QUIET):
        return Repeats(now, now)
    return replace(before, last=now, unsaid=before.unsaid + 1)
