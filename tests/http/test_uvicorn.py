"""Behind a real server: clients that hang up, streams, a shutdown (H7, H8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import pytest
import uvicorn
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from idemconsumer.embedded.postgres import free_port
from idemconsumer.http import IdempotencyMiddleware, Route, current_tx
from idemconsumer.rules.values import State
from tests.http.endpoints import Counting
from tests.http.site import MakeDoor, client, problem, replayed, service
from tests.support.ledger import Ledger, write
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

JOINED = {"POST /orders": Route(tx=True)}
LEASES: Final = "select count(*) from idemconsumer.worker where until > clock_timestamp()"
HEADERS = {"Idempotency-Key": "k", "X-Tenant": "t"}
BODY = b'{"id":1}'


@asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncIterator[tuple[uvicorn.Server, str]]:
    """In this loop, until the end of the block."""
    port = free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", **options)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    try:
        await until(lambda: server.started)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE)


def asking(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE)


class Slow:
    def __init__(self) -> None:
        self.inside, self.go, self.runs = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self, request: StarletteRequest) -> Response:
        self.runs += 1
        await request.body()
        await write(current_tx(), 1)
        self.inside.set()
        await self.go.wait()
        return JSONResponse("done", 201)


async def test_a_client_that_hangs_up_finds_its_response_when_it_comes_again(
    ledger: Ledger, make_door: MakeDoor
) -> None:
    slow = Slow()
    async with served(service(make_door(routes=JOINED), slow.__call__)) as (_, url):
        async with asking(url) as first:
            asked = asyncio.create_task(first.post("/orders", content=BODY, headers=HEADERS))
            await slow.inside.wait()
            asked.cancel()
            await asyncio.wait({asked})
        slow.go.set()
        await until(lambda: ledger.effects == ["1"])
        async with asking(url) as again:
            got = await again.post("/orders", content=BODY, headers=HEADERS)
    assert (got.status_code, got.json(), replayed(got), slow.runs) == (201, "done", True, 1)


async def test_a_stream_is_live_and_its_end_is_of_no_interest(ledger: Ledger, make_door: MakeDoor) -> None:
    more = asyncio.Queue[str]()

    async def events() -> AsyncIterator[str]:
        while True:
            yield await more.get()

    async def endpoint(request: StarletteRequest) -> Response:
        await request.body()
        await write(current_tx(), 1)
        return StreamingResponse(events(), media_type="text/event-stream")

    async with served(service(make_door(routes=JOINED), endpoint)) as (_, url), asking(url) as shop:
        async with shop.stream("POST", "/orders", content=BODY, headers=HEADERS) as live:
            lines = live.aiter_lines()
            for each in ("data: 1", "data: 2"):
                more.put_nowait(f"{each}\n")
                assert await anext(lines) == each
            assert ledger.effects == ["1"]
        again = await shop.post("/orders", content=BODY, headers=HEADERS)
    assert problem(again) == "not-replayable"


async def test_a_shutdown_that_cuts_a_request_off_leaves_nothing_of_it(ledger: Ledger, make_door: MakeDoor) -> None:
    slow = Slow()
    app = service(make_door(routes=JOINED), slow.__call__)
    async with served(app, timeout_graceful_shutdown=0) as (server, url), asking(url) as shop:
        asked = asyncio.create_task(shop.post("/orders", content=BODY, headers=HEADERS))
        await slow.inside.wait()
        server.should_exit = True
        await asyncio.wait({asked}, timeout=PATIENCE)
        assert asked.done()
        asked.exception()
    assert (ledger.effects, ledger.states) == ([], [])
    slow.go.set()
    async with client(app) as later:
        assert (await later.post(content=BODY)).status_code == 201
    assert ledger.effects == ["1"]


async def test_a_shutdown_leaves_its_key_to_a_leased_request_that_still_runs(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, endpoint: Counting
) -> None:
    """H14."""
    tuned(monkeypatch, closing_grace=0.01)
    endpoint.go.clear()
    app = service(make_door(), endpoint.__call__)
    async with served(app, timeout_graceful_shutdown=0) as (server, url), asking(url) as shop:
        asked = asyncio.create_task(shop.post("/orders", content=BODY, headers=HEADERS))
        await endpoint.inside.wait()
        server.should_exit = True
        await asyncio.wait({asked}, timeout=PATIENCE)
        assert asked.done()
        asked.exception()
    assert (ledger.states, endpoint.cancelled) == ([State.PROCESSING], False)
    async with client(service(make_door(), endpoint.__call__)) as later:
        here = {"Host": "127.0.0.1"}
        assert problem(await later.post(content=BODY, headers=here)) == "in-progress"
        endpoint.go.set()
        await until(lambda: ledger.states == [State.COMPLETED])
        assert replayed(await later.post(content=BODY, headers=here))
    assert endpoint.runs == 1


@pytest.mark.parametrize("says", ["an error", "nothing"])
async def test_what_an_app_that_knows_no_lifespan_has_opened_is_closed_at_the_end(
    ledger: Ledger, make_door: MakeDoor, says: str
) -> None:
    """H14: Django's raises ValueError."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            if says == "an error":
                raise ValueError("only http")
            return
        await Response("done", 201)(scope, receive, send)

    around = IdempotencyMiddleware(app, make_door())
    async with served(around) as (_, url), asking(url) as shop:
        assert (await shop.post("/orders", content=BODY, headers=HEADERS)).status_code == 201
        assert ledger.run(LEASES) == [(1,)]
    assert ledger.run(LEASES) == [(0,)]
