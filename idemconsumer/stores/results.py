"""Results at rest: the columns of `result`, and back (R36)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from idemconsumer.errors import CannotKeep
from idemconsumer.message.message import StoredResult
from idemconsumer.redaction import error_text

_HEADERS: Final = msgspec.json.Decoder(tuple[tuple[str, str], ...])


def stored_columns(results: Sequence[StoredResult]) -> dict[str, Any]:
    """The arrays of `store_results`, without the keys."""
    statuses = [result.status for result in results]
    headers = [_written(result) for result in results]
    return {
        "bodies": [result.body for result in results],
        "types": [result.content_type for result in results],
        "statuses": None if all(status is None for status in statuses) else statuses,
        "headers": None if all(each is None for each in headers) else headers,
    }


def stored_row(result: StoredResult | None) -> dict[str, Any]:
    """What ends a saga."""
    if result is None:
        return dict.fromkeys(("result", "content_type", "status", "sent"))
    sent = _written(result)
    return {"result": result.body, "content_type": result.content_type, "status": result.status, "sent": sent}


def kept_row(result: StoredResult) -> dict[str, Any]:
    """As `stored_row`. Raises CannotKeep for what Postgres has no column for, before anything is sent."""
    try:
        row = stored_row(result)
        result.content_type.encode()
    except (TypeError, ValueError, OverflowError) as error:
        raise CannotKeep(f"a response that cannot be stored in a row: {error_text(error)}") from error
    if "\0" in result.content_type:
        raise CannotKeep("a response with a NUL in its content type, which Postgres text cannot hold")
    return row


def read_result(body: bytes | None, kind: str, status: int | None, headers: bytes | None) -> StoredResult | None:
    """The inverse; `kind` is the content type. Raises msgspec.MsgspecError for headers that are none."""
    if body is None:
        return None
    return StoredResult(body, kind, status, () if headers is None else _HEADERS.decode(headers))


def _written(result: StoredResult) -> bytes | None:
    return msgspec.json.encode(result.headers) if result.headers else None
