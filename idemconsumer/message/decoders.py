"""Functions of the user's that are called with values from a message: what can be said of them at import, and what an
error of `decode=` says about the message that was to be read (D26)."""

from __future__ import annotations

import errno
import inspect
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias

from idemconsumer.errors import BadMessage, NotReadNow, Retry, Unavailable
from idemconsumer.message.message import Message

DecodeHook: TypeAlias = Callable[[bytes, Message], object]

_REASON: Final = "undecodable"
_AWAY: Final = (ConnectionError, TimeoutError, socket.gaierror, Unavailable)
# What the operating system says of a network, or of our own process, and never of a name that a message may hold.
_NUMBERS: Final = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOBUFS}
)


def is_async(function: object) -> bool:
    """Whether it returns a coroutine, as far as it can be seen."""
    call = getattr(function, "__call__", None)  # noqa: B004 - not whether it can be called, but what is
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether it can be called with so many. True for one that does not say, as some builtins."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def hooked(decode: DecodeHook) -> DecodeHook:
    """A user's decoder that is no async function. What it raises is BadMessage."""

    def safe(body: bytes, message: Message) -> object:
        try:
            payload = decode(body, message)
        except Exception as error:  # noqa: BLE001 - bad input, or whatever a decoder raises
            raise not_decoded(error) from None
        if isinstance(payload, Awaitable):
            if isinstance(payload, Coroutine):
                payload.close()
            what = f"a {type(payload).__name__}, as an async function does; declare it `async def`"
            raise BadMessage(_REASON, f"decode= returned {what}")
        return payload

    return safe


def not_decoded(error: Exception) -> BadMessage:
    """What the error of a user's decoder says about the message (D26). Its text may quote the payload, unless it is a
    BadMessage."""
    if isinstance(error, BadMessage):
        return error
    if (retry := _retry_in(error)) is not None or _is_outage(error):
        return NotReadNow(retry or error)
    return BadMessage(_REASON, f"decode= raised {type(error).__name__}")


def _retry_in(error: BaseException) -> Retry | None:
    """The Retry that it is, also where a TaskGroup wraps it (B1)."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _retry_in(each)) is not None), None)
    return error if isinstance(error, Retry) else None


def _is_outage(error: BaseException) -> bool:
    """Whether it is one of a connection, a timeout or a name that cannot be resolved, or was made of one, as clients of
    HTTP do. Not any OSError: a bad gzip is one, and so is a file that a message names and nobody has."""
    return any(
        isinstance(each, _AWAY) or (isinstance(each, OSError) and each.errno in _NUMBERS) for each in _made_of(error)
    )


def _made_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
        if (before := each.__cause__ or (None if each.__suppress_context__ else each.__context__)) is not None:
            left.append(before)
