"""Real lanes in virtual time, under all that may happen to them at once.

Rivals that hold keys and let them go, failures, replies that are not confirmed, outages, groups of which a part is
decided, pauses, sessions that end, lanes that are kept for a saga, and a room for two. No key runs in two lanes, each
message ends once, none is left behind, and what is counted is what is there. A seed gives the same run again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

import pytest

from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.settings import Settings
from idemconsumer.worker import lanes as worker_lanes
from idemconsumer.worker.in_flight import InHand
from idemconsumer.worker.lanes import Lanes
from idemconsumer.worker.turns import Turns
from tests.model.virtual_time import Loop, free, of_tenants, ordered
from tests.support.failures import Failures
from tests.support.tuning import tuned
from tests.support.workers import Item, body

AT_ONCE: Final = 100  # seeds
SHORT: Final = [range(first, first + AT_ONCE) for first in range(0, 400, AT_ONCE)]
LONG: Final = [range(first, first + AT_ONCE) for first in range(400, 6_000, AT_ONCE)]
STORM: Final = 40.0  # seconds, of the virtual clock
CALM: Final = 120.0
DUPLICATE: Final = Outcome(OutcomeKind.DUPLICATE, state=State.COMPLETED)
BUSY: Final = Outcome(OutcomeKind.BUSY, attempt=1)


class World(Failures):
    """The engine, the session and the broker of one worker, as far as lanes see them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.handler = chance.choice([free, ordered, of_tenants]).plan.bind("model")
        super().__init__(self.handler)
        self.down = self.calm = False
        self.twice: list[str] = []  # keys that ran in two lanes
        self._running = set[str]()
        self._done = set[str]()
        self._held_until: dict[str, float] = {}  # by a rival
        keys = [f"k{chance.randrange(count)}" for count in (chance.choice([20, 60]),) for _ in range(count)]
        self._failures = {key: chance.choice([0, 0, 0, 1, 3]) for key in keys}
        self._entity = {key: f"e{chance.randrange(4)}" for key in keys}
        self._queue = deque(keys)
        self._sent: dict[Delivery, str] = {}
        self.epoch = self._assigned()
        self.in_hand = InHand(cast(Any, self), NullObserver())
        self.lanes = Lanes(self.in_hand, [self.handler], Settings(concurrency=chance.choice([1, 2, 4])))

    # ------------------------------------------------------------------------------------------------------- its broker
    def _assigned(self) -> Epoch:
        return Epoch(self.chance.choice([0, 2]), takes_back=self.chance.random() < 0.5)

    @property
    def over(self) -> bool:
        return not self._queue and not self.in_hand.in_flight

    def deliver(self, most: int) -> None:
        while most and self._queue and not self.in_hand.paused:
            most -= 1
            key = self._queue.popleft()
            message = Message("memory:q", body(Item(key, self._entity[key])))
            delivery = Delivery(message, self.epoch, inherited=self.chance.random() < 0.3)
            self._sent[delivery] = key
            self.lanes.dispatch(Work.of(self.handler, message), delivery, cast(Any, self))

    def lose_session(self) -> None:
        lost, self.epoch = self.epoch, self._assigned()
        lost.end()
        self._back([delivery for delivery in self._sent if delivery.epoch is lost])

    def _back(self, deliveries: Sequence[Delivery]) -> None:
        self._queue.extendleft(self._sent.pop(each) for each in reversed(deliveries) if each in self._sent)

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        await asyncio.sleep(self.chance.choice([0.0, 0.001]))
        for delivery in deliveries:
            self._sent.pop(delivery, None)

    async def release(self, deliveries: Sequence[Delivery]) -> None:
        await asyncio.sleep(0)
        self._back(deliveries)

    # ------------------------------------------------------------------------------------------------------- its engine
    def group_size(self, handler: object) -> int:
        return 4

    def _likely(self, share: float) -> bool:
        return not self.calm and self.chance.random() < share

    def _busy(self, key: str) -> bool:
        now = asyncio.get_running_loop().time()
        if key in self._done:
            return False
        if key not in self._held_until:
            self._held_until[key] = now + self.chance.choice([0.2, 1.0, 2.0]) if self._likely(0.4) else 0.0
        if not 0.0 < self._held_until[key] <= now:
            return self._held_until[key] > 0.0
        self._held_until[key] = 0.0
        if self.chance.random() < 0.5:  # the rival has committed
            self._done.add(key)
        return False

    async def run(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """What it decides is a prefix. A rival is not waited for, as with `wait="0s"`."""
        keys = [_key(work) for work in group]
        self.twice += {*keys} & self._running
        self._running |= {*keys}
        try:
            await asyncio.sleep(self.chance.choice([0.001, 0.01, 0.05, 0.4]))
            if self.down or self._likely(0.01):
                raise StoreUnavailable("away")
            most = self.chance.randint(1, len(group)) if self._likely(0.1) else len(group)
            outcomes: list[Outcome] = []
            for work, key in list(zip(group, keys, strict=True))[:most]:
                outcomes.append(self._decided(work, key))
                if outcomes[-1].kind is OutcomeKind.RETRYING and outcomes[-1].reason != "reply":
                    break
            return outcomes
        finally:
            self._running -= {*keys}

    def _decided(self, work: Work, key: str) -> Outcome:
        if self._busy(key):
            return BUSY
        if key in self._done:
            return DUPLICATE
        if self._failures[key] and not self.calm:
            self._failures[key] -= 1
            first = not work.attempts
            if self._failing.failed(self._subject, work.identity, ValueError(), first=first, tenant=work.tenant):
                return Outcome(OutcomeKind.RETRYING, due=0.5, reason="failing")
            work.attempts += 1
            return Outcome(OutcomeKind.RETRYING, due=self.chance.choice([0.05, 1.0, 5.0]), attempt=1)
        self._failing.succeeded(self._subject, [work.identity], [work.tenant])
        self._done.add(key)
        if self._likely(0.4):
            return Outcome(OutcomeKind.RETRYING, due=2.0, reason="reply")
        return Outcome(OutcomeKind.APPLIED, state=State.COMPLETED)

    async def replay_committed(self, group: Sequence[Work]) -> list[Outcome | None]:
        await asyncio.sleep(self.chance.choice([0.002, 0.3]))
        if self.down:
            raise StoreUnavailable("away")
        return [DUPLICATE if not self._busy(key) and key in self._done else None for key in map(_key, group)]

    # ----------------------------------------------------------------------------------------------------- what happens
    def happen(self) -> None:
        """Something, or nothing."""
        name, event = self.handler.name, self.chance.random()
        if event < 0.02:
            self.down = True
        elif event < 0.1:
            self.down = False
        elif event < 0.12:
            self.lanes.pause([name])
        elif event < 0.2:
            self.lanes.pause([])
        elif event < 0.23:
            self.lose_session()
        elif event < 0.27:
            self.lanes.keep(name, self.chance.random() < 0.5)

    def calm_down(self) -> None:
        self.down, self.calm = False, True
        self.lanes.pause([])
        self.lanes.keep(self.handler.name, False)


def _key(work: Work) -> str:
    return str(work.call.payload.id)  # type: ignore[union-attr]


async def storm(world: World) -> None:
    clock, chance = asyncio.get_running_loop().time, world.chance
    working = asyncio.create_task(world.lanes.work())
    until = clock() + STORM
    while clock() < until and not working.done():
        world.deliver(chance.choice([0, 1, 5]))
        world.happen()
        await world.lanes.give_back()
        await asyncio.sleep(chance.choice([0.0, 0.001, 0.05, 0.3]))
    world.calm_down()
    until = clock() + CALM
    while clock() < until and not working.done() and not world.over:
        world.deliver(5)
        await asyncio.sleep(0.05)
    if working.done():
        await working
    assert not world.twice
    assert world.over, f"{world.in_hand.in_flight} wait for ever"
    strands = world.lanes.of(world.handler.name).strands
    assert (len(strands), strands.keys, strands.rivals, strands.retries) == (0, set(), [], 0)
    assert (strands._bytes, strands.quarantine.trying, world.epoch.waiting) == (0, 0, 0)
    world.lanes.drain()
    await working


@pytest.mark.parametrize("seeds", [*SHORT, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=str)
def test_each_ends_once_and_no_key_runs_in_two_lanes(seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, lane_room=2)

    async def main(seed: int) -> None:
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(worker_lanes, "Turns", lambda lanes: Turns(lanes, clock=clock, cpu=lambda: 0.0))
        try:
            await storm(World(random.Random(seed)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise

    for seed in seeds:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(main(seed))
