"""Broker sessions that end by themselves, again and again: each end costs every message in it a delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from structlog.testing import LogCapture

from idemconsumer import App, Retry, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import SessionEnded
from idemconsumer.handlers.options import Options
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from tests.support.logs import times
from tests.support.workers import Bench, Item, Lasting, body, connected, note


class ShortLived(Lasting):
    """Its sessions end at once; those whose number is in `good` first deliver one message and see it settled."""

    def __init__(self, *good: int) -> None:
        super().__init__()
        self.good = good
        self.opened: list[float] = []
        self.settled = asyncio.Event()

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        self.opened.append(asyncio.get_running_loop().time())
        self.settled.clear()
        (subscription,) = subscriptions
        return Short(self, subscription.name, self._queue(subscription.name), bounds)

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in pairwise(self.opened)]


class Short(MemorySession):
    def __init__(self, broker: ShortLived, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._broker = broker
        self._delivers = len(broker.opened) in broker.good

    async def fetch(self) -> Sequence[Delivery]:
        if self._delivers:
            self._delivers = False
            return [self._take()]
        if len(self._broker.opened) in self._broker.good:
            await self._broker.settled.wait()
        raise SessionEnded("it ends at once")

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        await super().settle(deliveries)
        self._broker.settled.set()


def app() -> App:
    made = App("sessions")

    @made.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return made


async def test_sessions_that_end_at_once_are_opened_more_and_more_rarely_and_it_is_said_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    broker = ShortLived()
    connected(bench, monkeypatch, memory=broker)
    async with bench.running(app()) as running:
        await running.until(lambda: len(broker.opened) == 5)
    assert all(later > 1.3 * earlier for earlier, later in pairwise(broker.pauses)), broker.pauses
    assert times(logged, "broker session lost, reconnecting") == 1
    assert times(logged, "consuming") == 1


async def test_a_session_that_got_something_done_is_followed_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    broker = ShortLived(4)
    connected(bench, monkeypatch, memory=broker)
    await broker.publish("q", [Outgoing(body(Item("one")))])
    async with bench.running(app()) as running:
        await running.until(lambda: len(broker.opened) == 5)
    assert bench.effects() == ["one"]
    assert broker.pauses[3] < 0.6 * broker.pauses[2], broker.pauses
    assert times(logged, "broker session lost, reconnecting") >= 2, "after one that worked it is news again"


async def test_a_drain_does_not_wait_for_the_next_session(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = ShortLived()
    connected(bench, monkeypatch, memory=broker)
    async with bench.running(app()) as running:
        await running.until(lambda: len(broker.opened) == 4)
        async with asyncio.timeout(0.7):  # the pause that has just begun is 1.2 s at least
            await running.leave()


class Bounded(Lasting):
    """Remembers how much each session may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[Bounds] = []

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        self.bounds.append(bounds)
        return await super().open(subscriptions, bounds)


@pytest.mark.parametrize("size", [None, 4])
async def test_a_session_may_hold_the_largest_groups_that_its_handlers_may_come_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    broker, made = Bounded(), App("sessions")
    options: Options = {} if size is None else {"group_size": size}

    @made.idempotent_handler("memory:q", key="id", **options)
    async def handle(item: Item, tx: Tx) -> None: ...

    connected(bench, monkeypatch, memory=broker)
    ((locks,),) = bench.do(
        "select current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int / 10"
    )
    async with bench.running(made, concurrency=20) as running:
        await running.until(lambda: bool(broker.bounds))
    assert [bounds.group for bounds in broker.bounds] == [size or min(128, locks // 20)]


async def test_a_worker_leaves_the_others_what_it_cannot_run_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, began, go_on = App("sessions"), asyncio.Event(), asyncio.Event()

    @made.idempotent_handler("postgres:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        began.set()
        await go_on.wait()

    connected(bench, monkeypatch)
    bench.enqueue("q", *(Item(str(number)) for number in range(100)))
    async with bench.running(made, concurrency=2) as running:
        await running.until(began.is_set)
        assert taken(bench) == 4 * 2 * 1  # its time is not known yet, so a group holds one message
        go_on.set()


async def test_what_waits_behind_a_retry_does_not_stop_the_fetching_for_other_lanes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, failed = App("sessions"), asyncio.Event()

    @made.idempotent_handler("postgres:q", key="id", order_by="entity", group_size=1)
    async def handle(item: Item, tx: Tx) -> None:
        if item.id == "stuck":
            failed.set()
            raise Retry(after="30s")
        await note(tx, item)

    connected(bench, monkeypatch)
    behind = [Item(f"behind-{number}", "stuck") for number in range(30)]
    bench.enqueue("q", Item("stuck", "stuck"), *behind)
    async with bench.running(made, concurrency=2) as running:
        await running.until(failed.is_set)
        bench.enqueue("q", *(Item(f"other-{n}", f"e{n}") for n in range(60)))
        await running.until(lambda: taken(bench) >= 31 and len(bench.effects()) >= 20)


def taken(bench: Bench) -> int:
    return int(bench.do("select count(*) from idemconsumer.queue where token is not null")[0][0])
