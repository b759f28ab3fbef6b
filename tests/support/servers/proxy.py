"""A TCP proxy that loses or freezes connections on purpose, also at an exact byte of the conversation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from dataclasses import dataclass, field
from typing import Literal, Self

from idemconsumer.embedded.postgres import free_port

# What Postgres is sent, and the end of its answer. Each with its closing zero, so that the COMMIT in
# `ISOLATION LEVEL READ COMMITTED` is no match.
PLAIN_COMMIT = b"COMMIT\x00"
# Those that decide something: behind other statements, or parsed. A query of its own is that of psycopg's
# `transaction()`: a pool examines each new connection with it (R18), and makes one at any time after another was lost.
COMMIT = (b"; COMMIT\x00", b"\x00COMMIT\x00")
READY_FOR_QUERY = b"Z\x00\x00\x00\x05"
_LAST_WORDS = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
LAST_WORDS = b"E" + struct.pack("!i", len(_LAST_WORDS) + 4) + _LAST_WORDS
_KEPT = 64  # bytes; no needle is longer

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Trap:
    """One cut that waits for its bytes. `sprung` is set when the connection is gone, or `frozen`."""

    needles: tuple[bytes, ...]
    mode: Literal["before", "after"]
    answer: bytes
    frozen: bool = False
    instead: bytes = b""
    sprung: asyncio.Event = field(default_factory=asyncio.Event)

    def springs(self, before: bytes, sent: bytes) -> bool:
        """A needle may be split over two reads; one that came whole `before` was not meant."""
        return any(needle in before[1 - len(needle) :] + sent for needle in self.needles)


class Proxy:
    """Forwards a port of `host` to a target on 127.0.0.1. Use it with `async with`.

    `cut()` resets every connection and refuses new ones until `restore()`. `cut_at` resets one connection,
    the one on which a client first sends the given bytes, and leaves the others and new ones alone.

    `freeze()` and `freeze_at` instead leave connections open, and silent for good: what either side sends is dropped.
    """

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self.port = free_port()
        self._host = host
        self.lead_to(target_port)
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._trap: Trap | None = None
        self.frozen = False  # what is accepted now

    @property
    def connections(self) -> int:
        return len(self._pairs)

    async def __aenter__(self) -> Self:
        await self.restore()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await asyncio.gather(*(pair.ended.wait() for pair in list(self._pairs)))

    def cut(self) -> None:
        """Reset all connections now, refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for pair in list(self._pairs):
            pair.reset()

    async def restore(self) -> None:
        """Accept connections (again), on the same port."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, self._host, self.port)

    def lead_to(self, *target_ports: int) -> None:
        """Where new connections go, in turn; the others stay where they are."""
        self._targets = itertools.cycle(target_ports)

    def freeze(self, *, answers_only: bool = False) -> None:
        """Freeze all connections; new ones are accepted and as silent until `thaw()`. `answers_only`: the server still
        gets what these clients send, and new connections work."""
        self.frozen = not answers_only
        for pair in self._pairs:
            pair.deaf = not answers_only
            pair.dumb = True

    def silences(self, port: int) -> bool:
        """Whether the client with this port gets no answer any more."""
        return any(pair.silent and pair.port == port for pair in self._pairs)

    def thaw(self) -> None:
        """New connections work again."""
        self.frozen = False

    def freeze_at(self, *needles: bytes, mode: Literal["before", "after"], answer: bytes = READY_FOR_QUERY) -> Trap:
        """As `cut_at`, but the connection stays open."""
        self._trap = Trap(needles or COMMIT, mode, answer, frozen=True)
        return self._trap

    def cut_at(
        self, *needles: bytes, mode: Literal["before", "after"], answer: bytes = READY_FOR_QUERY, instead: bytes = b""
    ) -> Trap:
        """Cut the connection on which one of `needles` is sent next, else a COMMIT; once.

        `before`: what arrives with the needle is not forwarded, so the server never sees it. `after`: it is
        forwarded, and the cut comes when `answer` was in the server's reply; the client gets nothing of it. With
        `instead` it gets what is before `answer`, and that, and then the end.
        """
        self._trap = Trap(needles or COMMIT, mode, answer, bool(instead), instead)
        return self._trap

    def take_trap(self, before: bytes, sent: bytes) -> Trap | None:
        """The armed trap if `sent` springs it; it is disarmed then."""
        trap = self._trap
        if trap is None or not trap.springs(before, sent):
            return None
        self._trap = None
        return trap

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", next(self._targets))
        except OSError:
            _reset(writer)
            return
        if self._server is None:  # cut while the connection was being made
            _reset(writer)
            _reset(upstream[1])
            return
        pair = _Pair(self, (reader, writer), upstream)
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            self._pairs.discard(pair)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pair:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: _Streams, server: _Streams) -> None:
        self.ended = asyncio.Event()
        self._proxy = proxy
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self._sprung: Trap | None = None
        self.deaf = self.dumb = proxy.frozen  # to the client; towards it
        self.port: int = self._client_writer.get_extra_info("peername")[1]

    @property
    def silent(self) -> bool:
        return self.dumb or (self._sprung is not None and self._sprung.frozen)

    async def run(self) -> None:
        directions = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_client())]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            self.reset()
            if self._sprung is not None:
                self._sprung.sprung.set()
            self.ended.set()

    def reset(self) -> None:
        _reset(self._client_writer)
        _reset(self._server_writer)

    async def _to_server(self) -> None:
        before = b""
        with contextlib.suppress(OSError):
            while sent := await self._client_reader.read(65_536):
                trap = None if self._sprung else self._proxy.take_trap(before, sent)
                before = (before + sent)[-_KEPT:]
                self._sprung = self._sprung or trap
                if trap is not None and trap.mode == "before":
                    if not trap.frozen:
                        return
                    self.deaf = self.dumb = True
                    trap.sprung.set()
                if not self.deaf:
                    self._server_writer.write(sent)
                    await self._server_writer.drain()
            if self._sprung is not None and not self._sprung.frozen:
                # The client has given up; the server's answer is still awaited.
                await asyncio.Event().wait()

    async def _to_client(self) -> None:
        kept = b""
        with contextlib.suppress(OSError):
            while received := await self._server_reader.read(65_536):
                if self._sprung is None:
                    if not self.dumb:
                        self._client_writer.write(received)
                        await self._client_writer.drain()
                    continue
                kept += received
                if self._sprung.answer in kept:
                    if not self._sprung.frozen:
                        return
                    if self._sprung.instead and not self.deaf:
                        self._client_writer.write(kept.partition(self._sprung.answer)[0] + self._sprung.instead)
                        self._client_writer.write_eof()
                    self._sprung.sprung.set()
                    self.deaf = True


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        # Closed with a reset instead of a FIN: what is on its way is dropped, as by a crash.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
