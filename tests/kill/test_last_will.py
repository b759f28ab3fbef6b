"""Kafka's partitions of a worker that was killed under its launcher."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import psycopg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer.stores.migrations import migrate
from tests.kill.harness import Mill
from tests.support.away import away
from tests.support.kafka import create_topic
from tests.support.servers.made import Server
from tests.support.waiting import until

pytestmark = [pytest.mark.kill, pytest.mark.slow]

PARTITIONS = 4
TURNS = 3  # with a kill between two of them
SESSION = "1800"  # seconds for which Kafka would wait for the dead one; this test waits for a tenth of that


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_partitions_of_a_killed_worker_are_consumed_long_before_its_session_is_over(
    kafka: Server, database: str, workers: int
) -> None:
    topic = f"payments-{uuid4().hex}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic, partitions=PARTITIONS)
    await admin.close()
    await asyncio.to_thread(migrate, database, "idemconsumer")
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as db:
        await db.execute("create table witness (id text not null, place bigint generated always as identity)")
    environment = {
        "KILL_SOURCE": f"kafka:{topic}",
        "IDEMCONSUMER_KAFKA": kafka.address,
        "IDEMCONSUMER_KAFKA_SESSION_TIMEOUT": SESSION,
        "IDEMCONSUMER_DRAIN_TIMEOUT": SESSION,  # for a rebalance that waits for its members too
    }
    async with away(database) as far:
        running = Mill(database, far, environment, workers=workers, seed=1)
        running.start()
        try:
            for turn in range(1, TURNS + 1):
                async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
                    for partition in range(PARTITIONS):
                        body = b'{"id": "%d-%d"}' % (turn, partition)
                        await producer.send_and_wait(topic, body, partition=partition)
                reached = turn * PARTITIONS

                async def applied(reached: int = reached) -> bool:
                    return await running.applied() == reached

                await until(applied, f"{reached} applied", within=float(SESSION) / 10)
                if turn < TURNS:
                    await running.kill_child()
            assert await running.drain() == 0
        finally:
            running.stop()
