"""A client of one server under test, in one mode."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import httpx

PATIENCE: Final = 45.0  # seconds; it only ends a test that hangs
_NO_TLS: Final = ssl.create_default_context()  # made once: each client would read all certificates
Headers = list[tuple[str, str]]


def new() -> str:
    """A key, or the name of an effect or a gate, that no other test has."""
    return uuid4().hex


@dataclass
class Service:
    """`effect` is what the requests of this test count under, unless they say otherwise."""

    url: str
    mode: str
    effect: str = field(default_factory=new)

    async def send(self, route: str = "orders", **request: Any) -> httpx.Response:
        """The whole response to what `sending` takes."""
        async with self.sending(route, **request) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def sending(
        self,
        route: str = "orders",
        *,
        key: str | None = None,
        keys: list[str] | None = None,
        tenant: str | None = "acme",
        method: str = "POST",
        content: Any = b'{"amount": 5}',
        headers: Headers | None = None,
        **query: str | int,
    ) -> AsyncIterator[httpx.Response]:
        """The response as soon as it begins. `keys`: the header as often, instead of `key`."""
        given = [("Content-Type", "application/json"), ("X-Effect", self.effect), *(headers or [])]
        given += [("Idempotency-Key", each) for each in (keys or ([key] if key is not None else []))]
        if tenant is not None:
            given.append(("X-Tenant", tenant))
        async with self._client() as http:
            request = http.build_request(
                method,
                f"/{self.mode}/{route}",
                params=query,
                headers=given,
                content=content,
            )
            response = await http.send(request, stream=True)
            try:
                yield response
            finally:
                await response.aclose()

    async def raw(self, body: bytes, *lines: bytes, length: int | None = None, **query: str | int) -> bytes:
        """The whole answer to a request to `orders`, with header lines as no client library would send them. Of a
        `length` that is more than the body, none is waited for."""
        host, port = self.url.removeprefix("http://").split(":")
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        head = [
            f"POST /{self.mode}/orders?{asked} HTTP/1.1".encode(), b"Host: " + host.encode(), b"X-Tenant: acme",
            f"X-Effect: {self.effect}".encode(), b"Connection: close",
            f"Content-Length: {length or len(body)}".encode(),
        ]  # fmt: skip
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\r\n".join([*head, *lines, b"", body]))
        await writer.drain()
        async with asyncio.timeout(PATIENCE):
            answer = b"" if length else await reader.read()
        writer.close()
        return answer

    async def effects(self, name: str | None = None) -> int:
        async with self._client() as http:
            answer = await http.get(f"/effects/{name or self.effect}")
            return int(answer.text)

    async def document(self) -> dict[str, Any]:
        """The paths of the OpenAPI document."""
        async with self._client() as http:
            paths: dict[str, Any] = (await http.get("/openapi.json")).json()["paths"]
            return paths

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=_NO_TLS)

    async def answered(self, route: str = "orders", **request: Any) -> httpx.Response:
        """As `send`, again and again until the answer is neither 409 nor 503, as a client does."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    response = await self.send(route, **request)
                except httpx.TransportError:  # the server is starting
                    continue
                if response.status_code not in (409, 503):
                    return response
                await asyncio.sleep(0.05)


def replayed(response: httpx.Response) -> bool:
    return bool(response.headers.get("Idempotent-Replayed") == "true")


def unclaimed(response: httpx.Response) -> bool:
    return bool(response.headers.get("Idempotent-Unclaimed") == "true")


def problem(response: httpx.Response) -> str:
    """The name of the problem that the front door answered with."""
    assert response.headers["Content-Type"] == "application/problem+json", response.text
    said = response.json()
    assert said["status"] == response.status_code
    prefix, _, name = said["type"].rpartition(":")
    assert prefix == "urn:idemconsumer:problem"
    return str(name)
