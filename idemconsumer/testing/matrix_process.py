"""Code that runs in the processes of the crash matrix.

The first process loads the consumer once, and then forks a process for each request. It has one thread, no event loop
and no connection, unless the consumer's modules create some when they are imported. All these processes end with the
test.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from idemconsumer.message.message import Message

GIVEN = "given"
SOCKET = "socket"


class MatrixDelivery:
    """A message as a broker delivers it: the argument of `consume` in `crash_matrix`. `message` has all of it."""

    def __init__(self, message: Message, channel: MatrixChannel) -> None:
        self.message = message
        self._channel = channel
        self._acknowledged = self._worked = False

    @property
    def body(self) -> bytes:
        """The message's payload."""
        return self.message.body

    @property
    def headers(self) -> Mapping[str, str | bytes]:
        """The message's headers."""
        return self.message.headers

    async def ack(self) -> None:
        """Acknowledge the message, which is then not delivered again. If `consume` returns, this acknowledges the
        message too; if it raises, it does not. A second call does nothing."""
        if not self._acknowledged:
            self._acknowledged = True
            await self._channel.ask("ack")

    async def _returned(self) -> None:
        """Called when `consume` has returned."""
        if self._acknowledged:
            await self._channel.ask("return")
        elif not self._worked:
            await self.ack()

    def _at(self, point: str) -> None:
        """Report a point of a worker, which settles its messages itself."""
        self._worked = True
        self._channel.at(point)


Consume = Callable[[MatrixDelivery, str], Awaitable[object]]


class MatrixChannel:
    """The channel to the test: lines of JSON. Each line is answered before the process goes on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    async def ask(self, kind: str, word: object = None) -> str:
        """Send a line, and return the answer. If the test has ended, this ends the process."""
        async with self._turn:
            self._writer.write(line_of(kind, word))
            if answer := await self._reader.readline():
                return answer.decode().strip()
        os._exit(1)

    def at(self, point: str) -> None:
        """Report a point. The event loop is blocked while the test decides, so no other request is sent meanwhile."""
        descriptor = self._writer.get_extra_info("socket").fileno()
        os.write(descriptor, line_of("point", point))
        select.select([descriptor], [], [])  # a read would not block, since the loop has made the socket non-blocking
        if not os.read(descriptor, 64):
            os._exit(1)


def line_of(kind: str, word: object) -> bytes:
    """One line for a channel."""
    return json.dumps((kind, word)).encode() + b"\n"


async def _work(folder: Path, consume: Consume, message: Message) -> NoReturn:
    channel = MatrixChannel(*await asyncio.open_unix_connection(folder / SOCKET))
    dsn = await channel.ask("begun", os.getpid())
    while True:
        delivery = MatrixDelivery(message, channel)
        try:
            await consume(delivery, dsn)
            await delivery._returned()
        except Exception:  # noqa: BLE001 - whatever the error, the broker delivers the message again
            dsn = await channel.ask("raised", traceback.format_exc())
        else:
            dsn = await channel.ask("done")


def _load(module: str, file: str | None, pickled: bytes) -> Any:
    found = None
    if module != "__main__":
        with suppress(ImportError):
            found = importlib.import_module(module)
    if file is not None and getattr(found, "__file__", None) != file:  # for a script, or a module outside of packages
        spec = importlib.util.spec_from_file_location("crash_matrix_main" if found is None else module, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return pickle.loads(pickled)


def main(folder: Path) -> NoReturn:
    """Fork a process for each line from the test, until the test closes the connection."""
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(str(folder / SOCKET))
        lines = test.makefile("r")
        try:
            consume, message = _load(*pickle.loads((folder / GIVEN).read_bytes()))
        except BaseException:  # noqa: BLE001 - the test shows it
            test.sendall(line_of("failed", traceback.format_exc()))
            os._exit(1)
        gc.collect()
        gc.freeze()
        test.sendall(line_of("ready", None))
        children: list[int] = []
        for _ in lines:
            children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
            if (child := os.fork()) == 0:
                try:
                    lines.close()
                    test.close()
                    asyncio.run(_work(folder, consume, message))
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.kill(child, signal.SIGKILL)
    os._exit(0)
