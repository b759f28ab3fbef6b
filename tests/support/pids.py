"""Processes as the kernel sees them."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

FORKING: Final = "forking"  # the name of a fork server: to nobody is it a process that was started


def children(pid: int) -> list[int]:
    """The processes that a process has started, as long as they are its own."""
    threads = Path(f"/proc/{pid}/task")
    while True:
        # A thread that ended has left its children to another one.
        with suppress(FileNotFoundError, ProcessLookupError):
            found = [child for thread in threads.glob("*/children") for child in thread.read_text().split()]
            return [int(child) for child in found if _name(child) != FORKING]


def alive(pid: int) -> bool:
    """Whether a process runs, or is frozen; a zombie does not."""
    return _state(pid) not in ("", "Z", "X")


def frozen(pid: int) -> bool:
    return _state(pid) == "T"


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def connected() -> set[int]:
    """The descriptors of this process that lead to somebody's port."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as same:
            if same.family in (socket.AF_INET, socket.AF_INET6) and same.getpeername():
                found.add(int(name))
    return found


def ended(pid: int) -> str:
    """How a child has ended, or that it has not."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "lives"
