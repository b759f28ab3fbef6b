"""Real lanes, quarantine and ledger in virtual time (D17): any number of messages that always fail, in any order."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from idemconsumer.engine.work import Work
from idemconsumer.message.message import Message
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.breaker import AGAIN, HANGS, NEXT
from idemconsumer.rules.values import Outcome, OutcomeKind, State
from idemconsumer.settings import Settings
from idemconsumer.worker.capacity import ROOM
from idemconsumer.worker.in_flight import InHand
from idemconsumer.worker.lanes import Lanes
from tests.model.virtual_time import Loop, free, of_tenants, ordered
from tests.support.failures import Failures
from tests.support.workers import Item, body

RUN = 0.01  # seconds that a handler takes
TIMEOUT = 2.0  # seconds for which one hangs before it has failed
KINDS = st.sampled_from(["bad", "bad", "bad", "hang", "good"])
MESSAGES = st.lists(st.tuples(KINDS, st.integers(0, 7)), max_size=40)
BACKLOGS = st.lists(st.tuples(KINDS, st.integers(0, 7)), min_size=12, max_size=40)
PROFILE = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class World:
    """A queue, and workers that take from it. Until `up` all messages fail, or `hangs`. `begun`: each run, with its
    message, when it began and how many ran then."""

    def __init__(
        self,
        messages: Sequence[Item],
        *,
        in_order: bool = False,
        tenants: bool = False,
        workers: int = 1,
        lanes: int = 8,
        up: float = 0.0,
        hangs: bool = False,
    ) -> None:
        self.handler = (ordered if in_order else of_tenants if tenants else free).plan.bind("model")
        self.queue = deque(messages)
        self.up = up
        self.hangs = hangs
        self.begun: list[tuple[str, float, int]] = []
        self.running = 0
        self.came: dict[str, float] = {}
        self.took: dict[str, float] = {}
        self.applied: list[str] = []
        self.dead: list[str] = []
        self.workers = [_Worker(self, lanes) for _ in range(workers)]

    async def fails(self, name: str) -> bool:
        """After the time that it takes."""
        now = asyncio.get_running_loop().time()
        down = now < self.up
        self.running += 1
        self.begun.append((name, now, self.running))
        await asyncio.sleep(TIMEOUT if name.startswith("hang") or (down and self.hangs) else RUN)
        self.running -= 1
        return down or not name.startswith(("good", "more"))

    async def until_applied(self, names: Sequence[str], *, within: float) -> None:
        await self._until(lambda: set(names) <= set(self.applied), within=within)

    async def until_ended(self, names: Sequence[str], *, within: float) -> None:
        """Each worker gets good ones all the time."""
        await self._until(lambda: set(names) <= {*self.applied, *self.dead}, within=within, feed=True)

    async def pour(self, seconds: int, *, bad: int, good: int) -> None:
        """So many of each in a second, the bad ones of tenant `a`."""
        for n in range(seconds * bad):
            each = [Item(f"bad-{n}", "a")]
            if n % (bad // good) == 0:
                each.append(Item(f"good-{n}", "b"))
            self.queue += each
            self.came |= {item.id: asyncio.get_running_loop().time() for item in each}
            await asyncio.sleep(1 / bad)

    async def _until(self, done: Callable[[], bool], *, within: float, feed: bool = False) -> None:
        deadline, number = asyncio.get_running_loop().time() + within, 0
        while not done():
            assert asyncio.get_running_loop().time() < deadline, (self.applied, self.dead)
            for worker in self.workers if feed else ():
                number += 1
                worker.take(Item(f"more-{number}", f"more-{number}"))
            await asyncio.sleep(0.1)


class _Worker(Failures):
    """The engine of a worker and its session too, as far as lanes see them."""

    def __init__(self, world: World, lanes: int) -> None:
        self._world, self._lanes_each = world, lanes
        super().__init__(world.handler)
        self._epoch = Epoch()
        self._in_hand = InHand(cast(Any, self), NullObserver())
        self._lanes = Lanes(self._in_hand, [world.handler], Settings(concurrency=lanes))

    async def work(self) -> None:
        working = asyncio.create_task(self._lanes.work())
        try:
            while True:
                most = 2 * self._lanes_each + min(ROOM, self._epoch.waiting)
                while self._world.queue and self._in_hand.in_flight < most:
                    self.take(self._world.queue.popleft())
                await asyncio.sleep(RUN)
        finally:
            self._lanes.drain()
            await working

    def take(self, item: Item) -> None:
        message = Message("memory:q", body(item), {})
        self._lanes.dispatch(Work.of(self._world.handler, message), Delivery(message, self._epoch), cast(Any, self))

    async def settle(self, deliveries: Sequence[Delivery]) -> None: ...

    async def run(self, group: Sequence[Work], *, defer: bool) -> list[Outcome]:
        """As `Endings.failed` decides."""
        (work,) = group
        name = work.call.payload.id  # type: ignore[union-attr]
        if not await self._world.fails(name):
            self._failing.succeeded(self._subject, [work.identity], [work.tenant])
            self._world.applied.append(name)
            self._world.took[name] = asyncio.get_running_loop().time() - self._world.came.get(name, 0.0)
            return [Outcome(OutcomeKind.APPLIED, state=State.COMPLETED)]
        first = not work.attempts
        if self._failing.failed(self._subject, work.identity, ValueError(), first=first, tenant=work.tenant):
            return [Outcome(OutcomeKind.RETRYING, due=0.5, reason="failing")]
        work.attempts += 1
        if work.attempts < 5:
            return [Outcome(OutcomeKind.RETRYING, due=0.05 * 2**work.attempts, reason="retry")]
        self._failing.ended(self._subject, work.identity)
        self._world.dead.append(name)
        return [Outcome(OutcomeKind.DEAD, state=State.DEAD)]


def items(messages: Sequence[tuple[str, int]]) -> list[Item]:
    return [Item(f"{kind}-{n}", f"e{entity}") for n, (kind, entity) in enumerate(messages)]


def kinds(of: Sequence[Item], *those: str) -> list[str]:
    return sorted(item.id for item in of if item.id.startswith(those))


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
@given(MESSAGES, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 8))
def test_the_good_ones_are_done_within_seconds_and_the_bad_ones_die(
    messages: list[tuple[str, int]], in_order: bool, tenants: bool, workers: int, lanes: int
) -> None:
    of = items(messages)
    world = World(of, in_order=in_order, tenants=tenants, workers=workers, lanes=lanes)

    async def scenario() -> None:
        if not in_order:  # else a good one may be behind a bad one of its entity
            hanging = len(kinds(of, "hang")) * 5 * TIMEOUT / lanes  # as if there was nothing but these lanes
            await world.until_applied(kinds(of, "good"), within=5.0 + 2 * NEXT * len(of) + hanging)
        await world.until_ended([item.id for item in of], within=30.0 + (3 + 5 * TIMEOUT) * len(of))

    in_virtual_time(world, scenario())
    assert sorted(world.dead) == kinds(of, "bad", "hang")
    for entity in {item.entity for item in of} if in_order and workers == 1 else ():
        its = [item.id for item in of if item.entity == entity and item.id.startswith("good")]
        assert [name for name in world.applied if name in its] == its


@PROFILE
@given(BACKLOGS, st.booleans(), st.booleans(), st.integers(1, 8), st.floats(0.5, 60.0), st.booleans())
def test_an_outage_kills_none_and_ends_for_all_within_seconds(
    messages: list[tuple[str, int]], in_order: bool, tenants: bool, lanes: int, lasts: float, hangs: bool
) -> None:
    of = items([(kind.replace("hang", "bad"), entity) for kind, entity in messages])
    assume(len({item.entity for item in of}) >= 5)  # with fewer heads it is not seen as one
    hangs = hangs and not in_order
    if hangs:  # with fewer lanes at work, up to four have used up their attempts before it is seen
        lanes = max(lanes, 5)
    world = World(of, in_order=in_order, tenants=tenants, lanes=lanes, up=lasts, hangs=hangs)

    async def scenario() -> None:
        await asyncio.sleep(lasts)
        assert world.dead == []
        if not in_order:
            begun = TIMEOUT if hangs else 0.0
            await world.until_applied(kinds(of, "good"), within=3.0 + 1.5 * AGAIN * len(of) + begun)
        await world.until_ended([item.id for item in of], within=30.0 + 3 * len(of))

    in_virtual_time(world, scenario())
    assert sorted(world.dead) == kinds(of, "bad")


def test_whose_tenant_has_not_failed_comes_before_more_of_one_that_has() -> None:
    of = items([*[("bad", 0)] * 300, *[("good", 1)] * 20])
    world = World(of, tenants=True)
    in_virtual_time(world, world.until_applied(kinds(of, "good"), within=2.0))
    assert len({name for name, _, _ in world.begun}) < 60


@pytest.mark.parametrize(("tenants", "within"), [(False, 6.0), (True, 2.0)])
def test_a_stream_of_bad_ones_holds_up_none(tenants: bool, within: float) -> None:
    """Nor does it open it again and again."""
    world = World([], tenants=tenants)

    async def scenario() -> None:
        await world.pour(15, bad=40, good=2)
        await world.until_applied([name for name in world.came if name.startswith("good")], within=within)

    in_virtual_time(world, scenario())
    assert max(world.took.values()) < within
    assert len(world.dead) > 15 * 40 - 500


def test_a_stream_of_one_tenant_that_is_more_than_can_be_tried_holds_up_no_other() -> None:
    """One lane can run half of its attempts."""
    world = World([], tenants=True, lanes=1)

    async def scenario() -> None:
        await world.pour(15, bad=40, good=2)
        assert max(world.took.values()) < 2.0
        assert len(world.took) >= 28
        assert len(world.dead) > 100, "it has its share"

    in_virtual_time(world, scenario())


def test_those_that_hang_hold_up_the_good_ones_for_no_longer_than_the_lanes_take_for_them() -> None:
    of = items([*[("hang", 0)] * 24, ("good", 0)])
    world = World(of)
    in_virtual_time(world, world.until_applied(kinds(of, "good"), within=24 / 8 * TIMEOUT + 2.0))


def test_one_that_hangs_delays_the_next_one_by_a_quarter_of_a_second() -> None:
    world = World([], lanes=16, up=0.5)

    async def scenario() -> None:
        world.queue += items([("good", 0)] * 8)  # which fail until then
        await asyncio.sleep(0.45)
        world.up = math.inf
        world.queue += items([("hang", 0)] * 6)
        await asyncio.sleep(TIMEOUT)
        begun = [at for name, at, _ in world.begun if name.startswith("hang")]
        assert len(begun) == 6
        assert max(later - at for at, later in pairwise(begun)) < HANGS + 0.05

    in_virtual_time(world, scenario())


def test_where_all_hang_as_many_as_lanes_are_tried_and_then_one_at_a_time() -> None:
    """None is tried sooner than a tenth of a second after another one."""
    of = items([("good", 0)] * 40)
    world = World(of, up=100.0, hangs=True)
    in_virtual_time(world, world.until_applied(kinds(of, "good"), within=130.0))
    assert world.dead == []
    down = [(name, at, beside) for name, at, beside in world.begun if at < 100.0]
    tried = {name: at for name, at, _ in reversed(down)}
    assert len(tried) == 40
    again = [beside for _, at, beside in down if at > max(tried.values()) + TIMEOUT]
    assert len(again) > 20
    assert set(again) == {1}
    times = [at for _, at, _ in down[12:]]  # once it is open: four lanes began again before
    assert min(later - at for at, later in pairwise(times)) > NEXT - 1e-3
