"""Deploys under load: where the broker counts what is given back, a drain finishes what it holds (D11)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from aiobotocore.session import get_session

from idemconsumer import App, Tx
from idemconsumer.brokers.sqs.sqs_broker import SqsBroker
from idemconsumer.ports.broker import Outgoing
from idemconsumer.settings import Settings
from tests.support.inside import in_flight, lanes_if_any
from tests.support.servers.made import Server
from tests.support.waiting import until
from tests.support.workers import Bench, Item, Running, body, note

LIMIT = 3  # a message that is delivered more often ends unprocessed
HELD = 8  # by a worker of four lanes, whose order leaves three of them nothing to do
A_DEPLOY = 80  # messages: more than a drain finishes, with what arrives before the broker knows of it


class Deployed:
    """Versions of one app. All messages are in one order, so a drain finds most of them waiting behind another."""

    def __init__(self, bench: Bench, source: str, **settings: Any) -> None:
        self._bench = bench
        self._settings = settings
        self._go = asyncio.Event()
        self.app = App("deployed")

        @self.app.idempotent_handler(source, key="id", order_by="entity", group_size=1)
        async def handle(item: Item, tx: Tx) -> None:
            await self._go.wait()
            await note(tx, item)

    async def deploy(self) -> None:
        self._go.clear()
        async with self._bench.running(self.app, **self._settings) as running:
            await running.until(lambda: in_hand(running) >= HELD)
            running.worker.drain()
            self._go.set()

    async def finish(self, count: int) -> list[str]:
        """What was applied, once that are so many."""
        async with self._bench.running(self.app, **self._settings):
            # One after the other, which takes longer the more there are.
            await until(lambda: len(self._bench.effects()) >= count, "all are applied", within=float(count))
        return self._bench.effects()


def in_hand(running: Running) -> int:
    return 0 if lanes_if_any(running.worker) is None else in_flight(running.worker)


def orders(count: int) -> list[bytes]:
    return [body(Item(f"{n:04d}", "the same")) for n in range(count)]


@asynccontextmanager
async def quorum_queue(server: Server, messages: list[bytes]) -> AsyncIterator[tuple[str, str]]:
    name = f"deployed-{uuid4().hex}"
    limits: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-delivery-limit": LIMIT,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": f"{name}-dead",
    }
    async with await aio_pika.connect(server.address) as connection, connection.channel() as channel:
        await channel.declare_queue(f"{name}-dead", durable=True)
        await channel.declare_queue(name, durable=True, arguments=limits)
        for message in messages:
            await channel.default_exchange.publish(aio_pika.Message(message), name)
        yield name, f"{name}-dead"
        for queue in (name, f"{name}-dead"):
            await channel.queue_delete(queue)


DEPLOYS = pytest.mark.parametrize("deploys", [LIMIT + 1, pytest.param(20, marks=pytest.mark.long)])


@DEPLOYS
async def test_deploys_in_a_row_leave_no_message_of_rabbitmq_unprocessed(
    bench: Bench, rabbitmq: Server, deploys: int
) -> None:
    messages = orders(deploys * A_DEPLOY)
    async with quorum_queue(rabbitmq, messages) as (name, dead):
        deployed = Deployed(bench, f"rabbitmq:{name}", rabbitmq=rabbitmq.address)
        for _ in range(deploys):
            await deployed.deploy()
        # What arrived while a consumer was being cancelled was returned, and may come after what followed it.
        assert sorted(await deployed.finish(len(messages))) == [f"{n:04d}" for n in range(len(messages))]
        async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
            found = await channel.declare_queue(dead, passive=True)
            assert found.declaration_result.message_count == 0


@DEPLOYS
async def test_deploys_in_a_row_leave_no_message_of_sqs_unprocessed(bench: Bench, sqs: Server, deploys: int) -> None:
    """One group of a FIFO queue: what is given back comes first again."""
    name, messages = f"deployed-{uuid4().hex}", orders(deploys * A_DEPLOY)
    fifo = {"FifoQueue": "true"}
    async with get_session().create_client("sqs", endpoint_url=sqs.address) as client:
        dead = (await client.create_queue(QueueName=f"{name}-dead.fifo", Attributes=fifo))["QueueUrl"]
        asked = await client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
        policy = {"deadLetterTargetArn": asked["Attributes"]["QueueArn"], "maxReceiveCount": str(LIMIT)}
        await client.create_queue(QueueName=f"{name}.fifo", Attributes={"RedrivePolicy": json.dumps(policy), **fifo})
        broker = SqsBroker(Settings(sqs=sqs.address))
        group = {"MessageGroupId": "same"}
        await broker.publish(f"{name}.fifo", [Outgoing(each, group, key=str(n)) for n, each in enumerate(messages)])
        await broker.close()

        deployed = Deployed(bench, f"sqs:{name}.fifo", sqs=sqs.address)
        for _ in range(deploys):
            await deployed.deploy()
        assert await deployed.finish(len(messages)) == [f"{n:04d}" for n in range(len(messages))]
        found = await client.get_queue_attributes(QueueUrl=dead, AttributeNames=["ApproximateNumberOfMessages"])
        assert found["Attributes"]["ApproximateNumberOfMessages"] == "0"
