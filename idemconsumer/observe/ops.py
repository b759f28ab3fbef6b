"""A launcher's HTTP endpoints: /metrics, /livez and /readyz. GET only, one answer per connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import msgspec

from idemconsumer.certificates import ours
from idemconsumer.errors import ConfigurationError
from idemconsumer.logs import log
from idemconsumer.observe.database import DatabaseLook
from idemconsumer.observe.fleet import Fleet
from idemconsumer.settings import Settings

_PATIENCE: Final = 10.0  # seconds for one request and its answer; waiting for the database takes less
_MOST: Final = 16 * 1024  # bytes of a request
_JSON: Final = "application/json"
_LACKS: Final = "needs prometheus-client: pip install 'idemconsumer[metrics]'"

Answer = tuple[HTTPStatus, str, bytes]


class Ops:
    """The HTTP endpoints of one launcher.

    Only `/metrics` queries the database, and it answers without the database's part if that does not answer. Only
    `/metrics` needs the metrics library, and answers 501 without it (O29).
    """

    def __init__(self, crew: Fleet, settings: Settings) -> None:
        if find_spec("prometheus_client") is None:
            log.warning("metrics unavailable, prometheus-client is not installed", error=f"/metrics {_LACKS}")
        self._crew = crew
        self._certificates = dict(ours(settings))
        self._database = None if settings.dsn is None else DatabaseLook(settings.dsn, settings.schema)

    @asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[None]:
        """Serve during the block. Raises ConfigurationError if the address cannot be listened on."""
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=_MOST)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigurationError(
                f"--ops-port: cannot listen on {host}:{port}: {why}; write another one, as [HOST:]PORT"
            ) from None
        try:
            yield
        finally:
            server.close()
            if self._database is not None:
                await self._database.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_PATIENCE):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_written(*await self._answer(request)))
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, request: bytes) -> Answer:
        method, _, rest = request.partition(b" ")
        if method != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, _JSON, b'{"error":"only GET"}\n'
        match rest.partition(b" ")[0].partition(b"?")[0]:
            case b"/metrics":
                return await self._metrics()
            case b"/livez":
                return _health("alive", self._crew.against_life())
            case b"/readyz":
                return _health("ready", self._crew.against_readiness())
            case _:
                return HTTPStatus.NOT_FOUND, _JSON, b'{"error":"there are /metrics, /livez and /readyz"}\n'

    async def _metrics(self) -> Answer:
        if find_spec("prometheus_client") is None:
            return HTTPStatus.NOT_IMPLEMENTED, _JSON, msgspec.json.encode({"error": _LACKS}) + b"\n"
        # In a thread: the import takes a while, and the workers' pipes are read in this one.
        module = await asyncio.to_thread(import_module, "idemconsumer.observe.exposition")
        found = None if self._database is None else await self._database.look(self._crew.sources)
        answer = None if self._database is None else self._database.answer
        return (
            HTTPStatus.OK,
            module.CONTENT_TYPE,
            module.exposition(self._crew, found, self._certificates, answer=answer),
        )


def _health(word: str, against: Iterable[str]) -> Answer:
    problems = list(against)
    body = msgspec.json.encode({word: not problems, "problems": problems})
    return HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK, _JSON, body + b"\n"


def _written(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    allow = "Allow: GET\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    return f"{head}{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body
