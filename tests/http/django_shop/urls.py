"""Views that are marked, and named in `routes=` as Django needs it. They write by the ORM, or by Tx: in a thread, in a
loop."""

from __future__ import annotations

import asyncio

from django.http import HttpRequest, HttpResponse
from django.urls import path

from idemconsumer.http import current_sync_tx, current_tx
from tests.http.blackbox.served import behaviour, wsgi
from tests.http.blackbox.served.policies import idempotency
from tests.http.deployed import given
from tests.http.django_shop.models import Effect

CONFIG = given()
DOOR = idempotency(CONFIG)


@DOOR.route(required=True)
def order(request: HttpRequest) -> HttpResponse:
    """By the ORM, whose connection is Django's."""
    Effect(name=request.headers["X-Effect"]).save(force_insert=True)
    return _answered(request)


@DOOR.route(tx=True, required=True)
def pay(request: HttpRequest) -> HttpResponse:
    current_sync_tx().execute(behaviour.ADD, (request.headers["X-Effect"],))
    return _answered(request)


@DOOR.route(tx=True)
async def pay_async(request: HttpRequest) -> HttpResponse:
    await current_tx().execute(behaviour.ADD, (request.headers["X-Effect"],))
    return await asyncio.to_thread(_answered, request)


def _answered(request: HttpRequest) -> HttpResponse:
    query = request.GET.dict()
    if "gate" in query:
        wsgi.wait_at(behaviour.Gate(CONFIG.folder, query["gate"]))
    if request.headers.get("X-Die") == "running":
        behaviour.die()
    reply = behaviour.reply(query, request.body)
    return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))


def effects(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse(str(Effect.objects.filter(name=name).count()))


urlpatterns = [
    path("leased/orders", order), path("joined/orders", pay), path("joined/optional", pay_async),
    path("effects/<name>", effects),
]  # fmt: skip
