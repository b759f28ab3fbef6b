"""What a client's work costs at the socket of its Postgres: flights and statements, whatever the machine's speed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.embedded.postgres import free_port

_PASSES: Final = 20  # of the event loop, in which a client that has more to send would have sent it
_ENDS_OF_STATEMENTS: Final = b"CEIs"  # CommandComplete, ErrorResponse, EmptyQueryResponse, PortalSuspended


@dataclass(frozen=True)
class Cost:
    """`flights`: how often a client wrote and then waited for the server, that is, round trips, but for those in which
    a statement was only prepared. `statements`: how many the server answered, each one of a simple query, COMMIT, and
    those that failed."""

    flights: int
    statements: int


class Wire:
    """Relays connections on 127.0.0.1 to a Postgres, and counts. Use it with `async with`, in the client's event loop.

    What the server answers is held back until the client has sent nothing in some passes of the loop: so what it
    sends without waiting is one flight, however early the first answer is there. A client in another thread has to
    wait for each answer.
    """

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self.flights = self.statements = 0
        self._server = str(given["host"]), int(given["port"] or 5432)
        self._port = free_port()
        # Unencrypted, as it has to be to be read.
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._port, sslmode="disable", gssencmode="disable")
        self._listener: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for pair in self._pairs:
            pair.close()
        await asyncio.gather(*(pair.ended.wait() for pair in list(self._pairs)))

    def taken(self) -> Cost:
        """Since the last call."""
        cost = Cost(self.flights, self.statements)
        self.flights = self.statements = 0
        return cost

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._server
        if host.startswith("/"):
            server = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            server = await asyncio.open_connection(host, port)
        pair = _Pair(self, (reader, writer), server)
        self._pairs.add(pair)
        try:
            await pair.run()
        finally:
            self._pairs.discard(pair)


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Pair:
    def __init__(self, wire: Wire, client: _Streams, server: _Streams) -> None:
        self.ended = asyncio.Event()
        self._wire = wire
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self._writes = 0
        self._counted = 0  # how many of them are in a flight that was counted
        self._rest = b""  # a message that has not arrived whole

    async def run(self) -> None:
        directions = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_client())]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            self.close()
            self.ended.set()

    def close(self) -> None:
        self._client_writer.close()
        self._server_writer.close()

    async def _to_server(self) -> None:
        with contextlib.suppress(OSError):
            while sent := await self._client_reader.read(65_536):
                self._writes += 1
                self._server_writer.write(sent)
                await self._server_writer.drain()

    async def _to_client(self) -> None:
        with contextlib.suppress(OSError):
            while received := await self._server_reader.read(65_536):
                await self._quiet()
                ended = self._ended(received)
                self._wire.statements += ended
                if ended and self._writes > self._counted:
                    self._wire.flights += 1
                    self._counted = self._writes
                self._client_writer.write(received)
                await self._client_writer.drain()

    async def _quiet(self) -> None:
        """The client has sent all that it sends before it knows the answer."""
        passes, before = 0, self._writes
        while passes < _PASSES:
            await asyncio.sleep(0)
            passes, before = (passes + 1, before) if self._writes == before else (0, self._writes)

    def _ended(self, received: bytes) -> int:
        """How many statements the messages that are whole now end."""
        ended, data, at = 0, self._rest + received, 0
        while len(data) >= at + 5:
            length = 1 + int.from_bytes(data[at + 1 : at + 5], "big")
            if len(data) < at + length:
                break
            ended += data[at] in _ENDS_OF_STATEMENTS
            at += length
        self._rest = data[at:]
        return ended
