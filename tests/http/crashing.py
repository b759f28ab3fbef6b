"""A service in a process of its own, which kills itself at the point that CRASH_AT names."""

from __future__ import annotations

import os
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from idemconsumer import App
from idemconsumer.http import Idempotency, Route, current_tx
from idemconsumer.testing.crash import CrashAt
from tests.http.site import by_header, place, service
from tests.support.ledger import write

ROUTES: Final = {"POST /orders": Route(tx=True), "POST /refused": Route(tx=True)}


async def refused(request: StarletteRequest) -> Response:
    await write(current_tx(), 1)
    return Response("no", 409)


def made(idempotency: Idempotency) -> Starlette:
    return service(idempotency, place, StarletteRoute("/refused", refused, methods=["POST"]))


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    observer = CrashAt.parse(os.environ["CRASH_AT"])
    return made(Idempotency(App("shop"), tenant=by_header, routes=ROUTES, observer=observer))
