"""Broker sessions that end by themselves, again and again: each end costs every message in it a delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from idemconsumer import App, Message, Retry, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import SessionEnded
from idemconsumer.handlers.options import Options
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Epoch, Outgoing
from idemconsumer.worker import feed
from tests.support.logs import LogCapture, times
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, Lasting, body, connected, note


class ShortLived(Lasting):
    """Its sessions end at once; those whose number is in `good` first deliver one message and see it settled."""

    def __init__(self, *good: int) -> None:
        super().__init__()
        self.good = good
        self.opened = 0
        self.settled = asyncio.Event()

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        self.opened += 1
        self.settled.clear()
        (subscription,) = subscriptions
        return Short(self, subscription.name, self._queue(subscription.name), bounds)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The failures that each pause is made for, negative where its session counts. They take no time."""
    made: list[int] = []

    def none(failures: int, *, counted: bool, jitter: float) -> float:
        made.append(-failures if counted else failures)
        return 0.0

    monkeypatch.setattr(feed, "session_pause", none)
    return made


class Short(MemorySession):
    def __init__(self, broker: ShortLived, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._broker = broker
        self._delivers = broker.opened in broker.good

    async def fetch(self) -> Sequence[Delivery]:
        if self._delivers:
            self._delivers = False
            return [self._take()]
        if self._broker.opened in self._broker.good:
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
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture, pauses: list[int]
) -> None:
    connected(bench, monkeypatch, memory=ShortLived())
    async with bench.running(app()) as running:
        await running.until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [1, 2, 3, 4, 5]
    assert times(logged, "broker session lost, reconnecting") == 1
    assert times(logged, "consuming") == 1
    assert times(logged, "consuming again") == 1


async def test_a_session_that_got_something_done_is_followed_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture, pauses: list[int]
) -> None:
    broker = ShortLived(4)
    connected(bench, monkeypatch, memory=broker)
    await broker.publish("q", [Outgoing(body(Item("one")))])
    async with bench.running(app()) as running:
        await running.until(lambda: len(pauses) >= 5)
    assert bench.effects() == ["one"]
    assert pauses[:5] == [1, 2, 3, 0, 1]
    assert times(logged, "broker session lost, reconnecting") >= 2, "after one that worked it is news again"


async def test_a_session_that_has_stood_for_long_is_followed_soon(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pauses: list[int]
) -> None:
    """As that of a queue in which nothing arrives, whose connection is lost once a day."""
    monkeypatch.setattr(feed, "LONGEST", 0.0)
    connected(bench, monkeypatch, memory=ShortLived())
    async with bench.running(app()) as running:
        await running.until(lambda: len(pauses) >= 5)
    assert pauses[:5] == [0, 0, 0, 0, 0]


async def test_sessions_whose_ends_count_are_opened_more_rarely_still(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pauses: list[int]
) -> None:
    monkeypatch.setattr(Short, "losses_count", True)
    connected(bench, monkeypatch, memory=ShortLived())
    async with bench.running(app()) as running:
        await running.until(lambda: len(pauses) >= 3)
    assert pauses[:3] == [-1, -2, -3]


async def test_what_was_revoked_is_not_decoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session may already have said that nothing of it runs."""
    broker = ShortLived(1)
    connected(bench, monkeypatch, memory=broker)
    epoch, read = Epoch(), list[bytes]()
    made = App("sessions")

    def key_of(message: Message) -> str:
        read.append(message.body)
        epoch.retiring = True
        return "key"

    @made.idempotent_handler("memory:q", key=key_of)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    async def both(session: Short) -> Sequence[Delivery]:
        if not read:
            return [Delivery(Message("memory:q", body(Item(name))), epoch) for name in "ab"]
        raise SessionEnded("it ends at once")

    monkeypatch.setattr(Short, "fetch", both)
    async with bench.running(made) as running:
        await running.until(lambda: broker.opened > 1)
    assert read == [body(Item("a"))]


async def test_what_is_held_for_its_next_attempt_is_given_up_with_its_session(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind it, and both of them when they come again, would wait for it."""
    made, runs, failed, fetch = App("sessions"), list[str](), asyncio.Event(), MemorySession.fetch

    @made.idempotent_handler("memory:q", key="id", order_by="entity", group_size=1)
    async def handle(item: Item, tx: Tx) -> None:
        runs.append(item.id)
        if len(runs) == 1:
            failed.set()
            raise Retry(after="30s")
        await note(tx, item)

    async def lost_once(session: MemorySession) -> Sequence[Delivery]:
        fetched = await fetch(session)
        if failed.is_set():
            failed.clear()
            raise SessionEnded("it was lost")
        return fetched

    monkeypatch.setattr(MemorySession, "fetch", lost_once)
    await bench.publish("q", Item("first", "e"), Item("behind", "e"))
    async with bench.running(made) as running, asyncio.timeout(20):  # and not the 30 s of the pause
        await running.until_count(applied=2)
    assert runs == ["first", "first", "behind"]


async def test_a_drain_does_not_wait_for_the_next_session(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, pausing = ShortLived(), asyncio.Event()

    def endless(failures: int, *, counted: bool, jitter: float) -> float:
        pausing.set()
        return 10.0 * PATIENCE

    monkeypatch.setattr(feed, "session_pause", endless)
    connected(bench, monkeypatch, memory=broker)
    async with bench.running(app()) as running:
        await pausing.wait()
        async with asyncio.timeout(PATIENCE):
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
        # Its time is not known yet, so each lane is to have a group of one, and one more; some get more of them.
        assert 2 * (1 + 1) <= taken(bench) <= 4 * 2 * (1 + 1)
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


class Cancelling(Lasting):
    """Its client cancels whoever fetches."""

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        raise asyncio.CancelledError


async def test_a_feed_that_is_cancelled_by_what_it_ran_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Better a restart than a worker that silently takes nothing more."""
    app = App("sessions")

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    bench = connected(Bench(bench.dsn, Cancelling()), monkeypatch)
    with pytest.raises(RuntimeError, match="a feed was cancelled"):
        async with asyncio.timeout(PATIENCE):
            await app.worker(bench.settings()).run()
