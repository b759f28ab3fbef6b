"""The format of messages in SQS: text bodies, at most ten attributes, size limits. Pure.

SQS accepts bodies of at least one character that XML allows, and attributes with a non-empty value of such characters
under a name of letters, digits, `_`, `-` and `.`. Everything else is encoded so that another idemconsumer can read it
back: a body as base64, headers as one JSON object in the attribute `idemconsumer-headers`. The header
`idemconsumer-message-id` is the message's id; a key that is given takes precedence over it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final
from uuid import uuid4

from idemconsumer.brokers.sqs.sqs_client import Queue
from idemconsumer.errors import BadMessage, ConfigurationError
from idemconsumer.message.headers import decode_headers, encode_headers
from idemconsumer.message.message import Message
from idemconsumer.message.queues import DEDUPLICATION_ID, GROUP, TOKEN, check_group
from idemconsumer.ports.broker import Outgoing

BATCH: Final = 10  # messages in one request
MAX_ATTRIBUTES: Final = 10
MAX_DELAY: Final = 900.0  # seconds

_ID: Final = "idemconsumer-message-id"
_BODY: Final = "idemconsumer-body"
_PACKED: Final = "idemconsumer-headers"
_MARKS: Final = {_BODY, _PACKED}  # attributes of our own; a header of such a name is packed
# A request of ten may have as many bytes as the largest message of any queue; that limit has always been at least 256
# KiB.
_LEAST_REQUEST: Final = 262_144

_UNSAYABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAME = re.compile(r"(?!aws\.|amazon\.)(?=.{1,256}$)[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII | re.IGNORECASE)

Entry = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ outgoing
def entry_of(queue: Queue, message: Outgoing) -> Entry:
    """One entry of SendMessageBatch, without its `Id`.

    Raises BadMessage when the message is larger than the queue accepts, ConfigurationError for a group that is missing
    or invalid.
    """
    check_group(queue.given or queue.name, message.headers)
    headers = dict(message.headers)
    group = headers.pop(GROUP, None)
    headers.pop(DEDUPLICATION_ID, None)  # the deduplication id of the message that this one was made from
    if message.key is not None:
        headers.pop(_ID, None)
        headers = {_ID: message.key, **headers}
    body, mark = _body(message.body)
    attributes = _attributes(headers, mark)
    size = _size(body, attributes)
    if size > queue.max_bytes:
        raise BadMessage(
            "oversized",
            f"{size} bytes with its headers, but queue {queue.name!r} accepts {queue.max_bytes}; publish a reference "
            "to the payload instead, or raise the queue's MaximumMessageSize",
        )
    entry: Entry = {"MessageBody": body}
    if attributes:
        entry["MessageAttributes"] = {
            name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()
        }
    if message.delay:
        entry["DelaySeconds"] = _delay(queue, message.delay)
    return entry | _fifo(queue, group, message.key)


def _delay(queue: Queue, seconds: float) -> int:
    instead = f"publish to a postgres: queue with the delay, and have its handler publish to {queue.source}"
    if queue.fifo:
        why = "a FIFO queue cannot delay a message"
        raise ConfigurationError(f"publish to {queue.source} with a delay: {why}; {instead}")
    if seconds > MAX_DELAY:
        raise ConfigurationError(f"publish to {queue.source} with a delay: SQS allows 15 minutes at most; {instead}")
    return math.ceil(seconds)


def requests(queue: Queue, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Batches that each fit into one request, numbered by `Id`, in order."""
    batch: list[Entry] = []
    room = limit = max(queue.max_bytes, _LEAST_REQUEST)
    for entry in entries:
        attributes = {name: value["StringValue"] for name, value in entry.get("MessageAttributes", {}).items()}
        size = _size(entry["MessageBody"], attributes)
        if len(batch) == BATCH or (batch and size > room):
            yield batch
            batch, room = [], limit
        batch.append({"Id": str(len(batch)), **entry})
        room -= size
    if batch:
        yield batch


