"""The outbox: how fast one worker relays what is there to Kafka, and what publishing with tx= costs a handler."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec
import psycopg
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks._brokers import KafkaTopic
from benchmarks._measure import Result, Subject, Target, side_by_side
from benchmarks._stage import PARTITIONS, Stage
from benchmarks.end_to_end import Consumer, consume, process, row

GOAL = 10_000.0  # messages a second
ALONE, WITH, RELAYED = "no message", "one with tx=", "one with tx=, relayed meanwhile"
_FILL = """
insert into idemconsumer.outbox (destination, key, order_key, body)
select %s, 'c' || n %% 1000, 'c' || n %% 1000,
    convert_to('{"id": "p' || n || '", "amount": ' || n %% 1000 || ', "note": "' || repeat('x', 150) || '"}', 'UTF8')
from generate_series(1, %s) as n
"""


async def outbox(stage: Stage) -> Result:
    count, rounds = (60_000, 1) if stage.quick else (300_000, 3)
    rates = await side_by_side(
        "Relayed to Kafka",
        {"1 worker": _relaying(stage, count)},
        [],
        rounds=rounds,
        say=stage.say,
        facts={"messages": f"{count:,} of about 200 bytes, 1,000 keys", "goal": f"at least {GOAL:,.0f}/s"},
    )
    messages, most = (10_000, 15.0) if stage.quick else (60_000, 30.0)
    topic = KafkaTopic(stage)

    async def nobody() -> str:
        return "rabbitmq:nobody"  # whose address the worker does not have

    async def another() -> str:
        return f"kafka:{await _topic(stage)}"

    def subject(publishing: Callable[[], Awaitable[str]] | None) -> Subject:
        async def measured(number: int) -> float:
            ours, to = Consumer.ours(), {} if publishing is None else {"BENCH_PUBLISH": await publishing()}
            ours = msgspec.structs.replace(ours, environment={**ours.environment, **to})
            return (await consume(stage, topic, ours, messages, most=most)).rate

        return measured

    costs = await side_by_side(
        "From topic to topic",
        {ALONE: subject(None), WITH: subject(nobody), RELAYED: subject(another)},
        [Target(WITH, ALONE), Target(RELAYED, ALONE)],
        rounds=rounds,
        say=stage.say,
        facts={"messages": f"{messages:,}", "handler": "one insert, and one message published"},
    )
    return Result("outbox", [rates, costs])


def _relaying(stage: Stage, count: int) -> Subject:
    async def measured(number: int) -> float:
        topic = await _topic(stage)
        with stage.database() as dsn:
            environment = {
                "BENCH_SOURCE": "postgres:nothing",
                "BENCH_GROUP": "bench",
                "IDEMCONSUMER_DSN": dsn,
                "IDEMCONSUMER_KAFKA": stage.kafka,
            }
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                await connection.execute(_FILL, (f"kafka:{topic}", count))
                await connection.execute("vacuum analyze idemconsumer.outbox")
                ours, clock = Consumer.ours(), asyncio.get_running_loop().time
                async with process({**environment, **ours.environment}, ours.command) as running:
                    began, first = 0.0, 0
                    while True:
                        (lowest,) = await row(connection, "select coalesce(min(id), 0) from idemconsumer.outbox")
                        if lowest == 0:
                            return (count - first) / (clock() - began)
                        if not first and lowest > 1:
                            began, first = clock(), lowest
                        if running.returncode is not None:
                            raise RuntimeError("the worker has ended; its errors are above")
                        await asyncio.sleep(0.02)

    return measured


async def _topic(stage: Stage) -> str:
    topic = f"out-{secrets.token_hex(4)}"
    admin = AIOKafkaAdminClient(bootstrap_servers=stage.kafka)
    await admin.start()
    await admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    await admin.close()
    return topic
