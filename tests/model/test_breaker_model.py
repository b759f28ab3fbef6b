"""Real lanes, quarantine and ledger in virtual time (D17): any number of messages that always fail, in any order."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from idemconsumer import Tx, idempotent_handler
from idemconsumer.engine.failing import Failing, Subject
from idemconsumer.engine.work import Work
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.failing import AGAIN, NEXT
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.settings import Settings
from idemconsumer.worker.in_hand import InHand
from idemconsumer.worker.lanes import Lanes
from tests.support.workers import Item, body

RUN = 0.01  # seconds that a handler takes
MESSAGES = st.lists(st.tuples(st.sampled_from(["bad", "bad", "bad", "good"]), st.integers(0, 7)), max_size=40)
PROFILE = settings(max_examples=30, deadline=None)


class Loop(asyncio.SelectorEventLoop):
    """Whoever waits makes time pass."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen"
        self._loop.now += max(timeout, 1e-6)
        return super().select(0)


@idempotent_handler("memory:q", key="id")
async def free(item: Item, tx: Tx) -> None: ...


@idempotent_handler("memory:q", key="id", order_by="entity")
async def ordered(item: Item, tx: Tx) -> None: ...


class World:
    """A queue, and workers that take from it. Until `up` all messages fail."""

    def __init__(self, messages: Sequence[Item], *, in_order: bool, workers: int, lanes: int, up: float = 0.0) -> None:
        self.handler = (ordered if in_order else free).plan.bind("model")
        self.queue = deque(messages)
        self.up = up
        self.applied: list[str] = []
        self.dead: list[str] = []
        self.workers = [_Worker(self, lanes) for _ in range(workers)]

    def fails(self, name: str) -> bool:
        return name.startswith("bad") or asyncio.get_running_loop().time() < self.up

    async def until_applied(self, names: Sequence[str], *, within: float) -> None:
        await self._until(lambda: set(names) <= set(self.applied), within=within)

    async def until_ended(self, names: Sequence[str], *, within: float) -> None:
        """Each worker gets good ones all the time."""
        await self._until(lambda: set(names) <= {*self.applied, *self.dead}, within=within, feed=True)

    async def _until(self, done: Callable[[], bool], *, within: float, feed: bool = False) -> None:
        deadline, number = asyncio.get_running_loop().time() + within, 0
        while not done():
            assert asyncio.get_running_loop().time() < deadline, (self.applied, self.dead)
            for worker in self.workers if feed else ():
                number += 1
                worker.take(Item(f"more-{number}", f"more-{number}"))
            await asyncio.sleep(0.1)


class _Worker:
    """The engine of a worker and its session too, as far as lanes see them."""

    def __init__(self, world: World, lanes: int) -> None:
        self._world, self._lanes_each = world, lanes
        self._failing, self._subject = Failing(watched=True), Subject.handler(world.handler)
        self._epoch = Epoch()
        self._in_hand = InHand(cast(Any, self), NullObserver())
        self._lanes = Lanes(self._in_hand, [world.handler], Settings(concurrency=lanes))

    async def work(self) -> None:
        working = asyncio.create_task(self._lanes.work())
        try:
            while True:
                while self._world.queue and self._in_hand.in_flight < 2 * self._lanes_each + self._epoch.waiting:
                    self.take(self._world.queue.popleft())
                await asyncio.sleep(RUN)
        finally:
            self._lanes.drain()
            await working

    def take(self, item: Item) -> None:
        message = Message("memory:q", body(item), {})
        self._lanes.dispatch(Work.of(self._world.handler, message), Delivery(message, self._epoch), cast(Any, self))

    async def settle(self, deliveries: Sequence[Delivery]) -> None: ...

    def group_size(self, handler: object) -> int:
        return 1

    def health(self, handler: object) -> object:
        return self._failing.of(self._subject)

    def has_failed(self, work: Work) -> bool:
        return work.attempts > 0 or self._failing.has_failed(self._subject, work.identity)

    async def run(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """As `Endings.failed` decides."""
        await asyncio.sleep(RUN)
        (work,) = group
        name = work.call.payload.id  # type: ignore[union-attr]
        if not self._world.fails(name):
            self._failing.succeeded(self._subject, [work.identity])
            self._world.applied.append(name)
            return [Outcome(OutcomeKind.APPLIED, state=State.COMPLETED)]
        if self._failing.failed(self._subject, work.identity, ValueError(), first=not work.attempts):
            return [Outcome(OutcomeKind.RETRYING, due=0.5, reason="failing")]
        work.attempts += 1
        if work.attempts < 5:
            return [Outcome(OutcomeKind.RETRYING, due=0.05 * 2**work.attempts, reason="retry")]
        self._failing.ended(self._subject, work.identity)
        self._world.dead.append(name)
        return [Outcome(OutcomeKind.DEAD, state=State.DEAD)]


def items(messages: Sequence[tuple[str, int]]) -> list[Item]:
    return [Item(f"{kind}-{n}", f"e{entity}") for n, (kind, entity) in enumerate(messages)]


def kinds(of: Sequence[Item], kind: str) -> list[str]:
    return sorted(item.id for item in of if item.id.startswith(kind))


def in_virtual_time(world: World, scenario: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        working = [asyncio.create_task(worker.work()) for worker in world.workers]
        await scenario
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


@PROFILE
@given(MESSAGES, st.booleans(), st.integers(1, 3), st.integers(1, 8))
def test_the_good_ones_are_done_within_seconds_and_the_bad_ones_die(
    messages: list[tuple[str, int]], in_order: bool, workers: int, lanes: int
) -> None:
    of = items(messages)
    world = World(of, in_order=in_order, workers=workers, lanes=lanes)

    async def scenario() -> None:
        if not in_order:  # else a good one may be behind a bad one of its entity
            await world.until_applied(kinds(of, "good"), within=3.0 + 2 * NEXT * len(of))
        await world.until_ended([item.id for item in of], within=30.0 + 3 * len(of))

    in_virtual_time(world, scenario())
    assert sorted(world.dead) == kinds(of, "bad")
    for entity in {item.entity for item in of} if in_order and workers == 1 else ():
        its = [item.id for item in of if item.entity == entity and item.id.startswith("good")]
        assert [name for name in world.applied if name in its] == its


@PROFILE
@given(MESSAGES, st.booleans(), st.integers(1, 8), st.floats(0.5, 60.0))
def test_an_outage_kills_none_and_ends_for_all_within_seconds(
    messages: list[tuple[str, int]], in_order: bool, lanes: int, lasts: float
) -> None:
    of = items(messages)
    assume(len({item.entity for item in of}) >= 5)  # with fewer heads it is not seen as one
    world = World(of, in_order=in_order, workers=1, lanes=lanes, up=lasts)

    async def scenario() -> None:
        await asyncio.sleep(lasts)
        assert world.dead == []
        if not in_order:
            await world.until_applied(kinds(of, "good"), within=3.0 + 1.5 * AGAIN * len(of))
        await world.until_ended([item.id for item in of], within=30.0 + 3 * len(of))

    in_virtual_time(world, scenario())
    assert sorted(world.dead) == kinds(of, "bad")