def _body(body: bytes) -> tuple[str, str | None]:
    """The text to send, and the mark that says how to decode it."""
    if not body:
        return "empty", "empty"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    if _UNSAYABLE.search(text):
        return base64.b64encode(body).decode(), "base64"
    return text, None


def _attributes(headers: Mapping[str, str | bytes], mark: str | None) -> dict[str, str]:
    """As many headers as fit into attributes; the others are packed into one more attribute."""
    attributes = {} if mark is None else {_BODY: mark}
    fit = {name: value for name, value in headers.items() if isinstance(value, str) and _fits(name, value)}
    fit = {name: value for name, value in fit.items() if name not in _MARKS}
    room = MAX_ATTRIBUTES - len(attributes)
    if len(headers) > min(len(fit), room):
        fit = dict(islice(fit.items(), room - 1))
        packed = {name: value for name, value in headers.items() if name not in fit}
        attributes[_PACKED] = encode_headers(packed).decode()
    return attributes | fit


def _fits(name: str, value: str) -> bool:
    return _NAME.fullmatch(name) is not None and value != "" and not _UNSAYABLE.search(value)


def _size(body: str, attributes: Mapping[str, str]) -> int:
    """The size as SQS counts it, with the names, types and values of the attributes."""
    parts = (f"{name}String{value}" for name, value in attributes.items())
    return len(body.encode()) + sum(len(part.encode()) for part in parts)


def _fifo(queue: Queue, group: str | bytes | None, key: str | None) -> Entry:
    if not queue.fifo:
        return {} if group is None else {GROUP: group}  # fair queues divide their consumers among the groups
    if key is not None:
        token = key if TOKEN.fullmatch(key) else hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    elif queue.content_based:
        return {GROUP: group}
    else:
        token = uuid4().hex  # the same when the client retries the request
    return {GROUP: group, DEDUPLICATION_ID: token}


# ------------------------------------------------------------------------------------------------------------ incoming
def message_of(queue: Queue, raw: Mapping[str, Any]) -> Message:
    """Translate one arrival. Numbers arrive as text, binary attributes as text if they are UTF-8.

    The message id is the key that it was published with, else the id of SQS, which identifies redeliveries but not a
    message that a producer sent twice. It is never the deduplication id of a FIFO queue, which becomes a header (A7):
    SQS compares that id for five minutes only, and in some queues only within a group, so another message may have the
    same.
    """
    system = raw.get("Attributes") or {}
    headers = {name: _value(value) for name, value in (raw.get("MessageAttributes") or {}).items()}
    packed, mark = headers.pop(_PACKED, ""), headers.pop(_BODY, None)
    if packed:
        headers |= decode_headers(packed if isinstance(packed, bytes) else packed.encode())
    headers |= {name: system[name] for name in (GROUP, DEDUPLICATION_ID) if name in system}
    text = raw.get("Body") or ""
    body = _read(text, mark)
    given = headers.pop(_ID, None)
    return Message(
        source=queue.source,
        body=body,
        headers=headers,
        message_id=given if isinstance(given, str) else raw["MessageId"],
        order_hint=system.get(GROUP) if queue.fifo else None,
        position=f"{queue.name}#{raw['MessageId']}",
        timestamp=_time(system.get("SentTimestamp")),
    )


def receives(raw: Mapping[str, Any]) -> int:
    """How often the message was received, this time included; approximate, according to SQS."""
    count = str((raw.get("Attributes") or {}).get("ApproximateReceiveCount", "1"))
    return max(1, int(count)) if count.isdecimal() else 1


def _time(milliseconds: object) -> datetime | None:
    text = str(milliseconds)
    return datetime.fromtimestamp(int(text) / 1000, UTC) if text.isdecimal() and len(text) < 15 else None


def _read(text: str, mark: str | bytes | None) -> bytes:
    if mark == "empty":
        return b""
    if mark == "base64":
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # another program's mark: the body is taken as it is
    return text.encode("utf-8", "surrogatepass")


def _value(value: Mapping[str, Any]) -> str | bytes:
    raw = value.get("BinaryValue")
    if raw is None:
        return str(value.get("StringValue", ""))
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return bytes(raw)
