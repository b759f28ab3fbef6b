"""A handler that is slow, or holds its connections for long, takes nothing away from the others of its worker (D13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from idemconsumer import App, Tx
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds, Delivery
from idemconsumer.worker.intake import Intake, _GivenUp
from tests.support.servers.made import Server
from tests.support.workers import Bench, Item, Lasting, Running, body, connected, note


class Slow:
    """Two handlers of one app. None of `slow`'s messages ends before `go`, and each keeps its connection meanwhile."""

    def __init__(self, slow: str, fast: str, **options: Any) -> None:
        self.app = App("apart")
        self.go = asyncio.Event()
        self.running = 0

        @self.app.idempotent_handler(slow, key="id", group_size=1, **options)
        async def slow_one(item: Item, tx: Tx) -> None:
            await note(tx, item)
            self.running += 1
            await self.go.wait()

        @self.app.idempotent_handler(fast, key="id")
        async def fast_one(item: Item, tx: Tx) -> None:
            await note(tx, item)

    @asynccontextmanager
    async def at_work(self, bench: Bench, lanes: int, **settings: Any) -> AsyncIterator[Running]:
        """A worker with all lanes of the slow one busy."""
        async with bench.running(self.app, **settings) as running:
            await running.until(lambda: self.running == lanes)
            try:
                yield running
            finally:
                self.go.set()


async def test_a_fast_handler_does_not_wait_for_a_slow_one(bench: Bench) -> None:
    handlers = Slow("memory:slow", "memory:fast")
    await bench.publish("slow", *(Item(f"slow-{n}") for n in range(60)))
    async with handlers.at_work(bench, 4, concurrency=4) as running:
        await bench.publish("fast", *(Item(f"fast-{n}") for n in range(100)))
        await running.until_count(applied=100)
        assert not [name for name in bench.effects() if name.startswith("slow")]
        handlers.go.set()
        await running.until_count(applied=160)
    assert handlers.running == 60


async def test_slow_handlers_leave_a_connection_to_each_other_one(bench: Bench) -> None:
    """The lanes of both could use all eight that the three handlers share."""
    handlers = Slow("memory:slow", "memory:fast")

    @handlers.app.idempotent_handler("memory:slower", key="id", group_size=1)
    async def slower_one(item: Item, tx: Tx) -> None:
        handlers.running += 1
        await handlers.go.wait()

    for queue in ("slow", "slower"):
        await bench.publish(queue, *(Item(f"{queue}-{n}") for n in range(60)))
    async with handlers.at_work(bench, 6, concurrency=4) as running:
        await bench.publish("fast", *(Item(f"fast-{n}") for n in range(100)))
        await running.until_count(applied=100)
        assert handlers.running == 6


async def test_a_fast_handler_does_not_wait_for_a_slow_one_on_rabbitmq(
    bench: Bench, rabbitmq: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = f"slow-{uuid4().hex}", f"fast-{uuid4().hex}"
    handlers = Slow(f"rabbitmq:{slow}", f"rabbitmq:{fast}")
    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        for queue in (slow, fast):
            await channel.declare_queue(queue, durable=True)

        async def publish(queue: str, items: Sequence[Item]) -> None:
            for item in items:
                await channel.default_exchange.publish(aio_pika.Message(body(item)), routing_key=queue)

        await publish(slow, [Item(f"slow-{n}") for n in range(400)])
        async with handlers.at_work(bench, 4, concurrency=4, rabbitmq=rabbitmq.address) as running:
            await publish(fast, [Item(f"fast-{n}") for n in range(200)])
            await running.until_count(applied=200)
            assert not [name for name in bench.effects() if name.startswith("slow")]
            handlers.go.set()
            await running.until_count(applied=600)


async def test_handlers_share_the_connections_that_one_of_them_could_use_and_one_more_for_each(bench: Bench) -> None:
    """Three handlers of four lanes each could have twelve transactions open."""
    app, go = App("apart"), asyncio.Event()
    running: list[str] = []

    def handler(name: str) -> None:
        @app.idempotent_handler(f"memory:{name}", key="id", name=name, group_size=1)
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)
            running.append(name)
            await go.wait()

    for name in "abc":
        handler(name)
        await bench.publish(name, *(Item(f"{name}{n}") for n in range(20)))
    async with bench.running(app, concurrency=4) as worker:
        await worker.until(lambda: len(running) == 7)
        connections = "select count(*) from pg_stat_activity where application_name = 'idemconsumer apart worker 0'"
        assert bench.do(connections)[0][0] <= 4 - 1 + 3 + 2
        assert set(running) == set("abc"), "each has one at least"
        go.set()
        await worker.until_count(applied=60)


