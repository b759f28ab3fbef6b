"""A service that books payments: FastAPI on its own, behind our front door, and behind what others have published.

`BENCH_HOW` says which; they differ in nothing else. For uvicorn: `benchmarks.rivals.web:api`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg_pool
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.rivals.applying import INSERT
from idemconsumer import App
from idemconsumer.http import Idempotency, IdempotencyMiddleware, Route
from idemconsumer.http.fastapi import RequestTx

CONNECTIONS = 8  # as our front door has


class Payment(BaseModel):
    id: str
    amount: int


class Receipt(BaseModel):
    id: str
    booked: int


@asynccontextmanager
async def _pool(api: FastAPI) -> AsyncIterator[None]:
    async with psycopg_pool.AsyncConnectionPool(
        os.environ["BENCH_DSN"], min_size=CONNECTIONS, max_size=CONNECTIONS, open=False
    ) as api.state.pool:
        await api.state.pool.wait()
        yield


async def plain(payment: Payment) -> Receipt:
    async with api.state.pool.connection() as connection:
        await connection.execute(INSERT, (payment.id, payment.amount))
    return Receipt(id=payment.id, booked=payment.amount)


async def joined(payment: Payment, tx: RequestTx) -> Receipt:
    await tx.execute(INSERT, (payment.id, payment.amount))
    return Receipt(id=payment.id, booked=payment.amount)


def ours(api: FastAPI) -> None:
    idempotency = Idempotency(App("bench"), tenant=lambda request: "everyone", default=Route(required=True))
    api.add_middleware(IdempotencyMiddleware, idempotency=idempotency)


def asgi_idempotency_header(api: FastAPI) -> None:
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends.redis import RedisBackend
    from redis.asyncio import Redis

    api.add_middleware(IdempotencyHeaderMiddleware, backend=RedisBackend(Redis.from_url(os.environ["BENCH_REDIS"])))


def _idemkit(api: FastAPI, backend: Any) -> None:
    """Its middleware hands the response on as it comes, and stores it afterwards."""
    from idemkit import IdempotencyMiddleware

    api.add_middleware(IdempotencyMiddleware, backend=backend, config=_of_everyone())


def _of_everyone() -> Any:
    from idemkit import HttpConfig

    return HttpConfig(scope=lambda request: "everyone")


def idemkit_redis(api: FastAPI) -> None:
    from idemkit import RedisBackend

    _idemkit(api, RedisBackend.from_url(os.environ["BENCH_REDIS"]))


def _idemkit_in_postgres() -> Any:
    from idemkit import PostgresBackend

    return PostgresBackend.from_url(os.environ["BENCH_DSN"], min_size=CONNECTIONS, max_size=CONNECTIONS)


def idemkit_postgres(api: FastAPI) -> None:
    _idemkit(api, _idemkit_in_postgres())


def idemkit_stored_first(api: FastAPI) -> None:
    """Its route for FastAPI stores the response before it is sent, as we do."""
    from idemkit.contrib.fastapi import idempotent_route

    api.router.route_class = idempotent_route(backend=_idemkit_in_postgres(), config=_of_everyone())


HOWS: dict[str, tuple[Callable[..., Any], Callable[[FastAPI], None]]] = {
    "plain": (plain, lambda api: None),
    "joined": (joined, ours),
    "leased": (plain, ours),
    "asgi-idempotency-header, Redis": (plain, asgi_idempotency_header),
    "idemkit, Redis": (plain, idemkit_redis),
    "idemkit, Postgres": (plain, idemkit_postgres),
    "idemkit, Postgres, stored first": (plain, idemkit_stored_first),
}

_endpoint, _before = HOWS[os.environ["BENCH_HOW"]]
api = FastAPI(lifespan=None if _endpoint is joined else _pool)
_before(api)
api.post("/payments", status_code=201)(_endpoint)
