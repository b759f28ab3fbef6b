"""What a function's signature says: its payload's type, what is injected where, how it is called."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, get_origin, get_type_hints

from idemconsumer._model import Message
from idemconsumer.errors import HandlerError
from idemconsumer.ports import Tx

Invoke: TypeAlias = Callable[[object, Tx | None, Message], Awaitable[object]]

_INJECTED = {Tx: "tx", Message: "message"}
_LATER = ("Saga", "Batch")


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The plan of a function. `invoke` takes payload, Tx and Message, and passes on what it asks for."""

    payload_type: Any
    needs_tx: bool
    needs_message: bool
    invoke: Invoke


def read_signature(handler: str, fn: Callable[..., Any]) -> Signature:
    """Raises HandlerError, naming the parameter, for what cannot be called with payload, Tx and Message."""
    payload_type, positional, keywords = _parameters(handler, fn)
    injected = {*positional, *keywords.values()}
    # A decorator that wraps an async function in a plain one gives back its coroutine: that is async enough.
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise HandlerError(handler, "the function yields", "return the result instead")
    if "tx" in injected and not is_async:
        raise HandlerError(
            handler,
            "a plain function runs in a thread and cannot use Tx, which is asynchronous",
            "declare it `async def`",
        )
    invoke = _invoker(fn, positional, keywords, is_async=is_async)
    return Signature(payload_type, "tx" in injected, "message" in injected, invoke)


def _parameters(handler: str, fn: Callable[..., Any]) -> tuple[Any, tuple[str, ...], dict[str, str]]:
    """(payload type, what to inject by position, what by keyword)."""
    parameters = list(inspect.signature(fn).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise HandlerError(handler, f"{parameter} takes anything", "name each parameter, with its type")
        if parameter.annotation is parameter.empty:
            raise HandlerError(
                handler,
                f"parameter `{parameter.name}` has no annotation",
                "write its type; the first parameter is the payload"
                + (", and a method cannot be a handler" if parameter.name in ("self", "cls") else ""),
            )
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise HandlerError(handler, "it takes no payload", "make the payload its first parameter")
    hints = _hints(handler, fn, {p.name: p.annotation for p in parameters})
    payload, *rest = parameters
    _check_types(handler, payload.name, hints)
    positional = tuple(_INJECTED[hints[p.name]] for p in rest if p.kind is not p.KEYWORD_ONLY)
    keywords = {p.name: _INJECTED[hints[p.name]] for p in rest if p.kind is p.KEYWORD_ONLY}
    return hints[payload.name], positional, keywords


def _hints(handler: str, fn: Callable[..., Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    # Only the parameters: a return type that is imported for type checkers alone is nobody's concern here.
    bare = SimpleNamespace(__annotations__=dict(annotations))
    try:
        return get_type_hints(bare, getattr(inspect.unwrap(fn), "__globals__", {}), include_extras=True)
    except NameError as error:
        raise HandlerError(
            handler,
            f"the annotation {error.name!r} cannot be resolved",
            "define or import it at the top of the module, not inside a function or under TYPE_CHECKING",
        ) from None
    except (SyntaxError, TypeError, AttributeError) as error:
        raise HandlerError(handler, f"an annotation cannot be resolved: {error}", "annotate with types") from None


def _check_types(handler: str, payload: str, hints: Mapping[str, Any]) -> None:
    later = [_ours(hint) for hint in hints.values() if _ours(hint) in _LATER]
    if "Saga" in later and Tx in hints.values():
        raise HandlerError(
            handler,
            "it asks for both Tx and Saga",
            "take Tx for one transaction, or Saga for several steps, each with its own (saga.tx)",
        )
    if later:
        raise HandlerError(
            handler, f"{later[0]} is not available in this version", "take Tx, one transaction a message"
        )
    if hints[payload] in _INJECTED:
        raise HandlerError(
            handler,
            f"its first parameter `{payload}` is a {hints[payload].__name__}",
            f"put the payload first: (payload: dict, {payload}: {hints[payload].__name__})",
        )
    for name, hint in hints.items():
        if name != payload and not (isinstance(hint, type) and hint in _INJECTED):
            raise HandlerError(
                handler,
                f"parameter `{name}` is of type {getattr(hint, '__name__', hint)}, which nobody can inject",
                "after the payload there can be Tx and Message",
            )


def _ours(hint: Any) -> str:
    """The name of a class of this package, else nothing."""
    cls = get_origin(hint) or hint
    return getattr(cls, "__name__", "") if getattr(cls, "__module__", "").startswith("idemconsumer") else ""


def _invoker(
    fn: Callable[..., Any], positional: tuple[str, ...], keywords: Mapping[str, str], *, is_async: bool
) -> Invoke:
    take = tuple(0 if what == "tx" else 1 for what in positional)
    named = tuple((name, 0 if what == "tx" else 1) for name, what in keywords.items())

    def call(payload: object, tx: Tx | None, message: Message) -> Any:
        given = (tx, message)
        return fn(payload, *[given[i] for i in take], **{name: given[i] for name, i in named})

    if is_async:
        return call

    def in_thread(payload: object, tx: Tx | None, message: Message) -> object:
        try:
            return call(payload, tx, message)
        except StopIteration as error:  # a future refuses to hold it, and would never be done
            raise RuntimeError("the handler raised StopIteration") from error

    async def plain(payload: object, tx: Tx | None, message: Message) -> object:
        return await asyncio.to_thread(in_thread, payload, tx, message)

    return plain
