"""Decoding and keying a message with an asynchronous `decode=`: in a task of its own, within the `timeout`.

All of it raises only BadMessage, or its subclass NotReadNow if the message is not to blame (D26).
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from idemconsumer.handlers.handler import BoundHandler, Call
from idemconsumer.message.decoders import not_decoded
from idemconsumer.message.message import Message
from idemconsumer.user_code.call import call_user_code, without_exit
from idemconsumer.user_code.cancellation import isolated
from idemconsumer.user_code.time_limit import TimeLimit

T = TypeVar("T")


async def read(handler: BoundHandler, message: Message) -> Call:
    """The handler call for a message."""
    if not handler.waits_for(message):
        return handler.call_for(message)
    return await _within(handler, handler.read(message))


async def renew(handler: BoundHandler, call: Call) -> None:
    """Decode again before each run, so that no run gets a payload that another run has changed (R33)."""
    if call.given and handler.decodes:
        await _within(handler, handler.renew(call))


async def _within(handler: BoundHandler, run: Coroutine[Any, Any, T]) -> T:
    limit = TimeLimit(handler.options.timeout)
    try:
        value = await call_user_code(isolated(without_exit(run)), limit)
        limit.check()
    except Exception as error:  # noqa: BLE001 - bad input, an outage, or whatever a decoder raises
        raise not_decoded(error) from None
    return value
