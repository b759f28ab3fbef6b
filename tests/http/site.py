"""Small services behind the front door, and how their clients ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from idemconsumer.http import Idempotency, IdempotencyMiddleware, Request, current_tx
from tests.support.ledger import write
from tests.support.waiting import PATIENCE

Endpoint = Callable[[StarletteRequest], Awaitable[Response]]
MakeDoor = Callable[..., Idempotency]

TYPE = "urn:idemconsumer:problem:"


def by_header(request: Request) -> str | None:
    return request.header("x-tenant")


async def place(request: StarletteRequest) -> Response:
    """An effect through Tx, and a response that tells one run from another."""
    order = await request.json()
    await write(current_tx(), order["id"])
    return JSONResponse({"placed": order["id"]}, 201, {"Location": f"/orders/{order['id']}"})


def service(idempotency: Idempotency, endpoint: Endpoint = place, *more: StarletteRoute) -> Starlette:
    """One endpoint at POST, PATCH, PUT and GET /orders."""
    route = StarletteRoute("/orders", endpoint, methods=["POST", "PATCH", "PUT", "GET"])
    return Starlette(routes=[route, *more], middleware=[Middleware(IdempotencyMiddleware, idempotency=idempotency)])


class Client:
    """Asks an ASGI app. What leaves the app as an exception is a 500, as of a server."""

    def __init__(self, app: Any) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=PATIENCE)

    async def post(
        self, id: object = 1, *, key: str | None = "k", tenant: str | None = "t", path: str = "/orders", **more: Any
    ) -> httpx.Response:
        headers = list((more.pop("headers", None) or {}).items())
        headers += [("Idempotency-Key", key)] if key is not None else []
        headers += [("X-Tenant", tenant)] if tenant is not None else []
        more = more if "content" in more or "json" in more else {"json": {"id": id}, **more}
        return await self.http.request(more.pop("method", "POST"), path, headers=headers, **more)


@asynccontextmanager
async def client(app: Any) -> AsyncIterator[Client]:
    made = Client(app)
    async with made.http:
        yield made


def problem(response: httpx.Response) -> str:
    """The name of the problem that the response is."""
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == response.status_code
    assert set(body) == {"type", "title", "status", "detail"}
    assert body["type"].startswith(TYPE)
    return str(body["type"].removeprefix(TYPE))


def replayed(response: httpx.Response) -> bool:
    return bool(response.headers.get("idempotent-replayed") == "true")


class Call:
    """One request to an ASGI app, message by message."""

    def __init__(self, app: Any, *, key: str = "k", body: bytes = b'{"id": 1}', path: str = "/orders") -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self.gone = asyncio.Event()
        self._body: bytes | None = body
        headers = [(b"host", b"shop"), (b"idempotency-key", key.encode()), (b"x-tenant", b"t")]
        headers.append((b"content-type", b"application/json"))
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.sent.put(message)

    async def next(self) -> Any:
        """The next message that is sent."""
        async with asyncio.timeout(PATIENCE):
            return await self.sent.get()

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=PATIENCE)
        assert self.task.done()
