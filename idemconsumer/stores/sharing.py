"""Which checkout gets the next connection of a pool (D13).

Each party has one reserved connection; the others go to the parties that hold the fewest.
A party is a handler of a worker, named by `PARTY` in its lanes' tasks. All other users of the pool are one party
together. At the front door, work that takes one round trip is another party, so it does not wait for endpoints (H10).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Final

OTHERS: Final = ""
SHORT: Final = "~short"  # not the name of any handler
PARTY: Final[ContextVar[str]] = ContextVar("idemconsumer_party", default=OTHERS)


@contextmanager
def short() -> Iterator[None]:
    """A checkout inside this block is for one round trip or two. If there is no such party, it belongs to
    `OTHERS`."""
    token = PARTY.set(SHORT)
    try:
        yield
    finally:
        PARTY.reset(token)


class _Hold:
    """A place that the current task has or had, and the place that it had before it got this one."""

    __slots__ = ("before", "over", "party", "sharing")

    def __init__(self, sharing: Sharing, party: str) -> None:
        self.sharing = sharing
        self.party = party
        self.before: _Hold | None = None
        self.over = False

    async def __aenter__(self) -> None:
        await self.sharing.enter(self.party)
        self.before = _HOLDS.get()
        _HOLDS.set(self)

    async def __aexit__(self, *_: object) -> None:
        self.over = True  # for tasks that were created meanwhile, which see it in their context
        _HOLDS.set(self.before)
        self.sharing.leave(self.party)


_HOLDS: Final[ContextVar[_Hold | None]] = ContextVar("idemconsumer_holds", default=None)


class Sharing:
    """The right to `places` connections. There are at most as many parties as places, including `OTHERS`.

    A party that holds none never waits for another one. A party that wants more waits in its own queue.
    """

    def __init__(self, places: int, parties: Iterable[str] = ()) -> None:
        self._held = dict.fromkeys((OTHERS, *parties), 0)
        self._spare = places - len(self._held)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order in which parties began to wait
        assert self._spare >= 0

    @property
    def used(self) -> int:
        """How many places are taken."""
        return sum(self._held.values())

    @property
    def pending(self) -> int:
        """How many tasks wait for a place."""
        return sum(map(len, self._waiting.values()))

    @property
    def full(self) -> bool:
        """Whether the current task would have to wait for a place."""
        return bool(self._held[self._party()]) and not self._spare

    @property
    def held_here(self) -> bool:
        """Whether the current task has a place: if it waited for another one, it could wait for itself (J29)."""
        hold = _HOLDS.get()
        while hold is not None and (hold.over or hold.sharing is not self):
            hold = hold.before
        return hold is not None

    def place(self) -> AbstractAsyncContextManager[None]:
        """One place, for the party of the current task."""
        return _Hold(self, self._party())

    def _party(self) -> str:
        return party if (party := PARTY.get()) in self._held else OTHERS

    async def enter(self, party: str) -> None:
        """Take a place, once it is free."""
        if not self._held[party] or self._spare:
            self._spare -= bool(self._held[party])
            self._held[party] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(party, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(KeyError, ValueError):  # `_give` has already removed it
                    self._waiting[party].remove(turn)
            else:  # granted at the same moment
                self.leave(party)
            raise

    def leave(self, party: str) -> None:
        """Release a place, and grant it to a task that waits for one."""
        self._held[party] -= 1
        own = not self._held[party]
        for other in [party] if own else sorted(self._waiting, key=self._held.__getitem__):
            if self._give(other):
                return
        self._spare += not own

    def _give(self, party: str) -> bool:
        waiting = self._waiting.pop(party, deque())
        while waiting:
            turn = waiting.popleft()
            if not turn.cancelled():
                self._held[party] += 1
                turn.set_result(None)
                if waiting:
                    self._waiting[party] = waiting  # behind the other parties
                return True
        return False
