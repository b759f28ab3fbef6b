"""Which messages of one process may run at the same time: one that may have killed a worker runs alone (B16)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, Token
from typing import Final, Self

from idemconsumer.logs import log

PATIENCE: Final = 1.0  # seconds that running sagas get when a message wants to run alone: most end, or finish a step
LONGEST: Final = 10.0  # seconds after which no message waits any longer: for a saga alone, or one that does not pause
_INSIDE: Final[ContextVar[tuple[Company, ...]]] = ContextVar("idemconsumer_company", default=())


class Stay:
    """One holder of the lock of a `Company`, exclusive (`alone`) or shared, from its entry to its end."""

    __slots__ = ("_before", "_company", "alone", "give_way")

    def __init__(self, company: Company, *, alone: bool, give_way: Callable[[], None] | None) -> None:
        self._company = company
        self._before: Token[tuple[Company, ...]] | None = None
        self.alone = alone
        self.give_way = give_way

    async def __aenter__(self) -> Self:
        around = _INSIDE.get()
        if self._company not in around:
            await self._company.enter(self)
            self._before = _INSIDE.set((*around, self._company))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._before is not None:
            _INSIDE.reset(self._before)
            self._company.leave(self)


class Company:
    """A lock that is either shared by many or held exclusively (`alone`) by one.

    A task that wants to be alone waits for the holders, and later tasks queue behind it. After an exclusive holder, all
    tasks that wait to share the lock go first: so neither kind starves. A holder may enter again, as a handler does
    that has another message processed.

    Sagas may hold the lock for hours, so they pass a `give_way`. It is called when a task has waited for `patience`
    seconds to be alone, and makes the saga leave; after `longest` seconds more the lock is taken from it.
    """

    def __init__(self, *, patience: float = PATIENCE, longest: float = LONGEST) -> None:
        self._patience = patience
        self._longest = longest
        self._inside: set[Stay] = set()
        self._one_alone = False
        self._waiting: deque[tuple[Stay, asyncio.Future[None]]] = deque()
        self._impatience: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether a holder is alone, or a task waits for the lock."""
        return self._one_alone or bool(self._waiting)

    def shared(self, give_way: Callable[[], None] | None = None) -> Stay:
        """Run beside others, but not beside a holder that is alone."""
        return Stay(self, alone=False, give_way=give_way)

    def alone(self) -> Stay:
        """Run alone, except for the holder that this is nested in."""
        return Stay(self, alone=True, give_way=None)

    @asynccontextmanager
    async def alone_at_first(self, give_way: Callable[[], None]) -> AsyncIterator[Stay]:
        """Run alone for `longest` seconds, or until `share` is called."""
        async with Stay(self, alone=True, give_way=give_way) as stay:
            bound = asyncio.get_running_loop().call_later(self._longest, self.share, stay)
            try:
                yield stay
            finally:
                bound.cancel()

    def share(self, stay: Stay) -> None:
        """A holder that was alone shares the lock from now on."""
        if stay in self._inside:
            self._let_others_in(stay)

    async def enter(self, stay: Stay) -> None:
        """Return once the lock is held."""
        if not self._waiting and self._may_enter(stay):
            self._let_in(stay)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((stay, turn))
        self._hurry()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # `_admit` has already removed it from the queue
                    self._waiting.remove((stay, turn))
                self._admit()
            else:  # the lock was granted at the same moment
                self.leave(stay)
            raise

    def _may_enter(self, stay: Stay) -> bool:
        return not self._inside if stay.alone else not self._one_alone

    def _let_in(self, stay: Stay) -> None:
        self._inside.add(stay)
        self._one_alone = stay.alone

    def leave(self, stay: Stay) -> None:
        """Release the lock, and grant it to the tasks that wait for it."""
        if stay in self._inside:  # else the lock was taken from it
            self._inside.remove(stay)
            self._let_others_in(stay)

    def _let_others_in(self, stay: Stay) -> None:
        if stay.alone:
            stay.alone = self._one_alone = False
            sharing = [waiter for waiter in self._waiting if not waiter[0].alone]
            self._waiting = deque([*sharing, *(waiter for waiter in self._waiting if waiter[0].alone)])
        if self._waiting or self._impatience is not None:
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._may_enter(self._waiting[0][0]):
            stay, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._let_in(stay)
                turn.set_result(None)
        self._hurry()

    # ------------------------------------------------------------------------------------------------------ giving way
    def _hurry(self) -> None:
        """Run the timer of `patience` while the next task waits for those that share the lock."""
        if self._waiting and not self._one_alone:
            if self._impatience is None:
                self._impatience = asyncio.get_running_loop().call_later(self._patience, self._ask)
        elif self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _ask(self) -> None:
        self._impatience = asyncio.get_running_loop().call_later(self._longest, self._wait_no_longer)
        for stay in list(self._inside):
            if stay.give_way is not None:
                stay.give_way()

    def _wait_no_longer(self) -> None:
        stuck = [stay for stay in self._inside if stay.give_way is not None]
        if stuck:
            log.warning("sagas did not pause; does their handler catch CancelledError?", sagas=len(stuck))
        for stay in stuck:
            self.leave(stay)
