"""--until-empty ends when, and only when, everything has been settled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psycopg
import pytest

from idemconsumer import App, Message, Tx
from tests.support.logs import LogCapture, times
from tests.support.servers.postgres import migrated
from tests.support.workers import SCHEMA, Bench, Item, note


async def test_it_ends_at_once_when_there_is_nothing(bench: Bench, logged: LogCapture) -> None:
    app = App("empty")

    @app.idempotent_handler("memory:q", "postgres:q", key="id")
    async def handle(item: Item, tx: Tx) -> None: ...

    worker = await bench.until_empty(app)
    assert worker.counts == {}
    assert times(logged, "worker stopped") == 1


@pytest.mark.parametrize("source", ["memory:q", "postgres:q"])
async def test_it_does_not_end_while_a_message_waits_for_its_next_attempt(bench: Bench, source: str) -> None:
    app = App("empty")

    @app.idempotent_handler(source, key="id", backoff="600ms, 600ms")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        await note(tx, item)
        if message.attempt == 1:
            raise ValueError("later")

    if source == "memory:q":
        await bench.publish("q", Item("slow"))
    else:
        bench.enqueue("q", Item("slow"))
    worker = await bench.until_empty(app)
    assert worker.counts == {"retrying": 1, "applied": 1}
    assert bench.do("select 1 from idemconsumer.queue") == []


async def test_what_a_handler_publishes_in_its_transaction_is_worked_off_too(bench: Bench) -> None:
    app = App("empty")

    @app.idempotent_handler("postgres:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if len(item.id) < 5:
            following = json.dumps({"id": item.id + "x", "entity": ""}).encode()
            await tx.execute("select idemconsumer.publish_bytes('q', %s)", (following,))

    bench.enqueue("q", Item("x"))
    await bench.until_empty(app)
    assert bench.effects() == ["x", "xx", "xxx", "xxxx", "xxxxx"]


_PROGRAM = """
import asyncio, json, os
from idemconsumer import App, Tx
from idemconsumer.settings import load

app = App("flat")

@app.idempotent_handler("postgres:q", key="id", group_size=16)
async def handle(payload: dict, tx: Tx) -> None:
    await tx.execute("insert into effect (id) values (%s)", (payload["id"],))

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

async def main():
    worker = app.worker(load(until_empty=True, concurrency=2))
    running = asyncio.create_task(worker.run())
    while worker.counts.get("applied", 0) < 2_000:
        assert not running.done()
        await asyncio.sleep(0.01)
    warm = resident()
    await running
    print(json.dumps({"counts": dict(worker.counts), "warm": warm, "end": resident()}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_memory_stays_flat_over_four_thousand_messages(database: str) -> None:
    migrated(database, SCHEMA)
    with psycopg.connect(database) as connection:
        connection.execute("create table effect (id text)")
        connection.execute(
            "select idemconsumer.publish('q', jsonb_build_object('id', n, 'pad', repeat('x', 10000)))"
            " from generate_series(1, 4000) n"
        )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | {"IDEMCONSUMER_DSN": database, "IDEMCONSUMER_SCHEMA": SCHEMA},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    print(said)
    assert said["counts"] == {"applied": 4_000}
    # The second 2,000, of 10 kB each, would show as 20 MB if they were kept. The allocator still takes a few.
    assert said["end"] - said["warm"] < 8_192, f"kB resident: {said}"
    with psycopg.connect(database) as connection:
        assert connection.execute("select count(*), count(distinct id) from effect").fetchone() == (4_000, 4_000)
