"""Checks of messages before they are sent, at once or in a transaction, for what no broker of that kind accepts (X11).
Also the order of sending, where a broker may refuse one message and accept the next (X5)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.message.queues import check_group
from idemconsumer.ports.broker import BEHIND, Outgoing, Unsent
from idemconsumer.rules.outbox import waves

Send = Callable[[Sequence[Outgoing]], Awaitable[Sequence[Unsent | None]]]

_MOST_IN_AMQP: Final = {"key": 255, "header's name": 128}  # bytes; the client truncates longer names of headers
_AROUND_RECORD: Final = 128  # bytes of a Kafka record and its batch beside key, value and headers, rounded up
_NO_UTF8: Final = re.compile("[\ud800-\udfff]")


def check_sendable(scheme: str, name: str, message: Outgoing, max_message_bytes: int) -> None:
    """Raise ConfigurationError for a message that must be written differently, BadMessage for one that is too large.
    Limits that only the broker knows, such as those of a queue or a topic, are reported by the broker later."""
    to = f"publish to '{scheme}:{name}'"
    given: Mapping[Any, Any] = message.headers  # of any type: these are the user's values
    if message.key is not None and (not _is_text(message.key) or "\0" in message.key):
        raise ConfigurationError(f"{to}: the key is not valid text for Postgres and brokers; give e.g. str(order_id)")
    for header, value in given.items():
        if not _is_text(header) or not isinstance(value, str | bytes):
            wrong = f"is of type {type(value).__name__}" if isinstance(header, str) else "has a name that is not text"
            raise ConfigurationError(f"{to}: the header {header!r} {wrong}; give text or bytes, or leave it out")
        if scheme in ("kafka", "rabbitmq") and isinstance(value, str) and not _is_text(value):
            raise ConfigurationError(f"{to}: the header {header!r} has a lone surrogate in it; give bytes")
    if scheme == "sqs":
        check_group(name, message.headers)
    elif scheme == "rabbitmq":
        for what, text in [("key", message.key or ""), *(("header's name", header) for header in message.headers)]:
            if len(text.encode()) > (most := _MOST_IN_AMQP[what]):
                limit = f"{most} bytes, the limit of a {what}"
                raise ConfigurationError(f"{to}: {text[:40]!r}… is longer than {limit}; give its hash")
    elif scheme == "kafka" and record_bytes(message) > (most := largest_record(max_message_bytes)):
        instead = "publish a reference to its payload, or raise IDEMCONSUMER_MAX_MESSAGE_BYTES"
        raise BadMessage("oversized", f"{to}: it is larger than {most} bytes, the limit for Kafka; {instead}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not _NO_UTF8.search(value)


def largest_record(max_message_bytes: int) -> int:
    """The largest record, in bytes, that is sent to Kafka."""
    return max(max_message_bytes, 1024 * 1024)


def record_bytes(message: Outgoing) -> int:
    """The size of the record, or a few bytes less. Raises ValueError for text that cannot be encoded as UTF-8."""
    parts = (message.record_key or message.key or "", *message.headers, *message.headers.values())
    size = sum(len(part if isinstance(part, bytes) else part.encode()) for part in parts)
    return len(message.body) + size + 10 * len(message.headers) + _AROUND_RECORD


async def one_after_another(
    messages: Sequence[Outgoing], orders: Sequence[str | None], send: Send, seconds: float
) -> list[Unsent | None]:
    """The answer to each message. `send` never gets two messages of one order in a call. A message that was not started
    after `seconds` is answered BEHIND, and so is each message of an order that follows one that was not confirmed."""
    answers: list[Unsent | None] = [BEHIND] * len(messages)
    clock = asyncio.get_running_loop().time
    until, stopped = clock() + seconds, set[str | None]()
    for wave in waves(orders):
        if not (going := [index for index in wave if orders[index] not in stopped]) or clock() > until:
            break
        for index, answer in zip(going, await send([messages[index] for index in going]), strict=True):
            answers[index] = answer
            if answer is not None and orders[index] is not None:
                stopped.add(orders[index])
    return answers
