"""Decompression of Kafka's batches, with a limit that is checked before memory is allocated (K14).

The broker limits the compressed batch, and the client decompresses whatever arrives: 300 MB of one repeated character
are a gzip batch of 300 kB, and took 945 MB of memory. A worker with less was killed by it at each start.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

import cramjam
from aiokafka.util import NO_EXTENSIONS

Decode = Callable[[Any], bytes]

LEAST_LIMIT: Final = 32 << 20
"""Producers bound a batch before they compress it, at 16 kB to 1 MB by default."""

_XERIAL: Final = b"\x82SNAPPY\0\0\0\0\1\0\0\0\1"  # how Java frames snappy; blocks with their lengths follow
_ROOM: Final = 256 << 10  # bytes of the first buffer, for codecs that do not announce the size
_IN_EXTENSION: Final = () if NO_EXTENSIONS else ("_crecords.",)

_limit = LEAST_LIMIT


class TooLarge(Exception):
    """More bytes than the limit. No buffer of that size was allocated."""

    def __init__(self) -> None:
        super().__init__(f"more than {_limit:,} bytes")


def limit(most: int) -> None:
    """From now on, make the client in this whole process raise TooLarge for a batch above `most` bytes. The highest
    limit requested so far counts, and 32 MiB at least."""
    global _limit
    _limit = max(_limit, most)
    for folder in ("", *_IN_EXTENSION):
        for name in ("default_records", "legacy_records"):
            module = import_module(f"aiokafka.record.{folder}{name}")
            for decode in (gzip_decode, snappy_decode, lz4_decode, zstd_decode):
                if hasattr(module, decode.__name__):
                    setattr(module, decode.__name__, decode)


def gzip_decode(data: Any) -> bytes:
    parts, left, rest = list[bytes](), _limit, bytes(data)
    while rest:  # gzip members, one after another
        member = zlib.decompressobj(wbits=31)
        parts.append(member.decompress(rest, left + 1))
        if (left := left - len(parts[-1])) < 0:
            raise TooLarge
        if not member.eof:
            raise EOFError
        rest = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def snappy_decode(data: Any) -> bytes:
    blocks = list(_snappy_blocks(bytes(data)))
    if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > _limit:
        raise TooLarge
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)


def _snappy_blocks(data: bytes) -> Iterator[bytes]:
    if not data.startswith(_XERIAL[:8]):
        yield data
        return
    at = len(_XERIAL)
    while at < len(data):
        (size,) = struct.unpack_from("!i", data, at)
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def lz4_decode(data: Any) -> bytes:
    return _into_a_buffer(cramjam.lz4.decompress_into, data)


def zstd_decode(data: Any) -> bytes:
    return _into_a_buffer(cramjam.zstd.decompress_into, data)


def _into_a_buffer(decompress_into: Callable[[Any, bytearray], int], data: Any) -> bytes:
    """Retry with a larger buffer as long as the buffer is the reason for the failure."""
    size = min(_limit, max(_ROOM, 8 * len(data)))
    while True:
        buffer = bytearray(size)
        try:
            made = decompress_into(data, buffer)
        except cramjam.DecompressionError as error:
            if "write whole buffer" not in str(error):
                raise
        else:
            return bytes(memoryview(buffer)[:made])
        if size == _limit:
            raise TooLarge
        size = min(_limit, 4 * size)
