"""Which delivery tags to acknowledge next, and how. Pure: finished tags in, acks out.

A channel numbers its deliveries 1, 2, 3, … without holes. RabbitMQ closes the channel when an ack names a tag
that is not outstanding, also one that an earlier `multiple` covered; and a `multiple` takes everything up to
its tag, finished or not. So `multiple` is used only over a finished prefix, and a tag is never named twice (Q3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ack:
    """One `basic.ack`. With `multiple` it takes every outstanding tag up to `tag`."""

    tag: int
    multiple: bool


class AckTags:
    """The tags of one channel: which are finished, which are acked."""

    def __init__(self) -> None:
        self._through = 0
        self._alone: set[int] = set()
        self._finished: set[int] = set()

    def finish(self, tags: Iterable[int]) -> None:
        """These deliveries are finished. Tags that were acked before are ignored."""
        self._finished.update(tag for tag in tags if tag > self._through and tag not in self._alone)

    def due(self) -> list[Ack]:
        """The acks to send next: one for the finished prefix, and one for each finished tag beyond it."""
        tag, last, taken = self._through + 1, 0, 0
        while (finished := tag in self._finished) or tag in self._alone:
            if finished:
                last, taken = tag, taken + 1
            tag += 1
        acks = [Ack(last, multiple=taken > 1)] if taken else []
        return acks + [Ack(beyond, multiple=False) for beyond in sorted(self._finished) if beyond > last]

    def sent(self, acks: Iterable[Ack]) -> None:
        """These were handed to the channel."""
        for ack in acks:
            if ack.multiple:
                covered = range(self._through + 1, ack.tag + 1)
                self._finished.difference_update(covered)
                self._alone.difference_update(covered)
                self._through = ack.tag
            else:
                self._finished.discard(ack.tag)
                self._alone.add(ack.tag)
        while self._through + 1 in self._alone:
            self._through += 1
            self._alone.remove(self._through)
