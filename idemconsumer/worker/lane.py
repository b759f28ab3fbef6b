"""A lane: one group at a time, and what has an order in order of arrival (D3)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.rules import breaker as failing
from idemconsumer.rules.breaker import HandlerHealth
from idemconsumer.rules.values import Outcome, OutcomeKind
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.stores.sharing import PARTY
from idemconsumer.worker.in_flight import InFlight, InHand
from idemconsumer.worker.probe import Probe
from idemconsumer.worker.spread import Spread
from idemconsumer.worker.turns import Turns
from idemconsumer.worker.waiting_room import WaitingRoom

_LOOK_UP: Final = 1.0  # seconds after which a lane that holds a delivery checks whether it still owns it


class Lane:
    """One of a handler's. Its own queue holds what has an order; what has none it takes from `spread`.

    `index` is the number under which an epoch counts what this lane ran. `probe`: which lane has its turn while all
    messages of the handler fail (D17).
    """

    def __init__(
        self,
        index: int,
        handler: BoundHandler,
        in_hand: InHand,
        spread: Spread,
        waiting_room: WaitingRoom,
        turns: Turns,
        probe: Probe,
    ) -> None:
        self._index = index
        self._handler = handler
        self._in_hand = in_hand
        self._spread = spread
        self._waiting_room = waiting_room
        self._turns = turns
        self._probe = probe
        self._queue: deque[InFlight] = deque()
        self._running = 0
        self._own_next = True
        self._behind_next = False
        self._wake = asyncio.Event()

    @property
    def load(self) -> int:
        """How many deliveries it has, running or waiting."""
        return self._running + len(self._queue)

    @property
    def free(self) -> bool:
        """Whether it runs nothing. What waits in its own queue does not count while it is kept for a saga."""
        return not self._running and (not self._queue or self._spread.kept)

    @property
    def ready(self) -> Iterable[InFlight]:
        """What waits to run."""
        return self._queue

    def add(self, held: InFlight) -> None:
        self._queue.append(held)
        self._wake.set()

    def take_back(self, line: Sequence[InFlight]) -> None:
        self._queue.extendleft(reversed(line))
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def drain(self) -> None:
        self._wake.set()

    def clear(self) -> list[InFlight]:
        deliveries = list(self._queue)
        self._queue.clear()
        return deliveries

    def give_back(self) -> list[InFlight]:
        """Take out what never started, as far as its broker takes it back."""
        deliveries = self.clear()
        self._queue.extend(held for held in deliveries if not held.can_go_back)
        return [held for held in deliveries if held.can_go_back]

    async def work(self) -> None:
        """Returns when drained."""
        PARTY.set(self._handler.name)
        while not self._in_hand.draining:
            self._drop_abandoned()
            self._spread.let_out(probing=self._health.probing)
            if self._paused:
                await self._woken(_LOOK_UP)
            elif self._spread.keeps:
                await self._pause(_LOOK_UP)
            elif self._something_to_run():
                await self._conclude(*await self._run_group())
            else:
                await self._pause(self._spread.until_let_out)

    def _something_to_run(self) -> bool:
        return bool(self._spread.ready or self._queue) or self._spread.has_behind(self, probing=self._health.probing)

    async def _run_group(self) -> tuple[list[InFlight], list[Outcome]]:
        if self._health.probing:
            async with self._probe.turn() as begun:
                while (health := self._health).probing and not self._in_hand.draining:
                    self._drop_abandoned()
                    self._quarantine_failed()
                    if not self._something_to_run():
                        return [], []
                    if (pause := health.next_run - asyncio.get_running_loop().time()) > 0:
                        await self._pause(pause)
                        continue
                    if not (self._spread.ready or self._queue):
                        self._spread.let_out_fresh(self)
                    begun()
                    return await self._run_next(1)
        if self._in_hand.engine.group_size(self._handler) == 1:
            return await self._run_next(1)
        async with self._turns.of(self._handler.name):
            self._drop_abandoned()
            if self._health.probing:  # it was not yet, when the turn was asked for
                return [], []
            return await self._run_next(self._in_hand.engine.group_size(self._handler))

    def _quarantine_failed(self) -> None:
        """What is of a tenant whose messages fail waits for those of others. While they are probed, what has failed
        waits for those that have not."""
        engine = self._in_hand.engine

        def is_kept(held: InFlight) -> bool:
            may = held.permitted and not self._spread.trying_again
            if may or held.abandoned:
                return False
            beside = engine.failed_beside(held.work)
            return beside >= failing.IN_A_ROW or (probing and (beside > 0 or engine.has_failed(held.work)))

        probing = self._health.probing
        while self._queue and is_kept(self._queue[0]):
            self._spread.quarantine(self._queue.popleft(), self._behind)
        self._spread.quarantine_ready(is_kept)

    @property
    def _paused(self) -> bool:
        return self._handler.name in self._in_hand.paused

    @property
    def _health(self) -> HandlerHealth:
        return self._in_hand.engine.health(self._handler)

    async def _run_next(self, size: int) -> tuple[list[InFlight], list[Outcome]]:
        group = [] if self._in_hand.draining or self._paused else self._take(size)
        self._spread.call()  # the lane that was woken for what is left may be this one
        if not group:
            return [], []
        self._running, again = len(group), group[0].permitted
        self._spread.running += 1
        self._spread.trying_again += again
        try:
            for held in group:
                if held.due and held.work.misread:
                    await self._in_hand.read_again(held, self)
                if self._on_probation(held):
                    held.work.suspect()
            return group, await self._in_hand.run(group)
        except asyncio.CancelledError:
            self._queue.extendleft(reversed(group))  # rolled back, so given back like what never started
            raise
        finally:
            self._running = 0
            self._spread.running -= 1
            self._spread.trying_again -= again

    async def _pause(self, seconds: float | None) -> None:
        """Until something arrives, or for so long."""
        self._spread.idle(self)
        try:
            await self._woken(seconds)
        finally:
            self._spread.busy(self)

    async def _woken(self, seconds: float | None) -> None:
        """As `_pause`, of a lane that takes nothing meanwhile, so that nobody looks for something for it."""
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _drop_abandoned(self) -> None:
        while self._queue and self._queue[0].abandoned:
            self._in_hand.forget([self._queue.popleft()])

    def _take(self, size: int) -> list[InFlight]:
        """What is already waiting, up to `size`. Nothing waits for a group to fill."""
        if not self._health.probing:
            self._quarantine_failed()
            if self._behind_next or not (self._spread.ready or self._queue):
                self._spread.let_out_behind(self)
            self._behind_next = not self._behind_next  # so that they have their share, whatever else there is
        own = bool(self._queue) and (self._own_next or not self._spread.ready)
        self._own_next = not own
        return self._take_own(size) if own else self._spread.take(self, size, self._turns.free)

    def _take_own(self, size: int) -> list[InFlight]:
        group: list[InFlight] = []
        while self._queue and len(group) < size:
            if self._queue[0].abandoned or (group and self._queue[0].due):
                break
            group.append(self._queue.popleft())
        return group

    def _on_probation(self, held: InFlight) -> bool:
        delivery = held.delivery
        return delivery.inherited and held.work.call is not None and delivery.epoch.on_probation(*self._budget(held))

    def _budget(self, held: InFlight) -> tuple[int, int]:
        """Under which number an epoch counts it, and for how many lanes: its own, or all that take from `spread`."""
        return (self._index, 1) if held.ordered else (self._spread.index, self._spread.lanes)

    async def _conclude(self, group: Sequence[InFlight], outcomes: Sequence[Outcome]) -> None:
        """Put back what was not decided; what is to run again steps aside until it is due, with all that must not run
        before it (D3, D15). What is busy goes to the waiting room."""
        busy: list[InFlight] = []
        again: list[InFlight] = []
        for held, outcome in zip(group, outcomes, strict=False):
            match settle(outcome):
                case Settlement.HOLD:
                    held.due = asyncio.get_running_loop().time() + outcome.due
                    again.append(held)
                case Settlement.WAITING_ROOM:
                    busy.append(held)
                case _ if held.delivery.inherited and outcome.kind is not OutcomeKind.DUPLICATE:
                    held.delivery.epoch.passed(*self._budget(held))
        self._queue.extendleft(reversed(group[len(outcomes) :]))
        for held in reversed(again):  # so that of one order the first one is the head again
            await self._spread.step_aside(held, self._behind)
        for held in busy:
            await self._waiting_room.admit(held)

    def _behind(self, held: InFlight) -> list[InFlight]:
        """Later deliveries of its order and of its key, taken out of the queue: they must not run before it."""
        if not held.ordered and self._in_hand.deliveries(held) == 1:
            return []
        behind, others = list[InFlight](), deque[InFlight]()
        for later in self._queue:
            waits = later.line == held.line or later.work.key == held.work.key
            (behind if waits else others).append(later)
        self._queue = others
        return behind
