"""Headers of ours: the origin of a message that was moved into our own queue; which record waits for one that was
accepted (H46); which saga has sent one that begins another (L80)."""

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
    """What is known of a message whose next attempt is due later (D18): under which key and scope it is recorded, how
    many attempts have failed, and its id at its own broker."""

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
    """The same message, about to be moved into our own queue; `letter`: since this dead letter is redriven."""
    assert message.whole is None, "the beginning of a body would be taken for all of it"
    delivered = msgspec.Raw(encode_delivered(message))
    order = None if message.order_hint is None else stored_value(message.order_hint)
    position, message_id = storable_text(message.position), message.message_id and storable_text(message.message_id)
    origin = _Origin(message.source, position, message_id, delivered, order, pending, letter)
    return msgspec.structs.replace(message, headers={**message.headers, ORIGIN: msgspec.json.encode(origin).decode()})


def restored(message: Message) -> Message | None:
    """The message as its own broker delivered it; None when it was not moved."""
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
    """The `order_hint` of one that was stored without it, as a dead letter is."""
    scheme, _, name = message.source.partition(":")
    if scheme == "kafka":
        return message.record_key
    return message.headers.get(GROUP) if scheme == "sqs" and name.endswith(".fifo") else None


def pending_of(message: Message) -> Pending | None:
    """Of a message in our own queue; None when it does not come for a further attempt."""
    origin = _origin(message)
    return None if origin is None else origin.pending


def letter_of(message: Message) -> int | None:
    """The dead letter that a message in our own queue was redriven from."""
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
    """What nobody can guess, and only an accepted message and its record have. None where it has none, or something
    else under that name."""
    given = message.headers.get(ACCEPTED)
    token = _from_hex(given.decode("utf-8", "replace") if isinstance(given, bytes) else given)
    return token if token is not None and len(token) == TOKEN_BYTES else None


def parent_of(message: Message) -> bytes | None:
    """The stored key of the saga that began this one. Only a message of a handler's own queue says so."""
    return _from_hex(message.headers.get(PARENT)) if message.source.startswith("postgres:~") else None


def _from_hex(given: str | bytes | None) -> bytes | None:
    try:
        return bytes.fromhex(given) if isinstance(given, str) else None
    except ValueError:
        return None
