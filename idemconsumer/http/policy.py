"""Route: the options of one route; and Policy, which is made from it once, at the start."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec

from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.handlers.arguments import Done, Duration, NotDone, Unknown
from idemconsumer.handlers.durations import MAX_RUN, parse_duration
from idemconsumer.http.exchanged import Headers, Request, Response
from idemconsumer.message import extraction, keys
from idemconsumer.message.decoders import is_async, takes
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message
from idemconsumer.ports.requests import LostRequest
from idemconsumer.rules.http import content_type, host_name, kept_by_default, of_router, streams

Fingerprint: TypeAlias = Literal["bytes", "json"] | Sequence[str] | None
Take: TypeAlias = Callable[[Request, bytes], bytes]
Judge: TypeAlias = Callable[[Response], bool]
Reconcile: TypeAlias = Callable[[LostRequest], Awaitable[Done[Response] | NotDone | Unknown]]
OnStale: TypeAlias = Literal["run", "review"]

MIB: Final = 1024 * 1024
_TX_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Route:
    """How the requests of a route are made idempotent. Durations are as in handlers ("10s", "24h").

    * `tx`: the route uses `Tx`, and its effects and its response are one commit (joined mode). Otherwise the key is
      leased while the route runs, and the response is stored afterwards (leased mode).
    * `required`: a request without a key gets 400. Otherwise such a request runs as usual, in joined mode in its
      transaction.
    * `fingerprint`: what else must be equal under one key, beside method, host, path and query. It is the body's
      "bytes", its value as "json", paths into a JSON body such as `["amount", "card.id"]`, or None, which compares
      nothing at all.
    * `store`: decides whether a response is kept as the answer to its key. A response that is not kept is sent, and in
      joined mode its effects are undone. By default 2xx, 3xx and 4xx are kept, but not 401, 405, 407, 408, 425 and 429.
    * `wait`: how long a request waits for another one with its key before it gets 409.
    * `timeout`: in joined mode, how long the route may run, by default 30 s. In leased mode, how long the client waits,
      by default without limit; the route goes on even if no client waits.
    * `expires`: the time after which a key is new again.
    * `retain`: how long the key's record is kept at most.
    * `max_body`, `max_response`: bytes. A larger body gets 413. A larger response is sent once, and never replayed.
    * `stream`: the response is sent as it is produced, once, and never replayed.

    In leased mode, a process that dies between the effect and the stored response leaves a lost request: how far it
    came is not known. These two decide about a lost request that is sent again:

    * `on_stale`: "run" runs it. "review" answers it with 503 until it is settled or released (`Idempotency.lost`).
    * `reconcile`: an async function of the LostRequest, which is called instead. `Done(Response(…))` is stored and
      sent. After `NotDone()` the request runs. `Unknown()` gives 503, and so does any exception, or no answer within
      `timeout` or 30 s.
    """

    tx: bool = False
    required: bool = False
    fingerprint: Fingerprint = "bytes"
    store: Judge | None = None
    wait: Duration = 0.0
    timeout: Duration | None = None
    expires: Duration | None = "24h"
    retain: Duration = "14d"
    max_body: int = MIB
    max_response: int = MIB
    stream: bool = False
    on_stale: OnStale = "run"
    reconcile: Reconcile | None = None


class RouteOptions(TypedDict, total=False):
    """The fields of Route, as keywords."""

    tx: bool
    required: bool
    fingerprint: Fingerprint
    store: Judge | None
    wait: Duration
    timeout: Duration | None
    expires: Duration | None
    retain: Duration
    max_body: int
    max_response: int
    stream: bool
    on_stale: OnStale
    reconcile: Reconcile | None


@dataclass(frozen=True, slots=True)
class Policy:
    """A compiled Route: times in seconds. `name`: the route's name in its scope. `named`: it was given in `routes=`.
    Options that need no conversion are only in `route`."""

    name: str
    route: Route
    named: bool
    tx: bool
    take: Take | None
    kept: Judge
    wait: float
    timeout: float | None
    expires: float | None
    retain: float
    again: bool  # whether another request may take over the key of a lost one

    def keeps(self, response: Response) -> bool:
        """Whether a response is kept as the answer to its key. A response that the router itself gave comes from no
        endpoint, and is not kept (H12). Raises what the route's `store` raises."""
        return (response.routed or not of_router(response.status)) and self.kept(response)

    def streams(self, headers: Headers) -> bool:
        """Whether a response with these headers is sent as it is produced."""
        return self.route.stream or streams(content_type(headers))


