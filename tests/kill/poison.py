"""A worker among whose messages some kill it: `python -m tests.kill.poison`.

An order's id says what it does. `kill-handler`, `kill-key`, `kill-tenant` and `kill-validator` end the process in that
place, and so do `kill-body` and `kill-step` in a saga; `…-late` half a second after it was entered. All others are
innocent; those with `slow` in their id take a while. `kill-task` and `kill-callback` end the event loop from beside
their handler.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from pydantic import BaseModel, field_validator

from idemconsumer import App, Message, Saga, Step, Tx
from idemconsumer.brokers import postgres_session
from idemconsumer.brokers.sqs import sqs_client as client
from idemconsumer.process.child import launch
from idemconsumer.settings import load

LATE = 0.5
SLOW = 0.2
ATTEMPTS = 1

app = App("poison")


def kill_in(place: str, name: str) -> None:
    if name.startswith(f"kill-{place}"):
        if name.endswith("late"):
            time.sleep(LATE)
        os._exit(1)


class Order(BaseModel):
    id: str

    @field_validator("id")
    @classmethod
    def look(cls, value: str) -> str:
        kill_in("validator", value)
        return value


def id_of(message: Message) -> str:
    return str(json.loads(message.body)["id"])


def key_of(message: Message) -> str:
    kill_in("key", id_of(message))
    return id_of(message)


def tenant_of(message: Message) -> str:
    kill_in("tenant", id_of(message))
    return "all"


@app.idempotent_handler(
    os.environ["POISON_SOURCE"], key=key_of, tenant=tenant_of, order_by=id_of, max_attempts=ATTEMPTS
)
async def place(order: Order, tx: Tx) -> None:
    await tx.execute("insert into witness (id) values (%s)", (order.id,))
    if "slow" in order.id:
        await asyncio.sleep(SLOW)
    if order.id.startswith("kill-handler"):
        if order.id.endswith("late"):
            await asyncio.sleep(LATE)
        os._exit(1)
    if order.id == "kill-task":
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())
    if order.id == "kill-callback":
        asyncio.get_running_loop().call_soon(interrupt)
        await asyncio.sleep(SLOW)


async def leave() -> None:
    sys.exit(1)


def interrupt() -> None:
    raise KeyboardInterrupt


async def travel(order: Order, saga: Saga) -> None:
    """The worker dies with what is open beside it: a call, and a transaction."""
    kill_in("body", order.id)
    await saga.call("looked", look, order.id)
    await saga.tx("went", go, order.id)


async def look(step: Step, name: str) -> None:
    if "slow" in name:
        await asyncio.sleep(SLOW)


async def go(tx: Tx, name: str) -> None:
    await tx.execute("insert into witness (id) values (%s)", (name,))
    kill_in("step", name)


if "POISON_SAGAS" in os.environ:
    sagas = app.idempotent_handler(os.environ["POISON_SAGAS"], key=key_of, lease="3s", max_attempts=ATTEMPTS)
    sagas(travel)


def main() -> int:
    # The next worker has to wait until what a dead one held is visible again.
    client.LEAST_VISIBILITY = 3  # type: ignore[misc]
    postgres_session.VISIBILITY = 3.0  # type: ignore[misc]
    return launch(lambda: app.worker(load(concurrency=4)), drain_timeout=20.0)


if __name__ == "__main__":
    sys.exit(main())
