"""Forks processes of ours from one that has imported the package, as `forked` asks it to.

It has one thread, no loop and no connection. What it forks is given to whoever asks as a child, has its own
descriptors, environment and folder, and then runs as `python -m MODULE` does, to its `atexit`. Where that starts
processes itself, it has a fork server of its own, forked before its first line.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from idemconsumer.process.child import LIFELINE
from tests.support import forked
from tests.support.pids import FORKING

LONGEST: Final = 1 << 20  # bytes of a request
_MOST: Final = 32  # descriptors
_PATIENCE: Final = 10.0
_PR_SET_NAME: Final = 15
_IMPORTED: Final = (
    "idemconsumer.brokers.kafka.kafka_broker", "idemconsumer.brokers.rabbitmq.rabbitmq_broker",
    "idemconsumer.brokers.sqs.sqs_broker",
    "idemconsumer.cli.main", "idemconsumer.cli.run_verb",
    "idemconsumer.cli.target", "idemconsumer.process.child", "idemconsumer.testing.crash",
    "idemconsumer.worker.worker", "runpy",
)  # fmt: skip


_ending: Final[list[int]] = []  # the exit code, once it is known


def main() -> None:
    atexit.register(_leave)  # before all others, so that it is called after them
    for name in _IMPORTED:
        importlib.import_module(name)
    with suppress(ImportError):
        importlib.import_module("uvloop")
    gc.collect()
    gc.freeze()
    _name(FORKING)
    asking = socket.socket(fileno=int(sys.argv[1]))
    asking.send(forked.READY)
    _become(*_serve(asking))


def _serve(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return in each process that is forked, with what was asked. Here it ends when nobody can ask any more."""
    while True:
        request, descriptors = _next(asking)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if child := os.fork():  # whose parent ends, so it becomes a child of whoever asks
                os.write(writing, str(child).encode())
                os._exit(0)
            asking.detach()
            return request, descriptors
        os.waitpid(between, 0)
        asking.send(os.read(reading, 32))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _next(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        data, descriptors, _, _ = socket.recv_fds(asking, LONGEST, _MOST)
    except KeyboardInterrupt:
        os._exit(130)
    if not data:
        os._exit(0)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in what is forked"
    return json.loads(data), descriptors


def _become(asked: dict[str, Any], descriptors: list[int]) -> NoReturn:
    _name("python")
    deadline = time.monotonic() + _PATIENCE
    while os.getppid() != asked["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    _own(descriptors, asked["numbers"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    if asked["session"]:
        os.setsid()
    if asked["group"] >= 0:
        os.setpgid(0, asked["group"])
    module, *words = asked["words"]
    if LIFELINE not in asked["environment"]:  # else it is a worker, which starts nothing
        _forks_as_well()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[0] = os.getcwd()
    importlib.invalidate_caches()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv = ["-m", *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        _ending.append(0)
    except SystemExit as ending:
        _ending.append(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
        raise
    sys.exit()


def _own(descriptors: list[int], numbers: list[int]) -> None:
    """Those, under these numbers, and no others."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, forked.HIGH) for descriptor in descriptors]
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) not in numbers:
            with suppress(OSError):  # the one with which they were listed
                os.close(number)


def _forks_as_well() -> None:
    """What is started from here as `python -m` is forked from this process as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _name(FORKING)  # before it is there, since nobody may take it for a process that was started
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        ours.detach()
        _own([nothing, nothing, nothing, theirs.detach()], [0, 1, 2, 3])
        _become(*_serve(socket.socket(fileno=3)))
    theirs.close()
    _name("python")
    forked.everywhere(ours)


def _leave() -> None:
    """What was imported is not taken apart, which would copy all of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_ending[0] if _ending else 1)


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


if __name__ == "__main__":
    main()
