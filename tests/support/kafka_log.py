"""What a disk or a foreign producer does to a log of Kafka: its file is changed in place, below the running broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aiokafka.record.default_records import DefaultRecordBase
from aiokafka.record.util import calc_crc32c


def edit_batch(log: Path, number: int, change: Callable[[bytearray], None], *, checked: bool = True) -> None:
    """Change the batch of this number, keeping its size. `checked`: as if it had been written so, with a right CRC."""
    data = bytearray(log.read_bytes())
    start = 0
    for _ in range(number):
        start += 12 + int.from_bytes(data[start + 8 : start + 12], "big")
    end = start + 12 + int.from_bytes(data[start + 8 : start + 12], "big")
    batch = data[start:end]
    change(batch)
    assert len(batch) == end - start
    if checked:
        at = DefaultRecordBase.CRC_OFFSET
        batch[at : at + 4] = calc_crc32c(bytes(batch[DefaultRecordBase.ATTRIBUTES_OFFSET :])).to_bytes(4, "big")
    with log.open("r+b") as file:
        file.seek(start)
        file.write(batch)


def replaced(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def change(batch: bytearray) -> None:
        assert batch.count(old) == 1
        place = batch.index(old)
        batch[place : place + len(old)] = new

    return change


def codec(number: int) -> Callable[[bytearray], None]:
    """Say that it is compressed with this codec, which it is not."""

    def change(batch: bytearray) -> None:
        batch[DefaultRecordBase.ATTRIBUTES_OFFSET + 1] |= number

    return change
