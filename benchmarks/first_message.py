"""When the first message of a Postgres queue is done, from the start of a program: ours, beside one written by hand."""

from __future__ import annotations

import asyncio
import time

import psycopg

from benchmarks._brokers import PostgresQueue
from benchmarks._measure import Result, Subject, Target, side_by_side
from benchmarks._stage import Stage
from benchmarks.end_to_end import Consumer, process, row

OURS, BY_HAND = "idemconsumer run", "by hand"


async def first_message(stage: Stage) -> Result:
    consumers = {OURS: Consumer.ours(), BY_HAND: Consumer.module("hand", "dedup")}

    def subject(consumer: Consumer) -> Subject:
        async def measured(number: int) -> float:
            with stage.database() as dsn:
                filled = await PostgresQueue().fill(dsn, 1)
                async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                    began = time.perf_counter()
                    async with process({"BENCH_DSN": dsn, **filled, **consumer.environment}, consumer.command):
                        while await row(connection, "select count(*) from payment") == (0,):
                            await asyncio.sleep(0.002)
                        return time.perf_counter() - began

        return measured

    table = await side_by_side(
        "First message",
        {name: subject(consumer) for name, consumer in consumers.items()},
        [Target(OURS, BY_HAND, 1.3, "at most")],
        rounds=2 if stage.quick else 10,
        say=stage.say,
        unit="s",
    )
    return Result("first_message", [table])
