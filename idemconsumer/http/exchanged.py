"""A request and its response, as the door sees them: of no framework, and of no protocol of servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.http import bodiless, content_type, kept_headers

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived, without its body.

    `method` is in capitals. `path` is decoded and begins with a slash; `query` is the raw text after the question mark.
    `headers` are in their order, with names in small letters. `environment` is the ASGI scope, or the WSGI environ.
    `root` is where the app is mounted, and no part of `path`.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    environment: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, whatever its case."""
        return next((value for given, value in self.headers if given == name.lower()), None)

    def values(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [value for given, value in self.headers if given == name.lower()]


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its `status`, `headers` and `body`. `whole`: no more of the body follows. `routed`: the framework
    found an endpoint for the request, as far as it tells."""

    status: int
    headers: Headers
    body: bytes
    whole: bool = True
    routed: bool = True

    def stored(self) -> StoredResult:
        """Return the part that is kept for replays."""
        return StoredResult(self.body, content_type(self.headers), self.status, kept_headers(self.headers))


def replay(stored: StoredResult) -> Response:
    """The stored response once more. Its `status` must be known."""
    assert stored.status is not None
    headers = [("content-type", stored.content_type)] if stored.content_type else []
    headers += stored.headers
    body = b"" if bodiless(stored.status) else stored.body
    if not bodiless(stored.status):
        headers.append(("content-length", str(len(body))))
    return Response(stored.status, (*headers, ("idempotent-replayed", "true")), body)
