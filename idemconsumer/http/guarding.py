"""A marked endpoint runs in no request that the front door has not looked at by the same mark (H1).

Whether it is found depends on how its app is built: an unknown framework, middleware that changes a path, an app that
is mounted. Here it is asked at the last moment, whatever led to the endpoint.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FunctionType
from typing import Any, Final

from idemconsumer.errors import ConfigurationError
from idemconsumer.http.policy import Policy, Route


class _Seen:
    """A request that the front door has looked at. Without a policy its method has no effect to repeat."""

    __slots__ = ("inside", "policy")

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.inside = False  # of a marked endpoint, which may call another one


_SEEN: Final[ContextVar[_Seen | None]] = ContextVar("idemconsumer_seen", default=None)


@contextmanager
def seen(policy: Policy | None) -> Iterator[None]:
    """For the tasks that are made inside, and for what is called there."""
    token = _SEEN.set(_Seen(policy))
    try:
        yield
    finally:
        _SEEN.reset(token)


@contextmanager
def unseen() -> Iterator[None]:
    """For a request that none of ours is, and that may be begun in the context of another one."""
    token = _SEEN.set(None)
    try:
        yield
    finally:
        _SEEN.reset(token)


def guarded(endpoint: Callable[..., Any], given: Route) -> Callable[..., Any]:
    """The endpoint, which raises ConfigurationError where it would run unprotected."""

    def check() -> None:
        _check(getattr(endpoint, "__qualname__", repr(endpoint)), given)

    guard = _guard(endpoint, check)
    # Frameworks resolve annotations by the globals of what they are given.
    its = getattr(endpoint, "__globals__", guard.__globals__)
    made = FunctionType(guard.__code__, its, guard.__name__, None, guard.__closure__)
    return functools.update_wrapper(made, endpoint)


def _guard(endpoint: Callable[..., Any], check: Callable[[], None]) -> FunctionType:
    """Uses no global names, see `guarded`. A coroutine function stays one, since frameworks ask for that. A generator
    may be begun when its request is over, so it is asked for as it is made."""
    made: Any
    if inspect.iscoroutinefunction(endpoint):

        async def made(*args: Any, **named: Any) -> Any:
            check()
            return await endpoint(*args, **named)

    else:

        def made(*args: Any, **named: Any) -> Any:
            check()
            return endpoint(*args, **named)

    return made  # type: ignore[no-any-return]


def _check(name: str, given: Route) -> None:
    request = _SEEN.get()
    if request is None:
        raise ConfigurationError(
            f"{name} is marked by @idempotency.route, but IdempotencyMiddleware has not found its route, so it was not "
            "run; put the middleware around the app, inside of what changes paths, or name the route in routes={…}; a "
            f"websocket cannot be marked; to call it outside of a request, write {name}.__wrapped__(…)"
        )
    if not request.inside and request.policy is not None and not _holds(request.policy, given):
        raise ConfigurationError(
            f"{name} is marked by @idempotency.route, but its request matched {request.policy.name!r}, so it was not "
            "run; put IdempotencyMiddleware inside of what changes paths, name the route in routes={…}, or "
            f"write {name}.__wrapped__(…) where another endpoint calls it"
        )
    request.inside = True


def _holds(policy: Policy, given: Route) -> bool:
    """Whether it is what was marked, or written down in `routes=`, which comes first."""
    return policy.named or policy.route == given or policy.route == replace(given, tx=True)
