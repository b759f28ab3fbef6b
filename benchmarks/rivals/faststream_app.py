"""FastStream with per-message deduplication by hand in its handler; acknowledged after the commit.

On Kafka FastStream commits each message's offset by itself when that is asked to come last, and then takes a
partition's messages one after another, with a consumer for each partition. On RabbitMQ it runs as many handlers as
are prefetched; the pool has as many connections as ours.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

import psycopg
from faststream import AckPolicy
from faststream.kafka import KafkaBroker
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

from benchmarks._loop import run
from benchmarks._stage import PARTITIONS
from benchmarks.rivals.applying import Connection, by_hand
from benchmarks.rivals.hand import ADDRESS, CONNECTIONS, DSN, NAME, SCHEME


async def main() -> None:
    free: asyncio.Queue[Connection] = asyncio.Queue()

    async def pay(payment: dict[str, Any]) -> None:
        connection = await free.get()
        try:
            await by_hand(connection, payment)
        finally:
            free.put_nowait(connection)

    async with AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            free.put_nowait(await stack.enter_async_context(await psycopg.AsyncConnection.connect(DSN)))
        broker: KafkaBroker | RabbitBroker
        if SCHEME == "kafka":
            broker = KafkaBroker(ADDRESS, logger=None)
            broker.subscriber(
                NAME, group_id=os.environ["BENCH_GROUP"], auto_offset_reset="earliest", ack_policy=AckPolicy.ACK,
                max_workers=PARTITIONS,
            )(pay)  # fmt: skip
        else:
            channel = Channel(prefetch_count=32 * CONNECTIONS)
            broker = RabbitBroker(ADDRESS, logger=None, default_channel=channel)
            queue = RabbitQueue(NAME, declare=False)
            broker.subscriber(queue, ack_policy=AckPolicy.NACK_ON_ERROR)(pay)
        await broker.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
