"""Resources: what a worker process creates once, before its lanes start, and closes when they have ended."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from idemconsumer.errors import ConfigurationError
from idemconsumer.handlers.arguments import Batch, Saga, Tx
from idemconsumer.logs import log
from idemconsumer.message.message import Message
from idemconsumer.redaction import error_text
from idemconsumer.user_code.cancellation import CancellationWatch

_OURS: Final = (Batch, Tx, Saga, Message)


@dataclass(frozen=True, slots=True)
class Resource:
    """An async generator function that yields one object, and the type by which handlers ask for it."""

    name: str
    type: type
    make: Callable[[], AsyncIterator[Any]]


def read_resource(fn: Callable[..., Any]) -> Resource:
    """Raises ConfigurationError, naming the function, for what cannot be created or injected."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if not inspect.isasyncgenfunction(fn):
        raise ConfigurationError(
            f"resource {name!r} is not an async generator; write `async def {name}() -> AsyncIterator[Client]:` "
            "with one `yield`, and after it what closes the object"
        )
    if inspect.signature(fn).parameters:
        raise ConfigurationError(f"resource {name!r} takes parameters, but none are passed; read what it needs inside")
    try:
        annotation = get_type_hints(fn).get("return")
    except NameError as error:
        raise ConfigurationError(
            f"resource {name!r}: the annotation {error.name!r} cannot be resolved; import it at the top of the module"
        ) from None
    arguments = get_args(annotation)
    yields = arguments[0] if get_origin(annotation) in (AsyncIterator, AsyncGenerator) else None
    if not isinstance(yields, type) or yields in _OURS or yields.__module__ == "builtins":
        raise ConfigurationError(
            f"resource {name!r} has no usable return annotation; annotate it `-> AsyncIterator[Client]`, with a class "
            "of its own, since handlers ask for it by that type"
        )
    return Resource(name, yields, fn)


class Resources:
    """The objects of one process, by type, while they are open."""

    def __init__(self, resources: Sequence[Resource]) -> None:
        self._resources = resources
        self._open: list[tuple[Resource, AsyncIterator[Any]]] = []
        self.values: dict[type, object] = {}

    async def open(self) -> None:
        """Create them in the order of their definition. Raises ConfigurationError for the first one that fails, after
        closing those created before it."""
        try:
            for resource in self._resources:
                generator = resource.make()
                outside = CancellationWatch()
                try:
                    self.values[resource.type] = await _first(generator)
                except StopAsyncIteration:
                    raise ConfigurationError(
                        f"resource {resource.name!r} ended without a yield; yield the object once"
                    ) from None
                except (Exception, asyncio.CancelledError) as error:
                    if outside.requested:
                        raise
                    raise ConfigurationError(
                        f"resource {resource.name!r} could not be made: {type(error).__name__}: {error_text(error)}"
                    ) from error
                self._open.append((resource, generator))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close them in reverse order, each one even if another fails."""
        while self._open:
            resource, generator = self._open.pop()
            self.values.pop(resource.type, None)
            outside = CancellationWatch()
            try:
                await anext(generator)
            except StopAsyncIteration:
                continue
            except (Exception, asyncio.CancelledError) as error:  # the user's error; the others must still be closed
                if outside.requested:
                    raise
                log.warning(
                    "resource not closed", resource=resource.name, error=f"{type(error).__name__}: {error_text(error)}"
                )
            else:
                log.warning("resource yielded twice", resource=resource.name)


def _first(generator: AsyncIterator[Any]) -> Awaitable[Any]:
    """Start the generator without the event loop's knowledge: the loop would end it at the same time as the code that
    uses it, while `close` ends it after that (O26)."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None)
    try:
        return anext(generator)
    finally:
        sys.set_asyncgen_hooks(*hooks)
