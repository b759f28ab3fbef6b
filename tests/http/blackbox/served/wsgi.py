"""The service on Flask, and on Django."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from flask import Flask, Response, request

from idemconsumer.http import current_sync_tx
from idemconsumer.http.openapi import describe
from idemconsumer.http.wsgi import IdempotencyMiddleware
from idemconsumer.http.wsgi_exchange import Environ, StartResponse, Wsgi
from tests.http.blackbox.served import behaviour
from tests.http.blackbox.served.behaviour import Gate, Reply
from tests.http.blackbox.served.config import Config
from tests.http.blackbox.served.policies import ROUTES, idempotency


def flask(config: Config) -> Wsgi:
    app = Flask("blackbox")

    @app.route("/leased/<name>", methods=["POST", "PATCH", "PUT", "HEAD"])
    def leased(name: str) -> Response:
        return _response(behave("leased", config, dict(request.headers), request.args, request.get_data()))

    @app.post("/joined/<name>")
    def joined(name: str) -> Response:
        return _response(behave("joined", config, dict(request.headers), request.args, request.get_data()))

    @app.get("/effects/<name>")
    def effects(name: str) -> str:
        return str(behaviour.count(config.effects, name))

    @app.get("/openapi.json")
    def openapi() -> dict[str, Any]:
        modes = ("leased",) if config.store == "redis" else ("leased", "joined")
        names = [f"/{mode}/{name}" for mode in modes for name in (*ROUTES, "unnamed")]
        described: dict[str, Any] = {"paths": {name: {"post": {}, "put": {}} for name in names}}
        describe(described, door)
        return described

    door = idempotency(config)
    app.wsgi_app = Cors(IdempotencyMiddleware(app.wsgi_app, door))  # type: ignore[method-assign]
    return Dying(app)


def _response(reply: Reply | Iterator[bytes]) -> Response:
    if isinstance(reply, Reply):
        return Response(reply.body, reply.status, reply.headers)
    return Response(reply, 200, mimetype="text/event-stream")


def django(config: Config) -> Wsgi:
    import django as package
    from django.conf import settings
    from django.core.wsgi import get_wsgi_application
    from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
    from django.urls import path

    def view(mode: str) -> Callable[..., Any]:
        def run(request: HttpRequest, name: str) -> HttpResponse | StreamingHttpResponse:
            reply = behave(mode, config, request.headers, request.GET.dict(), request.body)
            if not isinstance(reply, Reply):
                return StreamingHttpResponse(reply, content_type="text/event-stream")
            response = HttpResponse(reply.body, status=reply.status)
            for header, value in reply.headers:
                response[header] = value
            return response

        return run

    def effects(request: HttpRequest, name: str) -> HttpResponse:
        return HttpResponse(str(behaviour.count(config.effects, name)))

    class Urls:
        urlpatterns = (
            path("leased/<name>", view("leased")), path("joined/<name>", view("joined")),
            path("effects/<name>", effects),
        )  # fmt: skip

    settings.configure(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["*"], SECRET_KEY="blackbox", LOGGING_CONFIG=None)
    package.setup()
    return Dying(IdempotencyMiddleware(get_wsgi_application(), idempotency(config)))


def behave(
    mode: str, config: Config, headers: Mapping[str, str], query: Mapping[str, str], body: bytes
) -> Reply | Iterator[bytes]:
    """A reply, or the parts of a stream."""
    effect = headers["X-Effect"]
    if mode == "joined":
        current_sync_tx().execute(behaviour.ADD, (effect,))
    else:
        behaviour.add(config.effects, effect)
    if "events" in query:
        return _events(query["events"], config, query["gate"])
    if "gate" in query:
        wait_at(Gate(config.folder, query["gate"]))
    if headers.get("X-Die") == "running":
        behaviour.die()
    if "fail" in query:
        raise RuntimeError("the endpoint was asked to fail")
    if "sql" in query:
        with suppress(Exception):
            current_sync_tx().execute(query["sql"])
    return behaviour.reply(query, body)


def _events(number: str, config: Config, gate: str) -> Iterator[bytes]:
    for event in range(int(number)):
        yield f"data: {event}\n\n".encode()
        if event == 0:
            wait_at(Gate(config.folder, gate))


def wait_at(gate: Gate) -> None:
    gate.arrive()
    for _ in range(behaviour.MOST_GLANCES):
        if gate.is_open:
            return
        time.sleep(behaviour.GLANCE)


class Cors:
    """Around the front door: each answer may be read by the page that has asked."""

    def __init__(self, app: Wsgi) -> None:
        self._app = app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *error: Any) -> Any:
            if (origin := environ.get("HTTP_ORIGIN")) is not None:
                name = "Access-Control-Allow-Origin"
                headers = [each for each in headers if each[0] != name] + [(name, origin)]
            return start_response(status, headers, *error)

        return self._app(environ, start)


class Dying:
    """As the one of ASGI."""

    def __init__(self, app: Callable[[Environ, StartResponse], Iterable[bytes]]) -> None:
        self._app = app

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def dying(*_: object) -> Any:
            behaviour.die()

        return self._app(environ, dying if environ.get("HTTP_X_DIE") == "answering" else start_response)
