"""A worker's reports to its launcher, a line a second, through a pipe for which nobody waits (O11).

What does not fit into the pipe is dropped: the next report has all of it. Only of a line that was begun the rest comes
first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from idemconsumer import forks

VARIABLE: Final = "IDEMCONSUMER_REPORTS"  # the pipe's file descriptor, in a worker's environment
EVERY: Final = 1.0  # seconds
MOST: Final = 1024 * 1024  # bytes of a line


class Telling:
    """Of this process. Without a launcher that listens nothing is made and nothing is written."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._rest = b""

    def address(self, descriptor: int) -> None:
        """A pipe's end that does not block."""
        os.set_inheritable(descriptor, False)
        forks.not_inherited(self, lambda _: [descriptor])
        self._descriptor = descriptor

    @property
    def heard(self) -> bool:
        """Whether somebody listens."""
        return self._descriptor is not None

    async def run(self, make: Callable[[], bytes]) -> None:
        """Until it is cancelled, and once more then. `make` returns a line."""
        try:
            while self.heard:
                self.say(make())
                await asyncio.sleep(EVERY)
        finally:
            self.say(make())

    def say(self, line: bytes) -> None:
        self._rest = self._written(self._rest)
        if not self._rest and len(line) <= MOST:
            rest = self._written(line)
            self._rest = b"" if rest is line else rest

    def _written(self, line: bytes) -> bytes:
        """What is left of it."""
        if self._descriptor is None or not line:
            return b""
        try:
            return line[os.write(self._descriptor, line) :]
        except BlockingIOError:
            return line
        except OSError:  # the launcher is gone
            self._descriptor = None
            return b""


TELLING: Final = Telling()


def pipe(told: Callable[[bytes], None]) -> tuple[Ear, int]:
    """The launcher's end, and the descriptor of its worker's end, which does not block."""
    listening, saying = os.pipe()
    os.set_blocking(saying, False)
    return Ear(listening, told), saying


class Ear:
    """The launcher's end of one worker's pipe: `told` is called with each line, only the last of those that have come
    at the same time."""

    def __init__(self, descriptor: int, told: Callable[[bytes], None]) -> None:
        self._descriptor = descriptor
        self._told = told
        self._begun = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self.listen)

    def close(self) -> None:
        """Hear what the worker said last."""
        self.listen()
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def listen(self) -> None:
        last = b""
        try:
            while more := os.read(self._descriptor, 65_536):
                whole, newline, begun = more.rpartition(b"\n")
                if newline:
                    last = (bytes(self._begun) + whole).rpartition(b"\n")[2]
                    self._begun.clear()
                self._begun += begun
                if len(self._begun) > 2 * MOST:
                    self._begun.clear()
            self._loop.remove_reader(self._descriptor)  # the worker has ended
        except BlockingIOError:
            pass
        if last:
            self._told(last)
