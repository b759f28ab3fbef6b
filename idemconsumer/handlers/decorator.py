"""The decorator, and the Handler that it makes of a function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import update_wrapper, wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.handler import HandlerPlan
from idemconsumer.handlers.options import Options
from idemconsumer.handlers.planning import plan_handler
from idemconsumer.message.keys import KeySpec

P = ParamSpec("P")
R = TypeVar("R")


class Handler(Generic[P, R]):
    """A decorated function. Calling it runs the bare function, without claim or transaction, as in unit tests."""

    def __init__(self, function: Callable[P, Any], plan: HandlerPlan) -> None:
        update_wrapper(self, function)
        self._function = function
        self.plan = plan

    @property
    def name(self) -> str:
        """The handler's name, which is part of its stored keys. Another name makes every message new."""
        return self.plan.name

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: Any = self._function(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        return result  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Handler {self.plan.name!r} of {', '.join(self.plan.sources)}>"


class Decorate(Protocol):
    """The type of `idempotent_handler(…)`: it takes the function and returns its Handler."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> Handler[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Handler[P, R]: ...


def asks_for_key(decorator: Callable[P, R]) -> Callable[P, R]:
    """Raise ConfigurationError where Python's TypeError would not say what to write."""

    @wraps(decorator)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        given = [each for each in args if isinstance(each, str)]
        if not given or "key" not in options:
            what = "no key is given" if given else "no source is given"
            raise ConfigurationError(
                f'@idempotent_handler: {what}; write @idempotent_handler("{given[0] if given else "kafka:orders"}", '
                'key="order_id"), where key says what identifies a message'
            )
        return decorator(*args, **options)

    return checked


@asks_for_key
def idempotent_handler(source: str, *sources: str, key: KeySpec, **options: Unpack[Options]) -> Decorate:
    """Make a function the handler of one or more sources.

    A source is `kafka:topic`, `kafka:/regular expression of topics/`, `rabbitmq:queue`, `sqs:queue` (its name, ARN or
    URL) or `postgres:queue`.

    The first parameter is the payload, decoded by its annotation. `Tx`, `Message` and the app's resources are injected
    by type, in any order. Within `<app>/<tenant>/<name>`, the function's effects through Tx are applied once for each
    key. A plain function runs in a thread, without Tx; its effects are not part of any transaction. A function whose
    first parameter is a `Batch` of payloads is called once for all new messages of a group. A function that takes
    `Saga` instead of Tx runs step by step, and is resumed at its last recovery point. Raises HandlerError, when the
    function is decorated, for every mistake that is visible by then.
    """

    def decorate(fn: Callable[..., Any], /) -> Handler[Any, Any]:
        return Handler(fn, plan_handler(fn, (source, *sources), key, options))

    return decorate
