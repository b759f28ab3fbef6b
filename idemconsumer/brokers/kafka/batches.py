"""Decodes, one record at a time, batches that the client has failed to read (K13).

The client stops at the first fault and reports neither where it is nor what follows. Here a fault costs only the part
that it is in: one record whose header name is not text, or the whole batch if its checksum or compression is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBase
from aiokafka.record.util import calc_crc32c, decode_varint
from aiokafka.structs import ConsumerRecord

from idemconsumer.brokers.kafka.decompression import TooLarge, gzip_decode, lz4_decode, snappy_decode, zstd_decode
from idemconsumer.errors import BadMessage

_OVERHEAD = struct.calcsize(">qi")
_MAGIC_AT = struct.calcsize(">qii")
_EPOCH = struct.Struct(">qiib")  # base offset, length of the rest, the leader's epoch, format
_HEADER = DefaultRecordBase.HEADER_STRUCT
_CODECS = {1: ("gzip", gzip_decode), 2: ("snappy", snappy_decode), 3: ("lz4", lz4_decode), 4: ("zstd", zstd_decode)}


@dataclass(frozen=True, slots=True)
class Piece:
    """A record, or a stand-in for one or more that cannot be read; `next` is the offset after it.

    `fault` says why it cannot be read, without quoting it; `record` then holds what is left of it. `whole`: these are
    the bytes as they were written, so no replica has a better copy. `large`: the batch exceeds our limit (K14).
    """

    record: ConsumerRecord
    next: int
    fault: str | None = None
    whole: bool = False
    large: bool = False

    @property
    def offset(self) -> int:
        return int(self.record.offset)


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """`next` is the offset after its last record; `leaders` are its epochs, as `Leaders.follow` takes them."""

    next: int
    pieces: list[Piece]
    leaders: Sequence[tuple[int, int]]


def refused(pieces: Iterable[Piece]) -> dict[int, BadMessage]:
    """For each piece that cannot be read, by offset, the reason for its dead letter."""
    return {
        piece.offset: BadMessage(
            "oversized" if piece.large else "unreadable",
            f"{piece.fault}; offsets {piece.offset} to {piece.next - 1}",
        )
        for piece in pieces
        if piece.fault is not None
    }


def batch_at(
    at: TopicPartition, fetched: bytes, position: int, aborted: Iterable[tuple[int, int]] = ()
) -> RecordBatch | None:
    """The batch that contains `position`, or the first one after it; None if what was fetched has none.

    `aborted`: the aborted transactions that Kafka lists with a fetch, by producer and first offset. A batch of such a
    transaction has no records to read. None of them ends before `position`, so this batch belongs to one if the
    transaction has begun by then.
    """
    for raw in _batches(fetched):
        base = int.from_bytes(raw[:8], "big", signed=True)
        if len(raw) <= _MAGIC_AT or raw[_MAGIC_AT] < 2 or len(raw) < _HEADER.size:
            following = max(base, position) + 1
        else:
            following = base + _HEADER.unpack_from(raw)[6] + 1
        if following > position:
            undone = {producer for producer, first in aborted if first <= base}
            pieces = [each for each in _pieces(at, raw, base, following, undone) if each.next > position]
            return RecordBatch(following, pieces, list(leaders_of(raw)))
    return None


def leaders_of(fetched: bytes) -> Iterator[tuple[int, int]]:
    """Pairs of an offset and the leader epoch that holds from there on, for the fetched batches of a partition."""
    start, last = 0, None
    while len(fetched) - start >= _EPOCH.size:
        base, length, leader, magic = _EPOCH.unpack_from(fetched, start)
        if length <= 0:
            return
        if magic == 2 and leader != last:
            yield base, leader
            last = leader
        start += _OVERHEAD + length


def _batches(fetched: bytes) -> Iterator[bytes]:
    start = 0
    while len(fetched) - start >= _OVERHEAD:
        length = int.from_bytes(fetched[start + 8 : start + _OVERHEAD], "big", signed=True)
        end = start + _OVERHEAD + length
        if length < 0 or end > len(fetched):
            return
        yield fetched[start:end]
        start = end


def _pieces(at: TopicPartition, raw: bytes, base: int, following: int, undone: Collection[int]) -> list[Piece]:
    def whole(fault: str) -> list[Piece]:
        return [_unreadable(at, base, following, raw, fault)]

    if len(raw) < _HEADER.size or raw[_MAGIC_AT] != 2:
        return whole("the batch has a format that is not known")
    _, _, _, _, crc, attributes, _, first_time, max_time, producer, _, _, count = _HEADER.unpack_from(raw)
    if calc_crc32c(raw[DefaultRecordBase.ATTRIBUTES_OFFSET :]) != crc:
        return whole("the batch's checksum (CRC) is wrong")
    if attributes & DefaultRecordBase.CONTROL_MASK:
        return []
    if attributes & DefaultRecordBase.TRANSACTIONAL_MASK and producer in undone:
        return []
    records = raw[_HEADER.size :]
    if codec := attributes & DefaultRecordBase.CODEC_MASK:
        if codec not in _CODECS:
            return whole(f"the batch's compression {codec} is not known")
        name, decode = _CODECS[codec]
        try:
            records = decode(records)
        except TooLarge as error:
            fault = f"the batch has {error} when decompressed ({name}), so it is stored in its compressed form"
            return [replace(*whole(fault), whole=True, large=True)]
        except Exception as error:  # noqa: BLE001 - of whichever library decompresses
            return whole(f"the batch cannot be decompressed ({name}: {type(error).__name__})")
    appended = attributes & DefaultRecordBase.TIMESTAMP_TYPE_MASK
    return _records(at, bytearray(records), count, base, following, first_time, max_time if appended else None)


def _records(
    at: TopicPartition, data: bytearray, count: int, base: int, following: int, first_time: int, appended: int | None
) -> list[Piece]:
    pieces: list[Piece] = []
    pos = 0
    for _ in range(count):
        expected = pieces[-1].next if pieces else base
        try:
            length, start = decode_varint(data, pos)
            pos = start + length
            if length < 0 or pos > len(data):
                raise ValueError
            pieces.append(_record(at, data[start:pos], base, first_time, appended))
        except (ValueError, IndexError):
            rest = bytes(data[start:]) if pieces else bytes(data)
            return [*pieces, _unreadable(at, expected, following, rest, "the batch's records have a wrong structure")]
    return pieces


def _record(at: TopicPartition, data: bytearray, base: int, first_time: int, appended: int | None) -> Piece:
    """One record. Raises ValueError or IndexError when not even its offset, key and value can be decoded."""
    time_delta, pos = decode_varint(data, 1)
    offset_delta, pos = decode_varint(data, pos)
    key, pos = _bytes(data, pos)
    value, pos = _bytes(data, pos)
    count, pos = decode_varint(data, pos)
    headers, fault = [], None
    for _ in range(count):
        name, pos = _bytes(data, pos)
        header, pos = _bytes(data, pos)
        if name is None:
            raise ValueError
        try:
            text = name.decode()
        except UnicodeDecodeError:
            text, fault = name.decode(errors="backslashreplace"), "the name of a header is not UTF-8"
        headers.append((text, header))
    if pos != len(data):
        raise ValueError
    time = first_time + time_delta if appended is None else appended
    record = _consumer_record(at, base + offset_delta, time, key, value, tuple(headers))
    return Piece(record, base + offset_delta + 1, fault, whole=True)


def _bytes(data: bytearray, pos: int) -> tuple[bytes | None, int]:
    length, pos = decode_varint(data, pos)
    if length < 0:
        return None, pos
    if pos + length > len(data):
        raise ValueError
    return bytes(data[pos : pos + length]), pos + length


def _unreadable(at: TopicPartition, offset: int, following: int, raw: bytes, fault: str) -> Piece:
    return Piece(_consumer_record(at, offset, -1, None, raw, ()), following, fault)


def _consumer_record(
    at: TopicPartition,
    offset: int,
    time: int,
    key: bytes | None,
    value: bytes | None,
    headers: tuple[tuple[str, bytes | None], ...],
) -> ConsumerRecord:
    sizes = (-1 if key is None else len(key), -1 if value is None else len(value))
    return ConsumerRecord(at.topic, at.partition, offset, time, 0, key, value, None, *sizes, headers)
