"""Messages to the Postgres queue in a transaction of the caller's (P6)."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from idemconsumer.brokers.postgres import enqueue, enqueuing
from idemconsumer.ports.broker import Outgoing
from idemconsumer.ports.handler import Tx
from idemconsumer.stores.tx import PostgresTx, connection_of


async def enqueue_in(tx: Tx | AsyncConnection[Any], schema: str, queue: str, message: Outgoing) -> None:
    """It exists if and only if the transaction commits. In a handler that sends ahead it is not waited for (J26)."""
    query, params = enqueuing(schema, queue, message)
    if not isinstance(tx, PostgresTx) or not await tx.send_along(query.decode(), params):
        await enqueue(connection_of(tx), schema, queue, [message])
