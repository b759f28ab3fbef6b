"""A marked route runs as it was marked, or not at all (H1): however its app is built, and without the front door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import post as litestar_post
from starlette.applications import Starlette
from starlette.convertors import CONVERTOR_TYPES, StringConvertor
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Host, Mount, Router, WebSocketRoute
from starlette.routing import Route as StarletteRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from idemconsumer import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.http import Idempotency, IdempotencyMiddleware, Route
from idemconsumer.http.fastapi import RequestTx
from idemconsumer.http.marks import seen
from tests.http.fake_requests import FakeRequests
from tests.http.site import by_header, client, problem, replayed

Endpoint = Callable[[StarletteRequest], Awaitable[Response]]


@pytest.fixture
def runs() -> list[str]:
    return []


@pytest.fixture
def door(store: FakeRequests) -> Idempotency:
    """Covers nothing but what is marked."""
    return Idempotency(App("shop"), tenant=by_header, default=None, store=store)


def endpoint(runs: list[str]) -> Endpoint:
    async def run(request: StarletteRequest) -> Response:
        runs.append(request.url.path)
        return PlainTextResponse(f"run {len(runs)}", 201)

    return run


def marked(door: Idempotency, runs: list[str]) -> Endpoint:
    return door.route(required=True)(endpoint(runs))


def post(at: str, to: Any) -> StarletteRoute:
    return StarletteRoute(at, to, methods=["POST"])


def around(door: Idempotency, *routes: BaseRoute) -> Starlette:
    return Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, idempotency=door)])


async def is_kept(app: Any, runs: list[str], path: str, method: str = "POST") -> None:
    """Without a key it does not run, and with one it runs once."""
    async with client(app) as shop:
        assert problem(await shop.post(path=path, key=None, method=method)) == "key-missing"
        assert runs == []
        assert [replayed(await shop.post(path=path, method=method)) for _ in range(2)] == [False, True]
    assert len(runs) == 1


async def is_refused(app: Any, runs: list[str], path: str = "/orders", **more: Any) -> None:
    async with client(app) as shop:
        assert (await shop.post(path=path, key=None, **more)).status_code == 500
    assert runs == []


class Changing:
    """Middleware that changes a request before the app has it."""

    def __init__(self, app: Any, **changes: str) -> None:
        self._changing = app
        self._changes = changes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._changing({**scope, **self._changes}, receive, send)


# --------------------------------------------------------------------------------------------------- it is found
async def test_a_typed_parameter_takes_what_its_router_gives_it(door: Idempotency, runs: list[str]) -> None:
    numbers = post("/orders/{id:int}", endpoint(runs))
    app = around(door, numbers, post("/orders/{name}", marked(door, runs)))
    await is_kept(app, runs, "/orders/abc")
    async with client(app) as shop:
        assert (await shop.post(path="/orders/7", key=None)).status_code == 201


async def test_a_parameter_of_a_type_of_the_app(
    door: Idempotency, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(StringConvertor):
        regex = "[^/]+/[^/]+"

    monkeypatch.setitem(CONVERTOR_TYPES, "two", Two())
    app = around(door, Mount("/{shop:two}", routes=[post("/orders/{id:two}", marked(door, runs))]))
    await is_kept(app, runs, "/a/b/orders/1/2")


async def test_a_websocket_at_the_same_path_hides_no_mark(door: Idempotency, runs: list[str]) -> None:
    async def listen(socket: WebSocket) -> None: ...

    await is_kept(around(door, WebSocketRoute("/orders", listen), post("/orders", marked(door, runs))), runs, "/orders")


async def test_a_method_in_small_letters_is_that_method(runs: list[str], store: FakeRequests) -> None:
    """Django takes it for it, and so does a class of an older Starlette."""
    named = Idempotency(App("shop"), tenant=by_header, routes={"POST /orders": Route(required=True)}, store=store)
    app = Changing(Starlette(routes=[post("/orders", endpoint(runs))]), method="POST")
    await is_kept(Changing(IdempotencyMiddleware(app, named), method="post"), runs, "/orders")


async def test_an_app_that_is_mounted_behind_its_middleware(door: Idempotency, runs: list[str]) -> None:
    class Passing:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    inner = Passing(Starlette(routes=[post("/orders", marked(door, runs))]))
    await is_kept(around(door, Mount("/v1", inner)), runs, "/v1/orders")


@pytest.mark.parametrize("path", ["/orders/7", "/orders/7/", "/orders//7/"])
@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("named", ["/orders/{id}", "/orders/{id}/", None])
async def test_litestar_takes_no_notice_of_slashes(
    runs: list[str], store: FakeRequests, path: str, named: str | None, *, threaded: bool
) -> None:
    routes = {f"POST {named}": Route(required=True)} if named else None
    door = Idempotency(App("shop"), tenant=by_header, default=None, routes=routes, store=store)

    async def place(number: int) -> str:
        runs.append(str(number))
        return "placed"

    def place_threaded(number: int) -> str:
        runs.append(str(number))
        return "placed"

    its: Any = place_threaded if threaded else place
    its = its if named else door.route(required=True)(its)
    handler = litestar_post("/orders/{number:int}", sync_to_thread=True if threaded else None)(its)
    await is_kept(IdempotencyMiddleware(Litestar([handler]), door), runs, path)


async def test_a_route_of_one_host(door: Idempotency, runs: list[str]) -> None:
    app = around(door, Host("{name:str}", Router([post("/orders", marked(door, runs))])))
    await is_kept(app, runs, "/orders")


async def test_a_route_that_the_app_adds_as_it_starts(door: Idempotency, runs: list[str]) -> None:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.router.routes.append(post("/orders", marked(door, runs)))
        yield

    app = Starlette(lifespan=lifespan, middleware=[Middleware(IdempotencyMiddleware, idempotency=door)])
    with TestClient(app):
        await is_kept(app, runs, "/orders")


def test_what_cannot_be_is_said_before_that(door: Idempotency) -> None:
    api = FastAPI()
    api.add_middleware(IdempotencyMiddleware, idempotency=door)

    @api.post("/orders")
    @door.route(on_stale="review")
    async def place(tx: RequestTx) -> None: ...

    with pytest.raises(ConfigurationError, match="`on_stale`"), TestClient(api):
        pass


@pytest.mark.parametrize("wrapped", [True, False])
async def test_an_app_with_a_door_of_its_own_is_left_to_it(
    door: Idempotency, runs: list[str], *, wrapped: bool
) -> None:
    """Each has its tenants, and its store."""
    its = Idempotency(App("bank"), tenant=lambda request: "bank", default=None, store=FakeRequests())
    routes = post("/payments", its.route(required=True)(endpoint(runs)))
    inner = IdempotencyMiddleware(Starlette(routes=[routes]), its) if wrapped else around(its, routes)
    app = around(door, Mount("/bank", inner), post("/orders", marked(door, runs)))
    await is_kept(app, runs, "/bank/payments")
    runs.clear()
    await is_kept(app, runs, "/orders")


async def test_a_door_of_one_route(door: Idempotency, runs: list[str]) -> None:
    its = [Middleware(IdempotencyMiddleware, idempotency=door)]
    route = StarletteRoute("/orders", marked(door, runs), methods=["POST"], middleware=its)
    await is_kept(Starlette(routes=[route]), runs, "/orders")


# ------------------------------------------------------------------------------------------------- or it is refused
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_without_the_front_door_nothing_runs(door: Idempotency, runs: list[str], method: str) -> None:
    app = Starlette(routes=[StarletteRoute("/orders", marked(door, runs), methods=["GET", "POST"])])
    await is_refused(app, runs, method=method)


async def test_a_request_that_was_changed_behind_the_door_is_refused(door: Idempotency, runs: list[str]) -> None:
    app = Starlette(routes=[post("/orders", marked(door, runs)), post("/others", endpoint(runs))])
    await is_refused(IdempotencyMiddleware(Changing(app, path="/orders"), door), runs, "/others")


async def test_a_request_in_the_context_of_another_one_is_refused(door: Idempotency, runs: list[str]) -> None:
    """As uvicorn begins one that came in the same packet as the one before."""
    app = IdempotencyMiddleware(Changing(Starlette(routes=[post("/orders", marked(door, runs))]), path="/orders"), door)
    with seen(None):
        await is_refused(app, runs, "/others")


async def test_a_request_that_got_a_weaker_policy_is_refused(runs: list[str], store: FakeRequests) -> None:
    door = Idempotency(App("shop"), tenant=by_header, default=Route(), store=store)
    app = Starlette(routes=[post("/orders", marked(door, runs))])
    await is_refused(IdempotencyMiddleware(Changing(app), door), runs)


async def test_what_is_written_down_comes_before_a_mark_that_is_not_found(runs: list[str], store: FakeRequests) -> None:
    routes = {"POST /orders": Route(required=True, expires="1h")}
    door = Idempotency(App("shop"), tenant=by_header, routes=routes, store=store)
    app = Starlette(routes=[post("/orders", marked(door, runs))])
    await is_kept(IdempotencyMiddleware(Changing(app), door), runs, "/orders")


def test_a_websocket_that_was_marked_is_refused(door: Idempotency) -> None:
    @door.route(required=True)
    async def listen(socket: WebSocket) -> None:
        raise AssertionError("it ran")

    with (
        pytest.raises(ConfigurationError, match="a websocket cannot be marked"),
        TestClient(around(door, WebSocketRoute("/orders", listen))).websocket_connect("/orders"),
    ):
        pass


def test_what_nothing_would_keep_cannot_be_marked(door: Idempotency) -> None:
    class Reading:
        def get(self) -> None: ...

    class Asgi:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    for each in (Reading, Asgi()):
        with pytest.raises(ConfigurationError, match="neither a function nor a class with post"):
            door.route()(each)


# ------------------------------------------------------------------------------------------------ what it stays
async def test_a_marked_endpoint_may_call_another_one(door: Idempotency, runs: list[str]) -> None:
    inner = marked(door, runs)

    @door.route(required=True, expires="1h")
    async def outer(request: StarletteRequest) -> Response:
        return await inner(request)

    await is_kept(around(door, post("/v2/orders", outer), post("/orders", inner)), runs, "/v2/orders")
    with pytest.raises(ConfigurationError, match="__wrapped__"):
        await inner(StarletteRequest({"type": "http"}))


def test_a_function_stays_what_its_framework_asks_for(door: Idempotency) -> None:
    """FastAPI reads annotations in the module of the function."""

    def plain(order: StarletteRequest) -> str:
        return "c"

    ours: list[Any] = [plain, endpoint([])]
    kinds = [door.route()(each) for each in ours]
    assert [iscoroutinefunction(each) for each in kinds] == [False, True]
    assert all(each.__globals__ is globals() for each in kinds)


async def test_a_partial_is_marked_as_its_function(door: Idempotency, runs: list[str]) -> None:
    """Django's `method_decorator` makes one of each method."""

    async def run(request: StarletteRequest, *, status: int) -> Response:
        runs.append(request.url.path)
        return PlainTextResponse("ran", status)

    partly = door.route(required=True)(partial(run, status=201))
    await is_refused(Starlette(routes=[post("/orders", partly)]), runs)
    await is_kept(around(door, post("/orders", partly)), runs, "/orders")


