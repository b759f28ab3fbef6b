"""Batches taken apart: the same records as the client reads, and faults that cost no more than what they are in."""

from __future__ import annotations

import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBase, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from idemconsumer.brokers.kafka.batches import Piece, RecordBatch, batch_at

AT = TopicPartition("orders", 3)


def built(count: int = 4, *, base: int = 10, codec: int = 0, producer: int = -1) -> bytes:
    """In a transaction of this `producer`, if there is one."""
    builder = DefaultRecordBatchBuilder(2, codec, int(producer >= 0), producer, 0, 0, 1 << 20)
    for number in range(count):
        headers = [(f"name{number}", b"\xff"), ("none", None)]
        key = None if number == 0 else b"key%d" % number
        builder.append(number, 1_000 + number, key, b"value%d" % number, headers)
    data = bytearray(builder.build())
    data[:8] = base.to_bytes(8, "big")
    return bytes(data)


def with_crc(data: bytes) -> bytes:
    crc: bytes = calc_crc32c(data[DefaultRecordBase.ATTRIBUTES_OFFSET :]).to_bytes(4, "big")
    return data[: DefaultRecordBase.CRC_OFFSET] + crc + data[DefaultRecordBase.ATTRIBUTES_OFFSET :]


def found(data: bytes, position: int = 0) -> RecordBatch:
    batch = batch_at(AT, data, position)
    assert batch is not None
    return batch


def spans(pieces: list[Piece]) -> list[tuple[int, int, bool]]:
    return [(piece.offset, piece.next, piece.fault is not None) for piece in pieces]


@pytest.mark.parametrize("codec", range(5))
def test_what_can_be_read_is_what_the_client_reads(codec: int) -> None:
    data = built(codec=codec)
    batch = MemoryRecords(data).next_batch()
    assert batch is not None
    client = [(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in batch]
    ours = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in (piece.record for piece in found(data).pieces)]
    assert ours == client
    assert found(data).next == batch.next_offset
    assert not any(piece.fault for piece in found(data).pieces)


def test_the_batch_of_a_position_begins_there() -> None:
    data = built() + built(base=20)
    assert spans(found(data, 12).pieces) == [(12, 13, False), (13, 14, False)]
    assert [piece.offset for piece in found(data, 14).pieces] == [20, 21, 22, 23]
    assert batch_at(AT, data, 24) is None
    assert batch_at(AT, data[:-1], 14) is None


@pytest.mark.parametrize(
    ("producer", "aborted", "read"),
    [
        (7, [], True),
        (7, [(7, 10)], False),
        (7, [(8, 0), (7, 3), (7, 20)], False),
        (7, [(7, 11), (8, 10)], True),  # its next one, and another's
        (-1, [(-1, 10)], True),  # it is in no transaction
    ],
)
def test_what_was_aborted_has_no_records(producer: int, aborted: list[tuple[int, int]], read: bool) -> None:
    batch = batch_at(AT, built(producer=producer), 12, aborted)
    assert batch is not None
    assert (spans(batch.pieces), batch.next) == ([(12, 13, False), (13, 14, False)] if read else [], 14)


def test_of_what_was_aborted_nothing_is_taken_apart() -> None:
    batch = batch_at(AT, with_crc(built(producer=7).replace(b"name2", b"na\xfee2")), 10, [(7, 10)])
    assert batch is not None
    assert batch.pieces == []


def test_a_headers_name_that_is_no_text_costs_its_record() -> None:
    pieces = found(with_crc(built().replace(b"name2", b"na\xfee2"))).pieces
    assert spans(pieces) == [(10, 11, False), (11, 12, False), (12, 13, True), (13, 14, False)]
    assert (pieces[2].record.key, pieces[2].record.value) == (b"key2", b"value2")
    assert pieces[2].record.headers[0] == ("na\\xfee2", b"\xff")


@pytest.mark.parametrize("codec", [0, 1])
def test_a_wrong_checksum_costs_its_batch(codec: int) -> None:
    data = bytearray(built(codec=codec))
    data[-1] ^= 1
    (piece,) = found(bytes(data), 11).pieces
    assert spans([piece]) == [(10, 14, True)]
    assert piece.record.value == bytes(data)


def test_a_wrong_structure_costs_what_is_behind_it() -> None:
    data = built()
    place = data.index(b"value1")
    broken = with_crc(data[: place - 1] + b"\x7e" + data[place:])  # a value that is longer than its record
    assert spans(found(broken).pieces) == [(10, 11, False), (11, 14, True)]


def test_an_old_format_costs_its_batch() -> None:
    data = bytearray(built())
    data[DefaultRecordBase.CRC_OFFSET - 1] = 1
    assert spans(found(bytes(data), 10).pieces) == [(10, 11, True)]
