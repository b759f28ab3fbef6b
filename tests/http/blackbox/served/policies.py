"""The routes under test. Each is there twice: `/leased/…`, and `/joined/…` with the application's effects in Tx."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from idemconsumer import App
from idemconsumer.http import Idempotency, Request, Route
from tests.http.blackbox.served.config import Config

CAP: Final = 65_536  # bytes, of a body and of a response

ROUTES: Final = {
    "orders": Route(required=True, max_body=CAP, max_response=CAP),
    "optional": Route(max_body=CAP),
    "json": Route(fingerprint="json"),
    "fields": Route(fingerprint=["amount", "card.id"]),
    "anything": Route(fingerprint=None),
    "waiting": Route(wait="30s"),
    "brief": Route(expires="0.3s"),
    "chosen": Route(store=lambda response: response.status in (200, 503)),
    "limited": Route(timeout="0.5s"),
}


def idempotency(config: Config) -> Idempotency:
    """`POST` and `PATCH` of other paths are covered by the default."""
    routes = {f"POST /leased/{name}": route for name, route in ROUTES.items()}
    if config.store != "redis":
        routes |= {f"POST /joined/{name}": replace(route, tx=True) for name, route in ROUTES.items()}
    return Idempotency(App("blackbox"), tenant=tenant, routes=routes, store=config.store, redis=config.redis)


def tenant(request: Request) -> str | None:
    """A service would look up a token."""
    given = request.header("x-tenant")
    if given == "unknown to a directory that is down":
        raise RuntimeError("the directory of tenants is down")
    return given
