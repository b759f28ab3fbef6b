"""How long a source waits for its next session, as a pure function (D6, D27)."""

from __future__ import annotations

from typing import Final

from idemconsumer.rules.backoff import backoff

SOON: Final = 2.0  # seconds within which what was away is tried again, so that nobody waits for what works
LONGEST: Final = 60.0  # while each session that is lost costs what it held a delivery


def session_pause(failures: int, *, counted: bool, jitter: float) -> float:
    """Seconds until the next session is opened. `failures`: so many in a row could not be opened, or ended before they
    got anything done. `counted`: what the last one held counts as delivered, and its broker drops what was delivered
    too often. `jitter` in [0, 1) takes off up to a quarter."""
    return backoff(max(1, failures), first=0.2, cap=LONGEST if counted else SOON, jitter=jitter)
