"""One delivery on the wire: a method, a header and bodies, decoded without the client's objects.

The client creates some ten objects, a task and three queue entries for each delivery, which took more time than
everything else that a message needs here (Q12).

Property and header values that the client cannot read must not cost the other messages (Q7). pamqp raises for a
timestamp beyond the year 9999 (microseconds, a common mistake), for a name or short string that is not UTF-8, and for
headers nested some hundred deep. The broker checks none of these. The error ends aiormq's reader, and with it the
connection: everything prefetched is requeued and counted as returned, on each new connection again, until a quorum
queue's delivery limit deletes the message *and* its neighbours (seen: 20 returns in 14 s, RabbitMQ 3.10). Each such
value carries its length, so the rest of the message can be read nevertheless.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from pamqp import constants, decode
from pamqp.common import FieldTable, FieldValue

from idemconsumer.message.message import Whole

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
DELIVER: Final = struct.pack(">HH", 60, 60)

_TAG: Final = struct.Struct(">QB")
_HEADER: Final = struct.Struct(">HHQH")
_Read = Callable[[bytes], tuple[int, Any]]
Reader = Callable[[bytes], tuple[int, FieldValue]]


def read_everything() -> None:
    """Make pamqp, in this whole process, return a value where it raised one of those errors.

    Everything that it could read is read as before, and truncated frames are still refused; so the only effect on other
    users of pamqp is that connections stay open. A timestamp that no date can hold becomes None, as does nesting beyond
    the interpreter's recursion limit; text that is not UTF-8 is read as Latin-1.
    """
    taught: dict[Any, Reader] = {
        decode.timestamp: read_timestamp,
        decode.short_str: _short_str(decode.short_str),
        decode.field_table: read_table,
        decode.field_array: _bounded(decode.field_array),
    }
    tables: tuple[dict[Any, Any], ...] = (decode.METHODS, decode.TABLE_MAPPING)
    for table in tables:
        table.update({code: taught[reader] for code, reader in table.items() if reader in taught})
    # It also refuses names of queues and exchanges that RabbitMQ allows: any name of up to 255 bytes.
    constants.DOMAIN_REGEX.update(dict.fromkeys(constants.DOMAIN_REGEX, re.compile(".*", re.DOTALL)))


def _timestamp(strict: Reader) -> Reader:
    def read(value: bytes) -> tuple[int, FieldValue]:
        try:
            return strict(value)
        except (ValueError, OverflowError, OSError):  # which of them depends on the platform's time_t
            if len(value) < 8:
                raise
            return 8, None

    return read


def _short_str(strict: Reader) -> Reader:
    def read(value: bytes) -> tuple[int, FieldValue]:
        try:
            return strict(value)
        except UnicodeDecodeError:
            end = 1 + value[0]
            return end, read_text(value[1:end])

    return read


def _field_table(value: bytes) -> tuple[int, FieldValue]:
    """pamqp's own loop, with tolerant names. A retry around pamqp's would double the work at each level of nesting."""
    end = 4 + int.from_bytes(value[:4], "big")
    if len(value) < max(end, 4):
        raise ValueError("Field table length exceeds available data")
    table: FieldTable = {}
    offset = 4
    while offset < end:
        start = offset + 1
        offset = start + value[offset]
        if offset > end:
            raise ValueError("Field table key length exceeds data")
        name = read_text(value[start:offset])
        consumed, table[name] = decode.embedded_value(value[offset:])
        offset += consumed
    return end, table


def _bounded(reader: Reader) -> Reader:
    def read(value: bytes) -> tuple[int, FieldValue]:
        try:
            return reader(value)
        except RecursionError:  # too little stack may be left even to handle this here; then the level above has more
            return 4 + int.from_bytes(value[:4], "big"), None

    return read


def read_text(raw: bytes) -> str:
    """Decode UTF-8, else Latin-1: a replacement character would turn two ids into one key."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


read_timestamp = _timestamp(decode.timestamp)
read_table = _bounded(_field_table)


class Arrival(msgspec.Struct):
    """One delivery. `properties` are the AMQP properties that it carries, by name, headers and timestamp included.
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
    while more:  # further flags, which no AMQP version defines
        more, at = header[at + 1] & _MORE_FLAGS, at + 2
    rest, properties = header[at:], {}
    for name, read in _carried(flags):
        taken, properties[name] = read(rest)
        rest = rest[taken:]
    return size, properties
