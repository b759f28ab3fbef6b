"""What a worker tells its launcher: one pipe, for which nobody waits for long, and a line for each thing that is told.

A line is its kind and JSON. `beat`: for how many seconds this process may be silent (L56). `members`: its ids in
consumer groups, all of them after each change (K15). `report`: what it has counted (O11). `words`: what it says of its
end, for the last line of a launcher that gives up; they are in its own log too.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from idemconsumer import forks

VARIABLE: Final = "IDEMCONSUMER_CHANNEL"  # in a worker's environment: the pipe's end, and whether reports are wanted
MOST: Final = 1024 * 1024  # bytes of a line
_PATIENCE: Final = 1.0  # seconds: the launcher may have a large report to read first
_WORDS: Final = 300  # characters
_REPORTS: Final = "reports"


class Channel:
    """The worker's end. Without a launcher nothing is written."""

    def __init__(self) -> None:
        self.reports = False  # whether the launcher wants them
        self._descriptor: int | None = None
        self._members: dict[str, str] = {}
        self._owed = b""  # that line of its members, which has found no room so far
        self._rest = b""
        self._lock = threading.Lock()

    def attach(self, given: str) -> None:
        """What `VARIABLE` says."""
        number, _, wanted = given.partition(" ")
        descriptor = int(number)
        os.set_inheritable(descriptor, False)
        forks.not_inherited(self, lambda _: [descriptor])
        self._descriptor, self.reports = descriptor, wanted == _REPORTS

    @property
    def open(self) -> bool:
        """Whether there is a launcher."""
        return self._descriptor is not None

    def joined(self, group: str, member: str) -> None:
        self._change({**self._members, group: member})

    def left(self, group: str) -> None:
        self._change({other: member for other, member in self._members.items() if other != group})

    def _change(self, members: dict[str, str]) -> None:
        if members != self._members:
            with self._lock:
                self._members, self._owed = members, b"members %s\n" % json.dumps(members).encode()
            self._send(b"", 0.0)

    def last_words(self, text: str) -> None:
        self.tell("words", json.dumps(" ".join(text.split())[:_WORDS]).encode())

    def tell(self, kind: str, value: bytes, *, patience: float = _PATIENCE) -> None:
        """What finds no room in so many seconds is dropped: the next of its kind has all of it. Its members wait for
        the next line of any kind, since they may never change again; a thread of its own tells beats."""
        line = b"%s %s\n" % (kind.encode(), value)
        if len(line) <= MOST:
            self._send(line, patience)

    def _send(self, line: bytes, patience: float) -> None:
        """Behind the rest of a line that was begun, and the members that are owed."""
        until = time.monotonic() + patience
        while True:
            with self._lock:  # beats have a thread of their own
                self._rest = self._written(self._rest)
                self._owed = self._begun(self._owed)
                line = self._begun(line)
                descriptor = self._descriptor
            seconds = until - time.monotonic()
            if descriptor is None or seconds <= 0 or not (line or self._rest):
                return
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll(seconds * 1000)

    def _begun(self, line: bytes) -> bytes:
        """Nothing of it, once it is in the pipe or its rest is the next that goes there."""
        if self._rest or not line or (rest := self._written(line)) is line:
            return line
        self._rest = rest
        return b""

    def _written(self, line: bytes) -> bytes:
        """What is left of it."""
        if self._descriptor is None or not line:
            return b""
        try:
            return line[os.write(self._descriptor, line) :]
        except BlockingIOError:
            return line
        except OSError:  # the launcher is gone
            self._descriptor, self.reports = None, False
            return b""


CHANNEL: Final = Channel()


class Ear:
    """The launcher's end of one worker's pipe. `told` is called with the kind and the value of each line, of those of a
    kind that have come at the same time the last one, and with `end` once nobody has the other end: the worker has
    ended, or a library in it has closed what it does not know. `last` has the last one of each."""

    def __init__(self, told: Callable[[str, bytes], None]) -> None:
        self.last: dict[str, bytes] = {}
        self._descriptor, self.theirs = os.pipe()
        self._told = told
        self._begun = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._descriptor, False)
        os.set_blocking(self.theirs, False)
        self._loop.add_reader(self._descriptor, self.listen)

    def variable(self, *, reports: bool) -> dict[str, str]:
        """For the environment of the worker, which inherits `theirs`."""
        return {VARIABLE: f"{self.theirs} {_REPORTS if reports else ''}".strip()}

    def said(self, kind: str) -> Any:
        """The last of this kind; None: there was none."""
        return json.loads(self.last[kind]) if kind in self.last else None

    def close(self) -> None:
        """Hear what the worker said last."""
        self.listen()
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def listen(self) -> None:
        came: dict[str, bytes] = {}
        try:
            while more := os.read(self._descriptor, 65_536):
                whole, newline, begun = more.rpartition(b"\n")
                if newline:
                    lines = (bytes(self._begun) + whole).split(b"\n")
                    came |= {kind.decode(): value for kind, _, value in (line.partition(b" ") for line in lines)}
                    self._begun.clear()
                self._begun += begun
                if len(self._begun) > 2 * MOST:
                    self._begun.clear()
            self._loop.remove_reader(self._descriptor)
            came["end"] = b""
        except BlockingIOError:
            pass
        self.last |= came
        for kind, value in came.items():
            self._told(kind, value)