@pytest.mark.parametrize(("given", "most"), [(1, 1), (6, 6)])
async def test_a_handler_has_as_many_lanes_as_it_says(bench: Bench, given: int, most: int) -> None:
    handlers = Slow("memory:slow", "memory:fast", concurrency=given)
    await bench.publish("slow", *(Item(f"slow-{n}") for n in range(40)))
    async with handlers.at_work(bench, most, concurrency=3) as running:
        await bench.publish("fast", *(Item(f"fast-{n}") for n in range(20)))
        await running.until_count(applied=20)
        assert handlers.running == most


class Bounded(Lasting):
    """Remembers what each source may have in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: dict[str, int] = {}

    async def open(self, subscriptions: Sequence[Subscription], bounds: Bounds) -> Any:
        self.lanes[subscriptions[0].name] = bounds.lanes
        return await super().open(subscriptions, bounds)


async def test_a_session_may_hold_enough_for_the_lanes_of_its_own_handlers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Bounded()
    connected(bench, monkeypatch, memory=broker)
    async with bench.running(Slow("memory:slow", "memory:fast", concurrency=7).app, concurrency=3) as running:
        await running.until(lambda: broker.lanes == {"slow": 7, "fast": 3})


async def test_a_suspect_that_is_being_read_holds_up_its_own_queue_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All Postgres queues of a process are one session. A rival may take long to read the same message."""
    app, read_all, read, waiting = App("apart"), Intake._read_all, asyncio.Event(), list[Delivery]()

    @app.idempotent_handler("postgres:first", key="id")
    async def first(item: Item, tx: Tx) -> None:
        await note(tx, item)

    @app.idempotent_handler("postgres:second", key="id")
    async def second(item: Item, tx: Tx) -> None:
        await note(tx, item)

    async def held_up(intake: Intake, part: list[Delivery], given: list[Delivery]) -> None:
        waiting.extend(part)
        await read.wait()
        await read_all(intake, part, given)

    monkeypatch.setattr(Intake, "_read_all", held_up)
    bench.enqueue("first", Item("suspect"))
    bench.do("update idemconsumer.queue set deliveries = 1")
    async with bench.running(app) as running:
        await running.until(lambda: len(waiting) == 1)
        bench.enqueue("first", Item("behind it"))
        bench.enqueue("second", *(Item(f"{n}") for n in range(3)))
        await running.until_count(applied=3)
        bench.enqueue("second", Item("3"))
        await running.until_count(applied=4)
        assert sorted(bench.effects()) == ["0", "1", "2", "3"]
        read.set()
        await running.until_count(applied=6)
    assert sorted(bench.effects()[4:]) == ["behind it", "suspect"]


async def test_a_drain_gives_back_suspects_that_nobody_could_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, waiting = App("apart"), asyncio.Event()
    for name in ("first", "second"):

        @app.idempotent_handler(f"postgres:{name}", key="id", name=name)
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)

    async def by_a_rival(intake: Intake, part: object, given: object) -> tuple[int, bool]:
        waiting.set()
        if intake._draining.is_set():
            raise _GivenUp
        return 0, False

    monkeypatch.setattr(Intake, "_together", by_a_rival)
    bench.enqueue("first", Item("suspect"))
    bench.do("update idemconsumer.queue set deliveries = 1")
    async with bench.running(app) as running:
        await running.until(waiting.is_set)
    assert bench.do("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue") == [(1, True)]
