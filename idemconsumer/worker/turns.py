"""Lanes take turns while this process is limited by its CPU: `rules.group_size` decides how many run at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from idemconsumer.rules.group_size import open_groups

_LOOK: Final = 0.05  # seconds between two measurements of the CPU
_PATIENCE: Final = 0.5  # seconds


@dataclass(slots=True, eq=False)
class _Waiting:
    handler: str
    since: float
    turn: asyncio.Future[None]


class Turns:
    """Gives turns to groups. A handler with no open group gets one at once.

    Among waiting groups, the handler with the fewest open groups comes first, then the group that has waited longest.
    Any group gets a turn after half a second: a group that has its turn may wait long for a key that another worker
    holds, or for a row, while other work keeps the CPU busy.
    """

    def __init__(
        self, lanes: int, *, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._lanes = self._limit = lanes
        self._open: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._clock = clock
        self._cpu = cpu
        self._seen = (clock(), cpu())
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def of(self, handler: str) -> AsyncIterator[None]:
        """A turn for a group of this handler."""
        await self._enter(handler)
        try:
            yield
        finally:
            self._leave(handler)

    async def _enter(self, handler: str) -> None:
        self._look()
        if self._is_free(handler):
            self._open[handler] += 1
            return
        waiting = _Waiting(handler, self._clock(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._watch()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():  # the turn was given at the same moment
                self._leave(handler)
            raise

    def _leave(self, handler: str) -> None:
        self._open[handler] -= 1
        self._admit()

    @property
    def free(self) -> int:
        """How many more groups may be open now."""
        return max(0, self._limit - self._open.total())

    def _is_free(self, handler: str) -> bool:
        return not self._open[handler] or self.free > 0

    def _admit(self) -> None:
        """Give turns that are free. Called whenever one may be, so a group that finds one free overtakes none of its
        own handler."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.turn.cancelled()]
        while self._waiting:
            first = min(self._waiting, key=lambda waiting: self._open[waiting.handler])
            if not self._is_free(first.handler):
                first = self._waiting[0]
                if self._clock() - first.since < _PATIENCE:
                    break
            self._waiting.remove(first)
            first.turn.set_result(None)
            self._open[first.handler] += 1

    def _look(self) -> None:
        now, cpu = self._clock(), self._cpu()
        seconds = now - self._seen[0]
        if seconds >= _LOOK:
            self._limit = open_groups(self._limit, self._lanes, busy=(cpu - self._seen[1]) / seconds)
            self._seen = now, cpu
            self._admit()

    def _watch(self) -> None:
        """Keep measuring while a group waits, since for a long time no group may begin or end."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._look()
        self._admit()
        if self._waiting:
            self._watch()
