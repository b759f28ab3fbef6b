"""A lane: one group at a time, in order of arrival (D3)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.worker.in_hand import Held, InHand
from idemconsumer.worker.turns import Turns
from idemconsumer.worker.waiting_room import WaitingRoom

_LOOK_UP: Final = 1.0  # seconds after which a lane that holds a delivery checks whether it still owns it


class Lane:
    """`index` is the number under which an epoch counts what this lane ran."""

    def __init__(self, index: int, in_hand: InHand, waiting_room: WaitingRoom, turns: Turns) -> None:
        self._index = index
        self._in_hand = in_hand
        self._waiting_room = waiting_room
        self._turns = turns
        self._queue: deque[Held] = deque()
        self._running = 0
        self._wake = asyncio.Event()

    @property
    def load(self) -> int:
        """How many deliveries it has, running or waiting."""
        return self._running + len(self._queue)

    @property
    def held_up(self) -> int:
        """How many deliveries it has if the first one is not due yet, else none."""
        return len(self._queue) if self._queue and self._queue[0].due > asyncio.get_running_loop().time() else 0

    def add(self, held: Held) -> None:
        self._queue.append(held)
        self._wake.set()

    def drain(self) -> None:
        self._wake.set()

    def clear(self) -> list[Held]:
        deliveries = list(self._queue)
        self._queue.clear()
        return deliveries

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._in_hand.draining:
            self._drop_abandoned()
            if not self._queue:
                self._wake.clear()
                await self._wake.wait()
            elif (pause := self._queue[0].due - loop.time()) > 0:
                await self._pause(min(pause, _LOOK_UP))
            else:
                await self._conclude(*await self._run_group())

    async def _run_group(self) -> tuple[list[Held], list[Outcome]]:
        if self._in_hand.engine.group_size(self._queue[0].work.handler) == 1:
            return await self._run_next()
        async with self._turns:
            self._drop_abandoned()
            return ([], []) if self._in_hand.draining or not self._queue else await self._run_next()

    async def _run_next(self) -> tuple[list[Held], list[Outcome]]:
        group = self._take()
        self._running = len(group)
        try:
            return group, await self._in_hand.run(group)
        except asyncio.CancelledError:
            self._queue.extendleft(reversed(group))  # rolled back, so given back like what never started
            raise
        finally:
            self._running = 0

    async def _pause(self, seconds: float) -> None:
        """Hold the head (order is kept); a drain ends the pause at once, an arrival does not."""
        self._wake.clear()
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while not self._in_hand.draining:
                    await self._wake.wait()
                    self._wake.clear()
        except TimeoutError:
            return

    def _drop_abandoned(self) -> None:
        while self._queue and self._queue[0].abandoned:
            self._in_hand.forget([self._queue.popleft()])

    def _take(self) -> list[Held]:
        """What is already waiting for one handler, up to its group size. Nothing waits for a group to fill."""
        handler = self._queue[0].work.handler
        size = self._in_hand.engine.group_size(handler)
        group: list[Held] = []
        while self._queue and len(group) < size:
            held = self._queue[0]
            if held.work.handler is not handler or held.abandoned or (group and held.due):
                break
            if held.work.call is not None and held.delivery.epoch.on_probation(self._index):
                held.work.suspect()
            group.append(self._queue.popleft())
        return group

    async def _conclude(self, group: Sequence[Held], outcomes: Sequence[Outcome]) -> None:
        """Put back what was not decided, and what is held until it is due; send what is busy to the waiting room."""
        back = list(group[len(outcomes) :])
        busy: list[Held] = []
        for held, outcome in zip(group, outcomes, strict=False):
            match settle(outcome):
                case Settlement.HOLD:
                    held.due = asyncio.get_running_loop().time() + outcome.due
                    back.insert(0, held)
                case Settlement.WAITING_ROOM:
                    busy.append(held)
                case _ if outcome.kind is not OutcomeKind.DUPLICATE:
                    held.delivery.epoch.passed(self._index)
        self._queue.extendleft(reversed(back))
        for held in busy:
            await self._waiting_room.admit(held)
