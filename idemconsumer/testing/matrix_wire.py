"""A proxy between a consumer and Postgres that stops after each statement: these are the points of the crash matrix.

It reads the wire protocol (version 3), so it knows the statements of any driver: a Query, or an Execute with the
statement that was prepared for it. The answer is held back: the server has executed the statement, and its client does
not know that yet. If several statements are sent at once, each is answered before the next one is forwarded. Apart from
that a client sends and receives the same as without the proxy.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Final

At = Callable[[str], Awaitable[None]]
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

BEFORE: Final = "before the first statement"
_ENCRYPTED: Final = (80877103, 80877104)  # SSLRequest and GSSENCRequest
_CANCEL: Final = 80877102
_FLUSH: Final = b"H" + struct.pack("!i", 4)
# What ends an answer: of everything up to a Sync, of one Execute before a Flush. With a G the client is asked for rows.
_READY: Final = b"ZG"
_EXECUTED: Final = b"CIsEG"
# These statements neither change nor read data, so a kill after one is the same as a kill before it.
_QUIET: Final = frozenset({"BEGIN", "START", "SET", "SHOW", "RESET", "DISCARD", "LISTEN", "UNLISTEN", "DEALLOCATE"})
_ENDS: Final = (["COMMIT"], ["ROLLBACK"])
_LONGEST: Final = 60


class Wire:
    """The connections of one process to the Postgres at `host`. `at` is awaited with the name of each point, and may
    never return."""

    def __init__(self, host: str, port: int, at: At) -> None:
        self._address = (host, port)
        self._at = at
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._begun = False

    async def open(self) -> int:
        """Listen, and return the port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections. Data that has not been forwarded never is."""
        if self._server is not None:
            self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def begin(self) -> None:
        """A statement is about to be forwarded."""
        if not self._begun:
            self._begun = True
            await self._at(BEFORE)

    async def did(self, statement: str, tags: list[str], failed: bool) -> None:
        """A statement has been executed. `tags`: the server's command tags for it."""
        if failed:
            await self._at(f"after {_short(statement)}, which failed")
        elif any(tag.partition(" ")[0] not in _QUIET for tag in tags):
            await self._at(f"after {_short(statement)}")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.ensure_future(self._talk((reader, writer)))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, client: _Streams) -> None:
        opened = [client]
        try:
            first = await _startup(*client)
            host, port = self._address
            if host.startswith("/"):
                server = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            else:
                server = await asyncio.open_connection(host, port)
            opened.append(server)
            server[1].write(first)
            if struct.unpack("!i", first[4:8]) == (_CANCEL,):
                await server[0].read()
            else:
                await _Talk(self, client, server).go_on()
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side has disconnected; the other must notice
        finally:
            for _, writer in opened:
                writer.transport.abort()


class _Talk:
    """One connection."""

    def __init__(self, wire: Wire, client: _Streams, server: _Streams) -> None:
        self._wire = wire
        self._from_client, self._to_client = client
        self._from_server, self._to_server = server
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._copying: str | None = None  # the statement that copies rows from the client
        self._simple = False  # it is a Query, which needs no Sync
        self._until = b""  # the answer is held back up to one of these messages
        self._answered = asyncio.Event()
        self._held: list[bytes] = []
        self._last = b""
        self._tags: list[str] = []
        self._errors = False  # the last statement failed
        self._failed = False  # the server skips everything before the next Sync
        self._idle = True  # the last ReadyForQuery was outside of a transaction

    async def go_on(self) -> None:
        """Forward both directions until one side disconnects."""
        async with asyncio.TaskGroup() as directions:
            directions.create_task(self._answers())
            directions.create_task(self._asks())

    async def _asks(self) -> None:
        execute: tuple[bytes, str] | None = None  # not forwarded until the next message is known
        open_statement = ""  # executed, and committed by the next Sync if there is no transaction
        copied = ""  # like `execute`, for a COPY whose rows have been sent
        while True:
            kind, message = await _message(self._from_client)
            if execute is not None and kind != b"S":
                (sent, text), execute = execute, None
                await self._do(sent + _FLUSH, _EXECUTED, text)
                open_statement = "" if self._tags[-1:] in _ENDS else text
            if kind == b"Q":
                await self._do(message, _READY, _text(message[5:]))
                self._simple = True
            elif kind == b"F":
                await self._do(message, _READY, "a function call")
            elif kind == b"S":
                sent, text = execute or (b"", copied)
                await self._do(sent + message, _READY, text, "" if text else open_statement)
                execute, open_statement, copied = None, "", ""
            elif kind in (b"c", b"f") and self._copying is not None:
                text, self._copying = self._copying, None
                if self._simple:
                    await self._do(message, _READY, text)
                else:
                    copied = text
                    self._to_server.write(message)
            elif kind == b"E":
                self._simple = False
                execute = message, self._portals.get(message[5:].partition(b"\0")[0], "a statement")
            else:
                self._note(kind, message)
                self._to_server.write(message)
            await self._to_server.drain()

    def _note(self, kind: bytes, message: bytes) -> None:
        """Remember which statement an Execute stands for."""
        if kind == b"P":
            name, text, _ = message[5:].split(b"\0", 2)
            self._prepared[name] = text.decode("utf-8", "replace")
        elif kind == b"B":
            portal, name, _ = message[5:].split(b"\0", 2)
            self._portals[portal] = self._prepared.get(name, "a statement")

    async def _do(self, messages: bytes, until: bytes, statement: str, commits: str = "") -> None:
        """Forward the messages, wait for the answer, report the point after `statement`, and pass the answer to the
        client. `commits`: the statement that this commits, unless it is inside a transaction."""
        if statement:
            await self._wire.begin()
        failed, began_idle = self._failed, self._idle
        self._tags.clear()
        self._errors = False
        self._answered.clear()
        self._last = b""
        if until is _READY or not failed:
            self._until = until
            self._to_server.write(messages)
            await self._answered.wait()
        if self._last == b"G":
            self._copying = statement
        elif statement:
            await self._wire.did(statement, self._tags, failed or self._errors)
        elif commits and began_idle and self._idle:
            await self._wire.did(f"the commit of {commits}", ["COMMIT"], failed)
        self._until = b""
        self._release()

    async def _answers(self) -> None:
        while True:
            kind, message = await _message(self._from_server)
            self._held.append(message)
            if kind == b"C":
                self._tags.append(_text(message[5:]))
            elif kind == b"s":
                self._tags.append("SUSPENDED")
            elif kind == b"E":
                self._failed = self._errors = True
            elif kind == b"Z":
                self._failed, self._idle = False, message[5:] == b"I"
            if not self._until:
                self._release()
            elif kind in self._until:
                self._last = self._last or kind
                self._answered.set()

    def _release(self) -> None:
        self._to_client.write(b"".join(self._held))
        self._held.clear()


async def _startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The first message for the server."""
    while True:
        length = await reader.readexactly(4)
        body = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
        if struct.unpack("!i", body[:4])[0] not in _ENCRYPTED:
            return length + body
        writer.write(b"N")


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)


def _text(message: bytes) -> str:
    return message.partition(b"\0")[0].decode("utf-8", "replace")


def _short(statement: str) -> str:
    line = " ".join(statement.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
