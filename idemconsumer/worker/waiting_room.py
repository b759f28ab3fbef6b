"""The waiting room: deliveries with a key that a rival holds, put here so that their lanes can go on (D5)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.logs import log
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import Outcome
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.stores.sharing import PARTY
from idemconsumer.worker.in_flight import InFlight, InHand

_FIRST, _LAST = 0.05, 1.0  # seconds between two rounds; they double while no delivery leaves


class WaitingRoom:
    """Unsettled deliveries of a handler, up to `size` of each source. They are claimed again in rounds, and give up
    their order."""

    def __init__(self, handler: BoundHandler, in_hand: InHand, size: int) -> None:
        self._handler = handler
        self._in_hand = in_hand
        self._size = size
        self._deliveries: dict[InFlight, float] = {}  # with when they came
        self._running: Sequence[InFlight] = ()
        self._left = asyncio.Event()
        self._wake = asyncio.Event()

    def add(self, held: InFlight) -> None:
        held.delivery.epoch.waiting += 1
        self._deliveries[held] = asyncio.get_running_loop().time()
        self._wake.set()

    async def admit(self, held: InFlight) -> None:
        """Take a delivery over from its lane, which waits here while there is no room for its source."""
        source, logged = held.delivery.message.source, False
        while not self._in_hand.draining and self._count(source) >= self._size:
            if not logged:
                log.warning("waiting room full, lane waits", source=source, size=self._size)
                logged = True
            self._left.clear()
            await self._left.wait()
        self._in_hand.moved(held, self)
        self.add(held)

    def _count(self, source: str) -> int:
        return sum(held.delivery.message.source == source for held in self._deliveries)

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def oldest(self) -> float:
        """For how many seconds the oldest delivery has waited here."""
        came = next(iter(self._deliveries.values()), None)
        return 0.0 if came is None else asyncio.get_running_loop().time() - came

    @property
    def waiting(self) -> Counter[bytes]:
        """How many deliveries of each key only wait: those that do not run and hold no saga."""
        idle = self._deliveries.keys() - self._running
        return Counter(held.work.key for held in idle if held.work.leased is None)

    def drain(self) -> None:
        self._wake.set()
        self._left.set()

    def clear(self) -> list[InFlight]:
        deliveries, self._deliveries = list(self._deliveries), {}
        for held in deliveries:
            held.delivery.epoch.waiting -= 1
        return deliveries

    async def work(self) -> None:
        PARTY.set(self._handler.name)
        in_vain = 0  # rounds
        while not self._in_hand.draining:
            if not self._deliveries:
                in_vain = 0
                self._wake.clear()
                await self._wake.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff(in_vain + 1, first=_FIRST, cap=_LAST)):
                    while not self._in_hand.draining:
                        self._wake.clear()
                        await self._wake.wait()
            in_vain = in_vain + 1 if self._at_rest or not await self._claim_again() else 0

    @property
    def _at_rest(self) -> bool:
        """Whether nothing may begin."""
        return self._in_hand.draining or self._handler.name in self._in_hand.paused

    async def _claim_again(self) -> bool:
        """One round over all deliveries here; whether any of them left."""
        self._dismiss([held for held in self._deliveries if held.abandoned])
        now = asyncio.get_running_loop().time()
        deliveries = [held for held in self._deliveries if held.due <= now]
        before = len(self._deliveries)
        if deliveries:
            self._conclude(await self._in_hand.replay_committed(deliveries))
        waiting = [held for held in deliveries if held in self._deliveries and held.due <= now]
        if self._in_hand.engine.health(self._handler).probing:
            waiting = waiting[:1]
        size = self._in_hand.engine.group_size(self._handler)
        for start in range(0, len(waiting), size):
            if self._at_rest:
                return True
            if group := [held for held in waiting[start : start + size] if not held.abandoned]:
                self._running = group
                outcomes = await self._in_hand.run(group, defer=True)
                self._running = ()
                self._conclude(zip(group, outcomes, strict=False))
        return len(self._deliveries) < before

    def _conclude(self, outcomes: Iterable[tuple[InFlight, Outcome]]) -> None:
        for held, outcome in outcomes:
            match settle(outcome):
                case Settlement.FINISH | Settlement.DROP:
                    self._leave(held)
                case Settlement.HOLD:
                    held.due = asyncio.get_running_loop().time() + outcome.due

    def _dismiss(self, deliveries: Sequence[InFlight]) -> None:
        for held in deliveries:
            self._leave(held)
        self._in_hand.forget(deliveries)

    def _leave(self, held: InFlight) -> None:
        del self._deliveries[held]
        held.delivery.epoch.waiting -= 1
        self._left.set()
