"""How a message is applied by hand: what people write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, LiteralString, TypeAlias

import psycopg

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
Apply: TypeAlias = Callable[[Connection, dict[str, Any]], Awaitable[None]]  # on a connection that its lane keeps

INSERT: LiteralString = "insert into payment (id, amount) values (%s, %s)"
TAKE: LiteralString = "update stock set qty = qty - 1 where sku = %s"
READ: LiteralString = "select qty from stock where sku = %s"
AUTOCOMMIT = "bare, autocommit"


def statement(payment: dict[str, Any]) -> tuple[LiteralString, tuple[object, ...]]:
    if "sku" in payment:
        return TAKE, (payment["sku"],)
    return INSERT, (payment["id"], payment["amount"])


async def effects(connection: Connection, payment: dict[str, Any]) -> None:
    """What the message is about."""
    insert = INSERT, (payment["id"], payment["amount"])
    match payment.get("does"):
        case "two":
            await connection.execute(*insert)
            await connection.execute(TAKE, (payment["sku"],))
        case "read":
            row = await (await connection.execute(READ, (payment["sku"],))).fetchone()
            if row is not None and row[0] > 0:
                await connection.execute(*insert)
        case _:
            await connection.execute(*statement(payment))


async def bare(connection: Connection, payment: dict[str, Any]) -> None:
    """A transaction a message and no deduplication; a refused one is rolled back, a failing one tried again."""
    await effects(connection, payment)
    if "trouble" in payment:
        await connection.rollback()
        if payment["trouble"] == "once":
            await connection.execute(*statement(payment))
    await connection.commit()


async def autocommit(connection: Connection, payment: dict[str, Any]) -> None:
    """As bare, where the statement is the whole transaction."""
    await connection.execute(*statement(payment))


async def by_hand(connection: Connection, payment: dict[str, Any]) -> None:
    """The key in the same transaction."""
    cursor = await connection.execute("insert into seen (id) values (%s) on conflict do nothing", (payment["id"],))
    if cursor.rowcount:
        await effects(connection, payment)
    await connection.commit()


async def textbook(dsn: str, kept: Connection, payment: dict[str, Any]) -> None:
    """A connection a message, the claim committed first, a rival's waited for by polling. `kept` is idle, unless the
    message was taken from a queue with it."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        claim = "insert into claim (id, state) values (%s, 'working') on conflict do nothing"
        claimed = (await connection.execute(claim, (payment["id"],))).rowcount
        await connection.commit()
        if claimed:
            await connection.execute(*statement(payment))
            await connection.commit()
            await connection.execute("update claim set state = 'done' where id = %s", (payment["id"],))
            await connection.commit()
        while not claimed and not await _done(connection, payment["id"]):
            await asyncio.sleep(0.05)
    await kept.commit()


async def _done(connection: Connection, message: str) -> bool:
    row = await (await connection.execute("select state from claim where id = %s", (message,))).fetchone()
    await connection.commit()
    return row is not None and row[0] == "done"


_KEEPING: dict[str, Apply] = {"bare": bare, AUTOCOMMIT: autocommit, "by hand": by_hand}
HANDS = [*_KEEPING, "textbook"]


def applying(name: str, dsn: str) -> Apply:
    """How the one of that name applies a message."""
    return partial(textbook, dsn) if name == "textbook" else _KEEPING[name]
