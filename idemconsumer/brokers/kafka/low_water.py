"""What one reader has taken from its partition: the offset to commit, and the leaders that wrote the records. Pure.

Theory of the tracker: finished offsets in, the next commit out. Deliveries finish in any order, but a commit is one
number below which everything is done. So it is the lowest *delivered* offset that is not finished (K2). Offsets have
holes (transaction markers, compaction), so "last finished + 1" is not enough once no delivery is unfinished (K3): the
commit is then the reader's position, which has stepped over the holes. Otherwise a partition that ends in a marker
would show lag for ever.

A tracker lives as long as one assignment of its partition. After `end()` it refuses every mark and yields no commit:
the broker would accept a commit of a former assignment, even one that moves the group backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class Tracker:
    """One partition during one assignment. Offsets are delivered in ascending order and finished in any order.

    `highest` is the highest offset delivered, -1 before the first; `unfinished` are the offsets that were delivered and
    are not finished.
    """

    __slots__ = ("_committed", "_ended", "_order", "highest", "unfinished")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self.unfinished: set[int] = set()
        self.highest = -1
        self._committed: int | None = None
        self._ended = False

    @property
    def outstanding(self) -> int:
        """How many deliveries are not finished; 0 once the tracker has ended."""
        return len(self.unfinished)

    @property
    def span(self) -> int:
        """How many offsets lie between the low-water mark and the last one delivered: as much as a crash can repeat."""
        return self.highest + 1 - self._order[0] if self._order else 0

    def deliver(self, offsets: Iterable[int]) -> None:
        """Record deliveries. Raises ValueError when an offset is not above all earlier ones."""
        for offset in offsets:
            if offset <= self.highest:
                raise ValueError(f"offset {offset} was delivered after {self.highest}; begin a new tracker")
            self.highest = offset
            if not self._ended:
                self._order.append(offset)
                self.unfinished.add(offset)

    def finish(self, offset: int) -> bool:
        """Mark one delivery as finished. Returns False if it is not outstanding, or the assignment is over."""
        if offset not in self.unfinished:
            return False
        self.unfinished.remove(offset)
        while self._order and self._order[0] not in self.unfinished:
            self._order.popleft()
        return True

    def low_water(self, position: int | None) -> int | None:
        """The offset below which everything is finished. `position` is the next offset to be fetched, None if unknown.

        The position counts only while nothing is outstanding. Returns None when neither an offset nor a position is
        known.
        """
        if self._order:
            return self._order[0]
        if self.highest < 0:
            return position
        return self.highest + 1 if position is None else max(position, self.highest + 1)

    def due(self, position: int | None) -> int | None:
        """The offset to commit now; None if it would change nothing, or the assignment has ended."""
        mark = self.low_water(position)
        return None if self._ended or mark == self._committed else mark

    def committed(self, offset: int) -> None:
        """The broker has confirmed a commit of `offset`."""
        self._committed = offset

    def end(self) -> None:
        """End the assignment: nothing is outstanding from now on, and nothing will be marked or committed."""
        self._ended = True
        self._order.clear()
        self.unfinished.clear()


class Leaders:
    """Under which leaders the records of one partition were written, during one assignment (K21). `before` is the epoch
    of the leader that wrote the records before the reader's first one; None if unknown."""

    __slots__ = ("_proven", "_starts")

    def __init__(self, before: int | None = None) -> None:
        self._starts: list[tuple[int, int | None]] = [(-1, before)]
        self._proven: int | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def of(self, position: int) -> int | None:
        """The epoch of the last record before `position`; None if unknown."""
        return next((leader for start, leader in reversed(self._starts) if start < position), None)

    def follow(self, position: int, fetched: Sequence[tuple[int, int]]) -> bool:
        """Record what was fetched at `position`: pairs of an offset and the leader epoch that holds from there on.

        Returns True if it belongs to the log that was read before: the same leader continues it, or `proven` has
        confirmed it. Otherwise nothing is recorded. The records of one fetch belong to one log, whatever their leaders.
        """
        while self._starts and self._starts[-1][0] >= position:  # this was fetched before, and dropped
            self._starts.pop()
        before = self.of(position)
        if before is not None and fetched and fetched[0][1] != before and self._proven != position:
            return False
        for start, leader in fetched:
            if leader != before:
                self._starts.append((max(start, position), leader))
                before = leader
        return True

    def finished(self, position: int) -> None:
        """Forget the epochs below `position`: `of` is not called for them any more."""
        while len(self._starts) > 1 and self._starts[1][0] < position:
            del self._starts[0]

    def proven(self, position: int) -> None:
        """Record that the present log contains everything that was read before `position`."""
        self._proven = position
