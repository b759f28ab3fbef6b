"""Batches are decompressed as the client did it, up to a limit (K14)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import codec

from idemconsumer.brokers.kafka import decompression
from idemconsumer.brokers.kafka.decompression import TooLarge, gzip_decode, lz4_decode, snappy_decode, zstd_decode

LIMIT = decompression.LEAST_LIMIT
CODECS: dict[str, tuple[Callable[[bytes], bytes], Callable[[Any], bytes], Callable[[Any], bytes]]] = {
    "gzip": (codec.gzip_encode, codec.gzip_decode, gzip_decode),
    "snappy": (lambda data: bytes(codec.snappy_encode(data, False)), codec.snappy_decode, snappy_decode),
    "snappy of Java": (codec.snappy_encode, codec.snappy_decode, snappy_decode),
    "lz4": (codec.lz4_encode, codec.lz4_decode, lz4_decode),
    "zstd": (codec.zstd_encode, codec.zstd_decode, zstd_decode),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [1, 100, 300_000, 3_000_000])
def test_it_makes_what_the_client_makes(name: str, size: int) -> None:
    encode, theirs, ours = CODECS[name]
    for data in (b"x" * size, random.Random(7).randbytes(size)):
        encoded = encode(data)
        assert ours(memoryview(encoded)) == ours(encoded) == theirs(encoded) == data


@pytest.mark.parametrize("name", CODECS)
def test_what_has_the_limit_is_made_and_what_is_above_is_not(name: str) -> None:
    encode, _, ours = CODECS[name]
    assert len(ours(encode(bytes(LIMIT)))) == LIMIT
    with pytest.raises(TooLarge, match="more than 33,554,432 bytes"):
        ours(encode(bytes(LIMIT + 1)))


def test_members_of_gzip_count_together() -> None:
    half = codec.gzip_encode(bytes(LIMIT // 2))
    assert len(gzip_decode(half * 2)) == LIMIT
    assert gzip_decode(codec.gzip_encode(b"a") + b"\0\0") == b"a"
    with pytest.raises(TooLarge):
        gzip_decode(half * 2 + codec.gzip_encode(b"x"))


@pytest.mark.parametrize("name", CODECS)
def test_what_is_damaged_is_not_taken_for_large(name: str) -> None:
    encode, _, ours = CODECS[name]
    encoded = encode(random.Random(7).randbytes(100_000))
    with pytest.raises(Exception) as caught:
        ours(encoded[: len(encoded) // 2])
    assert not isinstance(caught.value, TooLarge)


def test_the_clients_own_modules_use_it() -> None:
    from aiokafka.record import default_records, legacy_records
    from aiokafka.record._crecords import default_records as fast

    decompression.limit(1)
    for module in (default_records, legacy_records, fast):
        assert module.gzip_decode is gzip_decode
        assert module.lz4_decode is lz4_decode
