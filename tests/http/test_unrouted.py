"""What an app's router answers by itself is no answer to a key (H12)."""

from __future__ import annotations

from typing import Any

import django
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path as django_path
from fastapi import APIRouter, FastAPI
from flask import Flask, abort, current_app, redirect
from litestar import Litestar
from litestar import post as litestar_post
from litestar.exceptions import HTTPException as LitestarError
from litestar.response import Redirect
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route, Router
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.routing import BaseConverter

from idemconsumer.http import IdempotencyMiddleware, current_key
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


class Copying:
    """Middleware that hands on a copy, as several do: nobody outside sees what a router has found."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(dict(scope), receive, send)


async def elsewhere_302(request: Request) -> Response:
    return RedirectResponse("/elsewhere", 302)


HIDDEN = [Route("/orders", elsewhere_302, methods=["POST"])]
COPIES = [Middleware(Copying)]


@pytest.mark.parametrize(
    "app",
    [
        Starlette(routes=[Mount("/v1", Starlette(routes=HIDDEN, middleware=COPIES))]),
        Starlette(routes=[Mount("/v1", Starlette(routes=[Mount("/", Starlette(routes=HIDDEN, middleware=COPIES))]))]),
        Starlette(routes=[Mount("/v1", routes=HIDDEN, middleware=COPIES)]),
        Starlette(routes=[Mount("/v1", Copying(Starlette(routes=HIDDEN)))]),
        Starlette(routes=[Mount("/v1", routes=HIDDEN)], middleware=COPIES),
    ],
)
async def test_what_an_endpoint_behind_a_copy_answers_is_stored(
    make_door: MakeDoor, store: FakeRequests, app: Any
) -> None:
    async with client(IdempotencyMiddleware(app, make_door(store=store))) as shop:
        got = [await shop.post(path="/v1/orders", key="k") for _ in range(2)]
    assert [(each.status_code, replayed(each)) for each in got] == [(302, False), (302, True)]


async def test_whoever_asks_for_the_key_is_an_endpoint_whatever_the_router_says(
    make_door: MakeDoor, store: FakeRequests
) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        assert current_key()
        await Response(status_code=404)(scope, receive, send)

    async with client(IdempotencyMiddleware(Router(default=other), make_door(store=store))) as shop:
        assert [replayed(await shop.post(path="/orders", key="k")) for _ in range(2)] == [False, True]


def beside() -> Flask:
    made = Flask("beside")
    made.add_url_rule("/orders", "missing", lambda: abort(404), methods=["POST"])
    made.add_url_rule("/moved", "moved", lambda: redirect("/elsewhere"), methods=["POST"])
    return made


def inside(app: Flask) -> Flask:
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/beside": beside()})  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize("make", [lambda app: DispatcherMiddleware(app.wsgi_app, {"/beside": beside()}), inside])
def test_what_is_mounted_beside_flask_has_a_router_of_its_own(
    make_door: MakeDoor, store: FakeRequests, make: Any
) -> None:
    app = WsgiMiddleware(make(Flask("shop")), make_door(store=store))
    for path in ("/beside/orders", "/beside/moved"):
        assert [ask(app, path, PATH_INFO=path).replayed for _ in range(2)] == [False, True]


def test_a_rule_that_only_flask_itself_can_match_has_a_view(make_door: MakeDoor, store: FakeRequests) -> None:
    class OfThisApp(BaseConverter):
        def to_python(self, value: str) -> str:
            return f"{current_app.name}/{value}"

    flask = Flask("shop")
    flask.url_map.converters["ours"] = OfThisApp
    flask.add_url_rule("/orders/<ours:order>", "moved", lambda order: redirect("/elsewhere"), methods=["POST"])
    app = WsgiMiddleware(flask, make_door(store=store))
    assert [ask(app, PATH_INFO="/orders/1").replayed for _ in range(2)] == [False, True]


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


def django_missing(request: HttpRequest) -> HttpResponse:
    raise Http404


class Elsewhere:
    """Another middleware's table of routes, as those have that go by the host."""

    urlpatterns = (django_path("elsewhere", django_missing),)


class Urls:
    urlpatterns = (
        django_path("orders", django_missing),
        django_path("moved", lambda _: HttpResponseRedirect("/orders")),
        django_path("listed/", django_missing),
    )


def elsewhere(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        if request.path_info == "/elsewhere":
            request.urlconf = Elsewhere
        if request.path_info == "/before":
            return HttpResponseRedirect("/done")
        response = get_response(request)
        return HttpResponseRedirect("/en/late") if request.path_info == "/late" else response

    return middleware


@pytest.fixture(scope="module")
def _django() -> None:
    if settings.configured:  # once in a process
        return
    middleware = [f"{__name__}.elsewhere", "django.middleware.common.CommonMiddleware"]
    settings.configure(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["*"], SECRET_KEY="s", MIDDLEWARE=middleware)
    django.setup()


OF_DJANGO = [("/nothing", 404, False), ("/listed", 301, False), ("/late", 302, False)]  # and of middleware behind it
OF_ITS_VIEWS = [("/orders", 404, True), ("/moved", 302, True), ("/elsewhere", 404, True)]
STORED = [*OF_ITS_VIEWS, ("/before", 302, True)]  # and of middleware, without its router


@pytest.mark.usefixtures("_django")
def test_what_djangos_router_answers_is_not_stored(make_door: MakeDoor, store: FakeRequests) -> None:
    app = WsgiMiddleware(get_wsgi_application(), make_door(store=store))
    for at, status, stored in [*OF_DJANGO, *STORED]:
        got = [ask(app, at, PATH_INFO=at) for _ in range(2)]
        assert [(each.status[:3], each.replayed) for each in got] == [(str(status), False), (str(status), stored)]
    assert (len(store.records), store.held) == (len(STORED), {})


@pytest.mark.usefixtures("_django")
async def test_nor_is_it_under_asgi(make_door: MakeDoor, store: FakeRequests) -> None:
    async with client(IdempotencyMiddleware(get_asgi_application(), make_door(store=store))) as shop:
        for at, status, stored in [*OF_DJANGO, *STORED]:
            got = [await shop.post(path=at, key=at) for _ in range(2)]
            assert [(each.status_code, replayed(each)) for each in got] == [(status, False), (status, stored)], at


@pytest.mark.usefixtures("_django")
def test_what_is_mounted_beside_django_has_a_router_of_its_own(make_door: MakeDoor, store: FakeRequests) -> None:
    beside = Flask("beside")
    beside.add_url_rule("/orders", "missing", lambda: abort(404), methods=["POST"])
    app = WsgiMiddleware(DispatcherMiddleware(get_wsgi_application(), {"/beside": beside}), make_door(store=store))
    assert [ask(app, PATH_INFO="/beside/orders").replayed for _ in range(2)] == [False, True]


def test_an_app_that_is_a_method_called_app_is_looked_into_once(make_door: MakeDoor, store: FakeRequests) -> None:
    class Shop:
        def app(self, environ: Any, start_response: Any) -> list[bytes]:
            start_response("404 Not Found", [])
            return [b""]

    app = WsgiMiddleware(Shop().app, make_door(store=store))
    assert [ask(app).replayed for _ in range(2)] == [False, True]
