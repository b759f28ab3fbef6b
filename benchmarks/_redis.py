"""A Redis for rivals, as it is by default: nobody waits for what it writes to the disk."""

from __future__ import annotations

import socket
from contextlib import suppress

from idemconsumer.embedded.postgres import free_port
from tests.support.servers.processes import Processes, need

_START_SECONDS = 10.0


class Redis:
    def __init__(self) -> None:
        need("Redis")
        self._processes = Processes("redis")
        self._port = free_port()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def version(self) -> str:
        said = self._ask("INFO server")
        return said.partition("redis_version:")[2].partition("\r\n")[0]

    def start(self) -> None:
        folder = str(self._processes.folder)
        self._processes.spawn(["redis-server", "--bind", "127.0.0.1", "--port", str(self._port), "--dir", folder])
        self._processes.wait_ready(self._answers, _START_SECONDS)

    def close(self) -> None:
        self._processes.close()

    def _answers(self) -> bool:
        with suppress(OSError):
            return self._ask("PING").startswith("+PONG")
        return False

    def _ask(self, command: str) -> str:
        with socket.create_connection(("127.0.0.1", self._port), _START_SECONDS) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(8_192).decode()
