"""Accept a request now and have a worker do it later. The client queries the result with the same key (H45)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

import msgspec

from idemconsumer.app.accepting import Accepted
from idemconsumer.app.app import App
from idemconsumer.app.sending import check_via
from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.handlers.decorator import Handler
from idemconsumer.http import problems
from idemconsumer.http.asgi_wire import Receive, Scope, Send, read_body, request_of, respond
from idemconsumer.http.exchanged import Request, Response
from idemconsumer.http.idempotency import Tenant, caller, key_in
from idemconsumer.http.policy import MIB
from idemconsumer.http.problems import MEDIA_TYPE, OF_A_STORE, Outages, Problem, Refused
from idemconsumer.rules.http import bodiless, keepable
from idemconsumer.rules.progress import Progress

CREATED_AT: Final = "idempotent-created-at"  # a header: the time of acceptance by the database's clock
_AGAIN: Final = 1  # seconds after which the client may query again
_PASSED: Final = ("content-type", "traceparent", "tracestate")


def bodiless_head(request: Request, response: Response) -> Response:
    """The response to a HEAD has headers but no body."""
    return replace(response, body=b"") if request.method == "HEAD" else response


class AcceptLater:
    """An ASGI app that accepts requests for a handler, which a worker runs later.

        later = AcceptLater(app, place, tenant=account, path="/orders")
        api.add_route("/orders", later)
        api.add_route("/orders/{id}", later)

    Under WSGI, use `AcceptLaterMiddleware(app.wsgi_app, later)` of `idemconsumer.http.wsgi`.

    A POST of `path` stores the body as a message under its Idempotency-Key. The response is 202 with a Location, the
    same each time. Once the message is done, a repeated POST gets the same response as the GET. Another body under the
    same key gets 422.

    A GET of the Location gets 202 until the message is done. Then it gets what the handler returned: status (200 unless
    given, 204 for nothing), headers and body. A rejection is a problem with its code and body, and its status or 422. A
    dead letter is a problem with 500. An unknown Location, or one of another tenant, gets 404.

    `tenant` is as in `Idempotency`. `headers` names the request headers to copy into the message, besides the content
    type and trace headers. `max_body` is bytes. `via` is as in `App.accept`; with it, a body that names another key or
    tenant than its request gets 422.

    During an outage of the database, every response is 503 and nothing is stored. Not guaranteed: that requests run in
    the order in which they came. Raises ConfigurationError for a wrong definition.
    """

    def __init__(
        self,
        app: App,
        handler: Handler[..., Any],
        *,
        tenant: Tenant,
        path: str,
        headers: Sequence[str] = (),
        max_body: int = MIB,
        via: str | None = None,
    ) -> None:
        if not callable(tenant):
            raise ConfigurationError(
                "AcceptLater: `tenant` is mandatory; write a function of the request that returns its tenant, such as "
                "lambda request: request.header('x-account')"
            )
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigurationError(f'AcceptLater: path={path!r}; write its path, such as "/orders"')
        if isinstance(headers, str):
            raise ConfigurationError(f"AcceptLater: headers={headers!r} is one text; write a list, [{headers!r}]")
        if via is not None:
            check_via(handler.plan, via)
            if handler.plan.tenant_spec is None:
                raise ConfigurationError(
                    f"AcceptLater: handler {handler.name!r} has no `tenant`, so a message from {via!r} would have none"
                    '; write e.g. tenant=Key.header("Account") there, which is sent along'
                )
        self._app = app
        self._handler = handler
        self._tenant = tenant
        self._path = path
        self._passed = {*_PASSED, *(name.lower() for name in headers)}
        self._via = via
        self._outages = Outages()
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            raise RuntimeError(f"AcceptLater answers HTTP requests, and this is {scope['type']!r}")
        request = request_of(scope)
        if not self.covers(request):
            await respond(send, problems.NOT_FOUND.response)
            return
        try:
            body = await read_body(request, receive, self.max_body) if request.method == "POST" else b""
            if body is None:
                return
            key = self.key_of(request)
            answer = await self.answer(request, key, await caller(self._tenant, request), body)
        except Refused as refused:
            answer = bodiless_head(request, refused.problem.response)
        await respond(send, answer)

    def covers(self, request: Request) -> bool:
        """Return whether the request is a POST of the path, or a GET of a Location."""
        if request.method == "POST":
            return request.path == self._path
        return request.method in ("GET", "HEAD") and request.path.startswith(f"{self._path}/")

    def ask_tenant(self, request: Request) -> Any:
        """Return what `tenant` returns: the tenant, or an awaitable of it. The function may block, and may need the
        thread of the request."""
        return self._tenant(request)

    def key_of(self, request: Request) -> str:
        """Return the key of a POST; an empty text for a GET of a Location. Raises Refused."""
        return _key_of(request) if request.method == "POST" else ""

    async def answer(self, request: Request, key: str, tenant: str, body: bytes) -> Response:
        """Return the response to a covered request."""
        if request.method == "POST":
            return await self._accept(request, key, tenant, body)
        answer = await self._status(request.path.removeprefix(f"{self._path}/"), tenant)
        return bodiless_head(request, answer)

    async def close(self) -> None:
        """Close the app, and with it everything it opened. Call it once all requests have been answered."""
        await self._app.close()

    async def accept(self, request: Request, body: bytes) -> Response:
        """Store the request's message, and return the response."""
        try:
            return await self._accept(request, _key_of(request), await caller(self._tenant, request), body)
        except Refused as refused:
            return refused.problem.response

    async def status(self, request: Request, id: str) -> Response:
        """Return how far the request has come whose Location ends with this id; its tenant must be the GET's."""
        try:
            return await self._status(id, await caller(self._tenant, request))
        except Refused as refused:
            return refused.problem.response

    async def _accept(self, request: Request, key: str, tenant: str, body: bytes) -> Response:
        try:
            headers = {name: value for name, value in request.headers if name in self._passed}
            accepted = await self._app.accept(
                self._handler, body, key=key, tenant=tenant, headers=headers, via=self._via
            )
            id = await self._app.accepted_id(self._handler, key=key, tenant=tenant)
        except BadMessage as error:
            return _refused(error).response
        except OF_A_STORE as error:
            return self._outages.answered(error).response
        self._outages.heard(wrote=accepted.new)
        if accepted.conflict:
            return problems.KEY_REUSED.response
        if accepted.progress not in (Progress.PENDING, Progress.RUNNING):
            return await self._status(id, tenant)
        return _waits(accepted, f"{quote(request.root + self._path)}/{id}")

    async def _status(self, id: str, tenant: str) -> Response:
        try:
            accepted = await self._app.accepted_by_id(self._handler, id=id, tenant=tenant)
        except OF_A_STORE as error:
            return self._outages.answered(error).response
        self._outages.heard(wrote=False)
        return told(accepted)


