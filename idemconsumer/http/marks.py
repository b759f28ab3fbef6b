"""The effect of `@idempotency.route` on an endpoint: it runs only in requests that the front door has matched to its
mark (H1).

Whether the front door finds a mark depends on how the app is built: an unknown framework, middleware that changes a
path, a mounted app. So each endpoint checks at the last moment, whatever way led to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.http.current import within
from idemconsumer.http.policy import Policy, Route

MARK: Final = "__idempotent_route__"
EFFECTS: Final = ("DELETE", "PATCH", "POST", "PUT")


@dataclass(slots=True)
class _Seen:
    """A request that the front door has checked. Without a policy: its method has no effect to protect. `inside`: a
    marked endpoint runs already, which may call another one."""

    policy: Policy | None
    inside: bool = False


_SEEN: Final[ContextVar[_Seen | None]] = ContextVar("idemconsumer_seen", default=None)


def seen(policy: Policy | None) -> AbstractContextManager[None]:
    """Mark the request as checked, for code that is called inside and for tasks that are created there."""
    return within(_SEEN, _Seen(policy))


def unseen() -> AbstractContextManager[None]:
    """Mark the request as not covered: it may begin in the context of another request, whose mark must not count."""
    return within(_SEEN, None)


def mark(endpoint: Any, route: Route) -> Any:
    """The guarded endpoint that replaces `endpoint`, and that carries the mark. Raises ConfigurationError."""
    if inspect.isclass(endpoint):
        its = [name for name in map(str.lower, EFFECTS) if callable(getattr(endpoint, name, None))]
        if not its:
            raise _unmarkable(endpoint)
        for name in its:
            if mark_of(method := getattr(endpoint, name)) is None:
                setattr(endpoint, name, mark(method, route))
        return endpoint
    if hasattr(endpoint, "_fn"):  # a route handler of Litestar holds the function
        endpoint._fn = mark(endpoint.fn, route)
        return endpoint
    if not (inspect.isroutine(endpoint) or isinstance(endpoint, functools.partial)):
        raise _unmarkable(endpoint)
    made = _guarded(endpoint, route)
    setattr(made, MARK, route)
    with suppress(AttributeError):  # a bound method has no attributes of its own
        setattr(endpoint, MARK, route)  # an app may hold the function from before it was marked
    return made


def mark_of(endpoint: Any) -> Route | None:
    """The mark of an endpoint, also through functions that wrap it."""
    while endpoint is not None:
        if (route := getattr(endpoint, MARK, None)) is not None:
            return route if isinstance(route, Route) else None
        endpoint = getattr(endpoint, "__wrapped__", None) or getattr(endpoint, "func", None)
    return None


def _unmarkable(endpoint: object) -> ConfigurationError:
    return ConfigurationError(
        f"@idempotency.route: {endpoint!r} is neither a function nor a class with post, put, patch or delete; write "
        "routes={'POST /orders': Route(…)}"
    )


def _guarded(endpoint: Callable[..., Any], given: Route) -> Callable[..., Any]:
    """The endpoint with a check that raises ConfigurationError if it would run unprotected. A coroutine function stays
    one, since frameworks test for that. A generator is checked when it is created: its first step may come after the
    end of its request."""
    check = functools.partial(_check, getattr(endpoint, "__qualname__", repr(endpoint)), given)
    guard: Any  # must not use global names, see below
    if inspect.iscoroutinefunction(endpoint):

        async def guard(*args: Any, **named: Any) -> Any:
            check()
            return await endpoint(*args, **named)

    else:

        def guard(*args: Any, **named: Any) -> Any:
            check()
            return endpoint(*args, **named)

    # Frameworks resolve annotations in the globals of the function that they get.
    its = getattr(endpoint, "__globals__", guard.__globals__)
    made = FunctionType(guard.__code__, its, guard.__name__, None, guard.__closure__)
    return functools.update_wrapper(made, endpoint)


def _check(name: str, given: Route) -> None:
    request = _SEEN.get()
    if request is None:
        raise ConfigurationError(
            f"{name} is marked by @idempotency.route, but IdempotencyMiddleware has not found its route, so it was not "
            "run; put the middleware around the app, inside any middleware that changes paths, or name the route in "
            f"routes={{…}}; a websocket cannot be marked; to call it outside of a request, write {name}.__wrapped__(…)"
        )
    if not request.inside and request.policy is not None and not _holds(request.policy, given):
        raise ConfigurationError(
            f"{name} is marked by @idempotency.route, but its request matched {request.policy.name!r}, so it was not "
            "run; put IdempotencyMiddleware inside any middleware that changes paths, name the route in routes={…}, or "
            f"write {name}.__wrapped__(…) where another endpoint calls it"
        )
    request.inside = True


def _holds(policy: Policy, given: Route) -> bool:
    """Whether the policy is the one of the mark, or one in `routes=`, which comes first."""
    return policy.named or policy.route == given or policy.route == replace(given, tx=True)
