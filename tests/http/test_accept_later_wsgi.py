"""AcceptLater around a WSGI app: Flask's, and Django's in `tests/test_orders.py` (H45)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from flask import Flask

from idemconsumer import App, Result, Tx
from idemconsumer.http import AcceptLater, Request
from idemconsumer.http.wsgi import AcceptLaterMiddleware
from tests.support.workers import Bench, Item, connected, note, prepare


@pytest.fixture
def bench(database: str, monkeypatch: pytest.MonkeyPatch) -> Bench:
    prepare(database)
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    return connected(Bench(database), monkeypatch)


class Service:
    """A Flask app, and a handler behind its front door."""

    def __init__(self) -> None:
        self.app, flask = App("orders"), Flask(__name__)
        self.asked: list[str] = []

        @self.app.idempotent_handler("memory:orders", key="id")
        async def place(item: Item, tx: Tx) -> Result:
            await note(tx, item)
            return Result({"id": item.id}, 201)

        @flask.get("/orders")
        def orders() -> str:
            return "the app's own"

        self.later = AcceptLater(self.app, place, tenant=self.tenant, path="/orders", max_body=100)
        self.door = AcceptLaterMiddleware(flask.wsgi_app, self.later)
        flask.wsgi_app = self.door  # type: ignore[method-assign]
        self.client = flask.test_client()

    def tenant(self, request: Request) -> str | None:
        self.asked.append(threading.current_thread().name)
        return request.header("x-tenant")

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        """In a thread, as a server does it."""
        headers = {"X-Tenant": "t"} | more.pop("headers", {})
        return await asyncio.to_thread(self.client.open, path, method=method, headers=headers, **more)


@pytest.fixture
async def service(bench: Bench) -> AsyncIterator[Service]:
    service = Service()
    yield service
    await asyncio.to_thread(service.door.close)


async def test_it_is_202_and_then_what_the_worker_says(bench: Bench, service: Service) -> None:
    for _ in range(2):
        taken = await service.ask("POST", "/orders", headers={"Idempotency-Key": '"a/b c"'}, json={"id": "a"})
        assert (taken.status_code, taken.headers["Location"][:8]) == (202, "/orders/")
    waits = await service.ask("GET", taken.headers["Location"])
    assert (waits.status_code, waits.json, waits.headers["Retry-After"]) == (202, {"progress": "pending"}, "1")
    await bench.until_empty(service.app)
    done = await service.ask("GET", taken.headers["Location"])
    assert (done.status_code, done.data) == (201, b'{"id":"a"}')
    assert done.headers["Idempotent-Created-At"] == waits.headers["Idempotent-Created-At"]
    head = await service.ask("HEAD", taken.headers["Location"])
    assert (head.status_code, head.data, head.headers["Content-Length"]) == (201, b"", "10")
    assert (await service.ask("GET", taken.headers["Location"], headers={"X-Tenant": "other"})).status_code == 404
    assert bench.effects() == ["a"]
    assert not [name for name in service.asked if name == "idemconsumer-http"], "in the thread of the request"


async def test_what_is_not_asked_of_it_is_the_apps(service: Service) -> None:
    assert (await service.ask("GET", "/orders")).data == b"the app's own"
    assert (await service.ask("DELETE", "/orders/k")).status_code == 404
    assert (await service.ask("POST", "/other", headers={"Idempotency-Key": "k"})).status_code == 404


async def test_what_cannot_be_accepted_is_said_and_stores_nothing(bench: Bench, service: Service) -> None:
    key = {"Idempotency-Key": "k"}
    for more, says in (
        ({"json": {"id": "a"}}, 400),
        ({"headers": key, "data": b"{"}, 400),
        ({"headers": key, "data": b"x" * 101}, 413),
        ({"headers": key | {"X-Tenant": ""}, "json": {"id": "a"}}, 401),
    ):
        assert (await service.ask("POST", "/orders", **more)).status_code == says
    head = await service.ask("HEAD", "/orders/k", headers={"X-Tenant": ""})
    assert (head.status_code, head.data) == (401, b"")
    assert bench.do("select from idemconsumer.record") == []


async def test_a_tenant_may_be_awaited(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tenant(request: Request) -> str:
        return "t"

    monkeypatch.setattr(service.later, "_tenant", tenant)
    taken = await service.ask("POST", "/orders", headers={"Idempotency-Key": "k"}, json={"id": "a"})
    assert taken.status_code == 202
