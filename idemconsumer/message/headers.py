"""Headers at rest: JSON that also holds bytes, and the origin of a message taken over from another broker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from idemconsumer.message.message import Message

ORIGIN: Final = "idemconsumer-origin"
UNREADABLE: Final = "idemconsumer-unreadable-headers"
_NO_SUCH_JSON: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)


class _Bytes(msgspec.Struct, forbid_unknown_fields=True):
    base64: bytes


class _Origin(msgspec.Struct):
    source: str
    position: str
    message_id: str | None


def encode_headers(headers: Mapping[str, str | bytes]) -> bytes:
    """As a JSON object. Values that jsonb does not take as text become {"base64": …}. Takes any headers."""
    return msgspec.json.encode(
        {
            name if _storable(name) else repr(name): value
            if isinstance(value, str) and _storable(value)
            else {"base64": value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value}
            for name, value in headers.items()
        }
    )


def _storable(text: str) -> bool:
    return "\0" not in text and (text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text))


def decode_headers(encoded: bytes) -> dict[str, str | bytes]:
    """The inverse. Takes anything, since SQL may have written it: other values are kept as JSON text, and anything
    that is not an object under `UNREADABLE`."""
    try:
        values = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except _NO_SUCH_JSON:
        return {UNREADABLE: encoded}
    return {name: _value(bytes(value)) for name, value in values.items()}


def _value(encoded: bytes) -> str | bytes:
    for kind in (str, _Bytes):
        try:
            value = msgspec.json.decode(encoded, type=kind)
        except _NO_SUCH_JSON:
            continue
        return value.base64 if isinstance(value, _Bytes) else str(value)
    return encoded.decode("utf-8", "replace")


def with_origin(message: Message) -> Message:
    """The same message, about to be moved into our own queue."""
    origin = msgspec.json.encode(_Origin(message.source, message.position, message.message_id)).decode()
    return msgspec.structs.replace(message, headers={**message.headers, ORIGIN: origin})


def restored(message: Message) -> Message | None:
    """The message as its own broker delivered it; None when it was not moved."""
    try:
        origin = msgspec.json.decode(message.headers[ORIGIN], type=_Origin)
    except (KeyError, *_NO_SUCH_JSON):
        return None
    headers = {name: value for name, value in message.headers.items() if name != ORIGIN}
    return msgspec.structs.replace(
        message, source=origin.source, position=origin.position, message_id=origin.message_id, headers=headers
    )
