"""Lanes take turns while this process's CPU is what limits it: `rules.group_size` decides how many run at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from idemconsumer.rules.group_size import open_groups

_LOOK: Final = 0.05  # seconds between two looks at the CPU
_PATIENCE: Final = 0.5  # seconds


class Turns:
    """`async with turns:` around a group. First come, first served, and within half a second in any case: a group that
    has its turn may wait long for a rival's key or for a row, while something else keeps the CPU busy.
    """

    def __init__(
        self, lanes: int, *, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time
    ) -> None:
        self._lanes = self._limit = lanes
        self._open = 0
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        self._clock = clock
        self._cpu = cpu
        self._seen = (clock(), cpu())
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._look()
        if self._open < self._limit:
            self._open += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, self._clock()))
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # given at the same moment
                await self.__aexit__()
            raise

    async def __aexit__(self, *raised: object) -> None:
        self._open -= 1
        self._admit()

    def _admit(self) -> None:
        """Called whenever a turn may be free, so a group that finds one free has none waiting before it."""
        while self._waiting and (self._open < self._limit or self._clock() - self._waiting[0][1] >= _PATIENCE):
            turn, _ = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(None)
                self._open += 1

    def _look(self) -> None:
        now, cpu = self._clock(), self._cpu()
        seconds = now - self._seen[0]
        if seconds >= _LOOK:
            self._limit = open_groups(self._limit, self._lanes, busy=(cpu - self._seen[1]) / seconds)
            self._seen = now, cpu
            self._admit()

    def _watch(self) -> None:
        """Go on looking while a group waits, since for a long time none may begin or end."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._look()
        self._admit()
        if self._waiting:
            self._watch()
