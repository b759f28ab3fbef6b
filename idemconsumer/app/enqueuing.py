"""Publishing in a transaction of the caller's: into a Postgres queue (P6), or into the outbox (X1)."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from idemconsumer.brokers.postgres_broker import enqueue, enqueuing
from idemconsumer.handlers.arguments import Tx
from idemconsumer.message.headers import encode_headers
from idemconsumer.ports.broker import Outgoing
from idemconsumer.sql.connecting import OwnCursor
from idemconsumer.sql.queries import in_words, load
from idemconsumer.stores.tx import PostgresTx, connection_of


async def enqueue_in(tx: Tx | AsyncConnection[Any], schema: str, queue: str, message: Outgoing) -> None:
    """Enqueue a message, which exists if and only if the transaction commits. In a handler that pipelines its
    statements this returns without waiting for the result (J26)."""
    query, params = enqueuing(schema, queue, message)
    if not isinstance(tx, PostgresTx) or not await tx.send_along(query.decode(), params):
        with in_words(schema):
            await enqueue(connection_of(tx), schema, queue, [message])


async def store_in(tx: Tx | AsyncConnection[Any], schema: str, destination: str, message: Outgoing) -> None:
    """Store a message in the outbox, for a relay to send after the commit. Otherwise like `enqueue_in`."""
    query = load(schema)["store_outgoing"]
    params = {
        "destination": destination,
        "body": message.body,
        "key": message.key,
        "headers": encode_headers(message.headers).decode(),
        "delay": message.delay,
    }
    if not isinstance(tx, PostgresTx) or not await tx.send_along(query.decode(), params):
        with in_words(schema):
            await OwnCursor(connection_of(tx)).execute(query, params)
