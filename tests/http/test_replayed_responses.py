"""What a replay has of the first response, and what is never replayed (H5, H7); what comes in (H4)."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator

import pytest
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from idemconsumer.http import IdempotencyMiddleware, Route, current_tx
from idemconsumer.http.asgi_wire import Receive, Scope, Send
from idemconsumer.rules.http import kept_headers
from tests.http.fake_requests import FakeRequests
from tests.http.site import Call, MakeDoor, client, problem, replayed, service
from tests.support.ledger import Ledger, write

JOINED = {"POST /orders": Route(tx=True)}
GUARDS = [
    ("X-Content-Type-Options", "nosniff"), ("Content-Security-Policy", "default-src 'none'"),
    ("X-Frame-Options", "DENY"), ("Strict-Transport-Security", "max-age=1"), ("Referrer-Policy", "no-referrer"),
    ("Vary", "Accept"), ("Allow", "POST"), ("Deprecation", "@1"), ("X-Total", "7"),
]  # fmt: skip


async def test_headers_come_again_in_their_order_but_for_those_of_one_caller(
    ledger: Ledger, make_door: MakeDoor
) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        response = JSONResponse({"a": 1}, 201)
        for name, value in [
            ("Link", "</a>; rel=a"), ("ETag", '"1"'), ("Link", "</b>; rel=b"), ("X-Other", "no"), *GUARDS,
            ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"), ("Location", "/a"), ("Connection", "close, x-other"),
            ("WWW-Authenticate", "Bearer"), ("Authorization", "secret"), ("Server", "old"),
            ("X-Csrf-Token", "secret"), ("X-Api-Key", "secret"), ("RateLimit-Remaining", "3"), ("X-Request-Id", "1"),
            ("Access-Control-Allow-Origin", "https://a"), ("Retry-After", "9"), ("Transfer-Encoding", "x"),
        ]:  # fmt: skip
            response.headers.append(name, value)
        response.set_cookie("session", "secret")
        return response

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        first, again = await shop.post(), await shop.post()

    assert "set-cookie" in first.headers
    assert again.headers.raw == [
        (b"content-type", b"application/json"), (b"link", b"</a>; rel=a"), (b"etag", b'"1"'), (b"link", b"</b>; rel=b"),
        *((name.lower().encode(), value.encode()) for name, value in GUARDS), (b"location", b"/a"),
        (b"retry-after", b"9"), (b"content-length", b"7"), (b"idempotent-replayed", b"true"),
    ]  # fmt: skip
    assert again.content == first.content
    stored = str(ledger.run("select headers, body from idemconsumer.result"))
    assert "secret" not in stored


@pytest.mark.parametrize(
    "name",
    ["Set-Cookie", "set-cookie2", "Authorization", "WWW-Authenticate", "Proxy-Authenticate", "Authentication-Info",
     "Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length", "Date",
     "Access-Control-Allow-Origin", "X-RateLimit-Reset", "X-Session-Token", "Refresh-Token", "traceresponse"],
)  # fmt: skip
def test_some_are_never_kept(name: str) -> None:
    assert kept_headers([(name, "x"), ("Location", "/"), ("X-Author", "a")]) == (("location", "/"), ("x-author", "a"))


async def test_what_compresses_inside_compresses_nothing_that_comes_again(make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        assert request.headers.getlist("accept-encoding") == ["identity"]
        return Response(b"text" * 1000)

    app = service(make_door(routes=JOINED), endpoint)
    app.add_middleware(GZipMiddleware)
    app.user_middleware.reverse()  # inside
    async with client(app) as shop:
        got = [await shop.post(headers={"Accept-Encoding": each}) for each in ("gzip", "identity")]
    assert [(each.headers.get("content-encoding"), each.content) for each in got] == [(None, b"text" * 1000)] * 2
    assert replayed(got[1])


async def test_cors_is_fresh_for_each_origin(make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response("ok")

    app = service(make_door(routes=JOINED), endpoint)
    app.user_middleware.insert(
        0, Middleware(CORSMiddleware, allow_origins=["https://a", "https://b"], allow_credentials=True)
    )
    async with client(app) as shop:
        got = [await shop.post(headers={"Origin": f"https://{each}"}) for each in "ab"]
    assert [each.headers["access-control-allow-origin"] for each in got] == ["https://a", "https://b"]
    assert replayed(got[1])


async def test_headers_may_be_read_only_once(make_door: MakeDoor, store: FakeRequests) -> None:
    """ASGI says that they can be iterated over."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = (each for each in [(b"Content-Type", b"text/plain"), (b"location", b"/a")])
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"placed"})

    async with client(IdempotencyMiddleware(app, make_door(store=store))) as shop:
        first, again = await shop.post(), await shop.post()
    assert [(each.headers["content-type"], each.headers["location"]) for each in (first, again)] == [
        ("text/plain", "/a")
    ] * 2
    assert replayed(again)


async def test_bytes_are_equal_whatever_they_are(make_door: MakeDoor) -> None:
    sent = gzip.compress(b"text" * 100, mtime=0)

    async def endpoint(request: StarletteRequest) -> Response:
        return Response(sent, headers={"Content-Encoding": "gzip"}, media_type="text/plain; charset=latin-1")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        got = [await shop.post(headers={"Accept-Encoding": "gzip"}) for _ in range(2)]
    assert [each.content for each in got] == [b"text" * 100] * 2
    assert [each.headers["content-type"] for each in got] == ["text/plain; charset=latin-1"] * 2
    assert [each.headers["content-length"] for each in got] == [str(len(sent))] * 2


