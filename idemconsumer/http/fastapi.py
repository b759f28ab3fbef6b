"""FastAPI: Tx as a parameter of an endpoint, which puts its route into joined mode, and the front door in OpenAPI.

@api.post("/orders")
async def place(order: Order, tx: RequestTx) -> Receipt: ...
"""

from __future__ import annotations

from typing import Annotated, Any

from idemconsumer.handlers.arguments import Tx
from idemconsumer.http.current import GIVES_TX, SyncTx, current_sync_tx, current_tx
from idemconsumer.http.idempotency import Idempotency
from idemconsumer.http.openapi import describe
from idemconsumer.missing import cannot_import

try:
    from fastapi import Depends, FastAPI
except ImportError as error:
    raise cannot_import("idemconsumer.http.fastapi: FastAPI", error) from error

__all__ = ["RequestSyncTx", "RequestTx", "document"]


async def _tx() -> Tx:  # FastAPI would call a plain function in a thread
    return current_tx()


async def _sync_tx() -> SyncTx:
    return current_sync_tx()


GIVES_TX.update((_tx, _sync_tx))

RequestTx = Annotated[Tx, Depends(_tx)]
"""For `async def` endpoints: writes through it and the stored response are one commit."""

RequestSyncTx = Annotated[SyncTx, Depends(_sync_tx)]
"""The same for `def` endpoints, which FastAPI runs in a thread."""


def document(api: FastAPI, idempotency: Idempotency) -> None:
    """Add the front door to the OpenAPI document of `api`, as `describe` does."""
    made = api.openapi

    def openapi() -> dict[str, Any]:
        schema = made()
        describe(schema, idempotency, api)
        return schema

    api.openapi = openapi  # type: ignore[method-assign]
