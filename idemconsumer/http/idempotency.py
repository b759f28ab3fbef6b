"""Idempotency: which routes of a service are idempotent, which tenant owns a key, and where keys are stored."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack

from idemconsumer.app.app import App
from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.http import problems
from idemconsumer.http.current import KEY, new_key
from idemconsumer.http.door import Door
from idemconsumer.http.exchanged import Answer, Request, Response, RunApplication
from idemconsumer.http.frameworks import COVERED, AppRoutes
from idemconsumer.http.lost import LostRequests
from idemconsumer.http.marks import mark
from idemconsumer.http.opened_stores import OpenedStores
from idemconsumer.http.policy import Policy, Route, RouteOptions, compile_route
from idemconsumer.http.problems import Problem, Refused
from idemconsumer.http.watch import DoorWatch
from idemconsumer.message import extraction, keys
from idemconsumer.ports.observer import NullObserver, Observer
from idemconsumer.ports.requests import LostRequest, RequestStore
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.http import BadKey, parse_key
from idemconsumer.rules.request_keys import UNNAMED, request_key
from idemconsumer.rules.routes import Pattern, pattern

if TYPE_CHECKING:  # prometheus_client is optional
    from prometheus_client import CollectorRegistry

T = TypeVar("T", bound=Callable[..., Any])
Tenant = Callable[[Request], "str | Awaitable[str | None] | None"]

DEFAULT_METHODS: Final = ("POST", "PATCH")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run: under its key, or without a key in its transaction (H16)."""

    request: Request
    policy: Policy
    key: str | None
    tenant: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One route. If it has no policy, the default's applies. `rule`: what the app's router returns for a request of
    this route, if the router can be called; None for a route in `routes=`."""

    pattern: Pattern
    policy: Policy | None
    rule: object = None


class RouteTable:
    """Policies by route. Routes in `routes=` come before those that are marked in `app`."""

    def __init__(self, routes: Sequence[Entry], default: Mapping[str, Policy], app: AppRoutes) -> None:
        self._app = app
        self._routes: dict[str, list[Entry]] = {}
        for each in routes:
            self._routes.setdefault(each.pattern.method, []).append(each)
        self._default = default

    @property
    def policies(self) -> list[Policy]:
        of_routes = [each.policy for entries in self._routes.values() for each in entries if each.policy is not None]
        return [*of_routes, *self._default.values()]

    def find(self, request: Request) -> Policy | None:
        """The policy of a request; None if the front door does not cover it."""
        method, (rule, spellings) = request.method, self._app.read(request)
        for each in self._routes.get(method, ()):
            asked = rule is not None and each.rule is not None
            if each.rule is rule if asked else each.pattern.matches(method, *spellings):
                return each.policy or self._default.get(method)
        return self._default.get(method)

    def find_described(self, method: str, path: str) -> Policy | None:
        """The policy for a path as OpenAPI writes it."""
        for each in self._routes.get(method, ()):
            policy = each.policy or self._default.get(method)
            if each.pattern.untyped == path or (policy and policy.named and each.pattern.matches(method, path)):
                return policy
        return self._default.get(method)


class Idempotency:
    """The configuration of the front door, for one service.

    `app` gives the name that is part of every key, and the settings. `tenant` is a function that returns the caller of
    a request. A key belongs to its tenant and its route, so two callers never share a key. If `tenant` returns None or
    an empty text, the response is 401; if it raises, the error passes on and nothing runs. `routes` maps routes such as
    "POST /orders/{id}" to a Route. `default` is for every other POST and PATCH; None leaves them uncovered. `store` is
    where routes without `tx` keep their keys: "postgres", "redis" or "hybrid". The last two use the address `redis`, or
    the setting. `metrics` is a registry of prometheus_client, such as its REGISTRY, in which requests are counted.
    `observer` is for tests. Raises ConfigurationError for a wrong definition.

    The first request that needs the database opens it. During an outage of the database, requests with a key get 503
    and nothing runs.
    """

    def __init__(
        self,
        app: App,
        *,
        tenant: Tenant,
        routes: Mapping[str, Route] | None = None,
        default: Route | None = Route(),  # noqa: B008 - frozen
        store: Literal["postgres", "redis", "hybrid"] | RequestStore = "postgres",
        redis: str | None = None,
        observer: Observer | None = None,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        if not callable(tenant):
            raise ConfigurationError(
                "Idempotency: `tenant` is mandatory; write a function of the request that returns its tenant, such as "
                "lambda request: request.header('x-account')"
            )
        self._name = app.name
        app.fronted = True
        self._tenant = tenant
        self._default = default
        self._opened = OpenedStores(app, store, redis, (observer or NullObserver()).at)
        self._door = Door(self._opened)
        self._watch = DoorWatch(app, metrics)
        self._routes = [
            Entry(_pattern(text, {}), self._obeyed(text, route, named=True)) for text, route in (routes or {}).items()
        ]
        self._defaults = {
            method: self._obeyed(f"{method} {UNNAMED}", default) for method in DEFAULT_METHODS if default is not None
        }

    def route(self, **options: Unpack[RouteOptions]) -> Callable[[T], T]:
        """Mark an endpoint, below its framework's decorator, with the options of a Route:

            @api.post("/orders")
            @idempotency.route(tx=True, required=True)
            async def place(order: Order) -> Receipt: ...

        The function itself does not change, but it runs only in requests that IdempotencyMiddleware has matched to this
        route. In any other request, and if code calls it outside of a request, it raises ConfigurationError;
        `__wrapped__` is the function without that check. An entry in `routes=` comes before this mark.
        """
        given = Route(**options)
        self._obeyed("@route", given)

        def marked(endpoint: T) -> T:
            its: T = mark(endpoint, given)
            return its

        return marked

    def table(self, app: AppRoutes) -> RouteTable:
        """Return the policies, including the routes that an app has marked. Raises ConfigurationError."""
        routes, known = list(self._routes), {each.pattern.name for each in self._routes}
        for each in app.all:
            if each.name in known:
                continue
            if each.route is None and not each.tx:  # it may come before a marked route with the same path
                with suppress(ConfigurationError):
                    routes.append(Entry(_pattern(each.name, each.types), None, each.rule))
            else:
                route = each.route or self._default or Route()
                policy = self._obeyed(each.name, replace(route, tx=True) if each.tx else route)
                routes.append(Entry(_pattern(each.name, each.types), policy, each.rule))
        table = RouteTable(routes, self._defaults, app)
        self._watch.expect(table.policies)
        return table

    def _obeyed(self, name: str, route: Route, *, named: bool = False) -> Policy:
        policy = compile_route(name, route, named=named)
        self._opened.expect(policy)
        return policy

    def key_of(self, request: Request, policy: Policy) -> str | None:
        """Return the key of a covered request, or None if it has none. Raises Refused, and ConfigurationError if the
        request already runs under its key."""
        key = key_in(request)
        if key is None and policy.route.required:
            raise Refused(problems.KEY_MISSING)
        if COVERED in request.environment:
            # The request would wait for itself, and the refusal would be stored as its answer for good.
            raise ConfigurationError(
                f"two IdempotencyMiddleware are around {policy.name!r}; leave one out, or write default=None and "
                "routes={…} for the outer one, so that each route has one"
            )
        return key

    def ask_tenant(self, request: Request) -> Any:
        """Return what `tenant` returns: the tenant, or an awaitable of it. The function may block, and may need the
        thread of the request."""
        return self._tenant(request)

    async def answer(self, admitted: Admitted, run: RunApplication) -> Answer:
        """Return the answer to an admitted request. Raises what the application raises. If the store cannot be used as
        configured and has never answered so far, raises ConfigurationError."""
        policy, key = admitted.policy, admitted.key
        if key is None:
            KEY.set(new_key())
            answering = self._door.answer_without_key(policy, run)
        else:
            answering = self._door.answer(lambda: self._claim(admitted, key), policy, run)
        return await self._watch.follow(policy, answering, keyed=key is not None)

    def refused(self, policy: Policy, problem: Problem) -> Response:
        """Return the response to a request that is not admitted."""
        return self._watch.refused(policy, problem)

    def _claim(self, admitted: Admitted, given: str) -> Claim:
        policy, tenant, request = admitted.policy, admitted.tenant, admitted.request
        stored = request_key(self._name, tenant, policy.name, given, root=request.root, path=request.path)
        KEY.set(stored.hex())
        return Claim(
            key=stored,
            scope=keys.scope_name(self._name, tenant, policy.name),
            fingerprint=None if policy.take is None else policy.take(request, admitted.body),
            retain=policy.retain,
            expires=policy.expires,
        )

    # ---------------------------------------------------------------------------------------------------- lost requests
    async def lost(self) -> list[LostRequest]:
        """Return the requests in leased mode whose process died before their response was stored, oldest first. How far
        they came is not known. Requests that still run are not included. With Redis, this reads all of its keys. Raises
        StoreUnavailable."""
        return await (await self._lost_requests()).all()

    async def settle(self, lost: LostRequest, response: Response) -> bool:
        """Settle a lost request that was done: `response` is the answer to its key from now on. Returns False, with
        nothing stored, if the request is no longer lost because it was sent again and runs, or has ended. Raises
        StoreUnavailable, and CommitUnknown if the response may be stored: then call again."""
        return await (await self._lost_requests()).settle(lost, response)

    async def release(self, lost: LostRequest) -> bool:
        """Release a lost request that was not done: its key is new, and the request runs when it is sent again. Returns
        and raises as `settle`."""
        return await (await self._lost_requests()).release(lost)

    async def _lost_requests(self) -> LostRequests:
        return LostRequests(await self._opened.requests(), app=self._name, by="the app")

    async def close(self) -> None:
        """Close everything that was opened. Call it once all requests have been answered; the next request opens
        everything anew. A request that still runs under a key gets some seconds to finish. After that it keeps its key,
        and the stores stay open until it has ended."""
        await asyncio.shield(self._opened.close())


def key_in(request: Request) -> str | None:
    """The key in the request's header. Raises Refused."""
    key = parse_key(request.values("idempotency-key"))
    if isinstance(key, BadKey):
        raise Refused(problems.KEY_REPEATED if key is BadKey.REPEATED else problems.KEY_MALFORMED)
    return key


def passes(request: Request, policy: Policy) -> bool:
    """Whether a request passes as if there were no front door."""
    return not (policy.tx or policy.route.required or request.values("idempotency-key"))


def _pattern(name: str, types: Mapping[str, str]) -> Pattern:
    try:
        return pattern(name, types)
    except ValueError as error:
        raise ConfigurationError(f"route {error}") from None


async def caller(resolve: Tenant, request: Request) -> str:
    """The tenant of a request. Raises what `resolve` raises, and the errors of `checked_tenant`."""
    given = resolve(request)
    return checked_tenant(await given if inspect.isawaitable(given) else given)


def checked_tenant(tenant: object) -> str:
    """The tenant that the resolver returned, if it is valid. Raises Refused, TypeError and ValueError."""
    if tenant is None or tenant == "":
        raise Refused(problems.TENANT_MISSING)
    if not isinstance(tenant, str):
        raise TypeError(f"`tenant` returned {type(tenant).__name__}; return str, or None")
    try:
        extraction.as_text(tenant, "tenant")
    except BadMessage as error:
        raise ValueError(f"`tenant`: {error.detail}") from None
    return tenant
