"""Consumers as people write them, wrong in the usual ways, and right ones. One more is in docs/crash-matrix.md."""

from __future__ import annotations

import json
import os
from typing import Any

import psycopg

from idemconsumer import App, Message, OutcomeKind, Saga, Step, Tx
from idemconsumer.testing import MatrixDelivery

_WORK = "update stock set qty = qty - %s where sku = %s"
_MARK = "insert into seen (id) values (%s)"


async def mark_before_work(delivery: MatrixDelivery, dsn: str) -> None:
    order = json.loads(delivery.body)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as db:
        try:
            await db.execute(_MARK, (order["id"],))
        except psycopg.errors.UniqueViolation:
            return
        await db.execute(_WORK, (order["qty"], order["sku"]))


async def mark_in_another_transaction(delivery: MatrixDelivery, dsn: str) -> None:
    order = json.loads(delivery.body)
    async with await psycopg.AsyncConnection.connect(dsn) as db:
        async with db.transaction():
            if await (await db.execute("select from seen where id = %s", (order["id"],))).fetchone() is not None:
                return
            await db.execute(_WORK, (order["qty"], order["sku"]))
        async with db.transaction():
            await db.execute(_MARK, (order["id"],))


async def acknowledge_first(delivery: MatrixDelivery, dsn: str) -> None:
    await delivery.ack()
    await right(delivery, dsn)


_done: set[str] = set()


async def cache_in_memory(delivery: MatrixDelivery, dsn: str) -> None:
    order = json.loads(delivery.body)
    if order["id"] not in _done:
        async with await psycopg.AsyncConnection.connect(dsn) as db:
            await db.execute(_WORK, (order["qty"], order["sku"]))
        _done.add(order["id"])


async def right(delivery: MatrixDelivery, dsn: str) -> None:
    order = json.loads(delivery.body)
    async with await psycopg.AsyncConnection.connect(dsn) as db:
        mark = await db.execute("insert into seen (id) values (%s) on conflict do nothing", (order["id"],))
        if mark.rowcount:
            await db.execute(_WORK, (order["qty"], order["sku"]))
    await delivery.ack()


async def right_in_a_pipeline(delivery: MatrixDelivery, dsn: str) -> None:
    """All at once, and then rows by COPY."""
    order = json.loads(delivery.body)
    async with await psycopg.AsyncConnection.connect(dsn) as db:
        async with db.pipeline():
            mark = await db.execute("insert into seen (id) values (%s) on conflict do nothing", (order["id"],))
            await db.execute("update stock set qty = qty - %s where sku = %s and %s not in (select id from done)",
                (order["qty"], order["sku"], order["id"]))  # fmt: skip
            await db.execute("insert into done (id) values (%s) on conflict do nothing", (order["id"],))
        if mark.rowcount:
            async with db.cursor().copy("copy line (sku) from stdin") as copy:
                await copy.write_row((order["sku"],))


async def dated(delivery: MatrixDelivery, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as db:
        await db.execute("update stock set qty = 1, updated_at = now()")


async def broken(delivery: MatrixDelivery, dsn: str) -> None:
    json.loads(delivery.body)["qty"] / 0


async def never_twice(delivery: MatrixDelivery, dsn: str) -> None:
    """It takes a duplicate for an error."""
    await cache_in_memory(delivery, dsn)
    if len(_done) == len(_failing):
        raise RuntimeError("I know this one")
    _failing.extend(_done)


_failing: list[str] = []


app = App("shop")


@app.idempotent_handler("kafka:orders", key="id")
async def reserve(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute(_WORK, (order["qty"], order["sku"]))


async def ours(delivery: MatrixDelivery, dsn: str) -> None:
    os.environ["IDEMCONSUMER_DSN"] = dsn
    outcome = await app.process(Message("kafka:orders", delivery.body, delivery.headers))
    if outcome.kind in (OutcomeKind.RETRYING, OutcomeKind.BUSY):
        raise RuntimeError("to be delivered again")


trips = App("trips")


@trips.idempotent_handler("rabbitmq:trips", key="id")
async def book(trip: dict[str, Any], saga: Saga) -> None:
    await saga.tx("reserved", reserve_seat, trip["sku"])
    await saga.call("charged", charge)


async def reserve_seat(tx: Tx, sku: str) -> None:
    await tx.execute("update stock set qty = qty - 1 where sku = %s", (sku,))


async def charge(step: Step) -> str:
    return "paid"


loose = App("loose")


@loose.idempotent_handler("sqs:orders", key="id")
async def reserve_beside(order: dict[str, Any]) -> None:
    """It has a transaction of its own, of which ours knows nothing."""
    async with await psycopg.AsyncConnection.connect(loose.settings.dsn or "", autocommit=True) as db:
        await db.execute(_WORK, (order["qty"], order["sku"]))
