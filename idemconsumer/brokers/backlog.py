"""For how long the oldest message that nobody has taken can have been there, without a look at it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from idemconsumer.ports.broker import Lag


@dataclass(slots=True)
class Backlog:
    """Of a source that gives its messages in order, as far as it does. What is left was sent after `newest`, the last
    one that was delivered; and came after the last look at which nothing was left."""

    newest: datetime | None = None
    _empty_at: float | None = None

    def lag(self, messages: int, *, part: bool = False) -> Lag:
        """So many are left now. Seconds are by the clock of whoever sent the last one and by ours."""
        now = time.time()
        if not messages:
            self._empty_at = now
            return Lag(0, 0.0, part)
        if self.newest is None:
            return Lag(messages, None, part)
        since = max(self.newest.timestamp(), self._empty_at or 0.0)
        return Lag(messages, max(0.0, now - since), part)
