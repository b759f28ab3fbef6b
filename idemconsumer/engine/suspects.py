"""What is on record about a suspect before it runs, so that a message that kills its worker is identified (B6).

A suspect was delivered before, or may have been, so it may have killed a worker; most have not. Those with nothing on
record are *marked*, by one commit, and run as one group whose completion deletes the marks (B7). A row that another
process left means that this message was begun before and did not end: it is *counted*, in a commit of its own, and runs
while nothing else of its process does (B8). A mark counts nothing, and nothing else is on record beside a message that
was counted, so no message loses an attempt to a killer; in exchange the killer kills one more worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile

from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.observer import Point
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.user_code.cancellation import uninterrupted

_MAX_CUT_OFF = 10_000


class Suspects:
    """The marks and counts of one process. Raises StoreUnavailable, after which `cut_off` keeps what is known."""

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
                if len(self._cut_off) >= _MAX_CUT_OFF:
                    self._cut_off.pop(next(iter(self._cut_off)))
                self._cut_off[work.key] = work.suspicion, work.attempts
