"""Who asks about a request finds the key under which the door has served it (H17)."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute

from idemconsumer.cli.main import main
from idemconsumer.http import IdempotencyMiddleware, Route, current_key
from tests.http.site import MakeDoor, client, replayed, service
from tests.support.ledger import Ledger
from tests.support.servers.redis import RedisServer


async def endpoint(request: StarletteRequest) -> Response:
    return Response(current_key())


async def run(*words: str) -> Result:
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, words))


@pytest.mark.parametrize("mounted", [False, True])
@pytest.mark.parametrize(
    ("options", "path", "names"),
    [
        ({}, "/things/7", []),
        ({"routes": {"POST /things/{id}": Route()}}, "/things/7", ["POST /things/{id}"]),
        ({"routes": {"POST /{rest:path}": Route(tx=True)}}, "/things/7/parts", []),
    ],
)
async def test_a_request_is_asked_for_by_what_its_client_has_sent(
    ledger: Ledger, make_door: MakeDoor, options: Any, path: str, names: list[str], *, mounted: bool
) -> None:
    app: Any = Starlette(
        routes=[StarletteRoute("/things/{rest:path}", endpoint, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware, idempotency=make_door(**options))],
    )
    sent = f"/v1{path}" if mounted else path
    if mounted:
        app = Starlette(routes=[Mount("/v1", app)])
    async with client(app) as shop:
        key = (await shop.post(path=sent)).text
        encoded = sent.replace("things", "%74hings") + "?page=1"
        for asked in [f"POST {sent}", f"POST {encoded}", *([] if mounted else names)]:
            told = json.loads((await run("explain", "--handler", asked, "--key", "k", "--json")).stdout)
            assert (told["key"], told["state"]) == (key, "completed")
        assert (await run("keys", "forget", "--handler", f"POST {sent}", "--key", "other", "--yes")).exit_code == 1
        unnamed = await run("explain", "--handler", "POST *", "--key", "k")
        assert (unnamed.exit_code, "write the method and path of the request" in unnamed.stderr) == (2, True)
        gone = await run("keys", "forget", "--handler", f"POST {sent}", "--key", "k", "--record", "--yes")
        assert (gone.exit_code, gone.stdout.startswith(f"forgotten: {key[:12]}")) == (0, True)
        assert not replayed(await shop.post(path=sent))


async def test_a_request_that_is_kept_in_redis_is_found_there(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_REDIS", redis_server.address)
    key = str(uuid4())
    async with client(service(make_door(store="redis"), endpoint)) as shop:
        stored = (await shop.post(key=key)).text
        asked = ["--handler", "POST /orders", "--key", key, "--app", "shop", "--tenant", "t"]
        for which in (asked, [stored]):
            told = json.loads((await run("keys", "show", *which, "--json")).stdout)
            assert (told["key"], told["store"], told["state"], told["result"]) == (stored, "redis", "completed", stored)
            assert "a duplicate: it would not run" in (await run("explain", *which)).stdout
            kept = await run("keys", "forget", "--yes", *which)
            assert (kept.exit_code, f"DEL idemconsumer:{stored}" in kept.stderr) == (1, True)
        assert (await run("explain", *asked[:3], "other", *asked[4:])).exit_code == 1
