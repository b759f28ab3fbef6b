"""Records in Redis's encoding, and back."""

from __future__ import annotations

from typing import Final

import msgspec

from idemconsumer.errors import CannotKeep, StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.redaction import error_text
from idemconsumer.rules.values import Record, State


class _Response(msgspec.Struct, array_like=True):
    body: bytes
    content_type: str
    status: int | None
    headers: tuple[tuple[str, str], ...]


class _Copy(msgspec.Struct, array_like=True):
    state: int
    fingerprint: bytes | None
    canonical: bytes | None
    result: _Response | None


_ENCODER: Final = msgspec.msgpack.Encoder()
_RESPONSES: Final = msgspec.msgpack.Decoder(_Response)
_COPIES: Final = msgspec.msgpack.Decoder(_Copy)


def encode_response(result: StoredResult) -> bytes:
    """Equal bytes for equal responses. Raises CannotKeep."""
    try:
        return _ENCODER.encode(_response(result))
    except (TypeError, ValueError, OverflowError) as error:
        raise CannotKeep(f"a response that cannot be encoded: {error_text(error)}") from error


def read_record(state: bytes, fingerprint: bytes | None, canonical: bytes | None, response: bytes | None) -> Record:
    """The record in the fields of a request's value. Raises StoreUnavailable for an invalid one: it decides nothing
    (R14)."""
    try:
        result = None if response is None else _result(_RESPONSES.decode(response))
        return Record(State(int(state)), fingerprint or None, result, canonical or None)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreUnavailable("Redis: the value of a key was not written by idemconsumer") from error


def encode_copy(record: Record) -> bytes:
    response = None if record.result is None else _response(record.result)
    return _ENCODER.encode(_Copy(int(record.state), record.fingerprint, record.canonical, response))


def read_copy(value: bytes) -> Record | None:
    """The record in a copy; None for an invalid copy."""
    try:
        copy = _COPIES.decode(value)
        return Record(
            State(copy.state), copy.fingerprint, None if copy.result is None else _result(copy.result), copy.canonical
        )
    except (ValueError, msgspec.MsgspecError):
        return None


def _response(result: StoredResult) -> _Response:
    return _Response(result.body, result.content_type, result.status, result.headers)


def _result(response: _Response) -> StoredResult:
    return StoredResult(response.body, response.content_type, response.status, response.headers)
