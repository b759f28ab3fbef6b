"""What a session holds of one source, in messages and in bytes; how many more it may take; how large the backlog is."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import datetime

from idemconsumer.message.delivered import held_size
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Bounds, Lag
from idemconsumer.rules import fetching


class Outstanding:
    """All messages that have arrived and are not settled or released yet, by their broker's handle.

    While the source is paused, no more may be taken (O14). Never more messages than `Bounds.wanted`. Never more bytes
    than the limit of the process, as long as no message is larger than the largest recent one; a message that is larger
    than the limit is held alone.
    """

    def __init__(self, bounds: Bounds, source: str) -> None:
        self._bounds = bounds
        self._source = source
        self._memory = bounds.memory
        self._sizes: dict[Hashable, int] = {}
        self._bytes = 0
        self._expected: float | None = None

    def __len__(self) -> int:
        return len(self._sizes)

    def arrived(self, handle: Hashable, message: Message) -> None:
        size = held_size(message)
        self._add(size - self._sizes.get(handle, 0))
        self._sizes[handle] = size
        self._expected = fetching.expected_size(self._expected, (size,))

    def left(self, handles: Iterable[Hashable]) -> None:
        """Remove messages that were settled, released or lost to another session. Unknown handles are ignored."""
        self._add(-sum(self._sizes.pop(handle, 0) for handle in handles))

    def clear(self) -> None:
        self._sizes.clear()
        self._add(-self._bytes)

    def may_hold(self, waiting: int) -> int:
        """How many messages may be held in all; `waiting` of them are in the waiting room."""
        return fetching.may_hold(self._bounds.wanted(self._source, waiting), self._allowed, self._size)

    @property
    def paused(self) -> bool:
        return self._bounds.paused(self._source)

    def may_take(self, waiting: int, asked_for: int = 0) -> int:
        """How many more messages may be requested, when `asked_for` have been requested already."""
        if self.paused:
            return 0
        held, size = len(self._sizes) + asked_for, self._size
        wanted = self._bounds.wanted(self._source, waiting)
        return fetching.may_take(wanted, held, self._allowed, self._bytes + int(asked_for * size), size)

    @property
    def bytes_left(self) -> int:
        return max(0, self._allowed - self._bytes)

    @property
    def most(self) -> int:
        """How many messages memory and `in_flight` allow, however many the lanes could start."""
        return fetching.may_hold(self._bounds.in_flight, self._allowed, self._size)

    @property
    def _allowed(self) -> int:
        return fetching.allowance(self._memory.bound, self._memory.held - self._bytes)

    @property
    def _size(self) -> float:
        return fetching.expected_size(self._expected, ())

    def _add(self, size: int) -> None:
        self._bytes += size
        self._memory.held += size


@dataclass(slots=True)
class Backlog:
    """An upper bound for the age of the oldest message that nobody has taken, without reading that message.

    For a source that delivers in order, and only as exact as that order: what is left was sent after `newest`, the last
    message delivered, and arrived after the last check at which nothing was left.
    """

    newest: datetime | None = None
    _empty_at: float | None = None

    def lag(self, messages: int, *, part: bool = False) -> Lag:
        """The lag when `messages` are left now. Its seconds compare the sender's clock with ours."""
        now = time.time()
        if not messages:
            self._empty_at = now
            return Lag(0, 0.0, part)
        if self.newest is None:
            return Lag(messages, None, part)
        since = max(self.newest.timestamp(), self._empty_at or 0.0)
        return Lag(messages, max(0.0, now - since), part)
