"""Which policy a request gets is what the app's own router says of it, wherever the app is mounted (H1)."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.routing import Route as StarletteRoute

from idemconsumer.http import Idempotency, IdempotencyMiddleware, Route
from idemconsumer.http.frameworks import MarkedRoute, static_first
from tests.http.site import Call, MakeDoor, client, problem, replayed
from tests.support.ledger import Ledger


async def path(request: StarletteRequest) -> Response:
    return PlainTextResponse(request.url.path, 201)


def around(idempotency: Idempotency, *routes: BaseRoute) -> Starlette:
    return Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, idempotency=idempotency)])


def post(at: str, endpoint: object = path) -> StarletteRoute:
    return StarletteRoute(at, endpoint, methods=["POST"])  # type: ignore[arg-type]


async def test_a_route_before_a_marked_one_is_not_marked(make_door: MakeDoor) -> None:
    door = make_door()
    marked = door.route(required=True)(lambda request: path(request))
    async with client(around(door, post("/orders/import"), post("/orders/{id}", marked))) as shop:
        assert (await shop.post(path="/orders/import", key=None)).status_code == 201
        assert problem(await shop.post(path="/orders/7", key=None)) == "key-missing"


def test_where_the_order_does_not_count_what_is_written_out_comes_first() -> None:
    names = ["POST /{a}/b", "POST /orders/{id}", "POST /orders/import", "POST /orders"]
    sorted_ = [each.name for each in static_first([MarkedRoute(name, None, tx=False) for name in names])]
    assert sorted_ == ["POST /orders", "POST /orders/import", "POST /orders/{id}", "POST /{a}/b"]


async def test_a_class_is_marked_or_one_of_its_methods(make_door: MakeDoor) -> None:
    door = make_door(default=None)

    @door.route(required=True)
    class Orders(HTTPEndpoint):
        async def post(self, request: StarletteRequest) -> Response:
            return await path(request)

    class Refunds(HTTPEndpoint):
        @door.route(required=True)
        async def post(self, request: StarletteRequest) -> Response:
            return await path(request)

        async def patch(self, request: StarletteRequest) -> Response:
            return await path(request)

    app = around(door, StarletteRoute("/orders", Orders), StarletteRoute("/refunds", Refunds))
    async with client(app) as shop:
        assert problem(await shop.post(key=None)) == "key-missing"
        assert problem(await shop.post(key=None, path="/refunds")) == "key-missing"
        assert (await shop.post(key=None, path="/refunds", method="PATCH")).status_code == 201


async def test_a_newline_behind_a_path_is_no_way_around(make_door: MakeDoor) -> None:
    """Starlette takes it for the same route."""
    door = make_door(default=None)
    async with client(around(door, post("/orders", door.route(required=True)(lambda request: path(request))))) as shop:
        assert problem(await shop.post(key=None, path="/orders%0A")) == "key-missing"


async def test_marks_of_an_app_that_is_mounted_are_found(make_door: MakeDoor) -> None:
    door = make_door(default=None)
    inner = Starlette(routes=[post("/orders", door.route(required=True)(lambda request: path(request)))])
    async with client(Starlette(routes=[Mount("/v1", IdempotencyMiddleware(inner, door))])) as shop:
        assert problem(await shop.post(key=None, path="/v1/orders")) == "key-missing"


@pytest.mark.parametrize("named", [True, False])
async def test_one_route_mounted_at_two_places_is_two(make_door: MakeDoor, *, named: bool) -> None:
    door = make_door(routes={"POST /orders": Route()} if named else None)
    shops = Starlette(routes=[Mount("/{shop}", around(door, post("/orders")))])
    async with client(shops) as shop:
        first = await shop.post(path="/1/orders")
        assert ((await shop.post(path="/2/orders")).text, first.text) == ("/2/orders", "/1/orders")
        assert replayed(await shop.post(path="/1/orders"))


@pytest.mark.parametrize("tx", [True, False])
async def test_two_doors_around_one_request_are_an_error(make_door: MakeDoor, ledger: Ledger, *, tx: bool) -> None:
    """The inner one would wait for the outer one, and its refusal be stored as the answer."""
    door = make_door(routes={"POST /orders": Route(tx=tx)})
    app = around(door, Mount("/", around(door, post("/orders"))))
    call = Call(app)
    assert (await call.next())["status"] == 500
    with pytest.raises(Exception, match="two IdempotencyMiddleware are around 'POST /orders'"):
        await call.task
    assert ledger.states == []
