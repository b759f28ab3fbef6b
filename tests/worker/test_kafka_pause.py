"""A paused handler's partitions of Kafka stand still, and its worker stays a member of the group (O14)."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaProducer

from idemconsumer import App, Tx
from tests.support.inside import lanes_of
from tests.support.kafka import world_of
from tests.support.logs import LogCapture, times
from tests.support.servers.made import Server
from tests.support.workers import Bench, Item, body, note


async def test_nothing_is_lost_or_run_twice_and_no_rebalance_happens(
    kafka: Server, bench: Bench, logged: LogCapture
) -> None:
    async with world_of(kafka) as world:
        await world.create(partitions=2)
        app, begun, go = App(world.topic.replace(".", "_")), list[str](), asyncio.Event()

        @app.idempotent_handler(f"kafka:{world.topic}", key="id", name="send")
        async def send(item: Item, tx: Tx) -> None:
            begun.append(item.id)
            await note(tx, item)
            await go.wait()

        async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
            for number in range(30):
                await producer.send_and_wait(world.topic, body(Item(f"{number:02}")), partition=number % 2)
            async with bench.running(app, kafka=kafka.address) as running:
                await running.until(lambda: len(begun) == 4)
                await app.pause("send")
                lanes = lanes_of(running.worker)
                await running.until(lambda: lanes.paused("send"))
                go.set()
                await running.until_count(applied=4)
                for number in range(30, 40):
                    await producer.send_and_wait(world.topic, body(Item(f"{number:02}")), partition=number % 2)
                assert len(begun) == 4
                await app.resume("send")
                await running.until_count(applied=40)
    assert sorted(bench.effects()) == [f"{number:02}" for number in range(40)]
    assert times(logged, "kafka assigned") == 1
