"""What the service manager is told (sd_notify): that all workers are at work, that it goes on, that it ends.

A `Type=notify` unit of systemd names a datagram socket. Without one nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Final

_SOCKET: Final = "NOTIFY_SOCKET"
_PATIENCE: Final = 1.0  # seconds: the manager may be behind, and yet does not hold up a launcher for long
_WATCHDOG: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """That of this process. What it said to us is taken out of `environ`: it is not for the processes we start."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop(_SOCKET, "")
        microseconds, pid = (environ.pop(name, "") for name in _WATCHDOG)
        mine = pid in ("", str(os.getpid()))
        self.watched = int(microseconds) / 1e6 if mine and microseconds.isdecimal() else 0.0  # seconds; 0: not at all

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def watch(self, well: Callable[[], bool]) -> None:
        """Until it is cancelled: says twice in the watched time that this program goes on, while that is so (O18)."""
        while self.watched:
            if well():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watched / 2)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.settimeout(_PATIENCE)
            sending.sendto(text.encode(), address)
