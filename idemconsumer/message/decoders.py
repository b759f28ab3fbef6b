"""The user's functions that get values from a message: what can be checked at import, and what an error of `decode=`
says about the message (D26: an outage there is no fault of the message)."""

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
# Errors of a network or of our own process; never errors about a name that a message may contain.
_NUMBERS: Final = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EMFILE, errno.ENFILE, errno.ENOBUFS}
)


def is_async(function: object) -> bool:
    """Whether it returns a coroutine, as far as that can be determined."""
    call = getattr(function, "__call__", None)  # noqa: B004 - not whether it can be called, but what is
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether it can be called with that many arguments. True if its signature is unknown, as for some builtins."""
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
    """Wrap a user's synchronous decoder, so that it raises only BadMessage."""

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
    """What the error of a user's decoder says about the message (D26). The error's text is not used, since it may quote
    the payload, unless it is a BadMessage."""
    if isinstance(error, BadMessage):
        return error
    if (retry := _retry_in(error)) is not None or _is_outage(error):
        return NotReadNow(retry or error)
    return BadMessage(_REASON, f"decode= raised {type(error).__name__}")


def _retry_in(error: BaseException) -> Retry | None:
    """The error itself if it is a Retry, or the Retry inside a TaskGroup's exception group (B1)."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _retry_in(each)) is not None), None)
    return error if isinstance(error, Retry) else None


def _is_outage(error: BaseException) -> bool:
    """Whether it is a connection error, a timeout or a failed name lookup, or was caused by one, as HTTP clients do.
    Not every OSError is: a bad gzip is one, and so is a missing file that a message names."""
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
