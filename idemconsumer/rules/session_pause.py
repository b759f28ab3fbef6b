"""How long a source waits before it opens its next session, as a pure function (D6, D27)."""

from __future__ import annotations

from typing import Final

from idemconsumer.rules.backoff import backoff

SOON: Final = 2.0  # seconds: a server that is back is noticed within this time
LONGEST: Final = 60.0  # seconds, while each lost session costs the messages that it held one delivery


def session_pause(failures: int, *, counted: bool, jitter: float) -> float:
    """Seconds until the next session is opened. `failures`: how many in a row could not be opened, or ended before any
    progress. `counted`: the messages that the last session held count as delivered, and the broker drops a message
    after too many deliveries. `jitter` in [0, 1) takes off up to a quarter."""
    return backoff(max(1, failures), first=0.2, cap=LONGEST if counted else SOON, jitter=jitter)
