"""The channel from a worker to its launcher: one pipe, with one line for each report. No writer blocks for long.

A line is its kind and a JSON value. `beat`: for how many seconds this process may be silent (L56). `members`: its ids
in consumer groups, all of them after each change (K15). `report`: its counters (O11). `words`: why it ends, for the
last log line of a launcher that gives up; the worker's own log has it too.
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

VARIABLE: Final = "IDEMCONSUMER_CHANNEL"  # in a worker's environment: its descriptor, and whether reports are wanted
MOST: Final = 1024 * 1024  # bytes, for one line
_PATIENCE: Final = 1.0  # seconds: the launcher may have a large report to read first
_WORDS: Final = 300  # characters
_REPORTS: Final = "reports"


class Channel:
    """The worker's end. Without a launcher nothing is written."""

    def __init__(self) -> None:
        self.reports = False  # whether the launcher wants them
        self._descriptor: int | None = None
        self._members: dict[str, str] = {}
        self._owed = b""  # the newest `members` line, if the pipe had no room for it yet
        self._rest = b""
        self._lock = threading.Lock()

    def attach(self, given: str) -> None:
        """Use the pipe that the variable `VARIABLE` names."""
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
        """Send one line. If the pipe has no room for it within `patience` seconds, it is dropped: the next line of its
        kind replaces it. Only the `members` line is kept, and sent before the next line of any kind, since the members
        may never change again. Beats are sent from a thread of their own."""
        line = b"%s %s\n" % (kind.encode(), value)
        if len(line) <= MOST:
            self._send(line, patience)

    def _send(self, line: bytes, patience: float) -> None:
        """Write the rest of a line that was begun, then `members` if it is owed, then this line."""
        until = time.monotonic() + patience
        while True:
            with self._lock:  # a thread of its own sends beats
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
        """The line, if nothing of it was written. Else nothing: its unwritten rest becomes the next thing to write."""
        if self._rest or not line or (rest := self._written(line)) is line:
            return line
        self._rest = rest
        return b""

    def _written(self, line: bytes) -> bytes:
        """Write the line, and return the rest that the pipe had no room for."""
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
    """The launcher's end of one worker's pipe.

    `told` is called with kind and value. If several lines of one kind have arrived together, it gets only the last one.
    It is called with `end` when no process has the other end any more: the worker has ended, or a library in it has
    closed descriptors that it does not know. `last` keeps the last value of each kind.
    """

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
        """For the environment of the worker, which inherits the descriptor `theirs`."""
        return {VARIABLE: f"{self.theirs} {_REPORTS if reports else ''}".strip()}

    def said(self, kind: str) -> Any:
        """The last value of this kind; None if there was none."""
        return json.loads(self.last[kind]) if kind in self.last else None

    def close(self) -> None:
        """Read what the worker sent last, then close."""
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
