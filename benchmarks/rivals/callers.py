"""Clients of a web service, so light that they are not what is measured: one request at a time each, on a connection
that is kept. Asked to `serve`, the process answers such requests without looking at them, which shows their limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import _loop
from benchmarks._child import serve

_REQUEST = (
    b"POST /payments HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nidempotency-key: %b\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_ANSWER = b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}"


class Caller(asyncio.Protocol):
    """Sends the requests of `ids` until there are no more, and keeps how long each took."""

    def __init__(self, ids: Iterator[str], times: list[float]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ids = ids
        self._times = times
        self._transport: Any = None
        self._got = b""
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        number = next(self._ids, None)
        if number is None:
            self._transport.close()
            self.ended.set_result(None)
            return
        name = number.encode()
        body = b'{"id": "%b", "amount": 5}' % name
        self._sent = time.perf_counter()
        self._transport.write(_REQUEST % (name, len(body), body))

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end or not _whole(head.lower(), body):
            return
        self._times.append(time.perf_counter() - self._sent)
        if not head.startswith(b"HTTP/1.1 201"):
            self.ended.set_exception(RuntimeError(f"{head.decode()} {body.decode()}"))
            return
        self._got = b""
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("the service has closed a connection"))


class Answering(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(_ANSWER)


def _whole(head: bytes, body: bytes) -> bool:
    _, found, rest = head.partition(b"\r\ncontent-length:")
    return len(body) >= int(rest.partition(b"\r\n")[0]) if found else body.endswith(b"0\r\n\r\n")


async def answer(question: dict[str, Any]) -> Any:
    """Seconds for all, the middle and the last percentile of one; or the port of a service."""
    loop = asyncio.get_running_loop()
    if question.get("serve"):
        server = await loop.create_server(Answering, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]
    times: list[float] = []
    ids = (f"{question['prefix']}-{number}" for number in range(question["count"]))
    begun = time.perf_counter()
    connecting = (
        loop.create_connection(lambda: Caller(ids, times), "127.0.0.1", question["port"])
        for _ in range(question["clients"])
    )
    callers = [caller for _, caller in await asyncio.gather(*connecting)]
    await asyncio.gather(*(caller.ended for caller in callers))
    seconds = time.perf_counter() - begun
    times.sort()
    return seconds, times[len(times) // 2], times[int(len(times) * 0.99)]


if __name__ == "__main__":
    _loop.run(serve(answer))
