"""The shop's front door in FastAPI: `uvicorn examples.orders.web:api`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import psycopg_pool
from fastapi import FastAPI, HTTPException
from starlette.routing import Route

from examples.orders.app import later, shop


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with psycopg_pool.AsyncConnectionPool(shop.settings.dsn or "", open=False) as api.state.pool:
        yield
    await shop.close()


api = FastAPI(lifespan=lifespan, routes=[Route("/orders", later), Route("/orders/{id}", later)])


@api.get("/placed/{number}")
async def placed(number: UUID) -> dict[str, Any]:
    """The order itself: its state is "placed", and "confirmed" once the stock has answered."""
    async with api.state.pool.connection() as connection:
        cursor = await connection.execute("select ref, sku, quantity, state from placed where id = %s", (number,))
        row = await cursor.fetchone()
    if row is None:
        raise HTTPException(404)
    return dict(zip(("ref", "sku", "quantity", "state"), row, strict=True))