def _key_of(request: Request) -> str:
    if (key := key_in(request)) is None:
        raise Refused(problems.KEY_MISSING)
    return key


def told(accepted: Accepted) -> Response:
    """The response that shows how far the message has come."""
    match accepted.progress:
        case Progress.UNKNOWN:
            return problems.NOT_FOUND.response
        case Progress.PENDING | Progress.RUNNING:
            answer = _waits(accepted, None)
        case Progress.DONE:
            answer = _done(accepted)
        case _:
            answer = _failed(accepted)
    if accepted.created_at is None:
        return answer
    return replace(answer, headers=(*answer.headers, (CREATED_AT, accepted.created_at.isoformat())))


def _waits(accepted: Accepted, location: str | None) -> Response:
    body = msgspec.json.encode({"progress": accepted.progress})
    headers = [("content-type", "application/json"), ("retry-after", str(_AGAIN)), ("cache-control", "no-store")]
    return _whole(202, headers + ([] if location is None else [("location", location)]), body)


def _done(accepted: Accepted) -> Response:
    body = accepted.body or b""
    headers = [("content-type", accepted.content_type)] if accepted.content_type else []
    headers += [(name.lower(), value) for name, value in accepted.headers if keepable(name.lower())]
    if "cache-control" not in dict(headers):
        headers.append(("cache-control", "no-store"))  # a cache cannot tell tenants apart
    return _whole(accepted.status or (200 if body else 204), headers, body)


def _failed(accepted: Accepted) -> Response:
    rejected = accepted.progress is Progress.FAILED
    problem = problems.REJECTED if rejected else problems.PUT_ASIDE
    problem = replace(problem, status=accepted.status or problem.status)
    fields = problem.fields | {"code": accepted.reason}
    if rejected and accepted.body is not None:
        fields["body"] = msgspec.json.decode(accepted.body).get("body")
    headers = [("content-type", MEDIA_TYPE), ("cache-control", "no-store"), *accepted.headers]
    return _whole(problem.status, headers, msgspec.json.encode(fields))


def _refused(error: BadMessage) -> Problem:
    if error.reason == "oversized":
        return problems.BODY_TOO_LARGE
    if error.reason in ("key_differs", "tenant_differs"):
        return problems.KEY_DIFFERS
    return problems.UNREADABLE  # the key in the header is valid, so the error is about a key in the body


def _whole(status: int, headers: list[tuple[str, str]], body: bytes) -> Response:
    length = [] if bodiless(status) else [("content-length", str(len(body)))]
    return Response(status, tuple(headers + length), body)
