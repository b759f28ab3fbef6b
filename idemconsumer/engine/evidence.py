"""What is known against messages, by their keys, since a message that is delivered again is a new delivery: that they
collide, that they lose their connections, and what is recorded of a suspect. Kept for one process."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Final, TypeVar

from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import ConnectionLost, CrashedBeside, StoreUnavailable
from idemconsumer.ports.observer import Point
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.user_code.cancellation import uninterrupted

_MOST: Final = 10_000  # keys of each kind; beyond that the oldest are forgotten
_K = TypeVar("_K")
_V = TypeVar("_V")


def put(known: dict[_K, _V], key: _K, value: _V) -> _V:
    """Store a value; if there are too many, the oldest one is dropped."""
    if key not in known and len(known) >= _MOST:
        del known[next(iter(known))]
    known[key] = value
    return value


# -------------------------------------------------------------------------------------------------------- collisions
OF_LATE: Final = 60.0  # seconds: more than a wait for a lock and the longest pause behind it


@dataclass(slots=True)
class Streak:
    """Collisions in a row; `last`: when the last one was. `progress`: a value that changes if the message has got
    further elsewhere in between, which ends the streak."""

    handler: str
    since: float
    progress: object
    collisions: int = 0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def describe(self, contention: Exception) -> str:
        """The text for the dead letter."""
        return (
            f"{self.collisions} runs in {self.seconds / 60:.0f} minutes, each blocked by rows or locks that another "
            f"transaction held; the last one: {contention}"
        )


class Contended:
    """For how long each message has done nothing but collide (B15)."""

    def __init__(self) -> None:
        self._streaks: dict[bytes, Streak] = {}

    def collided(self, key: bytes, handler: str, progress: object = None) -> Streak:
        """One more collision."""
        streak = self._streaks.get(key)
        if streak is None or streak.progress != progress:
            streak = put(self._streaks, key, Streak(handler, time.monotonic(), progress))
        streak.collisions, streak.last = streak.collisions + 1, time.monotonic()
        return streak

    def ended(self, *keys: bytes) -> None:
        """A run of each of these ended in another way than a collision."""
        if self._streaks:
            for key in keys:
                self._streaks.pop(key, None)

    def lasts(self, handler: str) -> bool:
        """Whether a key of this handler has collided lately, and its streak has not ended since."""
        late = time.monotonic() - OF_LATE
        return any(streak.handler == handler and streak.last > late for streak in self._streaks.values())


# -------------------------------------------------------------------------------------------------- lost connections
_IN_A_ROW: Final = 3
_CUTS: Final = 20  # cuts in a row that count for no message: perhaps it is a message that makes a proxy or pooler cut
_LATELY: Final = 60.0  # seconds; a function may notice late that its connection has ended


@dataclass(slots=True)
class _Losses:
    """`count`: own losses in a row. `cuts`: losses not counted. `started`: when the server of the last loss was
    started. `last`: the latest loss, if it is not judged yet."""

    count: int = 0
    cuts: int = 0
    started: datetime | None = None
    last: ConnectionLost | None = None


class LostConnections:
    """Messages that lose their connection each time they run (B13). `server_started` and `cut_within`: see
    `Pool`.

    A message can cause that: it closes the connection, makes the server end its session, or crashes it. A restart of
    the server looks the same. The cause is judged when the message is delivered again, since only a server that answers
    can show it. When one session crashes, the server ends all others too and reports the crash to them: these losses
    count for no message. Nor does a loss count if an idle connection has ended as well: then all were cut from outside.
    """

    def __init__(
        self,
        server_started: Callable[[], Awaitable[datetime]],
        cut_within: Callable[[float], bool] = lambda _: False,
    ) -> None:
        self._server_started = server_started
        self._cut_within = cut_within
        self._losses: dict[bytes, _Losses] = {}

    def __bool__(self) -> bool:
        return bool(self._losses)

    def lost(self, key: bytes, error: ConnectionLost) -> None:
        """The connection broke while the function of `key` ran. A loss by the crash of another session neither counts
        nor resets the count: a message that crashes its own session may run beside another that does."""
        if isinstance(error, CrashedBeside):
            return
        losses = self._losses.get(key) or put(self._losses, key, _Losses())
        losses.last = error

    async def judge(self, key: bytes) -> ConnectionLost | None:
        """Its last loss, if that was not judged before and so many in a row were its own that it costs an attempt.

        If the server was restarted since the last time, or is another one, the count begins anew. Raises
        StoreUnavailable while the server does not answer.
        """
        losses = self._losses.get(key)
        if losses is None or losses.last is None:
            return None
        started = await self._server_started()
        error, losses.last = losses.last, None
        if losses.cuts < _CUTS and self._cut_within(_LATELY):
            losses.cuts += 1
            return None
        losses.count = losses.count + 1 if losses.started in (None, started) else 0
        losses.started = started
        return error if losses.count >= _IN_A_ROW else None

    def suspected(self, key: bytes) -> bool:
        """Whether it has had so many own losses in a row that it is to be counted before it runs."""
        losses = self._losses.get(key)
        return losses is not None and losses.count >= _IN_A_ROW

    def ended(self, *keys: bytes) -> None:
        """A run of each of these ended in another way than a lost connection."""
        if self._losses:
            for key in keys:
                self._losses.pop(key, None)


# ---------------------------------------------------------------------------------------------------------- suspects
class Suspects:
    """Records that a suspect is about to run, so that a message that kills its worker is identified (B6).

    A suspect was delivered before, or may have been, so it may have killed a worker; most have not. Suspects without a
    row in `attempt` are *marked*, by one commit, and run as one group whose completion deletes the marks (B7). A row of
    another process means that the message was begun before and did not end: the message is *counted*, in a commit of
    its own, and runs alone in its process (B8). A mark counts nothing, and no other message has a row while a counted
    one runs. So no message loses an attempt to a message that kills the worker; the price is that one more worker is
    killed.

    Raises StoreUnavailable, after which `cut_off` keeps what is known.
    """

    def __init__(self, store: PostgresStore, at: Callable[[Point, str, Sequence[bytes]], None]) -> None:
        self._store = store
        self._at = at
        self._cut_off: dict[bytes, tuple[Suspicion, int]] = {}

    def take_over(self, suspects: Iterable[Work]) -> None:
        """A run that an outage cut off in this process killed nothing: its mark or its count is still its own."""
        for work in suspects:
            suspicion, attempts = self._cut_off.get(work.key, (None, 0))
            if suspicion is Suspicion.MARKED:
                del self._cut_off[work.key]
                work.suspicion, work.attempts = suspicion, attempts
            elif suspicion is Suspicion.COUNTED and work.suspicion is not suspicion:
                work.suspicion = Suspicion.BEGUN  # and counted once: see `count`

    async def mark(self, group: Sequence[Work], final: Container[Work]) -> list[Work]:
        """Mark the suspects of `group` except the `final` ones, which will not run. Returns the first of `group` that
        may run together: none if the very first one turns out to have been begun before."""
        unmarked = [work for work in group if work.suspicion is Suspicion.SUSPECT and work not in final]
        if unmarked:
            await uninterrupted(self._mark(unmarked))
            self._at(Point.SUSPECTS_MARKED, group[0].handler.name, [work.key for work in unmarked])
        together = list(takewhile(lambda work: not work.alone, group))
        running = {work.key for work in together}  # the same key may occur again further back
        await self.unmark([work for work in group[len(together) :] if work.key not in running])
        return together

    async def _mark(self, group: Sequence[Work]) -> None:
        marked = await self._store.mark_attempts([work.claim for work in group])
        for work in group:
            work.suspicion = Suspicion.MARKED if work.key in marked else Suspicion.BEGUN

    async def count(self, work: Work) -> None:
        """Count a message before it runs alone. One that was counted and then cut off is not counted again."""
        _, cut_off = self._cut_off.pop(work.key, (None, 0))
        if work.suspicion is not Suspicion.COUNTED:
            await uninterrupted(self._count(work, cut_off))
            self._at(Point.SUSPECT_COUNTED, work.handler.name, (work.key,))

    async def _count(self, work: Work, cut_off: int) -> None:
        work.attempts = cut_off or await self._store.count_attempt(work.claim, None)
        work.suspicion = Suspicion.COUNTED

    async def uncount(self, work: Work) -> None:
        """Undo the count of a message that did not run, or was cancelled (B9)."""
        if work.suspicion is Suspicion.COUNTED:
            work.suspicion = Suspicion.BEGUN
            await uninterrupted(self._store.uncount_attempt(work.claim))
            work.attempts -= 1
            if not work.attempts:  # no earlier run has a row any more
                work.suspicion = Suspicion.SUSPECT

    async def unmark(self, group: Sequence[Work]) -> None:
        """Delete the marks of messages that did not run, or were rolled back. If that fails they stay marked, and this
        process knows the marks as its own."""
        if marked := [work for work in group if work.suspicion is Suspicion.MARKED and not work.attempts]:
            with suppress(StoreUnavailable):
                await uninterrupted(self._unmark(marked))

    async def _unmark(self, group: Sequence[Work]) -> None:
        await self._store.unmark_attempts([work.key for work in group])
        for work in group:
            work.suspicion = Suspicion.SUSPECT

    def cut_off(self, group: Sequence[Work]) -> None:
        """After an outage, the next delivery of each key in this process takes over its mark or its count."""
        for work in group:
            if work.suspicion in (Suspicion.MARKED, Suspicion.COUNTED):
                put(self._cut_off, work.key, (work.suspicion, work.attempts))
