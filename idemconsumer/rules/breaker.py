"""Whether what a handler depends on is down, by how its messages end. Pure: times are given.

Theory of operation. When a database or a service that a handler calls is away, each of its messages fails, and soon all
of a backlog has used up its attempts. A message that can never succeed looks the same, but others beside it succeed. So
the sign is that *several messages in a row* fail, each for the first time, while nothing succeeds in between. One that
failed before says nothing new when it fails again: what is left of a backlog may be nothing but such messages.
How many are a sign depends on how many fail anyway: where a stream of bad ones comes beside the good ones, five in a
row are no news, and each such pause would hold up the good ones.

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
MOST: Final = 100  # messages in a row that are a sign, whatever was before
_CHANCE: Final = 1 / 3000  # of so many in a row by accident
_MEMORY: Final = 1 - 1 / 20  # of the share of bad ones: it follows the last 20 messages
FREE: Final = 86_400.0  # seconds for which failures cost no attempt
NEXT: Final = 0.1  # seconds until one that has not failed is tried: a service that is down is not asked more often
AGAIN: Final = 1.0  # seconds between two runs of those that have failed
HANGS: Final = 0.25  # seconds after which one that still runs keeps none waiting that has not failed


@dataclass(frozen=True, slots=True)
class HandlerHealth:
    """What is known of one handler. `failures`: since the last success. `bad`: the share of messages that failed while
    others succeeded. `since`: when its probing began. `next_run`: when the next one may run."""

    failures: int = 0
    bad: float = 0.0
    since: float | None = None
    next_run: float = -math.inf

    @property
    def probing(self) -> bool:
        return self.since is not None

    def is_free(self, now: float) -> bool:
        """Whether a failure costs no attempt."""
        return self.since is not None and now - self.since < FREE

    @property
    def needed(self) -> int:
        """How many in a row are a sign."""
        by_accident = math.log(_CHANCE) / math.log(self.bad) if self.bad else 0.0
        return max(IN_A_ROW, min(MOST, math.ceil(by_accident)))

    def succeeded(self, messages: int = 1) -> HandlerHealth:
        """So many were applied, or refused by the handler itself. What has failed since the last success was not down
        then; how many more failed while it was probed tells nothing, since that may have been an outage."""
        bad = 1 - (1 - self.bad) * _MEMORY**self.failures
        return HandlerHealth(bad=bad * _MEMORY**messages)

    def failed(self, now: float, *, first: bool) -> HandlerHealth:
        """A run failed; `first`: that message had not failed before."""
        if self.since is not None:
            return replace(self, next_run=now + NEXT)
        failures = self.failures + first
        if failures < self.needed:
            return replace(self, failures=failures)
        return replace(self, failures=failures, since=now, next_run=now + NEXT)
