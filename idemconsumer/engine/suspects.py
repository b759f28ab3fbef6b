"""What is on record about a suspect before it runs, so that a message that kills its worker is found out (B6).

A suspect was delivered before, or may have been, so a worker may have died of it; most did not kill anybody. Those
that nothing is known of are *marked*, by one commit, and run as one group whose completion forgets the marks (B7). A
row that somebody else has left means that this message was begun before and came to no end: it is *counted*, in a
commit of its own, and runs alone (B8). A mark counts nothing, so beside a killer no other message loses an attempt; the
killer takes one more worker along for it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile

from idemconsumer.engine.work import Suspicion, Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.observer import Point
from idemconsumer.ports.store import JoinedStore
from idemconsumer.user_code.cancellation import uninterrupted

_MOST_CUT_OFF = 10_000


class Suspects:
    """The marks and counts of one process. Raises StoreUnavailable, after which `cut_off` keeps what is known."""

    def __init__(self, store: JoinedStore, at: Callable[[Point, str, Sequence[bytes]], None]) -> None:
        self._store = store
        self._at = at
        self._cut_off: dict[bytes, int] = {}

    def take_over(self, suspects: Iterable[Work]) -> None:
        """What was cut off in this process killed nothing: its mark, or its count, is still ours."""
        for work in suspects:
            attempts = self._cut_off.get(work.key)
            if attempts == 0:
                del self._cut_off[work.key]
                work.suspicion = Suspicion.MARKED
            elif attempts is not None and work.suspicion is not Suspicion.COUNTED:
                work.suspicion = Suspicion.BEGUN  # and counted once: see `count`

    async def mark(self, group: Sequence[Work], final: Container[Work]) -> list[Work]:
        """As many of the first of `group` as may run together, now that those that are suspects are marked; the `final`
        ones will not run. Empty when the first one turns out to have been begun before."""
        unmarked = [work for work in group if work.suspicion is Suspicion.SUSPECT and work not in final]
        if unmarked:
            await uninterrupted(self._mark(unmarked))
            self._at(Point.SUSPECTS_MARKED, group[0].handler.name, [work.key for work in unmarked])
        together = list(takewhile(lambda work: not work.alone, group))
        running = {work.key for work in together}  # one of these may be delivered once more behind
        await self.unmark([work for work in group[len(together) :] if work.key not in running])
        return together

    async def _mark(self, group: Sequence[Work]) -> None:
        marked = await self._store.mark_attempts([work.claim for work in group])
        for work in group:
            work.suspicion = Suspicion.MARKED if work.key in marked else Suspicion.BEGUN

    async def count(self, work: Work) -> None:
        """For a run alone; not again what was counted and then cut off."""
        cut_off = self._cut_off.pop(work.key, None)
        if work.suspicion is not Suspicion.COUNTED:
            await uninterrupted(self._count(work, cut_off))
            self._at(Point.SUSPECT_COUNTED, work.handler.name, (work.key,))

    async def _count(self, work: Work, cut_off: int | None) -> None:
        work.attempts = cut_off or await self._store.count_attempt(work.claim, None)
        work.suspicion = Suspicion.COUNTED

    async def uncount(self, work: Work) -> None:
        """For what did not run, or was cancelled (B9)."""
        if work.suspicion is Suspicion.COUNTED:
            work.suspicion = Suspicion.BEGUN
            await uninterrupted(self._store.uncount_attempt(work.claim))
            work.attempts -= 1
            if not work.attempts:  # nothing is left on record of a run before
                work.suspicion = Suspicion.SUSPECT

    async def unmark(self, group: Sequence[Work]) -> None:
        """For what did not run, or was undone. Where that fails they are still marked, and known here as ours."""
        if marked := [work for work in group if work.suspicion is Suspicion.MARKED]:
            with suppress(StoreUnavailable):
                await uninterrupted(self._unmark(marked))

    async def _unmark(self, group: Sequence[Work]) -> None:
        await self._store.unmark_attempts([work.key for work in group])
        for work in group:
            work.suspicion = Suspicion.SUSPECT

    def cut_off(self, group: Sequence[Work]) -> None:
        """An outage: the next delivery of each key in this process takes its mark or its count over."""
        for work in group:
            if work.suspicion in (Suspicion.MARKED, Suspicion.COUNTED):
                if len(self._cut_off) >= _MOST_CUT_OFF:
                    self._cut_off.pop(next(iter(self._cut_off)))
                self._cut_off[work.key] = work.attempts
