"""What runs in the processes of the crash matrix.

The first one loads the consumer once, and then forks a process for whoever asks: it has one thread, no loop and no
connection, unless the consumer's modules make some as they are imported. When the test ends, all of these do.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import SocketIO
from typing import Any, NoReturn

from idemconsumer.message.message import Message

GIVEN = "given"
SOCKET = "socket"


class MatrixDelivery:
    """A message as a broker delivers it: the argument of `consume` in `crash_matrix`. `message` is all of it."""

    def __init__(self, message: Message, channel: Channel) -> None:
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
        """Acknowledge the message, which is then not delivered again. Returning from `consume` acknowledges it too;
        raising does not. A second call does nothing."""
        if not self._acknowledged:
            self._acknowledged = True
            await self._channel.ask("ack")

    async def _returned(self) -> None:
        """`consume` has."""
        if self._acknowledged:
            await self._channel.ask("return")
        elif not self._worked:
            await self.ack()

    def _at(self, point: str) -> None:
        """A worker runs, which settles its messages itself, and has come to a point."""
        self._worked = True
        self._channel.at(point)


Consume = Callable[[MatrixDelivery, str], Awaitable[object]]


class Channel:
    """To the test: lines of JSON. Each is answered before the process goes on."""

    def __init__(self, folder: Path, number: str) -> None:
        self._path, self._number = str(folder / SOCKET), number
        self._turn = asyncio.Lock()
        self._points: SocketIO | None = None

    async def open(self) -> str:
        """What to connect to, once a message is to be delivered."""
        self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        return await self.ask("begun", self._number, os.getpid())

    async def ask(self, *words: object) -> str:
        """The answer. Does not come back when the test has gone."""
        async with self._turn:
            self._writer.write(json.dumps(words).encode() + b"\n")
            if answer := await self._reader.readline():
                return answer.decode().strip()
        os._exit(1)

    def at(self, point: str) -> None:
        """The event loop stands still while the test decides."""
        if self._points is None:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._path)
                self._points = connection.makefile("rwb", 0)
            self._tell("points", self._number)
        self._tell(point)

    def _tell(self, *words: object) -> None:
        assert self._points is not None
        self._points.write(json.dumps(words).encode() + b"\n")
        if not self._points.readline():
            os._exit(1)


async def _work(folder: Path, number: str, consume: Consume, message: Message) -> NoReturn:
    channel = Channel(folder, number)
    dsn = await channel.open()
    while True:
        delivery = MatrixDelivery(message, channel)
        try:
            await consume(delivery, dsn)
            await delivery._returned()
        except Exception:  # noqa: BLE001 - whatever it is, the broker delivers the message again
            dsn = await channel.ask("raised", traceback.format_exc())
        else:
            dsn = await channel.ask("done")


def _load(module: str, file: str | None, pickled: bytes) -> Any:
    found = None
    if module != "__main__":
        with suppress(ImportError):
            found = importlib.import_module(module)
    if file is not None and getattr(found, "__file__", None) != file:  # a script, or a module without a package
        spec = importlib.util.spec_from_file_location("crash_matrix_main" if found is None else module, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return pickle.loads(pickled)


def main(folder: Path) -> NoReturn:
    """Fork a process for each line that the test sends, until it sends no more."""
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(str(folder / SOCKET))
        lines = test.makefile("r")
        try:
            consume, message = _load(*pickle.loads((folder / GIVEN).read_bytes()))
        except BaseException:  # noqa: BLE001 - shown in the test
            test.sendall(json.dumps(["failed", traceback.format_exc()]).encode() + b"\n")
            os._exit(1)
        gc.collect()
        gc.freeze()
        test.sendall(b'["ready"]\n')
        children: list[int] = []
        for line in lines:
            children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
            if (child := os.fork()) == 0:
                try:
                    lines.close()
                    test.close()
                    asyncio.run(_work(folder, line.strip(), consume, message))
                finally:
                    os._exit(1)
            children.append(child)
        for child in children:
            os.kill(child, signal.SIGKILL)
    os._exit(0)
