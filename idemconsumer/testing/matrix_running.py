"""The processes of the crash matrix, as the test controls them: each is killed or paused at one of its points."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

from msgspec.structs import replace

from idemconsumer.errors import ConfigurationError
from idemconsumer.message.message import Message
from idemconsumer.testing.matrix_database import MatrixDatabase
from idemconsumer.testing.matrix_process import GIVEN, SOCKET
from idemconsumer.testing.matrix_wire import Wire

_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0
LONG: Final = 1.0  # seconds within which a newly forked process reaches a point
_PROGRAM: Final = """
import json, pathlib, sys
sys.path[:] = json.loads(sys.argv[1])
from idemconsumer.testing.matrix_process import main
main(pathlib.Path(sys.argv[2]))
"""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Trap = tuple[int, Literal["kill", "pause"]]  # the number of the point, counted from 0
Ending = Literal["done", "raised", "killed"]


class Killed(ConnectionError):
    """The process at the other end has ended."""


class Processes:
    """Starts processes that have loaded the consumer. All end when the context is left."""

    def __init__(self, consume: Any, message: Message, database: MatrixDatabase, *, wired: bool) -> None:
        """`wired`: the points of a process are the statements that it sends to the database."""
        self.name = getattr(consume, "__qualname__", type(consume).__qualname__)
        module = str(getattr(inspect.unwrap(consume), "__module__", ""))
        try:
            plain = replace(message, headers=dict(message.headers), properties=dict(message.properties))
            pickled = pickle.dumps((consume, plain))
        except Exception as error:  # noqa: BLE001 - pickling can raise anything
            raise ConfigurationError(
                f"crash_matrix: {self.name} cannot be given to another process: {error}; write it at the top level of "
                "a module, and have it make there whatever it uses"
            ) from None
        self._given = module, getattr(sys.modules.get(module), "__file__", None), pickled
        self._database, self._wired = database, wired
        self._running: list[Process] = []
        self._begun: asyncio.Queue[tuple[str, Any, Streams]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="matrix-")))
            (folder / GIVEN).write_bytes(pickle.dumps(self._given))
            server = await asyncio.start_unix_server(self._accept, folder / SOCKET)
            stack.callback(server.close)
            forking = _start(folder)
            stack.push_async_callback(asyncio.to_thread, forking.wait)
            stack.callback(forking.kill)
            stack.push_async_callback(self.end_all)
            kind, error, (_, self._orders) = await self._next()
            if kind == "failed":
                raise ConfigurationError(
                    f"crash_matrix: {self.name} cannot be loaded in a process of its own:\n{error}"
                )
            stack.push_async_callback(_closed, self._orders)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._begun.put_nowait((*json.loads(await reader.readline()), (reader, writer)))

    async def _next(self) -> tuple[str, Any, Streams]:
        async with asyncio.timeout(_START_SECONDS):
            return await self._begun.get()

    async def start(self, trap: Trap | None = None) -> Process:
        """Start one more process, which is stopped at that trap."""
        self._orders.write(b"\n")
        _, pid, streams = await self._next()
        process = Process(pid, streams, self._database.dsn, trap)
        self._running.append(process)
        if self._wired:
            process.wire = Wire(self._database.host, self._database.port, process.at)
            process.dsn = self._database.address(await process.wire.open())
        return process

    def last_error(self) -> str:
        """The last error that `consume` raised in a running process; empty if there was none."""
        return next((process.errors[-1] for process in reversed(self._running) if process.errors), "")

    async def end_all(self) -> None:
        """Kill all running processes."""
        for process in self._running:
            await process.end()
        self._running.clear()


class Process:
    """A process that consumes. `points` are the names of the points that it has reached; `repeats`: it has reached one
    of them again; `errors`: what `consume` raised. `acknowledged`: the last delivery was acknowledged, so the broker
    need not deliver the message again. `stopped`: it has reached its trap; if it is paused there, it waits for
    `may_go_on`."""

    def __init__(self, pid: int, streams: Streams, dsn: str, trap: Trap | None) -> None:
        self._pid = pid
        self.dsn = dsn
        self.wire: Wire | None = None
        self._reader, self._writer = streams
        self._trap = trap
        self.may_go_on = asyncio.Event()
        self._times = Counter[str]()
        self.points: list[str] = []
        self.repeats = False
        self.errors: list[str] = []
        self.acknowledged = False
        self.stopped = asyncio.Event()
        self.heard = asyncio.get_running_loop().time()  # when it reached its last point

    async def at(self, point: str) -> None:
        """The process has reached this point. Returns when it may go on; raises Killed if it must not."""
        self.heard = asyncio.get_running_loop().time()
        self._times[point] += 1
        self.repeats = self.repeats or self._times[point] > 1
        self.points.append(point if self._times[point] == 1 else f"{point} ({self._times[point]})")
        if self._trap is not None and self._trap[0] == len(self.points) - 1:
            self.stopped.set()
            if self._trap[1] == "kill":
                self._kill()
                raise Killed
            await self.may_go_on.wait()

    async def deliver(self) -> Ending:
        """Deliver the message, and wait for the end of the run."""
        self.acknowledged = False
        with suppress(ConnectionError):
            self._say(self.dsn)
            while line := await self._reader.readline():
                kind, word = json.loads(line)
                if kind == "point":
                    await self.at(word)
                elif kind == "ack":
                    await self.at("before the acknowledgement")
                    self.acknowledged = True
                    await self.at("after the acknowledgement")
                elif kind == "return":
                    await self.at("before the return")
                elif kind == "raised":
                    self.errors.append(word)
                    return "raised"
                else:
                    return "done"
                self._say("go on")
        return "killed"

    async def end(self) -> None:
        """Kill the process if it still runs, and wait until it and its connections have ended."""
        self._kill()
        if self.wire is not None:
            await self.wire.close()
        with suppress(ConnectionError, TimeoutError):  # children that it forked may hold its sockets open
            async with asyncio.timeout(_END_SECONDS):
                while await self._reader.read(65_536):
                    pass
        await _closed(self._writer)

    def _say(self, text: str) -> None:
        self._writer.write(f"{text}\n".encode())

    def _kill(self) -> None:
        # While its end of the channel is open, the process has not ended, so the pid is still its own.
        if not self._reader.at_eof():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Close it, and wait for that: the loop may end right after the caller."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


class Delivered:
    """A broker that delivers a message until it is acknowledged."""

    async def send(self) -> None:
        """Send the same message once more."""

    async def notice(self) -> None:
        """Called when a consumer was killed."""

    def is_done(self, process: Process, ending: Ending) -> bool:
        """Whether no other delivery follows this one."""
        return process.acknowledged

    def quiet(self, rival: Process) -> float:
        """After how many seconds without a new point a process counts as waiting for one that is paused."""
        return LONG


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the first process. Not with asyncio, which in Python 3.11 starts processes in the main thread only."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
