"""A client of an ASGI app in this process, which also starts the app and shuts it down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from idemconsumer.errors import ConfigurationError
from idemconsumer.user_code.cancellation import end

if TYPE_CHECKING:
    import httpx


@asynccontextmanager
async def client_of(asgi_app: Any, base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The client. Raises ConfigurationError if httpx is missing, and what the app raises at its start."""
    try:
        import httpx
    except ImportError:
        raise ConfigurationError("kit.http: httpx is not installed; run pip install httpx") from None
    async with _living(asgi_app):
        transport = httpx.ASGITransport(asgi_app)
        async with httpx.AsyncClient(transport=transport, base_url=base_url) as client:
            yield client


@asynccontextmanager
async def _living(asgi_app: Any) -> AsyncIterator[None]:
    """Run the lifespan of the app around the block. An app without a lifespan has no start and no end."""
    orders, answers = asyncio.Queue[Mapping[str, Any]](), asyncio.Queue[Mapping[str, Any]]()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
    running = asyncio.ensure_future(asgi_app(scope, orders.get, answers.put))

    async def answered(what: str) -> bool:
        """Whether the app has answered; it may have returned instead."""
        await orders.put({"type": f"lifespan.{what}"})
        answer = asyncio.ensure_future(answers.get())
        await asyncio.wait([answer, running], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            return False
        if answer.result()["type"] == f"lifespan.{what}.failed":
            raise ConfigurationError(f"the app failed at its {what}: {answer.result().get('message', '')}")
        return True

    lives = await answered("startup")
    try:
        yield
    finally:
        if lives and not running.done():
            await answered("shutdown")
        await end(running)
