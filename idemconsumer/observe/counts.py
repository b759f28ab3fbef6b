"""What a worker has done so far, in plain numbers that only grow, and the sums that a launcher makes of many workers.

Counting decides nothing (O11). A group is counted at once, not message by message, and nothing here waits. Labels are
names from code and configuration: handlers, sources, outcomes, reasons; never keys, tenants or error texts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, Final

import msgspec

from idemconsumer.rules.values import Outcome, OutcomeKind

# Upper bounds of the buckets; the last bucket has none.
SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
MESSAGES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

_PUT_ASIDE: Final = (OutcomeKind.DEAD, OutcomeKind.CONFLICT)

_kind = attrgetter("kind")


class Histogram(msgspec.Struct, array_like=True):
    """How often a value fell into each bucket, and the sum of the values. A worker reports all its histograms each
    second, for each handler, so fixed bounds and empty counts are left out."""

    bounds: ClassVar[tuple[float, ...]]

    counts: list[int] = msgspec.field(default_factory=list)
    sum: float = 0.0

    @property
    def buckets(self) -> list[int]:
        return self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts = self.buckets
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def update(self, other: Histogram) -> None:
        """Add the other histogram, as `Counter.update` does."""
        if len(other.counts) == len(self.bounds) + 1:  # else it is empty, or from another version
            self.counts = [mine + theirs for mine, theirs in zip(self.buckets, other.counts, strict=True)]
            self.sum += other.sum


class Seconds(Histogram, array_like=True):
    bounds = SECONDS


class Messages(Histogram, array_like=True):
    bounds = MESSAGES


class HandlerCounts(msgspec.Struct, array_like=True):
    """The counts of one handler.

    `deliveries` is by source. `outcomes` is by kind; a delivery that is tried again has several. `letters` counts dead
    letters by reason. `handling` has the seconds that the function took for a message; in a group, each message counts
    with the mean. `groups` has the seconds of a group with its claim and its commit, and `sizes` how many messages ran
    in one transaction. For a saga, an attempt counts as a group.
    """

    deliveries: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    letters: Counter[str] = msgspec.field(default_factory=Counter)
    handling: Seconds = msgspec.field(default_factory=Seconds)
    groups: Seconds = msgspec.field(default_factory=Seconds)
    sizes: Messages = msgspec.field(default_factory=Messages)

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes of deliveries."""
        before = self._put_aside
        self.outcomes.update(map(_kind, outcomes))
        if self._put_aside > before:
            aside = (each for each in outcomes if each.kind in _PUT_ASIDE)
            # A duplicate of a dead key has its dead letter already (O6).
            self.letters.update(each.reason for each in aside if each.reason is not None and each.letter is None)

    @property
    def _put_aside(self) -> int:
        return sum(self.outcomes[kind] for kind in _PUT_ASIDE)

    def handled(self, messages: int, seconds: float) -> None:
        """The function ran for `messages` new messages of one transaction, and took `seconds` for all of them."""
        if messages:
            self.handling.observe(seconds / messages, messages)
            self.sizes.observe(messages)

    def add(self, other: HandlerCounts) -> None:
        for name in self.__struct_fields__:
            getattr(self, name).update(getattr(other, name))


class Counts(msgspec.Struct):
    """The counts of one process, by handler, or the sum of many processes.

    `pruned` is the number of records that were deleted. `relayed` counts outgoing messages that their brokers have
    confirmed, by destination, and `parked` those that they refused for good.
    """

    handlers: dict[str, HandlerCounts] = msgspec.field(default_factory=dict)
    pruned: int = 0
    relayed: Counter[str] = msgspec.field(default_factory=Counter)
    parked: Counter[str] = msgspec.field(default_factory=Counter)

    def of(self, handler: str) -> HandlerCounts:
        if (counts := self.handlers.get(handler)) is None:
            counts = self.handlers[handler] = HandlerCounts()
        return counts

    def add(self, other: Counts) -> None:
        for name, counts in other.handlers.items():
            self.of(name).add(counts)
        self.pruned += other.pruned
        self.relayed.update(other.relayed)
        self.parked.update(other.parked)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """The outcomes of all handlers together."""
        both = Counter[str]()
        for counts in self.handlers.values():
            both.update(counts.outcomes)
        return {str(kind): number for kind, number in both.items()}
