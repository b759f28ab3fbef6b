"""IdempotencyMiddleware: the front door as ASGI middleware, for Starlette, FastAPI, Litestar and other ASGI apps."""

from __future__ import annotations

from contextlib import nullcontext

from idemconsumer.errors import IdemConsumerError
from idemconsumer.http.asgi_wire import Asgi, Message, Receive, Scope, Send, read_body, request_of, respond
from idemconsumer.http.current import new_key, slot_for
from idemconsumer.http.exchange import Exchange
from idemconsumer.http.exchanged import Request
from idemconsumer.http.frameworks import COVERED, AsgiRoutes
from idemconsumer.http.idempotency import Admitted, Idempotency, RouteTable, caller, passes
from idemconsumer.http.marks import seen, unseen
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import Refused
from idemconsumer.logs import log
from idemconsumer.redaction import typed_text
from idemconsumer.rules.routes import SAFE


class IdempotencyMiddleware:
    """Wraps an ASGI app, or is added to one: `app.add_middleware(IdempotencyMiddleware, idempotency=idempotency)`.

    Requests of routes that are not covered, and websockets, pass unchanged. For a covered request, the body is read
    once and passed on unchanged, and the response is sent once it is certain. Put this middleware inside middleware
    that adds CORS headers or compresses, and outside middleware that has effects. If the server tells the middleware
    about the app's shutdown (lifespan), it closes what `idempotency` has opened.
    """

    __idempotent_door__ = True

    def __init__(self, app: Asgi, idempotency: Idempotency) -> None:
        self.app = app
        self.idempotency = idempotency
        self._table: RouteTable | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            self._made(scope)  # reports wrong routes at the start; but the app may still add routes while it starts
            await self._lifespan(scope, receive, self._closing(send))
        else:
            await self.app(scope, receive, send)

    def _made(self, scope: Scope) -> RouteTable:
        # The app in the scope may be one that wraps this middleware.
        return self.idempotency.table(AsgiRoutes(self.app, scope.get("app") or scope.get("litestar_app")))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(scope)
        if request.method in SAFE:
            with seen(None):
                await self.app(scope, receive, send)
        elif (policy := self._policy(request, scope)) is None:
            with nullcontext() if COVERED in scope else unseen():  # else an outer front door has checked it
                await self.app(scope, receive, send)
        elif passes(request, policy):
            with seen(policy), slot_for(policy.name, new_key()):
                await self.app(scope, receive, send)
        else:
            with seen(policy):
                await self._covered(request, policy, scope, receive, send)

    def _policy(self, request: Request, scope: Scope) -> Policy | None:
        """The policy of a request. The table is made at the first request, when all endpoints are marked."""
        if self._table is None:
            self._table = self._made(scope)
        return self._table.find(request)

    async def _covered(self, request: Request, policy: Policy, scope: Scope, receive: Receive, send: Send) -> None:
        door = self.idempotency
        try:
            key, tenant = door.key_of(request, policy), await caller(door.ask_tenant, request)
            body = await read_body(request, receive, policy.route.max_body)
        except Refused as refused:
            await respond(send, door.refused(policy, refused.problem))
            return
        if body is None:  # the client disconnected before it had sent the whole body; nothing has begun
            return
        exchange = Exchange(self.app, scope, body, receive, send, policy)
        answering = door.answer(Admitted(request, policy, key, tenant, body), exchange.run)
        await (exchange.serve(answering) if policy.tx else exchange.serve_to_its_end(answering))

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the lifespan. An app without lifespan support, such as Django's, returns or raises before it receives
        anything. Then the middleware answers the startup itself: a server reports its shutdown only where the startup
        was answered."""
        asked = False

        async def asking() -> Message:
            nonlocal asked
            asked = True
            return await receive()

        try:
            await self.app(scope, asking, send)
        except Exception as error:
            if asked or isinstance(error, IdemConsumerError):
                raise
            log.info("the app does not support lifespan", error=typed_text(error))
        if not asked:
            for each in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{each}.complete"})

    def _closing(self, send: Send) -> Send:
        async def passing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown."):
                await self.idempotency.close()
            await send(message)

        return passing
