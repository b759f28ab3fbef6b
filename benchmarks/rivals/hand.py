"""Consumers written by hand, each in a process of its own: `python -m benchmarks.rivals.hand HOW`.

HOW is `best` (as many connections as ours, concurrent within a partition, offsets committed each second), `dedup` (the
same with the key in the message's transaction), `textbook` (the same with a connection a message, and its claim
committed first) or `plain`, what is mostly written: one message after another. All tell the broker only after the
commit.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

import aio_pika
import psycopg
from aiobotocore.session import get_session
from aiokafka import AIOKafkaConsumer, TopicPartition

from benchmarks._loop import run
from benchmarks.rivals.applying import Apply, Connection, applying

CONNECTIONS = 8  # the lanes of a worker of ours, by default
DSN = os.environ["BENCH_DSN"]
SCHEME, _, NAME = os.environ["BENCH_SOURCE"].partition(":")
ADDRESS = os.environ.get("BENCH_ADDRESS", "")

HOW = {"best": "bare", "plain": "bare", "dedup": "by hand", "textbook": "textbook"}

Consume = Callable[[list[Connection], Apply], Coroutine[Any, Any, None]]


async def each(bodies: Iterable[bytes], connections: list[Connection], apply: Apply) -> None:
    """All of them, a free connection taking the next."""
    waiting = iter(bodies)

    async def lane(connection: Connection) -> None:
        for body in waiting:
            await apply(connection, json.loads(body))

    await asyncio.gather(*map(lane, connections))


async def kafka(connections: list[Connection], apply: Apply) -> None:
    consumer = AIOKafkaConsumer(
        NAME, bootstrap_servers=ADDRESS, group_id=os.environ["BENCH_GROUP"],
        enable_auto_commit=False, auto_offset_reset="earliest",
    )  # fmt: skip
    await consumer.start()
    plain = len(connections) == 1
    done: dict[TopicPartition, int] = {}
    fetched, committed = await consumer.getmany(timeout_ms=1_000, max_records=2_000), time.monotonic()
    while True:
        following = None if plain else asyncio.create_task(consumer.getmany(timeout_ms=1_000, max_records=2_000))
        await each([record.value for record in chain(*fetched.values())], connections, apply)
        done |= {partition: records[-1].offset + 1 for partition, records in fetched.items() if records}
        if done and (plain or time.monotonic() - committed > 1.0):
            await consumer.commit(done)
            committed = time.monotonic()
        fetched = await (consumer.getmany(timeout_ms=1_000) if following is None else following)


async def rabbitmq(connections: list[Connection], apply: Apply) -> None:
    broker = await aio_pika.connect(ADDRESS)
    channel = await broker.channel()
    await channel.set_qos(prefetch_count=32 * CONNECTIONS)
    queue = await channel.get_queue(NAME)

    async def lane(connection: Connection) -> None:
        while True:
            message = await arrived.get()
            await apply(connection, json.loads(message.body))
            await message.ack()

    if len(connections) == 1:
        async with queue.iterator() as messages:
            async for message in messages:
                async with message.process():
                    await apply(connections[0], json.loads(message.body))
    arrived: asyncio.Queue[aio_pika.abc.AbstractIncomingMessage] = asyncio.Queue()
    await queue.consume(arrived.put)
    await asyncio.gather(*map(lane, connections))


async def postgres(connections: list[Connection], apply: Apply) -> None:
    """The table `job`; a message is taken in the transaction that applies it."""

    async def lane(connection: Connection) -> None:
        while True:
            cursor = await connection.execute(
                "delete from job where id = (select id from job order by id for update skip locked limit 1)"
                " returning body"
            )
            row = await cursor.fetchone()
            if row is None:
                await connection.commit()
                await asyncio.sleep(0.1)
            else:
                await apply(connection, json.loads(row[0]))

    await asyncio.gather(*map(lane, connections))


async def sqs(connections: list[Connection], apply: Apply) -> None:
    """As many polls at a time as connections; ten messages are deleted with one request."""
    async with get_session().create_client("sqs", endpoint_url=ADDRESS) as client:
        url = (await client.get_queue_url(QueueName=NAME))["QueueUrl"]

        async def lane(connection: Connection) -> None:
            while True:
                answer = await client.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
                messages = answer.get("Messages", [])
                await each([message["Body"].encode() for message in messages], [connection], apply)
                if messages:
                    handles = [{"Id": str(n), "ReceiptHandle": m["ReceiptHandle"]} for n, m in enumerate(messages)]
                    await client.delete_message_batch(QueueUrl=url, Entries=handles)

        await asyncio.gather(*map(lane, connections))


BROKERS: dict[str, Consume] = {"kafka": kafka, "rabbitmq": rabbitmq, "postgres": postgres, "sqs": sqs}


async def main(how: str) -> None:
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(DSN))
            for _ in range(1 if how == "plain" else CONNECTIONS)
        ]
        await BROKERS[SCHEME](connections, applying(HOW[how], DSN))


if __name__ == "__main__":
    run(main(sys.argv[1]))
