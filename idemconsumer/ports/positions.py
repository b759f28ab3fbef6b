"""What a broker that keeps its readers' positions itself needs of the database, so that neither is ahead unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Kept:
    """What the database knows of a partition: every message from `base` up to `position` is decided in it.

    `history` names the reading that began at `base`; `counter` grows with each write, from one history to the next too.
    `quiet` is the counter at which its last reader left with nothing in hand. `leader` is an epoch: all that the log
    has of it and of earlier ones, and that is below `position`, is what was read (K21). None if unknown.
    """

    history: str
    base: int
    counter: int = 0
    position: int = 0
    quiet: int | None = None
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class Reached:
    """Up to where a reader has finished, and in which leader's epoch the message before that was written. `left`: it
    has nothing in hand, and leaves; then this is the counter of its last write."""

    history: str
    position: int
    leader: int | None = None
    left: int | None = None


Place = tuple[str, int]  # topic and partition


class Positions(Protocol):
    """Every method raises StoreUnavailable when the database is down, and CommitUnknown when an answer was lost."""

    async def read(self, cluster: str, group: str, topics: Sequence[str]) -> tuple[datetime, Mapping[Place, Kept]]:
        """When the server that answers was started, and what it knows."""

    async def begin(
        self, cluster: str, group: str, histories: Mapping[Place, Kept], server: datetime
    ) -> Mapping[Place, int]:
        """Put on record that these are being read: a history that is there goes on, any other begins at its `base`.
        Returns their counters; none if the server is another one now, and nothing was written."""

    async def save(
        self, cluster: str, group: str, positions: Mapping[Place, Reached], server: datetime
    ) -> Mapping[Place, int]:
        """Save the position in each history; returns their counters. Missing is what has another history by now; all
        are missing when the server is another one. Who has `left` goes off the record, unless somebody else has
        written since."""

    async def stop(self, cluster: str, group: str, place: Place, first: int, following: int, error: str) -> bool:
        """A reader stands before what it cannot read, from `first` up to `following`. Whether a person wants a dead
        letter in its place."""

    async def leave(self, cluster: str, group: str, place: Place) -> None:
        """It could be read after all."""

    async def server_started(self) -> datetime:
        """See `PostgresStore`."""


@runtime_checkable
class KeepsPositions(Protocol):
    """A broker whose sessions compare the positions that it keeps with those of the database."""

    def keep_positions_in(self, positions: Positions) -> None:
        """To be called before a session is opened."""
