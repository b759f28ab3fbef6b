"""The circuit breaker: detects from the ends of a handler's messages that a dependency is down. Pure: times are given.

Theory of operation. While a database or a service that a handler calls is down, each of its messages fails, and soon
the whole backlog has used up its attempts. A message that can never succeed looks the same, but other messages succeed
beside it. So an outage is assumed when *several messages in a row* fail, each for the first time, with no success in
between. A message that failed before is no evidence when it fails again: the rest of a backlog may consist of such
messages only. How many failures in a row are needed depends on the usual share of failures: in a stream with many bad
messages five in a row are normal, and each unneeded pause would hold up the good ones.

Then the handler is *probed*: one message runs at a time, and its failure costs no attempt. The first messages may all
be ones that always fail, so messages that have *not* failed are tried in quick succession, which shows within seconds
whether it is an outage; those that have failed wait in quarantine, from where one is tried now and then. A message that
hangs until its timeout must not hold up the others for so long, so the next one begins beside it. The first success
ends the probing, and from then on failures cost attempts again. After a day without a success the messages themselves
are to blame: their attempts count again, still one at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

IN_A_ROW: Final = 5  # messages; if one in five always fails, five in a row happen by accident once in 3,000
MOST: Final = 100  # failures in a row that are a sign of an outage, whatever the usual share of failures
_CHANCE: Final = 1 / 3000  # the accepted probability that so many in a row fail by accident
_MEMORY: Final = 1 - 1 / 20  # decay of the share of bad messages: it follows the last 20 messages
FREE: Final = 86_400.0  # seconds for which failures cost no attempt
NEXT: Final = 0.1  # seconds until the next message that has not failed is tried, to spare a service that is down
AGAIN: Final = 1.0  # seconds between two runs of messages that have failed
HANGS: Final = 0.25  # seconds after which a probe that still runs no longer delays messages that have not failed


@dataclass(frozen=True, slots=True)
class HandlerHealth:
    """The state of one handler. `failures`: first failures since the last success. `bad`: the share of messages that
    failed while others succeeded. `since`: when probing began. `next_run`: when the next message may run."""

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
        """How many failures in a row are a sign of an outage."""
        by_accident = math.log(_CHANCE) / math.log(self.bad) if self.bad else 0.0
        return max(IN_A_ROW, min(MOST, math.ceil(by_accident)))

    def succeeded(self, messages: int = 1) -> HandlerHealth:
        """`messages` were applied, or rejected by the handler itself. So the failures since the last success were not
        an outage, and count as bad messages. Failures while probing do not count: they may have been an outage."""
        bad = 1 - (1 - self.bad) * _MEMORY**self.failures
        return HandlerHealth(bad=bad * _MEMORY**messages)

    def failed(self, now: float, *, first: bool) -> HandlerHealth:
        """A run failed. `first`: the message had not failed before."""
        if self.since is not None:
            return replace(self, next_run=now + NEXT)
        failures = self.failures + first
        if failures < self.needed:
            return replace(self, failures=failures)
        return replace(self, failures=failures, since=now, next_run=now + NEXT)
