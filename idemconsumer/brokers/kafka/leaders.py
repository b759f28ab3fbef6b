"""Under which leaders the records were written that one reader has taken from its partition (K21). Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Leaders:
    """Of one partition during one assignment. `before`: the epoch of the leader that wrote what comes before the
    reader's first record, None if unknown."""

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
        """What was fetched at `position`: from which offset on which leader's epoch holds.

        True when it is of the log that was read before: the same leader goes on in it, or `proven` has said so.
        Otherwise nothing is noted. Within what was fetched at once the log goes on, whoever leads.
        """
        while self._starts and self._starts[-1][0] >= position:  # it was fetched before, and dropped
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
        """Nobody asks `of` what is below any more."""
        while len(self._starts) > 1 and self._starts[1][0] < position:
            del self._starts[0]

    def proven(self, position: int) -> None:
        """The present log has all that was read before `position`."""
        self._proven = position
