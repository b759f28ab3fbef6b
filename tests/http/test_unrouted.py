"""What an app's router answers by itself is no answer to a key (H12)."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from flask import Flask, abort, redirect
from litestar import Litestar
from litestar import post as litestar_post
from litestar.exceptions import HTTPException as LitestarError
from litestar.response import Redirect
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from idemconsumer.http import IdempotencyMiddleware
from idemconsumer.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.http.fake_requests import FakeRequests
from tests.http.site import MakeDoor, client, replayed
from tests.http.wsgi_client import ask

OWN = ["/nothing", "/v1/nothing", "/orders/", "/v1/orders/", "/shown", "/v1/shown"]  # of the router
GIVEN = ["/orders", "/v1/orders", "/moved", "/v1/moved"]  # of an endpoint: 404, and 307


async def missing(request: Request) -> Response:
    raise HTTPException(404)


async def moved(request: Request) -> Response:
    return RedirectResponse("/elsewhere")


async def shown(request: Request) -> Response:
    raise AssertionError


ROUTES = [
    Route("/orders", missing, methods=["POST"]),
    Route("/moved", moved, methods=["POST"]),
    Route("/shown", shown, methods=["GET"]),
]


def in_starlette() -> Any:
    return Starlette(routes=[*ROUTES, Mount("/v1", routes=ROUTES)])


def in_starlette_that_mounts_another() -> Any:
    return Starlette(routes=[*ROUTES, Mount("/v1", Starlette(routes=ROUTES))])


def in_fastapi() -> Any:
    api, router = FastAPI(), APIRouter()
    for route in ROUTES:
        router.add_api_route(route.path, route.endpoint, methods=list(route.methods or ()))
    api.include_router(router)
    api.include_router(router, prefix="/v1")
    return api


def in_litestar() -> Any:
    @litestar_post(["/orders", "/v1/orders"])
    async def missing() -> None:
        raise LitestarError(status_code=404)

    @litestar_post(["/moved", "/v1/moved"], status_code=307)
    async def moved() -> Redirect:
        return Redirect("/elsewhere", status_code=307)

    return Litestar([missing, moved])


@pytest.mark.parametrize("make", [in_starlette, in_starlette_that_mounts_another, in_fastapi, in_litestar])
async def test_what_an_asgi_router_answers_is_not_stored(make_door: MakeDoor, store: FakeRequests, make: Any) -> None:
    own = [path for path in OWN if make is not in_litestar or "nothing" in path]
    async with client(IdempotencyMiddleware(make(), make_door(store=store))) as shop:
        for path in own:
            got = [await shop.post(path=path, key="own") for _ in range(2)]
            assert [(each.status_code in (404, 405, 307), replayed(each)) for each in got] == [(True, False)] * 2, path
        assert (store.records, store.held) == ({}, {})
        for path in GIVEN:
            got = [await shop.post(path=path, key="given") for _ in range(2)]
            assert [(each.status_code in (404, 307), replayed(each)) for each in got] == [
                (True, False), (True, True),
            ], path  # fmt: skip


def test_what_is_mounted_beside_flask_has_a_router_of_its_own(make_door: MakeDoor, store: FakeRequests) -> None:
    beside = Flask("beside")
    beside.add_url_rule("/orders", "missing", lambda: abort(404), methods=["POST"])
    app = WsgiMiddleware(DispatcherMiddleware(Flask("shop").wsgi_app, {"/beside": beside}), make_door(store=store))
    assert [ask(app, PATH_INFO="/beside/orders").replayed for _ in range(2)] == [False, True]


def test_what_flasks_router_answers_is_not_stored(make_door: MakeDoor, store: FakeRequests) -> None:
    flask = Flask("shop")
    flask.add_url_rule("/orders", "missing", lambda: abort(404), methods=["POST"])
    flask.add_url_rule("/moved", "moved", lambda: redirect("/elsewhere", 308), methods=["POST"])
    flask.add_url_rule("/listed/", "listed", lambda: "no", methods=["POST"])
    flask.add_url_rule("/shown", "shown", lambda: "no", methods=["GET"])
    app = WsgiMiddleware(flask.wsgi_app, make_door(store=store))

    def twice(path: str) -> list[tuple[str, bool]]:
        return [(got.status[:3], got.replayed) for got in (ask(app, "k", PATH_INFO=path) for _ in range(2))]

    for path, status in [("/nothing", "404"), ("/listed", "308"), ("/shown", "405")]:
        assert twice(path) == [(status, False)] * 2
    assert (store.records, store.held) == ({}, {})
    for path, status in [("/orders", "404"), ("/moved", "308")]:
        assert twice(path) == [(status, False), (status, True)]
