"""Sagas that start others: a parent, its child, and what runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg

from idemconsumer import (
    App,
    Child,
    Handler,
    Message,
    Outcome,
    Reject,
    Saga,
    Tx,
)
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.message.headers import decode_headers
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from tests.support.sagas import Bench, Station, put, take_back


class Ride(msgspec.Struct):
    driver: str


Body = Callable[[Any, Saga], Awaitable[object]]


class Family:
    """An app with a parent `book` and a child `ride`, run by one station. `rides`: the payloads of the children that
    ran; `ride` is what they do, and `book` what the parent does."""

    def __init__(self, bench: Bench, station: Station) -> None:
        self.bench, self.station = bench, station
        self.app = app = App("shop")
        self.rides: list[object] = []
        self.ride: Body = drive
        self.book: Body

        @app.idempotent_handler("memory:rides", key="id", name="ride", backoff="1ms, 1ms", max_attempts=2)
        async def ride(payload: dict[str, Any], saga: Saga) -> Ride:
            self.rides.append(payload)
            return await self.ride(payload, saga)  # type: ignore[return-value]

        @app.idempotent_handler("memory:orders", key="id", name="book", backoff="1ms, 1ms")
        async def book(order: dict[str, Any], saga: Saga) -> Any:
            return await self.book(order, saga)

        self.handler: Handler[[dict[str, Any], Saga], Ride] = ride
        self.bound: dict[str, BoundHandler] = {each.name: each for each in app.bound_handlers(Settings(dsn=bench.dsn))}

    async def begin(self, book: Body) -> Outcome:
        self.book = book
        return await self.station.deliver(self.bound["book"])

    async def resume(self, name: str = "book") -> Outcome:
        return await self.station.resume(self.bound[name])

    async def deliver(self) -> Outcome:
        """The next message of a child."""
        ((name, key, body, headers),) = self.bench.run(
            "delete from idemconsumer.queue where id = (select min(id) from idemconsumer.queue)"
            " returning name, message_id, body, headers"
        )
        message = Message(f"postgres:{name}", body, decode_headers(headers), message_id=key)
        return await self.station.deliver(self.bound["ride"], message)

    @property
    def queued(self) -> int:
        return len(self.bench.run("select 1 from idemconsumer.queue"))

    def states(self) -> dict[str, State]:
        rows = self.bench.run(
            "select c.name, r.state from idemconsumer.record as r join idemconsumer.scope as c on c.id = r.scope_id"
        )
        return {scope.rpartition("/")[2]: State(state) for scope, state in rows}

    @asynccontextmanager
    async def ending(self, key: bytes) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Somebody is at the COMMIT that completes this saga."""
        async with await psycopg.AsyncConnection.connect(self.bench.dsn) as rival:
            await rival.execute("select set_config('idemconsumer.open', 't', true)")
            await rival.execute("update idemconsumer.record set state = 3 where key = %s", (key,))
            await rival.execute("delete from idemconsumer.saga where key = %s", (key,))
            await rival.execute(
                "insert into idemconsumer.result (key, body, content_type) values (%s, %s, 'application/json')",
                (key, b'{"driver":"Ann"}'),
            )
            await rival.execute("select idemconsumer.seal('t')")
            await rival.execute("set constraints all immediate")
            yield rival


async def drive(payload: dict[str, Any], saga: Saga) -> Ride:
    await saga.tx("driven", put, "driven")
    return Ride("Ann")


async def nap(payload: dict[str, Any], saga: Saga) -> Ride:
    await saga.tx("driven", put, "driven", undo=take_back)
    await saga.sleep("nap", "3d")
    return Ride("Ann")


async def refuse(payload: dict[str, Any], saga: Saga) -> None:
    raise Reject("no_driver", {"at": 7})


def simple(family: Family, key: str | None = None, **more: Any) -> Body:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("noted", put, "noted", undo=take_back)
        child = await saga.start("ride", family.handler, {"to": "sea"}, key=key, **more)
        ride = await saga.result("ride_done", child)
        await saga.tx("billed", put, f"billed {ride.driver}")
        return f"with {ride.driver}"

    return book


CLAIM_LOCK = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea for 8), 'hex'))::bit(64)::bigint)"
RIDE = keys.digest("shop", None, "ride", "r")


async def compensate(tx: Tx, child: Child[Ride], payload: dict[str, Any]) -> None:
    await put(tx, f"compensated {payload['to']}")


def undone(family: Family, **more: Any) -> Body:
    """It is rejected once its child has been started, without a look at its end."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("noted", put, "noted", undo=take_back)
        await saga.start("ride", family.handler, {"to": "sea"}, **more)
        await saga.sleep("soon", 0 if family.rides else "3d")
        raise Reject("no")

    return book


async def undo_of(family: Family, bench: Bench) -> Outcome:
    bench.script(
        "begin; update idemconsumer.saga set due = clock_timestamp() where handler = 'book';"
        "select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.step set until = clock_timestamp() where name = 'soon';"
        "select idemconsumer.seal('t'); commit"
    )
    return await family.resume()
