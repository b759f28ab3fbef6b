"""Our own headers: the origin of a message that was moved into our own queue; the token that ties an accepted message
to its record (H46); the saga that sent a message which begins another saga (L80)."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from idemconsumer.message.delivered import encode_delivered, given_value, storable_text, with_delivered
from idemconsumer.message.headers import stored_value
from idemconsumer.message.message import Message
from idemconsumer.message.queues import GROUP

ORIGIN: Final = "idemconsumer-origin"
ACCEPTED: Final = "idemconsumer-accepted"
PARENT: Final = "idemconsumer-parent"
TOKEN_BYTES: Final = 16


class Pending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a message whose next attempt is due later (D18). Its stored key and scope, how many attempts
    have failed, and its id at its own broker."""

    key: bytes
    scope: str
    attempts: int = 0
    own_id: str | None = None


class _Origin(msgspec.Struct):
    source: str
    position: str
    message_id: str | None
    delivered: msgspec.Raw = msgspec.Raw(b"{}")
    order: Any = None
    pending: Pending | None = None
    letter: int | None = None


def with_origin(message: Message, pending: Pending | None = None, letter: int | None = None) -> Message:
    """The message with its origin, to be moved into our own queue. `letter`: the dead letter that it redrives."""
    assert message.whole is None, "the beginning of a body would be taken for all of it"
    delivered = msgspec.Raw(encode_delivered(message))
    order = None if message.order_hint is None else stored_value(message.order_hint)
    position, message_id = storable_text(message.position), message.message_id and storable_text(message.message_id)
    origin = _Origin(message.source, position, message_id, delivered, order, pending, letter)
    return msgspec.structs.replace(message, headers={**message.headers, ORIGIN: msgspec.json.encode(origin).decode()})


def restored(message: Message) -> Message | None:
    """The message as its own broker delivered it; None if it was not moved."""
    if (origin := _origin(message)) is None:
        return None
    moved = msgspec.structs.replace(
        message,
        source=origin.source,
        position=origin.position,
        message_id=origin.message_id,
        headers={name: value for name, value in message.headers.items() if name != ORIGIN},
        order_hint=origin.order,
    )
    return with_delivered(moved, bytes(origin.delivered))


def broker_order(message: Message) -> str | bytes | None:
    """The `order_hint` of a message that was stored without it, as a dead letter is."""
    scheme, _, name = message.source.partition(":")
    if scheme == "kafka":
        return message.record_key
    return message.headers.get(GROUP) if scheme == "sqs" and name.endswith(".fifo") else None


def pending_of(message: Message) -> Pending | None:
    """The pending attempt of a message in our own queue; None if it does not come for a further attempt."""
    origin = _origin(message)
    return None if origin is None else origin.pending


def letter_of(message: Message) -> int | None:
    """The dead letter that a message in our own queue was redriven from; None if it was not."""
    origin = _origin(message)
    return None if origin is None else origin.letter


def _origin(message: Message) -> _Origin | None:
    try:
        origin = msgspec.json.decode(message.headers[ORIGIN], type=_Origin)
        origin.order = None if origin.order is None else given_value(origin.order)
    except (KeyError, TypeError, msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return origin


def token_of(message: Message) -> bytes | None:
    """The random token that only an accepted message and its record have. None if the header is missing, or no valid
    token."""
    given = message.headers.get(ACCEPTED)
    token = _from_hex(given.decode("utf-8", "replace") if isinstance(given, bytes) else given)
    return token if token is not None and len(token) == TOKEN_BYTES else None


def parent_of(message: Message) -> bytes | None:
    """The stored key of the saga that began this one. Read only from a message in a handler's own queue."""
    return _from_hex(message.headers.get(PARENT)) if message.source.startswith("postgres:~") else None


def _from_hex(given: str | bytes | None) -> bytes | None:
    try:
        return bytes.fromhex(given) if isinstance(given, str) else None
    except ValueError:
        return None
