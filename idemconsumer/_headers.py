"""Headers at rest: JSON that also holds bytes, and the mark of a message taken over from another broker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from idemconsumer._model import Message

ORIGIN: Final = "idemconsumer-origin"


def encode(headers: Mapping[str, str | bytes]) -> bytes:
    """As a JSON object; values that are not text, or none that jsonb takes, as {"base64": …}. Takes any headers."""
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


def decode(encoded: bytes) -> dict[str, str | bytes]:
    """The inverse; a value that is neither text nor bytes (published by SQL) is kept as JSON text."""
    headers: dict[str, str | bytes] = {}
    for name, value in msgspec.json.decode(encoded, type=dict[str, Any]).items():
        if isinstance(value, dict) and value.keys() == {"base64"}:
            headers[name] = msgspec.convert(value["base64"], bytes)
        else:
            headers[name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return headers


def with_origin(message: Message) -> Message:
    """The same message, about to be moved into our own queue."""
    origin = f"{message.source} {message.position}"
    return replace(message, headers={**message.headers, ORIGIN: origin})


def restored(message: Message) -> Message | None:
    """The message as its own broker delivered it; None when it was not moved."""
    origin = message.headers.get(ORIGIN)
    if origin is None:
        return None
    source, _, position = str(origin).partition(" ")
    headers = {name: value for name, value in message.headers.items() if name != ORIGIN}
    return replace(message, source=source, position=position, headers=headers)
