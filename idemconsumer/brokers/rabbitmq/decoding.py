"""Property and header values that the client refuses to read, so that one message cannot cost the others (Q7).

pamqp raises for a timestamp beyond the year 9999 (microseconds, a common slip), for a name or short string that is
not UTF-8, and for headers nested some hundred deep. The broker checks none of these. The error ends aiormq's reader,
and with it the connection: everything prefetched goes back and is counted as returned, on each new connection
again, until a quorum queue's delivery limit deletes the message *and* its innocent neighbours (20 returns in 14 s
seen, RabbitMQ 3.10). Each such value carries its length, so the rest of the message can be read nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pamqp import constants, decode
from pamqp.common import FieldTable, FieldValue

Reader = Callable[[bytes], tuple[int, FieldValue]]


def read_everything() -> None:
    """Teach pamqp, in this whole process, to give a value where it raised one of those errors.

    What it could read it reads as before, and frames that are cut short are still refused; so all that other users of
    pamqp notice is connections that stay open. A timestamp that no date can hold becomes None, as does nesting beyond
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
    # It also refuses names of queues and exchanges that RabbitMQ allows: all of up to 255 bytes.
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
    """pamqp's own loop with tolerant names; around it, a retry at every level would double the work per level."""
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
        except RecursionError:  # here too little stack may be left even for this; then the level above has more
            return 4 + int.from_bytes(value[:4], "big"), None

    return read


def read_text(raw: bytes) -> str:
    """UTF-8, else Latin-1, since a replacement character would make one key of two ids."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


read_timestamp = _timestamp(decode.timestamp)
read_table = _bounded(_field_table)