def compile_route(name: str, route: Route, *, named: bool = False) -> Policy:
    """The policy of a route. Raises ConfigurationError, which names the route, for wrong options."""

    def refuse(problem: str) -> ConfigurationError:
        return ConfigurationError(f"route {name!r}: {problem}")

    def seconds(option: str, value: Duration) -> float:
        try:
            return parse_duration(value)
        except ConfigurationError as error:
            raise refuse(f"`{option}`: {error}") from None

    for option in ("max_body", "max_response"):
        if getattr(route, option) < 0:
            raise refuse(f"`{option}` is negative; write a number of bytes")
    timeout = None if route.timeout is None else seconds("timeout", route.timeout)
    if timeout is not None and not 0 < timeout <= MAX_RUN:
        raise refuse(f"`timeout` is {route.timeout!r}; write more than 0 s, and at most 20d")
    expires = None if route.expires is None else seconds("expires", route.expires)
    retain = seconds("retain", route.retain)
    if expires is not None and not 0 < expires <= retain:
        raise refuse(f"`expires` is {route.expires!r}; write more than 0 s and at most `retain`, {route.retain!r}")
    if route.on_stale not in ("run", "review"):
        raise refuse(f'`on_stale` is {route.on_stale!r}; write "run" or "review"')
    if route.reconcile is not None and not inspect.iscoroutinefunction(route.reconcile):
        raise refuse(f"`reconcile` is {route.reconcile!r}; write an async function of a LostRequest")
    if route.tx and (route.reconcile is not None or route.on_stale != "run"):
        raise refuse(
            "`on_stale` and `reconcile` are for routes without `tx`, whose effects are elsewhere; leave them out"
        )
    given: object = route.store
    if given is not None and (not callable(given) or is_async(given) or not takes(given, 1)):
        raise refuse(f"`store` is {given!r}; write a plain function of a Response that says whether it is kept")
    return Policy(
        name=name,
        route=route,
        named=named,
        tx=route.tx,
        take=compile_fingerprint(name, route.fingerprint),
        kept=_kept_by_default if route.store is None else route.store,
        wait=seconds("wait", route.wait),
        timeout=_TX_SECONDS if timeout is None and route.tx else timeout,
        expires=expires,
        retain=retain,
        again=route.on_stale == "run" or route.reconcile is not None,
    )


def _kept_by_default(response: Response) -> bool:
    return kept_by_default(response.status)


def compile_fingerprint(name: str, spec: Fingerprint) -> Take | None:
    """The function for the fingerprint that `spec` asks for: over method, host, path, query and the chosen part of the
    body, which must be equal in two requests with one key (H4). None if nothing is compared. A body that is not JSON is
    compared by its bytes. Raises ConfigurationError for an invalid spec."""
    given: object = spec
    if given is None:
        return None
    if given == "bytes":
        return lambda request, body: _of(request, b"bytes", body)
    if given == "json":
        return _of_value
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigurationError(
            f'route {name!r}: `fingerprint` is {given!r}; write "bytes", "json", a list of paths into a JSON body '
            'such as ["amount"], or None'
        )
    take = extraction.compile_fingerprint(Key.all(*given), Any, handler=name)

    def chosen(request: Request, body: bytes) -> bytes:
        try:
            named = take(Message("", body), msgspec.json.decode(body))
        except (msgspec.MsgspecError, RecursionError, UnicodeError, BadMessage):
            return _of(request, b"bytes", body)
        return _of_value(request, body) if named is None else _of(request, b"fields", named)

    return chosen


def _of_value(request: Request, body: bytes) -> bytes:
    value = keys.canonical(body)
    return _of(request, b"bytes", body) if value is None else _of(request, b"json", value)


def _of(request: Request, kind: bytes, body: bytes) -> bytes:
    """The fingerprint of the parts, each with its length before it, so that no two requests give the same text."""
    host, path = host_name(request.header("host") or ""), request.path
    texts = [text.encode(errors="surrogateescape") for text in (request.method, host, path)]
    parts = (*texts, request.query, kind, body)
    return keys.fingerprint(b"".join(len(part).to_bytes(8, "big") + part for part in parts))
