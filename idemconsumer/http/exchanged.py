"""A request, the application's response and the door's answer: of no framework, and of no protocol of servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.http import bodiless, content_type, kept_headers

Headers = tuple[tuple[str, str], ...]

UNCLAIMED: Final = (("idempotent-unclaimed", "true"),)
"""Of a response whose key nobody held (H27): the client knows that the request may run again."""


class CutOff(RuntimeError):
    """The application was ended in the middle, as its process is about to be: nobody knows how far it came."""


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
        """Return the part that is kept for replays: of what is not whole, nothing that could be replayed (H7)."""
        if not self.whole:
            return StoredResult(b"")
        return StoredResult(self.body, content_type(self.headers), self.status, kept_headers(self.headers))


class RunApplication(Protocol):
    """Runs the application."""

    def __call__(self, limit: float | None = None) -> Awaitable[Response]:
        """The response of a new run, which is not sent before `Answer.live` says so. It has begun when this returns.

        After `limit` seconds the client may be told that it goes on; that ends nothing. Cancelled, it ends the
        application, as far as that can be ended. Raises what the application raises, and CutOff."""
        ...


@dataclass(frozen=True, slots=True)
class Open:
    """A response that is not kept, and of which more is to come: its key is held until `end`, which is to be called
    once the application has ended. If `lost` is done, the key is, and the application is to be cut off."""

    lost: asyncio.Future[None]
    end: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets. `live`: what the application gave in the last run, to be sent as the application has it,
    and `marks` with its headers; else `response` is to be sent, and the application is to be ended if it waits.
    `problem`: the name of the one that it is."""

    response: Response
    live: bool
    marks: Headers = ()
    open: Open | None = None
    problem: str | None = None

    @property
    def outcome(self) -> str:
        """How the request was answered, in a word for who counts."""
        return self.problem or ("run" if self.live else "replayed")


def replay(stored: StoredResult) -> Response:
    """The stored response once more. Its `status` must be known."""
    assert stored.status is not None
    headers = [("content-type", stored.content_type)] if stored.content_type else []
    headers += stored.headers
    body = b"" if bodiless(stored.status) else stored.body
    if not bodiless(stored.status):
        headers.append(("content-length", str(len(body))))
    return Response(stored.status, (*headers, ("idempotent-replayed", "true")), body)
