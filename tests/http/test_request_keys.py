"""Which requests are covered, and what their key is (H1, H11)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response

from idemconsumer import App, ConfigurationError
from idemconsumer.http import Idempotency, IdempotencyMiddleware, Request, Route, current_key
from idemconsumer.http.policy import compile_fingerprint
from idemconsumer.rules.http import BadKey, parse_key
from tests.http.site import MakeDoor, by_header, client, place, problem, replayed, service
from tests.support.ledger import Ledger

VISIBLE = "".join(map(chr, range(0x20, 0x7F)))
ORDERS = {"POST /orders": Route(tx=True)}


# ---------------------------------------------------------------------------------------------------------- the header
@pytest.mark.parametrize(
    "parameters",
    [";a", "; a=1", ';a="x;\\"y"', ";a=?1;b=-1.5; *c=:aGk=:", ";a=b/c:d", ";a=1;a=2 "],
)
def test_parameters_of_a_quoted_string_mean_nothing(parameters: str) -> None:
    assert parse_key([f'"k"{parameters}']) == "k"


@pytest.mark.parametrize("value", ["8e03978e-40d5", '"8e03978e-40d5"', ' "8e03978e-40d5"\t', "\t8e03978e-40d5 "])
def test_a_token_and_a_quoted_string_are_one_key(value: str) -> None:
    assert parse_key([value]) == "8e03978e-40d5"


@given(st.text(VISIBLE, min_size=1, max_size=255))
def test_each_visible_text_can_be_quoted(key: str) -> None:
    quoted = key.replace("\\", r"\\").replace('"', r"\"")
    assert parse_key([f'"{quoted}"']) == key


@pytest.mark.parametrize(
    "value",
    [
        "", " ", '""', "a b", "a;b", "a\\b", "käse", "k\x00", "k\x7f", "k\n", '"', '"a', 'a"', '"a\\b"', '"a\tb"',
        '"ä"', '"a";', '"a";A=1', '"a";x=', '"a";x=1 y', '"a" ;x', '"a" x=1', "a;x=1", '"a"b', "k" * 256,
        '"' + "k" * 256 + '"', "a,,b", ",",
    ],
)  # fmt: skip
def test_what_is_no_key_is_malformed(value: str) -> None:
    assert parse_key([value]) is BadKey.MALFORMED


@pytest.mark.parametrize("values", [["a", "b"], ["a", "a"], ["a, b"], ['"a", "b"'], ['"a",b']])
def test_two_are_none(values: list[str]) -> None:
    assert parse_key(values) is BadKey.REPEATED


def test_one_may_be_as_long_as_255_characters() -> None:
    assert parse_key(["k" * 255]) == "k" * 255
    assert parse_key([]) is None


async def test_bad_keys_are_400_and_nothing_runs(ledger: Ledger, make_door: MakeDoor) -> None:
    async with client(service(make_door(routes={"POST /orders": Route(tx=True, required=True)}))) as shop:
        malformed = await shop.post(key="a b")
        missing = await shop.post(key=None)
        doubled = await shop.http.post(
            "/orders", json={"id": 1}, headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "a"), ("X-Tenant", "t")]
        )
        joined = await shop.post(key="a, b")

    assert [each.status_code for each in (malformed, missing, doubled, joined)] == [400] * 4
    assert [problem(each) for each in (malformed, missing, doubled, joined)] == [
        "key-malformed", "key-missing", "key-repeated", "key-repeated",
    ]  # fmt: skip
    assert all(each.headers["link"].endswith('rel="describedby"') for each in (malformed, missing, doubled, joined))
    assert ledger.effects == []


# --------------------------------------------------------------------------------------------------- what is covered
@pytest.mark.parametrize("store", ["postgres", "hybrid"])
async def test_without_a_key_a_joined_route_runs_each_time_in_its_transaction_and_nothing_is_stored(
    ledger: Ledger, make_door: MakeDoor, store: str
) -> None:
    seen = []

    async def endpoint(request: StarletteRequest) -> Response:
        response = await place(request)
        seen.append(current_key())
        response.status_code = (await request.json()).get("status", 201)
        return response

    door = make_door(routes=ORDERS, store=store, redis="redis://127.0.0.1:1")
    async with client(service(door, endpoint)) as shop:
        got = [await shop.post(key=None, json={"id": 1, "status": status}) for status in (201, 201, 409, 503)]
    assert [(each.status_code, replayed(each)) for each in got] == [(status, False) for status in (201, 201, 409, 503)]
    assert ledger.effects == ["1", "1"]
    assert ledger.run("select key from idemconsumer.record union select key from idemconsumer.result") == []
    assert len(set(seen)) == 4


async def test_without_a_key_current_key_is_a_new_one_each_time(make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        assert current_key() == current_key() == await run_in_threadpool(current_key)
        return Response(current_key())

    async with client(service(make_door(), endpoint)) as shop:
        seen = [(await shop.post(key=None)).text for _ in range(2)]
    assert [len(bytes.fromhex(each)) for each in seen] == [32, 32]
    assert seen[0] != seen[1]


async def test_other_methods_pass_untouched(ledger: Ledger, make_door: MakeDoor) -> None:
    runs = 0

    async def count(request: StarletteRequest) -> Response:
        nonlocal runs
        runs += 1
        assert await request.body() == b'{"id":1}'
        return JSONResponse(runs)

    door = make_door()
    async with client(service(door, count)) as shop:
        got = [await shop.post(method=method, tenant=None, key="a b") for method in ("PUT", "GET", "PUT", "GET")]

    assert [each.json() for each in got] == [1, 2, 3, 4]
    assert not any(replayed(each) for each in got)
    assert ledger.states == []


async def test_websockets_and_lifespan_pass_as_they_are(make_door: MakeDoor) -> None:
    seen = []

    async def app(scope: object, receive: object, send: object) -> None:
        seen.append((scope, receive, send))

    around = IdempotencyMiddleware(app, make_door())
    scope, receive, send = {"type": "websocket", "path": "/orders"}, object(), object()
    await around(scope, receive, send)  # type: ignore[arg-type]
    assert seen == [(scope, receive, send)]


async def test_without_a_default_only_what_is_named_is_covered(ledger: Ledger, make_door: MakeDoor) -> None:
    async with client(service(make_door(default=None, routes={"POST /other": Route(tx=True)}), _plain)) as shop:
        assert [(await shop.post()).status_code for _ in range(2)] == [200, 200]
    assert ledger.states == []


async def _plain(request: StarletteRequest) -> Response:
    return JSONResponse("plain")


# ---------------------------------------------------------------------------------------------------------- whose key
async def test_without_a_tenant_nothing_runs(ledger: Ledger, make_door: MakeDoor) -> None:
    async with client(service(make_door(routes=ORDERS))) as shop:
        for tenant in (None, ""):
            got = await shop.post(tenant=tenant)
            assert (got.status_code, problem(got)) == (401, "tenant-missing")
            assert "www-authenticate" in got.headers
    assert ledger.effects == []


@pytest.mark.parametrize("given", [RuntimeError("no"), 7, "a\0b"], ids=repr)
async def test_a_resolver_that_fails_is_an_error_and_nothing_runs(
    ledger: Ledger, make_door: MakeDoor, given: object
) -> None:
    async def tenant(request: Request) -> object:
        if isinstance(given, Exception):
            raise given
        return given

    async with client(service(make_door(routes=ORDERS, tenant=tenant))) as shop:
        assert (await shop.post()).status_code == 500
    assert (ledger.effects, ledger.states) == ([], [])


async def test_one_key_of_two_tenants_or_two_routes_is_two_keys(ledger: Ledger, make_door: MakeDoor) -> None:
    from starlette.routing import Route as StarletteRoute

    more = StarletteRoute("/returns/{id}", place, methods=["POST"])
    door = make_door(routes={**ORDERS, "POST /returns/{id}": Route(tx=True)})
    async with client(service(door, place, more)) as shop:
        got = [
            await shop.post(1),
            await shop.post(2, tenant="u"),
            await shop.post(3, path="/returns/3"),
            await shop.post(1),
        ]

    assert [(each.status_code, replayed(each)) for each in got] == [(201, False)] * 3 + [(201, True)]
    assert ledger.effects == ["1", "2", "3"]
    scopes = ledger.run("select name from idemconsumer.scope order by name")
    assert scopes == [("shop/t/POST %2Forders",), ("shop/t/POST %2Freturns%2F{id}",), ("shop/u/POST %2Forders",)]


async def test_routes_that_nobody_named_have_one_scope_and_a_key_for_each_path(
    ledger: Ledger, make_door: MakeDoor
) -> None:
    from starlette.routing import Route as StarletteRoute

    more = StarletteRoute("/things/{id}", place, methods=["POST"])
    async with client(service(make_door(default=Route(tx=True)), place, more)) as shop:
        got = [await shop.post(n, path=f"/things/{n}") for n in (1, 2, 1)]

    assert [(each.status_code, replayed(each)) for each in got] == [(201, False), (201, False), (201, True)]
    assert ledger.run("select name from idemconsumer.scope where name like '%things%' or name like '%POST *'") == [
        ("shop/t/POST *",)
    ]


# ------------------------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tenant": None}, "tenant"),
        ({"routes": {"orders": Route()}}, "POST /orders"),
        ({"routes": {"GET /orders": Route()}}, "no effect"),
        ({"routes": {"POST /o": Route(wait="soon")}}, "wait"),
        ({"routes": {"POST /o": Route(timeout=0)}}, "timeout"),
        ({"routes": {"POST /o": Route(expires="30d")}}, "retain"),
        ({"routes": {"POST /o": Route(fingerprint="hash")}}, "canonical|json"),
        ({"routes": {"POST /o": Route(fingerprint=["a["])}}, "JMESPath"),
        ({"routes": {"POST /o": Route(max_body=-1)}}, "max_body"),
        ({"store": "mysql"}, "postgres"),
        ({"store": "redis", "redis": "redis://x", "routes": {"POST /o": Route(tx=True)}}, "hybrid"),
        ({"routes": {"POTS /o": Route()}}, "write POST /o"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(options: dict[str, object], says: str) -> None:
    given: dict[str, object] = {"tenant": by_header, **options}
    with pytest.raises(ConfigurationError, match=says):
        Idempotency(App("shop"), **given)  # type: ignore[arg-type]


def test_where_the_named_fields_are_not_there_the_whole_body_is_compared() -> None:
    take = compile_fingerprint("orders", ["amount", "card.id"])
    assert take is not None

    def taken(body: bytes) -> bytes:
        return take(Request("POST", "/orders", b"", ()), body)

    assert taken(b'{"amount":1,"at":1}') == taken(b'{"amount":1.0,"at":2}') != taken(b'{"amount":2,"at":1}')
    assert taken(b'{"at":1}') == taken(b'{"at": 1}') != taken(b'{"at":2}')