@pytest.mark.parametrize("status", [204, 304])
async def test_what_has_no_body_has_no_length_either(make_door: MakeDoor, status: int) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response(None, status)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        await shop.post()
        again = await shop.post()
    assert (again.status_code, again.content, replayed(again)) == (status, b"", True)
    assert "content-length" not in again.headers
    assert "content-type" not in again.headers


# ------------------------------------------------------------------------------------------------------- sent but once
async def test_a_response_over_the_cap_is_live_once_and_then_gone(ledger: Ledger, make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        return Response(b"x" * 101, 201, {"Set-Cookie": "a=b"})

    door = make_door(routes={"POST /orders": Route(tx=True, max_response=100)})
    async with client(service(door, endpoint)) as shop:
        first = await shop.post()
        again = [await shop.post() for _ in range(2)]
    assert (first.status_code, len(first.content), first.headers["set-cookie"]) == (201, 101, "a=b")
    assert [(each.status_code, problem(each), replayed(each)) for each in again] == [(410, "not-replayable", False)] * 2
    assert ledger.effects == ["1"]


async def test_a_response_of_exactly_the_cap_is_kept(make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response(b"x" * 100)

    door = make_door(routes={"POST /orders": Route(tx=True, max_response=100)})
    async with client(service(door, endpoint)) as shop:
        assert [len((await shop.post()).content) for _ in range(2)] == [100, 100]


@pytest.mark.parametrize("how", ["its type", "its route"])
async def test_an_endless_stream_is_live_from_its_head_on(ledger: Ledger, make_door: MakeDoor, how: str) -> None:
    more = asyncio.Queue[str]()

    async def events() -> AsyncIterator[str]:
        while True:
            yield await more.get()

    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        return StreamingResponse(events(), media_type="text/event-stream" if how == "its type" else "text/plain")

    app = service(make_door(routes={"POST /orders": Route(tx=True, stream=how == "its route")}), endpoint)
    call = Call(app)
    assert (await call.next())["status"] == 200
    assert ledger.effects == ["1"]
    for each in ("a", "b"):
        more.put_nowait(each)
        assert await call.next() == {"type": "http.response.body", "body": each.encode(), "more_body": True}
    async with client(app) as shop:
        assert problem(await shop.post(content=b'{"id": 1}')) == "not-replayable"
    call.gone.set()
    await call.cancel()


async def test_a_stream_that_ends_within_the_cap_is_kept_whole(make_door: MakeDoor) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for each in (b"a", b"b", b"c"):
            yield each

    async def endpoint(request: StarletteRequest) -> Response:
        return StreamingResponse(parts(), media_type="text/csv")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        got = [await shop.post() for _ in range(2)]
    assert [(each.content, replayed(each)) for each in got] == [(b"abc", False), (b"abc", True)]


# ------------------------------------------------------------------------------------------------------ what comes in
async def test_the_body_is_handed_on_as_it_came(make_door: MakeDoor) -> None:
    seen = []

    async def endpoint(request: StarletteRequest) -> Response:
        seen.append(await request.body())
        return Response("ok")

    async def parts() -> AsyncIterator[bytes]:
        for each in (b"a", b"", b"\x00\xff"):
            yield each

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        await shop.post(content=parts())
        assert replayed(await shop.post(content=b"a\x00\xff"))
    assert seen == [b"a\x00\xff"]


@pytest.mark.parametrize("declared", ["120", "9" * 5_000, None])
async def test_a_body_over_the_cap_is_413_and_nothing_runs(
    ledger: Ledger, make_door: MakeDoor, declared: str | None
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 60
        yield b"x" * 60

    door = make_door(routes={"POST /orders": Route(tx=True, max_body=100)})
    async with client(service(door)) as shop:
        got = await shop.post(content=parts(), headers={"Content-Length": declared} if declared else None)
    assert (got.status_code, problem(got)) == (413, "body-too-large")
    assert ledger.states == []


@pytest.mark.parametrize(
    ("fingerprint", "same", "other"),
    [
        ("bytes", b'{"a":1,"b":2}', b'{"b":2,"a":1}'),
        ("json", b'{ "b": 2, "a": 1 }', b'{"a":1,"b":3}'),
        (["a"], b'{"a":1,"b":3}', b'{"a":2,"b":2}'),
        (None, b"anything", None),
    ],
)
async def test_what_is_compared(make_door: MakeDoor, fingerprint: object, same: bytes, other: bytes | None) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response("ok")

    door = make_door(routes={"POST /orders": Route(tx=True, fingerprint=fingerprint)})  # type: ignore[arg-type]
    async with client(service(door, endpoint)) as shop:
        await shop.post(content=b'{"a":1,"b":2}')
        assert replayed(await shop.post(content=same))
        if other is not None:
            assert problem(await shop.post(content=other)) == "key-reused"


async def test_another_path_of_one_route_is_another_request(make_door: MakeDoor) -> None:
    from starlette.routing import Route as StarletteRoute

    async def endpoint(request: StarletteRequest) -> Response:
        return Response("ok")

    more = StarletteRoute("/things/{id}", endpoint, methods=["POST"])
    door = make_door(routes={"POST /things/{id}": Route(tx=True)})
    async with client(service(door, endpoint, more)) as shop:
        await shop.post(path="/things/1")
        assert problem(await shop.post(path="/things/2")) == "key-reused"


async def test_another_host_is_another_request(make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response(request.url.hostname)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        hosts = ["a.example", "A.example.:8080", "b.example", "[::1]:80", "[::1]"]
        got = [await shop.post(key="six" if "[" in host else "four", headers={"Host": host}) for host in hosts]
    assert [replayed(each) for each in got] == [False, True, False, False, True]
    assert (got[1].text, problem(got[2])) == ("a.example", "key-reused")
