"""What one delivery is on the wire: a method, a header and bodies, read without the client's objects. Pure.

The client makes some ten objects, a task and three queue entries of each delivery, which took more time than all else
that a message needs here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec

from idemconsumer.brokers.rabbitmq.decoding import read_table, read_text, read_timestamp
from idemconsumer.message.message import Whole

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
DELIVER: Final = struct.pack(">HH", 60, 60)

_TAG: Final = struct.Struct(">QB")
_HEADER: Final = struct.Struct(">HHQH")
_Read = Callable[[bytes], tuple[int, Any]]


class Arrival(msgspec.Struct):
    """One delivery. `properties` are those that it carries, headers and timestamp among them, by their AMQP names.
    `whole` describes a body of which only the beginning was kept."""

    consumer_tag: str
    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: Mapping[str, Any] = {}
    body: bytes = b""
    whole: Whole | None = None


def _short(data: bytes) -> tuple[int, str]:
    end = 1 + data[0]
    if end > len(data):
        raise ValueError("a short string is cut off")
    return end, read_text(data[1:end])


def _octet(data: bytes) -> tuple[int, int]:
    return 1, data[0]


_PROPERTIES: Final[tuple[tuple[int, str, _Read], ...]] = (
    (1 << 15, "content_type", _short),
    (1 << 14, "content_encoding", _short),
    (1 << 13, "headers", read_table),
    (1 << 12, "delivery_mode", _octet),
    (1 << 11, "priority", _octet),
    (1 << 10, "correlation_id", _short),
    (1 << 9, "reply_to", _short),
    (1 << 8, "expiration", _short),
    (1 << 7, "message_id", _short),
    (1 << 6, "timestamp", read_timestamp),
    (1 << 5, "type", _short),
    (1 << 4, "user_id", _short),
    (1 << 3, "app_id", _short),
    (1 << 2, "cluster_id", _short),
)
_MORE_FLAGS: Final = 1


@lru_cache(maxsize=256)
def _carried(flags: int) -> tuple[tuple[str, _Read], ...]:
    return tuple((name, read) for flag, name, read in _PROPERTIES if flags & flag)


def delivered(method: bytes) -> Arrival:
    """A delivery from its method frame, without properties and body. Raises ValueError, IndexError or struct.error."""
    at, consumer_tag = _short(method[4:])
    tag, bits = _TAG.unpack_from(method, 4 + at)
    rest = method[4 + at + _TAG.size :]
    at, exchange = _short(rest)
    _, routing_key = _short(rest[at:])
    return Arrival(consumer_tag, tag, bool(bits & 1), exchange, routing_key)


def described(header: bytes) -> tuple[int, dict[str, Any]]:
    """The size of the body and the properties, from a header frame. Raises ValueError, IndexError or struct.error."""
    _, _, size, flags = _HEADER.unpack_from(header)
    if not flags:
        return size, {}
    at, more = _HEADER.size, flags & _MORE_FLAGS
    while more:  # nobody has defined what these would be
        more, at = header[at + 1] & _MORE_FLAGS, at + 2
    rest, properties = header[at:], {}
    for name, read in _carried(flags):
        taken, properties[name] = read(rest)
        rest = rest[taken:]
    return size, properties
