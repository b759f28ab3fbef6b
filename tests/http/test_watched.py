"""What is told of requests: each is counted once, by how it was answered, and is one span (H55)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from idemconsumer import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.http import Idempotency, Route
from idemconsumer.http.watch import OUTCOMES
from idemconsumer.http.wsgi import IdempotencyMiddleware as WsgiMiddleware
from idemconsumer.observe.request_metrics import RequestNumbers
from tests.http.endpoints import Counting
from tests.http.site import Call, MakeDoor, client, place, replayed, service
from tests.http.wsgi_client import ask
from tests.support.ledger import Ledger
from tests.support.logs import LogCapture, times
from tests.support.spans import TRACER, collected, parent, said, traceparent_of

NAME = "idemconsumer_http_requests_total"
ROUTE = "POST /orders"


def samples(registry: CollectorRegistry, name: str = NAME) -> dict[str, float]:
    """By outcome, also those that are 0."""
    return {
        sample.labels.get("outcome", ""): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and (sample.labels["app"], sample.labels["route"]) == ("shop", ROUTE)
    }


def counted(registry: CollectorRegistry) -> dict[str, float]:
    return {outcome: number for outcome, number in samples(registry).items() if number}


async def test_each_answer_is_counted_by_how_it_came(ledger: Ledger, make_door: MakeDoor) -> None:
    registry = CollectorRegistry()
    inside, go = asyncio.Event(), asyncio.Event()

    async def endpoint(request: StarletteRequest) -> Response:
        id = (await request.json())["id"]
        if id == "slow":
            inside.set()
            await go.wait()
        if id == "broken":
            raise ZeroDivisionError
        return await place(request)

    routes = {ROUTE: Route(tx=True, required=True, max_body=50)}
    make_door(routes=routes, metrics=registry)  # one registry is enough for all of a process
    app = service(make_door(routes=routes, metrics=registry), endpoint)
    async with client(app) as shop:
        assert (await shop.post()).status_code == 201
        assert samples(registry) == dict.fromkeys(OUTCOMES, 0) | {"run": 1}
        for _ in range(2):
            assert replayed(await shop.post())
        refused = [
            await shop.post(2),
            await shop.post(key=None),
            await shop.post(key="a\tb"),
            await shop.post(headers={"Idempotency-Key": "another"}),
            await shop.post(tenant=None),
            await shop.post("x" * 50),
            await shop.post("broken", key="broken"),
        ]
        assert [each.status_code for each in refused] == [422, 400, 400, 400, 401, 413, 500]
        slow = asyncio.create_task(shop.post("slow", key="slow"))
        await inside.wait()
        assert (await shop.post("slow", key="slow")).status_code == 409
        go.set()
        assert (await slow).status_code == 201
    assert counted(registry) == {
        "run": 2, "replayed": 2, "key-reused": 1, "key-missing": 1, "key-malformed": 1, "key-repeated": 1,
        "tenant-missing": 1, "body-too-large": 1, "failed": 1, "in-progress": 1,
    }  # fmt: skip
    took = samples(registry, "idemconsumer_http_request_duration_seconds_count")
    assert took == {"": 7}, "not of what was refused before its key was looked at"


async def test_what_is_cut_off_is_counted_too(ledger: Ledger, make_door: MakeDoor) -> None:
    registry, endpoint = CollectorRegistry(), Counting()
    endpoint.go.clear()
    app = service(make_door(routes={ROUTE: Route(tx=True)}, metrics=registry), endpoint.__call__)
    call = Call(app)
    await endpoint.inside.wait()
    await call.cancel()
    assert counted(registry) == {"cancelled": 1}


async def test_under_wsgi_too(ledger: Ledger, make_door: MakeDoor) -> None:
    registry = CollectorRegistry()
    door = make_door(routes={ROUTE: Route(required=True)}, metrics=registry)
    app = WsgiMiddleware(lambda _, start: (start("201 Created", []), [b"done"])[1], door)
    answers = [await asyncio.to_thread(ask, app, key) for key in ("k", "k", None)]
    assert [each.status[:3] for each in answers] == ["201", "201", "400"]
    assert counted(registry) == {"run": 1, "replayed": 1, "key-missing": 1}
    await asyncio.to_thread(app.close)


async def test_what_cannot_be_counted_fails_no_request(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    """As where several processes count in files, and the disk is full."""
    app = service(make_door(routes={ROUTE: Route(tx=True)}, metrics=CollectorRegistry()))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with client(app) as shop:
        assert (await shop.post()).status_code == 201
        monkeypatch.setattr(RequestNumbers, "count", full)
        assert [(await shop.post(key=key)).status_code for key in ("a", "b")] == [201, 201]
    assert times(logged, "requests are not counted") == 1


@pytest.mark.parametrize("tx", [True, False], ids=["joined", "leased"])
async def test_a_request_is_one_span_around_all_that_is_done_for_it(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, tx: bool
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_TRACING", "1")
    spans = collected()

    async def endpoint(request: StarletteRequest) -> Response:
        with TRACER.start_as_current_span("own"):
            if (await request.json())["id"] == 2:
                raise ZeroDivisionError("4111-secret")
            return Response("done", 201)

    async with client(service(make_door(routes={ROUTE: Route(tx=tx)}), endpoint)) as shop:
        with TRACER.start_as_current_span("server"):
            assert [(await shop.post(id, key=key)).status_code for id, key in ((1, "k"), (1, "k"), (2, "other"))] == [
                201, 201, 500,
            ]  # fmt: skip
    ran, again, broken = spans.named(f"idempotent {ROUTE}")
    assert {parent(each) for each in (ran, again, broken)} == {traceparent_of(spans.only("server"))}
    assert [parent(each) for each in spans.named("own")] == [traceparent_of(ran), traceparent_of(broken)]
    ((key,),) = ledger.run("select encode(key, 'hex') from idemconsumer.record")
    its = {"app": "shop", "route": ROUTE, "key": key[:12]}
    assert (said(ran), said(again)) == (its | {"outcome": "run"}, its | {"outcome": "replayed"})
    assert said(broken)["outcome"] == "failed"
    assert (broken.attributes or {})["error.type"] == "ZeroDivisionError"
    assert "secret" not in "".join(each.to_json() for each in (ran, again, broken))


@pytest.mark.parametrize("given", ["yes", True, CollectorRegistry])
def test_what_is_no_registry_is_refused_with_one_that_is(given: object) -> None:
    with pytest.raises(ConfigurationError, match=r"`metrics` is a \w+; write prometheus_client.REGISTRY"):
        Idempotency(App("shop"), tenant=str, metrics=given)  # type: ignore[arg-type]


def test_the_pages_name_each_outcome() -> None:
    docs = Path(__file__).parents[2] / "docs"
    row = (docs / "operations.md").read_text("utf-8").partition(f"`{NAME}` counts by outcome")[2].partition("\n\n")[0]
    problems = (docs / "http.md").read_text("utf-8").partition("## Error responses")[2].partition("\n## ")[0]
    assert [outcome for outcome in OUTCOMES if f"`{outcome}`" not in row + problems] == []
