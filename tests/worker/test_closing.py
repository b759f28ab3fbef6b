"""Leaving: what was cancelled ends though it swallows that, and every session ends closed, in whatever state it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from idemconsumer import App, Tx
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.errors import SessionEnded
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery
from idemconsumer.user_code.cancellation import end, run_on
from idemconsumer.worker.worker import Worker
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, Lasting, connected, note


class Stubborn:
    """Goes on for ever, and swallows so many cancellations."""

    def __init__(self, swallows: int) -> None:
        self.left = swallows
        self.began = asyncio.Event()

    async def run(self) -> None:
        self.began.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.left:
                    raise
                self.left -= 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, cancel_again_pause=0.01)


async def test_what_swallows_its_cancellation_is_cancelled_again() -> None:
    both = Stubborn(1), Stubborn(3)
    tasks = [asyncio.create_task(each.run()) for each in both]
    await asyncio.gather(*(each.began.wait() for each in both))
    async with asyncio.timeout(PATIENCE):
        await end(*tasks)
    assert all(task.cancelled() for task in tasks)


async def test_who_is_cancelled_while_it_waits_for_another_one_s_end_sees_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned(monkeypatch, cancel_again_pause=PATIENCE)
    stubborn = Stubborn(1)
    task = asyncio.create_task(stubborn.run())
    await stubborn.began.wait()
    ending = asyncio.create_task(end(task))
    while stubborn.left:
        await asyncio.sleep(0)
    ending.cancel()
    async with asyncio.timeout(PATIENCE / 2):
        await asyncio.wait([ending])
    assert ending.cancelled()
    assert task.cancelled()


async def test_a_part_of_a_worker_ends_though_it_swallows_its_cancellation() -> None:
    stubborn = Stubborn(2)
    part = asyncio.create_task(run_on(stubborn.run(), "part"))
    await stubborn.began.wait()
    part.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([part])
    assert part.cancelled()


class Slow(Lasting):
    """Its sessions close, and undo an opening that is cut off, once they are `let`."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.undoing, self.undone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fetching, self.closing, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.lost, self.let = asyncio.Event(), asyncio.Event()
        self.opens: asyncio.Event | None = None

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        self.opening.set()
        if self.opens is not None:
            try:
                await self.opens.wait()
            except asyncio.CancelledError:
                self.undoing.set()
                await self.let.wait()
                self.undone.set()
                raise
        (subscription,) = subscriptions
        return SlowSession(self, subscription.name, self._queue(subscription.name), bounds)


class SlowSession(MemorySession):
    def __init__(self, broker: Slow, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._broker = broker

    async def fetch(self) -> Sequence[Delivery]:
        self._broker.fetching.set()
        await self._broker.lost.wait()
        raise SessionEnded("it was lost")

    async def close(self) -> None:
        self._broker.closing.set()
        await self._broker.let.wait()
        await super().close()
        self._broker.closed.set()


def app() -> App:
    made = App("closing")

    @made.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    return made


def begin(bench: Bench, monkeypatch: pytest.MonkeyPatch, broker: Slow) -> tuple[Worker, asyncio.Task[None]]:
    connected(Bench(bench.dsn, broker), monkeypatch, memory=broker)
    worker = app().worker(bench.settings())
    return worker, asyncio.create_task(worker.run())


async def some_turns() -> None:
    """What was cancelled would have ended."""
    for _ in range(20):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("leave", ["drain", "abort"])
async def test_a_lost_session_that_is_being_closed_when_its_worker_leaves_is_closed_to_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    broker = Slow()
    worker, task = begin(bench, monkeypatch, broker)
    async with asyncio.timeout(PATIENCE):
        broker.lost.set()
        await broker.closing.wait()
        worker.drain() if leave == "drain" else worker.abort()
        await some_turns()
        assert not task.done()
        broker.let.set()
        await asyncio.wait([task])
    assert broker.closed.is_set()


@pytest.mark.parametrize("leave", ["drain", "abort"])
async def test_an_opening_that_is_cut_off_is_undone_to_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    broker = Slow()
    broker.opens = asyncio.Event()
    worker, task = begin(bench, monkeypatch, broker)
    async with asyncio.timeout(PATIENCE):
        await broker.opening.wait()
        worker.drain() if leave == "drain" else worker.abort()
        await broker.undoing.wait()
        await some_turns()
        assert not task.done()
        broker.let.set()
        await asyncio.wait([task])
    assert broker.undone.is_set()


async def test_a_session_that_opens_though_it_was_cut_off_is_closed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Slow()
    broker.let.set()
    real = broker.open

    async def swallowing(subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        broker.opening.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await real(subscriptions, bounds)

    monkeypatch.setattr(broker, "open", swallowing)
    worker, task = begin(bench, monkeypatch, broker)
    async with asyncio.timeout(PATIENCE):
        await broker.opening.wait()
        worker.abort()
        await asyncio.wait([task])
    assert broker.closed.is_set()
    assert not broker.fetching.is_set()


async def test_a_drain_that_is_aborted_while_it_closes_a_session_closes_it_to_its_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Slow()
    worker, task = begin(bench, monkeypatch, broker)
    async with asyncio.timeout(PATIENCE):
        await broker.fetching.wait()
        worker.drain()
        await broker.closing.wait()
        worker.abort()
        await some_turns()
        assert not task.done()
        broker.let.set()
        broker.lost.set()
        await asyncio.wait([task])
    assert broker.closed.is_set()


class Broken(Lasting):
    """The first session that is closed raises, and so does the broker."""

    def __init__(self) -> None:
        super().__init__()
        self.fetching: set[str] = set()
        self.closed: list[str] = []

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> MemorySession:
        (subscription,) = subscriptions
        return BrokenSession(self, subscription.name, self._queue(subscription.name), bounds)

    async def close(self) -> None:
        self.closed.append("broker")
        raise RuntimeError("its broker does not close")


class BrokenSession(MemorySession):
    def __init__(self, broker: Broken, name: str, *args: object) -> None:
        super().__init__(name, *args)  # type: ignore[arg-type]
        self._broken, self._of = broker, name

    async def fetch(self) -> Sequence[Delivery]:
        self._broken.fetching.add(self._of)
        return await super().fetch()

    async def close(self) -> None:
        await super().close()
        self._broken.closed.append(self._of)
        if len(self._broken.closed) == 1:
            raise RuntimeError("its session does not close")


@pytest.mark.parametrize("leave", ["drain", "abort"])
async def test_what_does_not_close_leaves_nothing_else_open(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leave: str
) -> None:
    made = App("closing")
    for name in "abc":

        @made.idempotent_handler(f"memory:{name}", name=name, key="id")
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)

    broken = Broken()
    connected(Bench(bench.dsn, broken), monkeypatch, memory=broken)
    worker = made.worker(bench.settings())
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(PATIENCE):
        while broken.fetching != set("abc"):
            await asyncio.sleep(0.01)
        worker.drain() if leave == "drain" else worker.abort()
        await asyncio.wait([task])
    assert sorted(broken.closed) == ["a", "b", "broker", "c"]
    with pytest.raises(RuntimeError, match="does not close"):
        task.result()
