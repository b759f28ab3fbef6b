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
    """A message as a broker delivers it: the argument of `consume` in `crash_matrix`. `message` is all of it."""

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


class MatrixChannel:
    """To the test: lines of JSON. Each is answered before the process goes on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    async def ask(self, kind: str, word: object = None) -> str:
        """The answer. Does not come back when the test has gone."""
        async with self._turn:
            self._writer.write(line_of(kind, word))
            if answer := await self._reader.readline():
                return answer.decode().strip()
        os._exit(1)

    def at(self, point: str) -> None:
        """The event loop stands still while the test decides. Nothing else is asked meanwhile."""
        descriptor = self._writer.get_extra_info("socket").fileno()
        os.write(descriptor, line_of("point", point))
        select.select([descriptor], [], [])  # it does not block, since it is the loop's
        if not os.read(descriptor, 64):
            os._exit(1)


def line_of(kind: str, word: object) -> bytes:
    """One line of a channel."""
    return json.dumps((kind, word)).encode() + b"\n"


async def _work(folder: Path, consume: Consume, message: Message) -> NoReturn:
    channel = MatrixChannel(*await asyncio.open_unix_connection(folder / SOCKET))
    dsn = await channel.ask("begun", os.getpid())
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