@pytest.mark.parametrize("threaded", [True, False])
async def test_a_generator_of_fastapi(door: Idempotency, runs: list[str], *, threaded: bool) -> None:
    async def parts() -> AsyncIterator[str]:
        runs.append("ran")
        yield "a"

    def sync_parts() -> Iterator[str]:
        runs.append("ran")
        yield "a"

    api = FastAPI()
    its: Any = sync_parts if threaded else parts
    api.post("/orders")(door.route(required=True)(its))
    await is_refused(api, runs)
    await is_kept(IdempotencyMiddleware(api, door), runs, "/orders")


async def test_a_get_of_a_marked_function_passes(door: Idempotency, runs: list[str]) -> None:
    api = FastAPI()

    @api.api_route("/orders", methods=["GET", "POST"])
    @door.route(required=True)
    def orders() -> str:
        runs.append("ran")
        return "orders"

    api.add_middleware(IdempotencyMiddleware, idempotency=door)
    async with client(api) as shop:
        assert (await shop.post(key=None, method="GET")).status_code == 200
        assert problem(await shop.post(key=None)) == "key-missing"
    assert runs == ["ran"]


@pytest.mark.parametrize(
    "path",
    [
        "/orders/<int:id>",
        "/orders/$",
        "/orders/(?P<id>[0-9]+)/",
        "/orders/:id",
        "/orders/*",
        "/orders?a=1",
        "/{id:odd}",
    ],
)
def test_a_path_that_no_request_would_have_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write \{"):
        Idempotency(App("shop"), tenant=by_header, routes={f"POST {path}": Route()})


async def test_a_mark_above_the_decorator_of_the_framework_is_found(door: Idempotency, runs: list[str]) -> None:
    """There it cannot be guarded, since the app has the function as it was."""
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, idempotency=door)

    @door.route(required=True)
    @app.post("/orders", status_code=201)
    async def place() -> None:
        runs.append("placed")

    await is_kept(app, runs, "/orders")
