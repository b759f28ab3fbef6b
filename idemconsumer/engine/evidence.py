"""What is known against messages, kept for one process by their keys, since a delivery that its broker takes back comes
again as another one: that they collide, that they lose their connections, and what of a suspect is on record."""

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

_MOST: Final = 10_000  # keys of each kind; those of more are forgotten, oldest first
_K = TypeVar("_K")
_V = TypeVar("_V")


def put(known: dict[_K, _V], key: _K, value: _V) -> _V:
    """In the place of the oldest one, if there are too many."""
    if key not in known and len(known) >= _MOST:
        del known[next(iter(known))]
    known[key] = value
    return value


# -------------------------------------------------------------------------------------------------------- collisions
OF_LATE: Final = 60.0  # seconds: more than a lock is waited for, and the longest pause behind that


@dataclass(slots=True)
class Streak:
    """Collisions in a row, the `last` one when. `progress`: what has changed if something else happened to it in
    between, elsewhere."""

    handler: str
    since: float
    progress: object
    collisions: int = 0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def describe(self, contention: Exception) -> str:
        """For the dead letter."""
        return (
            f"{self.collisions} runs in {self.seconds / 60:.0f} minutes, each blocked by what another transaction "
            f"held; the last one: {contention}"
        )


class Contended:
    """How long messages have done nothing but collide (B15)."""

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
        """A run of these ended in another way."""
        if self._streaks:
            for key in keys:
                self._streaks.pop(key, None)

    def lasts(self, handler: str) -> bool:
        """Whether a key of this handler has collided of late, and not ended since."""
        late = time.monotonic() - OF_LATE
        return any(streak.handler == handler and streak.last > late for streak in self._streaks.values())


# -------------------------------------------------------------------------------------------------- lost connections
_IN_A_ROW: Final = 3
_CUTS: Final = 20  # in a row that are nobody's: there might be a message of which a proxy or a pooler ends
_LATELY: Final = 60.0  # seconds; a function may notice late that its connection has ended


@dataclass(slots=True)
class _Losses:
    """`count` in a row, all with the server that was `started` then; `last` is not judged yet."""

    count: int = 0
    cuts: int = 0
    started: datetime | None = None
    last: ConnectionLost | None = None


class LostConnections:
    """Messages that lose their connection each time they run (B13). `server_started` and `cut_within`: see
    `Pool`.

    A message can do that: it closes the connection, asks the server to end its session, or crashes it. So can a
    server that is restarted. What it was is judged when the message comes again, since only a server that answers can
    tell. When one session crashes, the server ends all the others too, and says so: their losses are nobody's. Nor
    are those of which a connection that did nothing has ended as well: somebody has cut them all.
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
        """The connection broke while the function of `key` ran. That another session crashed neither counts nor starts
        the count anew: a message that crashes its own may run beside another that does."""
        if isinstance(error, CrashedBeside):
            return
        losses = self._losses.get(key) or put(self._losses, key, _Losses())
        losses.last = error

    async def judge(self, key: bytes) -> ConnectionLost | None:
        """Its last loss, if that is news, and so many in a row were its own that it costs an attempt.

        A server that was started since the last time, or is another one, begins the count anew. Raises StoreUnavailable
        while it does not answer.
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
        """Whether it has lost so many in a row that it is to be counted before it runs."""
        losses = self._losses.get(key)
        return losses is not None and losses.count >= _IN_A_ROW

    def ended(self, *keys: bytes) -> None:
        """A run of these ended in another way."""
        if self._losses:
            for key in keys:
                self._losses.pop(key, None)


