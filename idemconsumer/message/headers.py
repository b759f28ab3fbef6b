"""Headers as they are stored: JSON that also holds bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

UNREADABLE: Final = "idemconsumer-unreadable-headers"
_ADDED: Final = ("x-death", "x-delivery-count", "x-acquired-count", "x-first-death", "x-last-death", "x-opt-")
_NO_SUCH_JSON: Final = (msgspec.MsgspecError, RecursionError, UnicodeError)


class _Bytes(msgspec.Struct, forbid_unknown_fields=True):
    base64: bytes


def encode_headers(headers: Mapping[str, str | bytes]) -> bytes:
    """Any headers as a JSON object. Values that jsonb does not take as text become {"base64": …}."""
    return msgspec.json.encode({stored_name(name): stored_value(value) for name, value in headers.items()})


def stored_name(name: str) -> str:
    return name if _storable(name) else repr(name)


def stored_value(value: str | bytes) -> str | dict[str, bytes]:
    if isinstance(value, str) and _storable(value):
        return value
    return {"base64": value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value}


def _storable(text: str) -> bool:
    return "\0" not in text and (text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text))


def sent_headers(headers: Mapping[str, str | bytes]) -> bytes:
    """The headers that the producer sent, the same in each delivery: without those that brokers add or change on the
    way."""
    sent = {name: headers[name] for name in sorted(headers) if not name.lower().startswith(_ADDED)}
    return encode_headers(sent)


def decode_headers(encoded: bytes) -> dict[str, str | bytes]:
    """The inverse of `encode_headers`. Takes any JSON, since SQL may have written it. Other values are kept as JSON
    text, a null header is left out (R41), and anything but an object is kept under `UNREADABLE`."""
    try:
        values = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except _NO_SUCH_JSON:
        return {UNREADABLE: encoded}
    return {name: _value(bytes(value)) for name, value in values.items() if bytes(value) != b"null"}


def _value(encoded: bytes) -> str | bytes:
    for kind in (str, _Bytes):
        try:
            value = msgspec.json.decode(encoded, type=kind)
        except _NO_SUCH_JSON:
            continue
        return value.base64 if isinstance(value, _Bytes) else str(value)
    return encoded.decode("utf-8", "replace")
