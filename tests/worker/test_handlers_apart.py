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
from idemconsumer.ports.broker import Bounds
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
        connections = "select count(*) from pg_stat_activity where application_name = 'idemconsumer'"
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
