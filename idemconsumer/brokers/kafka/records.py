"""A record of Kafka as a message."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from idemconsumer.message.message import Message


def message_of(source: str, record: Any) -> Message:
    """Translate one record of aiokafka. Without a value it is a tombstone; a header without a value is none (R41)."""
    pairs = tuple((name, _text(value)) for name, value in record.headers if value is not None)
    headers = dict(pairs)
    return Message(
        source=source,
        body=record.value or b"",
        headers=headers,
        order_hint=record.key,
        position=f"{record.topic}-{record.partition}-{record.offset}",
        timestamp=_time(record.timestamp),
        partition=record.partition,
        offset=record.offset,
        record_key=record.key,
        repeated_headers=pairs if len(headers) < len(pairs) else (),
        tombstone=record.value is None,
    )


def size_of_record(record: Any) -> int:
    """Bytes of its value, its key and its headers."""
    size = len(record.value or b"") + len(record.key or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers) if record.headers else size


def _time(milliseconds: int | None) -> datetime | None:
    if milliseconds is None or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # microseconds, a common slip, are a year beyond 9999
        return None


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
