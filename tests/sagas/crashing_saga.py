"""A worker process that dies at a point: `python -m tests.sagas.crashing_saga POINT:NTH`.

Its remote is a table written on a connection of its own, as a gateway's would be: it notes every call.
"""

from __future__ import annotations

import asyncio
import os
import sys

import psycopg

from idemconsumer import App, Reject, Saga, Step, Tx
from idemconsumer.settings import load
from idemconsumer.testing.crash import CrashAt

QUEUE = "rides"

app = App("crashing")


async def note(step: Step, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(os.environ["IDEMCONSUMER_DSN"], autocommit=True) as gateway:
        await gateway.execute("insert into remote (key, name) values (%s, %s)", (step.key, name))


async def write(tx: Tx, name: str) -> str:
    await tx.execute("insert into effect (name) values (%s)", (name,))
    return name


async def erase(tx: Tx, output: str, name: str) -> None:
    await tx.execute("insert into effect (name) values (%s)", (f"undo {output}",))


async def charge(step: Step) -> int:
    await note(step, "charge")
    return 7


async def refund(step: Step, charged: int) -> None:
    await note(step, f"refund {charged}")


async def refuse(step: Step) -> None:
    await note(step, "refuse")
    raise Reject("refused")


async def stumble(tx: Tx, id: str) -> None:
    """Fails as long as nobody was told to go on, which the first release does."""
    cursor = await tx.execute("select 1 from step_ok where id = %s", (id,))
    await write(tx, "stumbled")
    if await cursor.first() is None:
        async with await psycopg.AsyncConnection.connect(os.environ["IDEMCONSUMER_DSN"], autocommit=True) as other:
            await other.execute("insert into step_ok values (%s)", (id,))
        raise ValueError("once")


@app.idempotent_handler(f"postgres:{QUEUE}", key="id", backoff="10ms, 10ms", max_attempts=20)
async def ride(order: dict[str, str], saga: Saga) -> str:
    """What it does is told by the order's name."""
    await saga.tx("created", write, "created", undo=erase)
    await saga.call("charged", charge, undo=refund)
    if order["id"] == "sleepy":
        await saga.sleep("rested", "0.3s")
    if order["id"] == "flaky":
        await saga.tx("stumbled", stumble, order["id"])
    if order["id"] == "refused":
        await saga.call("refused", refuse)
    await saga.tx("booked", write, "booked")
    return "done"


if __name__ == "__main__":
    asyncio.run(app.worker(load(concurrency=2), CrashAt.parse(sys.argv[1])).run())
