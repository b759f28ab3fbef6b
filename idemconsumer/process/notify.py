"""Notifies the service manager (sd_notify): all workers consume, the program is alive, it stops.

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
_PATIENCE: Final = 1.0  # seconds: the manager may lag behind, but must not hold up a launcher for long
_WATCHDOG: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The service manager of this process. Removes its variables from `environ`, since they are not for child
    processes."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop(_SOCKET, "")
        microseconds, pid = (environ.pop(name, "") for name in _WATCHDOG)
        mine = pid in ("", str(os.getpid()))
        self.watched = int(microseconds) / 1e6 if mine and microseconds.isdecimal() else 0.0  # seconds; 0: no watchdog

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def watch(self, well: Callable[[], bool]) -> None:
        """Send the watchdog signal twice in the watched time while `well` is true (O18). Runs until cancelled."""
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
