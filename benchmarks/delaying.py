"""A TCP proxy that makes a server seem farther away, in a process of its own.

One thread and one queue for all connections of a distance: what is read is due after the same time, so the queue is in
order. select() waits with microseconds, where epoll and uvloop round to milliseconds.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from select import select
from typing import Any

from benchmarks._child import serve
from benchmarks._loop import run


class Delaying:
    """Relays to a port of 127.0.0.1, each direction half of `round_trip` seconds later. `port`: where it listens."""

    def __init__(self, target: int, round_trip: float) -> None:
        self._target = target
        self._delay = round_trip / 2
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._other: dict[socket.socket, socket.socket] = {}
        self._due: deque[tuple[float, socket.socket, bytes]] = deque()  # b"": the end
        self._full: list[socket.socket] = []  # the one that the first in the queue is for, while it takes no more
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        while True:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due and not self._full else None
            readable, writable, _ = select([self._listener, *self._other], self._full, [], wait)
            for each in readable:
                if each is self._listener:
                    self._accept()
                else:
                    self._read(each)
            if writable:
                self._full = []
            while self._due and not self._full and self._due[0][0] <= time.monotonic():
                self._write(*self._due.popleft())

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:  # it is down, and the client sees what it would see without us: a connection that ends
            client.close()
            return
        for each, other in ((client, server), (server, client)):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)
            self._other[each] = other

    def _read(self, each: socket.socket) -> None:
        try:
            data = each.recv(65_536)
        except OSError:
            data = b""
        other = self._other[each] if data else self._other.pop(each)
        self._due.append((time.monotonic() + self._delay, other, data))

    def _write(self, due: float, to: socket.socket, data: bytes) -> None:
        try:
            sent = to.send(data)
            if not data:
                to.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is gone, and whoever sent this will read so
            return
        if sent < len(data):
            self._due.appendleft((due, to, data[sent:]))
            self._full = [to]


async def main() -> None:
    made: dict[tuple[int, float], Delaying] = {}

    async def answer(question: dict[str, Any]) -> Any:
        where = question["port"], question["round_trip"]
        if where not in made:
            made[where] = Delaying(*where)
        return made[where].port

    await serve(answer)


if __name__ == "__main__":
    run(main())