# ---------------------------------------------------------------------------------------------------------- suspects
class Suspects:
    """What is on record about a suspect before it runs, so that a message that kills its worker is identified (B6).

    A suspect was delivered before, or may have been, so it may have killed a worker; most have not. Those with
    nothing on record are *marked*, by one commit, and run as one group whose completion deletes the marks (B7). A row
    that another process left means that this message was begun before and did not end: it is *counted*, in a commit
    of its own, and runs while nothing else of its process does (B8). A mark counts nothing, and nothing else is on
    record beside a message that was counted, so no message loses an attempt to a killer; in exchange the killer kills
    one more worker.

    Raises StoreUnavailable, after which `cut_off` keeps what is known.
    """

    def __init__(self, store: PostgresStore, at: Callable[[Point, str, Sequence[bytes]], None]) -> None:
        self._store = store
        self._at = at
        self._cut_off: dict[bytes, tuple[Suspicion, int]] = {}

    def take_over(self, suspects: Iterable[Work]) -> None:
        """A run that was cut off in this process killed nothing: its mark, or its count, is still ours."""
        for work in suspects:
            suspicion, attempts = self._cut_off.get(work.key, (None, 0))
            if suspicion is Suspicion.MARKED:
                del self._cut_off[work.key]
                work.suspicion, work.attempts = suspicion, attempts
            elif suspicion is Suspicion.COUNTED and work.suspicion is not suspicion:
                work.suspicion = Suspicion.BEGUN  # and counted once: see `count`

    async def mark(self, group: Sequence[Work], final: Container[Work]) -> list[Work]:
        """Mark the suspects of `group` but the `final` ones, which will not run. Returns the first of `group` that may
        run together: none when the first one turns out to have been begun before."""
        unmarked = [work for work in group if work.suspicion is Suspicion.SUSPECT and work not in final]
        if unmarked:
            await uninterrupted(self._mark(unmarked))
            self._at(Point.SUSPECTS_MARKED, group[0].handler.name, [work.key for work in unmarked])
        together = list(takewhile(lambda work: not work.alone, group))
        running = {work.key for work in together}  # the same key may come once more behind
        await self.unmark([work for work in group[len(together) :] if work.key not in running])
        return together

    async def _mark(self, group: Sequence[Work]) -> None:
        marked = await self._store.mark_attempts([work.claim for work in group])
        for work in group:
            work.suspicion = Suspicion.MARKED if work.key in marked else Suspicion.BEGUN

    async def count(self, work: Work) -> None:
        """Before a run alone. What was counted and then cut off is not counted again."""
        _, cut_off = self._cut_off.pop(work.key, (None, 0))
        if work.suspicion is not Suspicion.COUNTED:
            await uninterrupted(self._count(work, cut_off))
            self._at(Point.SUSPECT_COUNTED, work.handler.name, (work.key,))

    async def _count(self, work: Work, cut_off: int) -> None:
        work.attempts = cut_off or await self._store.count_attempt(work.claim, None)
        work.suspicion = Suspicion.COUNTED

    async def uncount(self, work: Work) -> None:
        """For a message that did not run, or was cancelled (B9)."""
        if work.suspicion is Suspicion.COUNTED:
            work.suspicion = Suspicion.BEGUN
            await uninterrupted(self._store.uncount_attempt(work.claim))
            work.attempts -= 1
            if not work.attempts:  # no earlier run is left on record
                work.suspicion = Suspicion.SUSPECT

    async def unmark(self, group: Sequence[Work]) -> None:
        """For messages that did not run, or were rolled back. If it fails they stay marked, and known here as ours."""
        if marked := [work for work in group if work.suspicion is Suspicion.MARKED and not work.attempts]:
            with suppress(StoreUnavailable):
                await uninterrupted(self._unmark(marked))

    async def _unmark(self, group: Sequence[Work]) -> None:
        await self._store.unmark_attempts([work.key for work in group])
        for work in group:
            work.suspicion = Suspicion.SUSPECT

    def cut_off(self, group: Sequence[Work]) -> None:
        """An outage: the next delivery of each key in this process takes over its mark or its count."""
        for work in group:
            if work.suspicion in (Suspicion.MARKED, Suspicion.COUNTED):
                put(self._cut_off, work.key, (work.suspicion, work.attempts))
