"""Whether what a handler depends on is down, by how its messages end. Pure: times are given.

Theory of operation. When a database or a service that a handler calls is away, each of its messages fails, and soon all
of a backlog has used up its attempts. A message that can never succeed looks the same, but others beside it succeed. So
the sign is that *several messages in a row* fail, each for the first time, while nothing succeeds in between. One that
failed before says nothing new when it fails again: what is left of a backlog may be nothing but such messages.

Then the handler is *probed*: one message runs at a time, and its failure costs no attempt. Messages that always fail
may be all that comes first, so those that have *not* failed are tried one soon after the other, which tells within
seconds whether it is an outage; those that have failed wait in quarantine, from where one is tried now and then. One
that hangs until its timeout must not hold up the others for so long, so the next one begins beside it. The first
success ends that, and from then on failures cost attempts again. If there is none for a day, the messages themselves
are to blame: their attempts count again, still one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

IN_A_ROW: Final = 5  # messages; where one in five can never succeed, so many come in a row once in 3,000
FREE: Final = 86_400.0  # seconds for which failures cost no attempt
NEXT: Final = 0.1  # seconds until one that has not failed is tried: a service that is down is not asked more often
AGAIN: Final = 1.0  # seconds between two runs of those that have failed
HANGS: Final = 0.25  # seconds after which one that still runs keeps none waiting that has not failed


@dataclass(frozen=True, slots=True)
class Health:
    """What is known of one handler. `since`: when its probing began. `next_run`: when the next one may run."""

    failures: int = 0
    since: float | None = None
    next_run: float = -math.inf

    @property
    def probing(self) -> bool:
        return self.since is not None

    def is_free(self, now: float) -> bool:
        """Whether a failure costs no attempt."""
        return self.since is not None and now - self.since < FREE

    def succeeded(self) -> Health:
        """A message was applied, or refused by the handler itself."""
        return Health()

    def failed(self, now: float, *, first: bool) -> Health:
        """A run failed; `first`: that message had not failed before."""
        if self.since is not None:
            return replace(self, next_run=now + NEXT)
        failures = self.failures + first
        if failures < IN_A_ROW:
            return replace(self, failures=failures)
        return Health(failures, since=now, next_run=now + NEXT)
