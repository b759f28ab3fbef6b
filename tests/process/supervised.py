"""A parent and its workers as real processes, directed through a Unix socket by test_supervisor.py.

`python -m tests.process.supervised parent SOCKET OPTIONS` runs a Supervisor; each worker is `… worker SOCKET`.
A worker reports what happens to it, a JSON line each, and does what it is told, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from idemconsumer.errors import ConfigurationError
from idemconsumer.process.child import WORKER, Exit, launch, leave_as_killed
from idemconsumer.process.pulse import PULSE
from idemconsumer.process.supervisor import Supervisor, python_changes


def hold_the_interpreter() -> None:
    """No thread of this process runs any more, and it does not end."""
    re.match("(a+)+$", 64 * "a" + "b")


def spin() -> None:
    """The event loop stands still, and other threads run."""
    while True:
        pass


def reread(settings: Path) -> None:
    """Notes that it was read, and what was in it."""
    text = settings.read_text()
    settings.with_suffix(".read").write_text(text)
    if text == "wrong":
        raise ConfigurationError("concurrency is wrong")


class Directed:
    def __init__(self, address: str) -> None:
        self._address = address
        self._ended = asyncio.Event()
        self._deaf = False
        self._numb = False
        self._writer: asyncio.StreamWriter

    async def run(self) -> None:
        # Blocking: a worker that is asked to drain can say so.
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._say("started")
        ended = asyncio.create_task(self._ended.wait())
        while not ended.done():
            order = asyncio.create_task(reader.readline())
            await asyncio.wait([ended, order], return_when=asyncio.FIRST_COMPLETED)
            if order.done():
                self._obey((await order).decode().split())

    def drain(self) -> None:
        self._say("draining")
        if not self._deaf:
            self._ended.set()

    def abort(self) -> None:
        self._say("aborting")
        if not self._numb:
            self._ended.set()

    def when_asked(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def _obey(self, order: list[str]) -> None:
        match order:
            case ["ask"]:
                self._leave()
            case ["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["raise"]:
                raise RuntimeError("the pool is misbuilt,\non two lines")
            case ["leave"]:
                leave_as_killed("event loop blocked", where="here")
            case ["exit", code]:
                os._exit(int(code))
            case ["finish"]:
                self._ended.set()
            case ["ignore-drain"]:
                self._deaf = True
            case ["ignore-abort"]:
                self._deaf = self._numb = True
            case ["freeze"]:
                self._say("frozen")
                os.kill(os.getpid(), signal.SIGSTOP)
            case ["beat", limit]:
                PULSE.begin(float(limit))
            case ["beat-and-watch", limit]:
                PULSE.begin(float(limit), lambda place: os._exit(Exit.ERROR if " in spin" in place else Exit.DONE))
            case ["spin"]:
                spin()
            case ["beat-no-more"]:
                PULSE.end()
            case ["hold"]:
                hold_the_interpreter()
            case ["thread"]:  # like a handler that is not async and does not come back
                asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        self._say("heard")

    def _say(self, event: str) -> None:
        said = {"event": event, "worker": int(os.environ.get(WORKER, "-1")), "pid": os.getpid()}
        self._writer.write(json.dumps(said).encode() + b"\n")


class Powerless(Supervisor):
    """Its kill does not end a worker, as where that waits for a disk that is gone."""

    def _end_silent(self, index: int, seconds: float) -> None:
        self._manager._send("STATUS=silent")


def main() -> int:
    role, address, *rest = sys.argv[1:]
    options = json.loads(rest[0]) if rest else {}
    if role == "worker":
        return launch(lambda: Directed(address), float(os.environ["DRAIN_TIMEOUT"]))
    watched, settings = options.pop("watched", None), options.pop("settings", None)
    supervisor = (Powerless if options.pop("powerless", False) else Supervisor)(
        [sys.executable, "-m", "tests.process.supervised", "worker", address],
        environment=os.environ | {"DRAIN_TIMEOUT": str(options["drain_timeout"])},
        changes=python_changes(Path(watched)) if watched else None,
        reread=partial(reread, Path(settings)) if settings else None,
        **options,
    )
    return asyncio.run(supervisor.run())


if __name__ == "__main__":
    sys.exit(main())
