"""The app that whole worker processes run: `idemconsumer run tests.sagas.deployed:app`.

What a saga does is told by its order. Its remote is a table written on a connection of its own, which remembers each
key as a gateway does; its effects go to a table without any unique constraint.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, Literal
from uuid import UUID

import msgspec
import psycopg

from idemconsumer import App, Reject, Saga, Step, Tx
from idemconsumer.handlers.options import Options
from tests.support.sagas import hog

QUEUE = "rides"
SOURCE = os.environ.get("SAGA_SOURCE", f"postgres:{QUEUE}")
LEASE = float(os.environ.get("SAGA_LEASE", "1.0"))
SETTLE: Literal["claimed", "finished"] = "finished" if os.environ.get("SAGA_SETTLE") == "finished" else "claimed"
OPTIONS: Options = {"lease": f"{LEASE}s", "settle": SETTLE, "backoff": "10ms, 10ms", "max_attempts": 100}
if "SAGA_VERSION" in os.environ:
    OPTIONS["version"] = os.environ["SAGA_VERSION"]
if "SAGA_TIMEOUT" in os.environ:
    OPTIONS["timeout"] = os.environ["SAGA_TIMEOUT"]

TABLES = """
create table effect (
    id bigint generated always as identity, at timestamptz not null default clock_timestamp(),
    saga text not null, step text not null, pid integer not null
);
create table remote (key uuid primary key, saga text not null, name text not null, asked integer not null default 1);
create table halted (saga text primary key, pid integer not null, at timestamptz not null default clock_timestamp());
"""

Ends = Literal["booked", "declined", "refused"]
Place = Literal["in tx", "in call", "between", "in the last tx"]


class Order(msgspec.Struct):
    id: str
    ends: Ends = "booked"
    halt: Place | None = None  # where its first run comes to a halt
    how: Literal["freeze", "hang", "hog"] = "hang"
    pause: float = 0.0  # seconds in each step


app = App("deployed")


class Remote:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def ask(self, key: UUID, order: Order, name: str) -> None:
        await self._connection.execute(
            "insert into remote (key, saga, name) values (%s, %s, %s)"
            " on conflict (key) do update set asked = remote.asked + 1",
            (key, order.id, name),
        )

    async def halt(self, order: Order, here: Place) -> None:
        """The process stops, or the saga goes no further, the first time that it gets here."""
        if order.halt != here:
            return
        cursor = await self._connection.execute(
            "insert into halted (saga, pid) values (%s, %s) on conflict do nothing returning pid",
            (order.id, os.getpid()),
        )
        if await cursor.fetchone() is None:
            return
        if order.how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif order.how == "hog":
            hog(60.0)
        else:
            await asyncio.Event().wait()


@app.resource
async def remote() -> AsyncIterator[Remote]:
    """One connection a process, as an HTTP client would be."""
    dsn = os.environ.get("REMOTE_DSN") or os.environ["IDEMCONSUMER_DSN"]
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        yield Remote(connection)


async def write(tx: Tx, order: Order, step: str) -> None:
    await tx.execute("insert into effect (saga, step, pid) values (%s, %s, %s)", (order.id, step, os.getpid()))


async def create(tx: Tx, remote: Remote, order: Order) -> str:
    await write(tx, order, "created")
    await remote.halt(order, "in tx")
    await asyncio.sleep(order.pause)
    return f"ride {order.id}"


async def cancel(tx: Tx, ride: str, remote: Remote, order: Order) -> None:
    await asyncio.sleep(order.pause)
    await write(tx, order, f"cancelled {ride}")


async def charge(step: Step, remote: Remote, order: Order) -> int:
    await remote.halt(order, "in call")
    await remote.ask(step.key, order, "charge")
    await asyncio.sleep(order.pause)
    if order.ends == "declined":
        raise Reject("declined")
    return 7


async def refund(step: Step, charged: int, remote: Remote, order: Order) -> None:
    await remote.ask(step.key, order, f"refund {charged}")
    await asyncio.sleep(order.pause)


async def note(tx: Tx, order: Order) -> None:
    await write(tx, order, "noted")


async def finish(tx: Tx, remote: Remote, order: Order) -> None:
    await write(tx, order, "finished")
    await remote.halt(order, "in the last tx")
    await asyncio.sleep(order.pause)
    if order.ends == "refused":
        raise Reject("refused")


@app.idempotent_handler(SOURCE, key="id", **OPTIONS)
async def ride(order: Order, saga: Saga, remote: Remote) -> str:
    ride = await saga.tx("created", create, remote, order, undo=cancel)
    await remote.halt(order, "between")
    await saga.call("charged", charge, remote, order, undo=refund)
    if "SAGA_NOTES" in os.environ:  # a later build of the same version
        await saga.tx("noted", note, order)
    await saga.tx("finished", finish, remote, order)
    return ride
