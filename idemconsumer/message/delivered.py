"""What a broker delivered beside body and headers, as JSON: stored for a dead letter, a saga, a message taken over."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from typing import Any, Final

import msgspec

from idemconsumer.message.headers import sent_headers, stored_name, stored_value
from idemconsumer.message.message import NO_PROPERTIES, Message, Whole

_NO_SUCH_JSON: Final = (msgspec.MsgspecError, RecursionError, ValueError, KeyError, TypeError)


class _Delivered(msgspec.Struct, omit_defaults=True):
    message_id: str | None = None
    timestamp: datetime | None = None
    partition: int | None = None
    offset: int | None = None
    record_key: bytes | None = None
    properties: dict[str, str | int] = {}
    headers: list[tuple[str, Any]] = []
    tombstone: bool = False


def encode_delivered(message: Message) -> bytes:
    """The JSON, `{}` if there is nothing. Contains headers only if one is repeated: the last value of each is stored
    anyway."""
    properties = {
        storable_text(name): storable_text(v) if isinstance(v, str) else v for name, v in message.properties.items()
    }
    return msgspec.json.encode(
        _Delivered(
            message_id=None if message.message_id is None else storable_text(message.message_id),
            timestamp=message.timestamp,
            partition=message.partition,
            offset=message.offset,
            record_key=message.record_key,
            properties=properties,
            headers=[(stored_name(name), stored_value(value)) for name, value in message.repeated_headers],
            tombstone=message.tombstone,
        )
    )


def with_delivered(message: Message, encoded: bytes | None) -> Message:
    """The message with what was stored of its delivery. None, or unreadable JSON, adds nothing."""
    try:
        found = msgspec.json.decode(encoded or b"{}", type=_Delivered)
        repeated = tuple((name, given_value(value)) for name, value in found.headers)
    except _NO_SUCH_JSON:
        return message
    return msgspec.structs.replace(
        message,
        message_id=message.message_id if found.message_id is None else found.message_id,
        timestamp=found.timestamp,
        partition=found.partition,
        offset=found.offset,
        record_key=found.record_key,
        properties=found.properties or NO_PROPERTIES,
        repeated_headers=repeated,
        tombstone=found.tombstone,
    )


def content_of(message: Message) -> bytes:
    """SHA-256 of everything that the producer sent, the same in each delivery of the message."""
    beside = (sent_headers(message.headers), encode_delivered(message))
    digests = (whole_body(message).sha256, *(hashlib.sha256(part).digest() for part in beside))
    return hashlib.sha256(b"".join(digests)).digest()


def whole_body(message: Message) -> Whole:
    """Size and SHA-256 of the whole body, of which only the beginning may be held."""
    return message.whole or Whole(len(message.body), hashlib.sha256(message.body).digest())


def size_of(message: Message) -> int:
    """Bytes of body, headers and record key, as they were sent."""
    held = held_size(message)
    return held if message.whole is None else held + message.whole.size - len(message.body)


def held_size(message: Message) -> int:
    """Bytes of body, headers and record key that are held in memory."""
    size = len(message.body) + len(message.record_key or b"")
    return size + sum(map(_header_size, message.all_headers)) if message.headers else size


def beginning(message: Message, limit: int) -> Message:
    """The message with the first `limit` bytes of its body, of its record key, and of all its headers together."""
    if size_of(message) <= limit:
        return message
    kept: list[tuple[str, str | bytes]] = []
    room = limit
    for name, value in message.all_headers:
        if (room := room - _header_size((name, value))) < 0:
            break
        kept.append((name, value))
    headers = dict(kept)
    return msgspec.structs.replace(
        message,
        body=message.body[:limit],
        record_key=None if message.record_key is None else message.record_key[:limit],
        headers=headers,
        repeated_headers=tuple(kept) if len(headers) < len(kept) else (),
    )


def _header_size(header: tuple[str, str | bytes]) -> int:
    name, value = header
    return len(name) + len(value if isinstance(value, bytes) or value.isascii() else value.encode("utf-8", "replace"))


def storable_text(text: str) -> str:
    """The text with everything replaced that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def given_value(found: Any) -> str | bytes:
    """The value that `stored_value` was given."""
    return found if isinstance(found, str) else base64.b64decode(found["base64"], validate=True)
