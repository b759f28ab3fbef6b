"""A function's signature: the type of its payload, the injected parameters, and how to call it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from idemconsumer import forks
from idemconsumer.errors import HandlerError
from idemconsumer.handlers.arguments import Batch, Saga, Tx
from idemconsumer.message.message import Message

Invoke: TypeAlias = Callable[[object, Tx | Saga | None, Message, Mapping[type, object]], Awaitable[object]]

_INJECTED: dict[type, str] = {Tx: "tx", Saga: "saga", Message: "message"}


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """How to call a function. `invoke` takes payload, Tx, Message and the resources, and passes on those that `fn`
    takes.

    With `batch` it takes a Batch in place of the payload, and `payload_type` is that of an item. `resources` are the
    parameters that only an app's resources can fill, with their types. Whether the app has these resources is known
    when it starts.
    """

    payload_type: Any
    needs_tx: bool
    needs_saga: bool
    needs_message: bool
    batch: bool
    resources: tuple[tuple[str, type], ...]
    invoke: Invoke


def read_signature(handler: str, fn: Callable[..., Any]) -> Signature:
    """The signature of a handler's function. Raises HandlerError, which names the parameter, if the function cannot be
    called with payload, Tx, Message and resources."""
    payload_type, positional, keywords, resources = _parameters(handler, fn)
    injected = {*positional, *keywords.values()}
    # A plain wrapper around an async function returns its coroutine, so it counts as async.
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inspect.unwrap(fn))
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise HandlerError(handler, "the function yields", "return the result instead")
    if injected & {"tx", "saga"} and not is_async:
        raise HandlerError(
            handler,
            "a plain function runs in a thread and cannot use Tx or Saga, which are asynchronous",
            "declare it `async def`",
        )
    batch = _is_batch(payload_type)
    if batch:
        _check_batch(handler, fn, payload_type, injected)
        payload_type = _item_type(payload_type)
    return Signature(
        payload_type,
        needs_tx="tx" in injected,
        needs_saga="saga" in injected,
        needs_message="message" in injected,
        batch=batch,
        resources=resources,
        invoke=_invoker(fn, positional, keywords, is_async=is_async),
    )


def _parameters(
    handler: str, fn: Callable[..., Any]
) -> tuple[Any, tuple[str | type, ...], dict[str, str | type], tuple[tuple[str, type], ...]]:
    """(payload type, injected positional parameters, injected keyword parameters, which of these are resources)."""
    parameters = list(inspect.signature(fn).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise HandlerError(handler, f"{parameter} accepts anything", "name each parameter and its type")
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
    what: dict[str, str | type] = {p.name: _INJECTED.get(hints[p.name], hints[p.name]) for p in rest}
    positional = tuple(what[p.name] for p in rest if p.kind is not p.KEYWORD_ONLY)
    keywords = {p.name: what[p.name] for p in rest if p.kind is p.KEYWORD_ONLY}
    resources = tuple((name, wanted) for name, wanted in what.items() if isinstance(wanted, type))
    return hints[payload.name], positional, keywords, resources


def _hints(handler: str, fn: Callable[..., Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    # Only the parameters are resolved: a return type that is imported for type checkers only does not matter here.
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


def returned(fn: Callable[..., Any]) -> Any:
    """The return annotation; Any if there is none, or if it is meant for type checkers only."""
    bare = SimpleNamespace(__annotations__={"return": inspect.signature(fn).return_annotation})
    try:
        hint = get_type_hints(bare, getattr(inspect.unwrap(fn), "__globals__", {}), include_extras=True)["return"]
    except (NameError, SyntaxError, TypeError, AttributeError):
        return Any
    return Any if hint is inspect.Signature.empty else hint


def _check_types(handler: str, payload: str, hints: Mapping[str, Any]) -> None:
    if Saga in hints.values() and Tx in hints.values():
        raise HandlerError(
            handler,
            "it takes both Tx and Saga",
            "take Tx for one transaction, or Saga for several steps, each with its own (saga.tx)",
        )
    if misplaced := [name for name, hint in hints.items() if name != payload and _is_batch(hint)]:
        raise HandlerError(
            handler,
            f"its batch `{misplaced[0]}` is not its first parameter",
            f"write ({misplaced[0]}: Batch[…], …): a batch replaces the payload",
        )
    if hints[payload] in _INJECTED:
        raise HandlerError(
            handler,
            f"its first parameter `{payload}` is a {hints[payload].__name__}",
            f"put the payload first: (payload: dict, {payload}: {hints[payload].__name__})",
        )
    for name, hint in hints.items():
        # A class of the user may be the type of a resource that is defined later.
        if name != payload and (not isinstance(hint, type) or hint.__module__ == "builtins"):
            raise not_injectable(handler, name, hint)


def not_injectable(handler: str, name: str, hint: Any, resources: str = "a resource of the app") -> HandlerError:
    """The error for a parameter that neither the engine nor a resource can fill."""
    return HandlerError(
        handler,
        f"parameter `{name}` is of type {getattr(hint, '__name__', hint)}, which cannot be injected",
        f"after the payload a handler can take Tx or Saga, Message, and {resources} (@app.resource)",
    )


def _is_batch(hint: Any) -> bool:
    return (get_origin(hint) or hint) is Batch


def _item_type(hint: Any) -> Any:
    """X of Batch[X]; a bare Batch takes any JSON."""
    return next(iter(get_args(hint)), Any)


def _check_batch(handler: str, fn: Callable[..., Any], hint: Any, injected: set[str | type]) -> None:
    if "saga" in injected:
        raise HandlerError(
            handler,
            "it takes both Batch and Saga",
            "take one payload with Saga, or Tx with Batch: a saga has one key",
        )
    if "message" in injected or _item_type(hint) is Message:
        raise HandlerError(
            handler,
            "it takes both Batch and Message",
            "remove Message and call batch.message(i) for each item",
        )
    # Not resolved, since it may be imported for type checkers only. With postponed annotations, None is a text.
    returns = inspect.signature(fn).return_annotation
    if returns not in (inspect.Signature.empty, None, "None"):
        raise HandlerError(
            handler,
            f"it takes a Batch and is declared to return {getattr(returns, '__name__', returns)}",
            "declare it `-> None` and give each item its result with batch.result(i, value)",
        )


def _invoker(
    fn: Callable[..., Any], positional: tuple[str | type, ...], keywords: Mapping[str, str | type], *, is_async: bool
) -> Invoke:
    # A handler takes Tx or Saga, so both share one place. The resources come after it.
    wanted = [what for what in (*positional, *keywords.values()) if isinstance(what, type)]
    take = tuple(_place(what, wanted) for what in positional)
    named = tuple((name, _place(what, wanted)) for name, what in keywords.items())

    def call(payload: object, tx: Tx | Saga | None, message: Message, resources: Mapping[type, object]) -> Any:
        given = (tx, message, *[resources[what] for what in wanted])
        return fn(payload, *[given[i] for i in take], **{name: given[i] for name, i in named})

    if is_async:
        return call

    def in_thread(payload: object, tx: Tx | Saga | None, message: Message, resources: Mapping[type, object]) -> object:
        try:
            with forks.never_in_a_child():
                return call(payload, tx, message, resources)
        except StopIteration as error:  # a future does not accept StopIteration, and would never finish
            raise RuntimeError("the handler raised StopIteration") from error

    async def plain(
        payload: object, tx: Tx | Saga | None, message: Message, resources: Mapping[type, object]
    ) -> object:
        return await asyncio.to_thread(in_thread, payload, tx, message, resources)

    return plain


def _place(what: str | type, wanted: list[type]) -> int:
    return 2 + wanted.index(what) if isinstance(what, type) else 1 if what == "message" else 0
