"""IdempotencyMiddleware for WSGI: the same front door for Flask, Django and other WSGI apps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from idemconsumer.http.accept_later import AcceptLater, bodiless_head
from idemconsumer.http.background import background
from idemconsumer.http.current import new_key, slot_for
from idemconsumer.http.exchange import Exchange, gone
from idemconsumer.http.exchanged import Headers, Request, Response
from idemconsumer.http.frameworks import FlaskRoutes
from idemconsumer.http.idempotency import Admitted, Idempotency, RouteTable, checked_tenant, passes
from idemconsumer.http.marks import seen
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import BODY_TOO_LARGE, Refused
from idemconsumer.http.wsgi_exchange import Environ, RequestThread, StartResponse, Wsgi, respond
from idemconsumer.rules.http import MOST_DIGITS
from idemconsumer.rules.routes import SAFE

_PART: Final = 65_536  # bytes
_GONE: Final = Response(400, (("Content-Length", "0"),), b"")  # the client disconnected too early


class IdempotencyMiddleware:
    """Wraps a WSGI app: `app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, idempotency)` for Flask,
    `application = IdempotencyMiddleware(get_wsgi_application(), idempotency)` for Django.

    Requests of routes that are not covered pass unchanged. For a covered request, the body is read once and passed on
    unchanged, and the response is sent once it is certain. The application runs in its server's thread, as usual. The
    decisions run in one event loop of the process, in a thread that the first covered request starts; a child that the
    server forks later does not inherit it. Everything opened is closed when the process exits.

    A thread cannot be cancelled. A route with `tx` that runs longer than its `timeout` is rolled back: its Tx refuses
    every further call, and the client is answered once the route returns. Other routes run to their end, whatever their
    `timeout`, and are answered then.
    """

    def __init__(self, app: Wsgi, idempotency: Idempotency) -> None:
        self.app = app
        self.idempotency = idempotency
        self._table: RouteTable | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        request = _request(environ)
        if request.method in SAFE:
            with seen(None):
                return self.app(environ, start_response)
        if self._table is None:  # made at the first request, when all endpoints of the app are marked
            self._table = self.idempotency.table(FlaskRoutes(self.app))
        policy = self._table.find(request)
        if policy is None:
            return self.app(environ, start_response)
        with seen(policy):
            if not passes(request, policy):
                return self._covered(request, policy, environ, start_response)
            with slot_for(policy.name, new_key()):
                return self.app(environ, start_response)

    def _covered(
        self, request: Request, policy: Policy, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        door = self.idempotency
        try:
            key = door.key_of(request, policy)
            # In this thread, since the function may use a connection that belongs to it, as in Django.
            tenant = checked_tenant(_awaited(door.ask_tenant(request)))
            body = _read(environ, policy.route.max_body)
        except Refused as refused:
            return respond(start_response, door.refused(policy, refused.problem))
        if body is None:
            return respond(start_response, _GONE)
        thread = RequestThread(self.app, environ, body, policy)
        background().closing.add(door.close)
        return thread.serve(self._answer(Admitted(request, policy, key, tenant, body), thread), start_response)

    async def _answer(self, admitted: Admitted, thread: RequestThread) -> None:
        exchange = Exchange(thread, {"headers": ()}, b"", gone, thread.send, admitted.policy)
        await exchange.serve(self.idempotency.answer(admitted, exchange.run))

    def close(self) -> None:
        """Close what was opened in this process. Call it once all requests have been answered; the next one opens it
        anew."""
        background().start(self.idempotency.close()).result()


class AcceptLaterMiddleware:
    """Wraps a WSGI app: `app.wsgi_app = AcceptLaterMiddleware(app.wsgi_app, later)` for Flask,
    `application = AcceptLaterMiddleware(get_wsgi_application(), later)` for Django.

    A POST of the path of `later`, and a GET below it, are answered as `AcceptLater` describes; the app answers
    everything else. `tenant` is called in the thread of the request. The rest runs in the event loop that
    `IdempotencyMiddleware` uses too. So the `App` of `later` must not also serve ASGI in the same process.
    """

    def __init__(self, app: Wsgi, later: AcceptLater) -> None:
        self.app = app
        self.later = later

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        request, later = _request(environ), self.later
        if not later.covers(request):
            return self.app(environ, start_response)
        there = background()
        there.closing.add(later.close)
        try:
            body = _read(environ, later.max_body) if request.method == "POST" else b""
            if body is None:
                return respond(start_response, _GONE)
            key, tenant = later.key_of(request), checked_tenant(_awaited(later.ask_tenant(request)))
        except Refused as refused:
            return respond(start_response, bodiless_head(request, refused.problem.response))
        return respond(start_response, there.start(later.answer(request, key, tenant, body)).result())

    def close(self) -> None:
        """Close what was opened in this process. Call it once all requests have been answered; the next one opens it
        anew."""
        background().start(self.later.close()).result()


def _awaited(tenant: Any) -> Any:
    """The tenant. If it is awaitable, it is awaited in the event loop."""
    return background().start(tenant).result() if inspect.iscoroutine(tenant) else tenant


def _request(environ: Environ) -> Request:
    path = _decoded(environ.get("PATH_INFO", "")) or "/"
    query, root = environ.get("QUERY_STRING", "").encode("latin-1"), _decoded(environ.get("SCRIPT_NAME", ""))
    return Request(environ["REQUEST_METHOD"].upper(), path, query, _headers(environ), environ, root)


def _read(environ: Environ, cap: int) -> bytes | None:
    """The whole body; None if the client disconnected before it had sent all. Raises Refused if it is too large."""
    given = environ.get("CONTENT_LENGTH") or ""
    length = int(given) if given.isdecimal() and len(given) <= MOST_DIGITS else None
    if given.isdecimal() and (length is None or length > cap):
        raise Refused(BODY_TOO_LARGE)
    if length is None and not environ.get("wsgi.input_terminated"):
        return b""  # nothing tells where the body would end
    left = cap + 1 if length is None else length
    parts = list[bytes]()
    while left and (part := environ["wsgi.input"].read(min(left, _PART))):
        parts.append(part)
        left -= len(part)
    if length is None and not left:
        raise Refused(BODY_TOO_LARGE)
    return None if length is not None and left else b"".join(parts)


def _decoded(text: str) -> str:
    """The text, from a string in which the server has put one byte into each character (PEP 3333)."""
    return text.encode("latin-1").decode("utf-8", "replace")


def _headers(environ: Environ) -> Headers:
    given = {name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")}
    given |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    return tuple((name.replace("_", "-").lower(), value) for name, value in given.items())
