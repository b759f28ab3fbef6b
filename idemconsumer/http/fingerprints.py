"""What must be equal in two requests with one key: method, host, path, query and, as the route says, the body (H4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.http.messages import Request
from idemconsumer.message import keys
from idemconsumer.message.keys import Key
from idemconsumer.message.message import Message
from idemconsumer.rules.http import host_name

Take: TypeAlias = Callable[[Request, bytes], bytes]


def compile_fingerprint(name: str, spec: Literal["bytes", "json"] | Sequence[str] | None) -> Take | None:
    """The fingerprint that `spec` asks for; None if nothing is compared. Raises ConfigurationError for what is no
    spec. What is not JSON is compared by its bytes, whatever was asked for."""
    given: object = spec
    if given is None:
        return None
    if given == "bytes":
        return lambda request, body: _of(request, b"bytes", body)
    if given == "json":
        return lambda request, body: _of_value(request, body, keys.canonical(body))
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ConfigurationError(
            f'route {name!r}: `fingerprint` is {given!r}; write "bytes", "json", a list of paths into a JSON body '
            'such as ["amount"], or None'
        )
    take = keys.compile_fingerprint(Key.all(*given), Any, handler=name)

    def chosen(request: Request, body: bytes) -> bytes:
        try:
            named = take(Message("", body), msgspec.json.decode(body))
        except (msgspec.MsgspecError, RecursionError, UnicodeError, BadMessage):
            return _of(request, b"bytes", body)
        return _of_value(request, body, keys.canonical(body)) if named is None else _of(request, b"fields", named)

    return chosen


def _of_value(request: Request, body: bytes, value: bytes | None) -> bytes:
    return _of(request, b"bytes", body) if value is None else _of(request, b"json", value)


def _of(request: Request, kind: bytes, body: bytes) -> bytes:
    """Length-prefixed, so that no two requests look alike."""
    host, path = host_name(request.header("host") or ""), request.path
    texts = [text.encode(errors="surrogateescape") for text in (request.method, host, path)]
    parts = (*texts, request.query, kind, body)
    return keys.fingerprint(b"".join(len(part).to_bytes(8, "big") + part for part in parts))
