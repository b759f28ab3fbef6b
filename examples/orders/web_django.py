"""The same front door in Django, in one file, for any WSGI server: `examples.orders.web_django:application`."""

from __future__ import annotations

import sys
from uuid import UUID

import django
import psycopg
from django.conf import settings
from django.core.servers.basehttp import run
from django.core.wsgi import get_wsgi_application
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from examples.orders.app import later, shop
from idemconsumer.http.wsgi import AcceptLaterMiddleware

settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], LOGGING_CONFIG=None)
django.setup()


def placed(request: HttpRequest, number: UUID) -> HttpResponse:
    with psycopg.connect(shop.settings.dsn or "") as connection:
        row = connection.execute("select ref, sku, quantity, state from placed where id = %s", (number,)).fetchone()
    if row is None:
        raise Http404
    return JsonResponse(dict(zip(("ref", "sku", "quantity", "state"), row, strict=True)))


urlpatterns = [path("placed/<uuid:number>", placed)]
application = AcceptLaterMiddleware(get_wsgi_application(), later)

if __name__ == "__main__":  # a port; for the demonstration, with Django's own server
    run("127.0.0.1", int(sys.argv[1]), application, threading=True)
