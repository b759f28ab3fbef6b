"""Stored values as the columns of statements, and back: claims, stored results, dead letters, the delivery log."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import msgspec

from idemconsumer.errors import CannotKeep
from idemconsumer.message.headers import encode_headers
from idemconsumer.message.message import Message, StoredResult
from idemconsumer.redaction import error_text
from idemconsumer.rules.claim import Claim
from idemconsumer.stores.literals import clean, rows_text

T = TypeVar("T")

Statement = tuple[str, dict[str, Any]]  # a statement of the engine: its name and its parameters

_HEADERS: Final = msgspec.json.Decoder(tuple[tuple[str, str], ...])
_LONGEST: Final = 20 * 86_400.0  # seconds; as milliseconds, they fit into an integer of the database


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The next attempt of a message, `after` seconds from now, from `queue` (D18).

    `attempts`: how many have failed so far; with `error` one more is counted in the same commit. `own_id`: the
    message's id at its own broker. `row`: id and delivery token of the row in `queue` that this one replaces, if the
    message came from there. `letter`: the dead letter that it was redriven from.
    """

    queue: str
    message: Message
    after: float
    attempts: int
    max_attempts: int
    error: str | None = None
    own_id: str | None = None
    row: tuple[int, int] | None = None
    letter: int | None = None


@dataclass(frozen=True, slots=True)
class NewDeadLetter:
    """A message that becomes a dead letter. A second arrival with the same `identity` is counted, not added. So is an
    arrival with `again`, if there is a dead letter with that `content` (R24).

    `body` and `headers` may be only the beginning; `body_size` and `body_sha256` are those of the whole. `delivered`:
    the broker's other data (`message.delivered`). `letter`: the dead letter that it was redriven from, which is written
    again (O3). `traceback`: of the exception that `error` describes, if there is one.
    `forward`: where it is sent too, under an id that begins with the name of the `app` (O19).
    """

    identity: bytes
    handler: str
    scope: str
    source: str
    position: str
    reason: str
    error: str
    body: bytes
    headers: Mapping[str, str | bytes]
    attempts: int = 0
    delivered: bytes = b"{}"
    body_size: int | None = None
    body_sha256: bytes | None = None
    content: bytes | None = None
    again: bytes | None = None
    letter: int | None = None
    traceback: str | None = None
    forward: str | None = None
    app: str = ""


@dataclass(frozen=True, slots=True)
class LoggedDeliveries:
    """A row of the delivery log, of one handler and kept for `keep` seconds (O22): for each delivery its outcome, its
    attempt, when it ended, and when it arrived in this process, as times of `time.monotonic`.

    A single element in `sources`, `outcomes`, `attempts` or `ended` stands for all."""

    keep: float
    app: str
    handler: str
    worker: str
    keys: Sequence[bytes]
    sources: Sequence[str]
    positions: Sequence[str]
    outcomes: Sequence[str]
    attempts: Sequence[int]
    ended: Sequence[float]
    arrived: Sequence[float]


# ------------------------------------------------------------------------------------------------------------ claims
def claimed(claims: Sequence[Claim], scopes: Sequence[int | None]) -> str:
    """The parameter of each claiming statement: an array of the type `claim`."""
    return rows_text(map(Claim.row, claims, scopes))


# ----------------------------------------------------------------------------------------------------------- results
def stored_columns(results: Sequence[StoredResult]) -> dict[str, Any]:
    """The arrays of `store_results`, without the keys (R36)."""
    statuses = [result.status for result in results]
    headers = [_written(result) for result in results]
    return {
        "bodies": [result.body for result in results],
        "types": [result.content_type for result in results],
        "statuses": None if all(status is None for status in statuses) else statuses,
        "headers": None if all(each is None for each in headers) else headers,
    }


def stored_row(result: StoredResult | None) -> dict[str, Any]:
    """The columns of a saga's final result."""
    if result is None:
        return dict.fromkeys(("result", "content_type", "status", "sent"))
    sent = _written(result)
    return {"result": result.body, "content_type": result.content_type, "status": result.status, "sent": sent}


def kept_row(result: StoredResult) -> dict[str, Any]:
    """As `stored_row`. Raises CannotKeep, before anything is sent, for a response that no column of Postgres can
    hold."""
    try:
        row = stored_row(result)
        result.content_type.encode()
    except (TypeError, ValueError, OverflowError) as error:
        raise CannotKeep(f"a response that cannot be stored in a row: {error_text(error)}") from error
    if "\0" in result.content_type:
        raise CannotKeep("a response with a NUL in its content type, which Postgres text cannot hold")
    return row


def read_result(body: bytes | None, kind: str, status: int | None, headers: bytes | None) -> StoredResult | None:
    """The inverse; `kind` is the content type. Raises msgspec.MsgspecError for invalid headers."""
    if body is None:
        return None
    return StoredResult(body, kind, status, () if headers is None else _HEADERS.decode(headers))


def _written(result: StoredResult) -> bytes | None:
    return msgspec.json.encode(result.headers) if result.headers else None


# --------------------------------------------------------------------------------- dead letters and the delivery log
def dead_letter(letter: NewDeadLetter, key: bytes | None) -> Statement:
    params = {each.name: getattr(letter, each.name) for each in fields(letter)}
    params |= {"key": key, "headers": encode_headers(letter.headers)}
    texts = ("handler", "scope", "source", "position", "reason", "error", "traceback")
    return "dead_letter", params | {name: clean(text) for name in texts if (text := params[name]) is not None}


def columns_of(logged: LoggedDeliveries) -> dict[str, Any]:
    """A row of the delivery log, all as text, which is formatted into a statement ten times as fast as arrays."""
    now = time.monotonic()
    return {
        "keep": logged.keep,
        "app": logged.app,
        "handler": logged.handler,
        "worker": logged.worker,
        "keys": _array(struct.unpack(f">{len(logged.keys)}q", b"".join([key[:8] for key in logged.keys]))),
        "sources": _lines(_alike(logged.sources)),
        "positions": _lines(logged.positions),
        "outcomes": _lines(_alike(logged.outcomes)),
        "attempts": _array(_alike(logged.attempts)),
        "ended": _array(_alike(_milliseconds(now, logged.ended))),
        "arrived": _array(_alike(_milliseconds(now, logged.arrived))),
    }


def first_bytes(key: bytes) -> int:
    """The part of a stored key that the delivery log has."""
    return int.from_bytes(key[:8], signed=True)


def _alike(values: Sequence[T]) -> Sequence[T]:
    return values[:1] if values.count(values[0]) == len(values) else values


def _array(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def _lines(texts: Sequence[str]) -> str:
    joined = "\n".join(texts)
    if joined.isascii() and "\0" not in joined and joined.count("\n") == len(texts) - 1:
        return joined
    return "\n".join(clean(text).replace("\n", " ") for text in texts)


def _milliseconds(now: float, times: Sequence[float]) -> list[int]:
    return [int(min(now - each, _LONGEST) * 1000) for each in times]
