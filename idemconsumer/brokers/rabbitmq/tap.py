"""A connection whose deliveries bypass the client; everything else goes through it (Q12).

The client lets its user create the transport. Ours inspects the bytes as they arrive: the frames of a delivery become
an `Arrival` at once, if the channel has a taker; all other frames are passed on to the client.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import aio_pika
import aiormq
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from idemconsumer.brokers.rabbitmq.amqp_channel import Ack
from idemconsumer.brokers.rabbitmq.arrivals import (
    BODY,
    DELIVER,
    HEADER,
    HEARTBEAT,
    METHOD,
    Arrival,
    delivered,
    described,
)
from idemconsumer.message.message import Whole

Taker = Callable[[Arrival], None]

_FRAME: Final = struct.Struct(">BHI")
_END: Final = 0xCE
_KINDS: Final = frozenset((METHOD, HEADER, BODY, HEARTBEAT))
_ALIVE: Final = _FRAME.pack(HEARTBEAT, 0, 0) + bytes([_END])
_ACK: Final = struct.Struct(">BHIHHQBB")
_BASIC, _BASIC_ACK = 60, 80
_ACK_SIZE: Final = 13


class _Coming:
    """A delivery of which not all frames have arrived."""

    __slots__ = ("_arrival", "_digest", "_parts", "_room", "_size", "left")

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self._parts: list[bytes] = []
        self._digest: hashlib._Hash | None = None
        self.left: int | None = None  # bytes of the body; unknown before the header

    def described(self, header: bytes, most: int) -> None:
        """Take over the header. Of a body above `most` bytes only that many are kept."""
        self.left, self._arrival.properties = described(header)
        if self.left > most:
            self._size, self._room, self._digest = self.left, most, hashlib.sha256()

    def add(self, content: bytes) -> None:
        assert self.left is not None
        self.left -= len(content)
        if self._digest is not None:
            self._digest.update(content)
            content = content[: self._room]
            self._room -= len(content)
        self._parts.append(content)

    def arrival(self) -> Arrival:
        """The complete delivery, once no bytes are left."""
        arrival, parts = self._arrival, self._parts
        arrival.body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._digest is not None:
            arrival.whole = Whole(self._size, self._digest.digest())
        return arrival


class DeliveryReader(asyncio.StreamReader):
    """The stream that the client reads from. `takers` get the deliveries of their channels as they arrive, in order,
    with at most `most_of_body` bytes of each body."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.takers: dict[int, Taker] = {}
        self.most_of_body = sys.maxsize
        self._coming: dict[int, _Coming] = {}
        self._rest = bytearray()  # the beginning of a frame
        self._needed = _FRAME.size
        self._is_amqp = True
        self._told = 0.0
        self.heard_at = time.monotonic()

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        self.heard_at = time.monotonic()
        if not self._is_amqp:
            super().feed_data(data)
            return
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data, self._rest = bytes(self._rest), bytearray()
        try:
            self._read(data)
        except Exception as error:  # noqa: BLE001 - here it would end the connection without its reason
            self.set_exception(ConnectionError(f"a delivery cannot be read: {error!r}"))

    def feed_eof(self) -> None:
        if self._rest:
            super().feed_data(bytes(self._rest))
        super().feed_eof()

    def _read(self, data: bytes) -> None:
        at = passed = 0
        end, self._needed = len(data), _FRAME.size
        while end - at >= _FRAME.size:
            kind, channel, size = _FRAME.unpack_from(data, at)
            following = at + _FRAME.size + size + 1
            if kind not in _KINDS or (following <= end and data[following - 1] != _END):
                self._is_amqp = False  # the client reports what it is
                super().feed_data(data[passed:])
                return
            if following > end:
                self._needed = following - at
                break
            if channel in self.takers and self._take(kind, channel, data[at + _FRAME.size : following - 1]):
                if passed < at:
                    super().feed_data(data[passed:at])
                passed = following
            at = following
        if passed < at:
            super().feed_data(data[passed:at])
        elif passed:
            self._tell()
        self._rest += data[at:]

    def _take(self, kind: int, channel: int, content: bytes) -> bool:
        coming = self._coming.get(channel)
        if coming is None:
            if kind != METHOD or content[:4] != DELIVER:
                return False
            self._coming[channel] = _Coming(delivered(content))
            return True
        if kind == HEADER and coming.left is None:
            coming.described(content, self.most_of_body)
        elif kind == BODY and coming.left:
            coming.add(content)
        else:
            raise ValueError(f"a frame of kind {kind} within a delivery")
        if coming.left is not None and coming.left <= 0:
            del self._coming[channel]
            self.takers[channel](coming.arrival())
        return True

    def _tell(self) -> None:
        """Pass a heartbeat on to the client: the broker sends none while it delivers, and the client waits for any
        frame."""
        if (now := time.monotonic()) - self._told > 1.0:
            self._told = now
            super().feed_data(_ALIVE)


class TappedConnection(aio_pika.Connection):
    """A plain connection of the client that handles deliveries and acks itself."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.kwargs["transport_factory"] = _Transport(self)
        self.reader: DeliveryReader
        self.writer: asyncio.StreamWriter

    def take(self, channel: int, taker: Taker, most_of_body: int) -> None:
        """From now on the deliveries of this channel go to `taker`, not to a callback of the client. Of a body above
        `most_of_body` bytes, only the beginning is kept."""
        self.reader.takers[channel] = taker
        self.reader.most_of_body = most_of_body

    def acknowledge(self, channel: int, acks: Iterable[Ack]) -> None:
        """Send all these acks, before anything that the client is asked to send from now on. They are lost on a dead
        connection."""
        if self.writer.is_closing():
            return
        frames = [_ACK.pack(METHOD, channel, _ACK_SIZE, _BASIC, _BASIC_ACK, a.tag, a.multiple, _END) for a in acks]
        self.writer.write(b"".join(frames))


class _Transport(aiormq.TransportFactory):
    def __init__(self, connection: TappedConnection) -> None:
        self._connection = connection

    async def create(self, url: URL, **given: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = given.pop("ssl_context_provider")
        assert url.host is not None
        assert url.port is not None
        loop, reader = asyncio.get_running_loop(), DeliveryReader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol,
                url.host,
                url.port,
                ssl=await tls.get_context() if url.scheme == "amqps" else None,
                **given,
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._connection.reader, self._connection.writer = reader, writer
        return reader, writer
