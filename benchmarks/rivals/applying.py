"""How a message is applied by hand, on a connection that is kept: what people write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, LiteralString, TypeAlias

import psycopg

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
Apply: TypeAlias = Callable[[Connection, dict[str, Any]], Awaitable[None]]

INSERT: LiteralString = "insert into payment (id, amount) values (%s, %s)"
TAKE: LiteralString = "update stock set qty = qty - 1 where sku = %s"


def statement(payment: dict[str, Any]) -> tuple[LiteralString, tuple[object, ...]]:
    if "sku" in payment:
        return TAKE, (payment["sku"],)
    return INSERT, (payment["id"], payment["amount"])


async def bare(connection: Connection, payment: dict[str, Any]) -> None:
    """A transaction a message and no deduplication; a refused one is rolled back, a failing one tried again."""
    await connection.execute(*statement(payment))
    if "trouble" in payment:
        await connection.rollback()
        if payment["trouble"] == "once":
            await connection.execute(*statement(payment))
    await connection.commit()


async def by_hand(connection: Connection, payment: dict[str, Any]) -> None:
    """The key in the same transaction."""
    cursor = await connection.execute("insert into seen (id) values (%s) on conflict do nothing", (payment["id"],))
    if cursor.rowcount:
        await connection.execute(*statement(payment))
    await connection.commit()


HANDS: dict[str, Apply] = {"bare": bare, "by hand": by_hand}
