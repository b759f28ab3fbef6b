"""The same service in Starlette, FastAPI and Litestar, and its OpenAPI document (H9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from litestar import Litestar
from litestar import post as litestar_post
from litestar.exceptions import HTTPException as LitestarError
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.routing import Route as StarletteRoute

from idemconsumer import Tx
from idemconsumer.errors import HandlerFault
from idemconsumer.http import Idempotency, IdempotencyMiddleware, Route, SyncTx, current_sync_tx, current_tx
from idemconsumer.http.fastapi import RequestSyncTx, RequestTx, document
from idemconsumer.http.openapi import describe
from tests.http.fake_requests import FakeRequests
from tests.http.site import MakeDoor, client, problem, replayed
from tests.support.ledger import Ledger, write
from tests.support.spans import collected

Make = Callable[[Idempotency], Any]


async def act(tx: Tx, order: dict[str, Any], refuse: Callable[..., Exception]) -> dict[str, Any]:
    """What each of these services does."""
    await write(tx, order["id"])
    match order.get("how"):
        case "refuse":
            raise refuse(status_code=409, detail="sold out")
        case "break":
            raise RuntimeError("broken")
        case "commit":
            await tx.connection.commit()
    return {"placed": order["id"]}


def in_starlette(door: Idempotency) -> Any:
    @door.route(tx=True)
    async def place(request: StarletteRequest) -> Response:
        return JSONResponse(await act(current_tx(), await request.json(), StarletteError), 201)

    mounted = Mount("/v1", routes=[StarletteRoute("/orders", place, methods=["POST"])])
    return Starlette(routes=[mounted], middleware=[Middleware(IdempotencyMiddleware, idempotency=door)])


def in_fastapi(door: Idempotency) -> Any:
    api, router = FastAPI(), APIRouter(prefix="/v1")

    @router.post("/orders", status_code=201)
    async def place(order: dict[str, Any], tx: RequestTx) -> dict[str, Any]:
        return await act(tx, order, HTTPException)

    api.include_router(router)
    api.add_middleware(IdempotencyMiddleware, idempotency=door)
    return api


def in_litestar(door: Idempotency) -> Any:
    @litestar_post("/v1/orders")
    @door.route(tx=True)
    async def place(data: dict[str, Any]) -> dict[str, Any]:
        return await act(current_tx(), data, LitestarError)

    return Litestar([place], middleware=[DefineMiddleware(cast(Any, IdempotencyMiddleware), idempotency=door)])


def around_litestar(door: Idempotency) -> Any:
    @door.route(tx=True)
    @litestar_post("/v1/orders")
    async def place(data: dict[str, Any]) -> dict[str, Any]:
        return await act(current_tx(), data, LitestarError)

    return IdempotencyMiddleware(Litestar([place]), door)


def in_starlette_behind_more(door: Idempotency) -> Any:
    """As `in_starlette`, with middleware around and inside of it that runs the app in tasks of its own."""

    async def pass_on(request: StarletteRequest, call_next: Callable[[Any], Awaitable[Response]]) -> Response:
        return await call_next(request)

    app = in_starlette(door)
    inner, outer = Middleware(BaseHTTPMiddleware, dispatch=pass_on), Middleware(BaseHTTPMiddleware, dispatch=pass_on)
    app.user_middleware = [outer, *app.user_middleware, inner]
    return app


each_framework = pytest.mark.parametrize(
    "make", [in_starlette, in_fastapi, in_litestar, around_litestar, in_starlette_behind_more]
)


@each_framework
async def test_effect_and_response_are_one_commit(ledger: Ledger, make_door: MakeDoor, make: Make) -> None:
    async with client(make(make_door())) as shop:
        first = await shop.post(path="/v1/orders", json={"id": 1})
        again = await shop.post(path="/v1/orders", json={"id": 1})
        other = await shop.post(path="/v1/orders", json={"id": 2})
    assert (first.status_code, first.json(), replayed(first)) == (201, {"placed": 1}, False)
    assert (again.status_code, again.content, replayed(again)) == (201, first.content, True)
    assert (other.status_code, problem(other)) == (422, "key-reused")
    assert ledger.effects == ["1"]


async def test_what_fastapi_keeps_for_its_traces_does_not_use_tx(ledger: Ledger, make_door: MakeDoor) -> None:
    collected()  # from then on, in this process
    async with client(in_fastapi(make_door())) as shop:
        assert (await shop.post(path="/v1/orders", json={"id": 1})).status_code == 201
    assert ledger.effects == ["1"]


@each_framework
@pytest.mark.parametrize(
    ("how", "status", "kept"), [("refuse", 409, True), ("break", 500, False), ("commit", 500, False)]
)
async def test_what_is_refused_or_fails_has_no_effect(
    ledger: Ledger, make_door: MakeDoor, make: Make, how: str, status: int, kept: bool
) -> None:
    async with client(make(make_door())) as shop:
        got = [await shop.post(path="/v1/orders", json={"id": 1, "how": how}) for _ in range(2)]
    assert [(each.status_code, replayed(each)) for each in got] == [(status, False), (status, kept)]
    assert (ledger.effects, len(ledger.states)) == ([], int(kept))


@each_framework
async def test_two_at_once_have_one_effect(ledger: Ledger, make_door: MakeDoor, make: Make) -> None:
    async with client(make(make_door(default=Route(wait="30s")))) as shop:
        got = await asyncio.gather(*(shop.post(path="/v1/orders", json={"id": 1}) for _ in range(4)))
    assert {each.status_code for each in got} <= {201, 409}
    assert ledger.effects == ["1"]


# ----------------------------------------------------------------------------------------------------- in a thread
def insert(tx: SyncTx, id: object) -> int:
    assert tx.execute("insert into witness (id) values (%s)", (str(id),)).rowcount == 1
    assert tx.execute("select id from witness", into=str).all() == [str(id)]
    assert tx.execute("select id from witness").first() == (str(id),)
    return int(tx.execute("select count(*) from witness", into=int).one())


async def test_a_sync_endpoint_has_a_sync_tx(ledger: Ledger, make_door: MakeDoor) -> None:
    api = FastAPI()
    left: list[SyncTx] = []

    @api.post("/orders")
    def place(order: dict[str, Any], tx: RequestSyncTx) -> int:
        left.append(tx)
        return insert(tx, order["id"])

    @api.post("/others")
    def other(order: dict[str, Any], tx: Annotated[SyncTx, Depends(current_sync_tx)]) -> int:
        return insert(tx, order["id"])

    api.add_middleware(IdempotencyMiddleware, idempotency=make_door())
    async with client(api) as shop:
        assert [(await shop.post()).json() for _ in range(2)] == [1, 1]
        ledger.run("truncate witness")
        assert [replayed(await shop.post(2, path="/others")) for _ in range(2)] == [False, True]
    assert ledger.effects == ["2"]
    with pytest.raises(HandlerFault, match="after the response"):
        await run_in_threadpool(insert, left[0], 3)


async def test_sync_tx_in_the_loop_is_refused(make_door: MakeDoor) -> None:
    said = []

    async def endpoint(request: StarletteRequest) -> Response:
        with pytest.raises(HandlerFault) as error:
            current_sync_tx().execute("select 1")
        said.append(str(error.value))
        return Response("ok")

    app = Starlette(
        routes=[StarletteRoute("/orders", make_door().route(tx=True)(endpoint), methods=["POST"])],
    )
    async with client(IdempotencyMiddleware(app, make_door())) as shop:
        assert (await shop.post()).status_code == 200
    assert "current_tx()" in said[0]


# ----------------------------------------------------------------------------------------------------------- OpenAPI
def test_openapi_says_what_the_door_does_and_of_nothing_else() -> None:
    from idemconsumer import App
    from tests.http.site import by_header

    door = Idempotency(App("shop"), tenant=by_header, default=None, store=FakeRequests())
    api = FastAPI()

    @api.post("/orders")
    @door.route(required=True, expires="1h")
    async def place(order: dict[str, Any], tx: RequestTx) -> None: ...

    @api.post("/others")
    async def other() -> None: ...

    @api.get("/orders")
    async def listed() -> None: ...

    document(api, door)
    schema = api.openapi()
    assert schema == api.openapi()

    described = schema["paths"]["/orders"]["post"]
    (header,) = [each for each in described["parameters"] if each["name"] == "Idempotency-Key"]
    assert (header["in"], header["required"], header["schema"]["maxLength"]) == ("header", True, 255)
    assert set(described["responses"]) >= {"200", "400", "401", "409", "410", "413", "422", "503"}
    assert set(described["responses"]["422"]["content"]) == {"application/json", "application/problem+json"}
    assert "Retry-After" in described["responses"]["409"]["headers"]
    assert "Idempotent-Replayed" in described["responses"]["200"]["headers"]
    assert described["x-idempotency"]["mode"] == "joined"
    assert described["x-idempotency"]["expires"] == 3_600.0
    for path, method in (("/others", "post"), ("/orders", "get")):
        assert "x-idempotency" not in schema["paths"][path][method]
        assert "parameters" not in schema["paths"][path][method]


def test_any_document_can_be_described() -> None:
    from idemconsumer import App
    from tests.http.site import by_header

    door = Idempotency(App("shop"), tenant=by_header, default=None)
    app = around_litestar(door).app
    schema: dict[str, Any] = app.openapi_schema.to_schema()
    describe(schema, door, app)
    assert schema["paths"]["/v1/orders"]["post"]["x-idempotency"]["mode"] == "joined"
