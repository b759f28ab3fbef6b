"""A request, the application's response and the front door's answer: independent of frameworks, ASGI and WSGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.http import bodiless, content_type, kept_headers

Headers = tuple[tuple[str, str], ...]

UNCLAIMED: Final = (("idempotent-unclaimed", "true"),)
"""Header of a response that ran without a claim (H27): it tells the client that the request may run again."""


class CutOff(RuntimeError):
    """The application was ended in the middle because its process is about to end. How far it came is not known."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived, without its body.

    `method` is in upper case. `path` is decoded and begins with a slash; `query` is the raw text after the question
    mark. `headers` are in their order, with names in lower case. `environment` is the ASGI scope, or the WSGI environ.
    `root` is the path where the app is mounted, and not part of `path`.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    environment: Mapping[str, Any] = field(default_factory=dict)
    root: str = ""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None. The case of the name does not matter."""
        return next((value for given, value in self.headers if given == name.lower()), None)

    def values(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [value for given, value in self.headers if given == name.lower()]


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its `status`, `headers` and `body`. `whole`: the body is complete. `routed`: the framework found
    an endpoint for the request, as far as it reports that."""

    status: int
    headers: Headers
    body: bytes
    whole: bool = True
    routed: bool = True

    def stored(self) -> StoredResult:
        """Return what is kept for replays. Of a response that is not whole, nothing is kept that could be replayed
        (H7)."""
        if not self.whole:
            return StoredResult(b"")
        return StoredResult(self.body, content_type(self.headers), self.status, kept_headers(self.headers))


class RunApplication(Protocol):
    """Starts a run of the application."""

    def __call__(self, limit: float | None = None) -> Awaitable[Response]:
        """Start a new run, and return its response. The run has begun when this returns the awaitable. The response is
        not sent before an Answer with `live` releases it.

        After `limit` seconds the client may be told that the run goes on; this does not end the run. Cancelling the
        awaitable ends the application as far as it can be ended. Raises what the application raises, and CutOff.
        """
        ...


@dataclass(frozen=True, slots=True)
class Open:
    """A response that is not kept and not complete yet. Its key is held until `end`, which must be called once the
    application has ended. If `lost` is done, the key was lost, and the application must be cut off."""

    lost: asyncio.Future[None]
    end: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client gets. With `live`: the response of the last run, sent as the application sends it, with `marks`
    as additional headers. Otherwise `response` is sent, and an application that waits is ended. `problem`: the name of
    the problem, if it is one."""

    response: Response
    live: bool
    marks: Headers = ()
    open: Open | None = None
    problem: str | None = None

    @property
    def outcome(self) -> str:
        """How the request was answered, as one word for metrics."""
        return self.problem or ("run" if self.live else "replayed")


def replay(stored: StoredResult) -> Response:
    """The stored response again. Its `status` must be known."""
    assert stored.status is not None
    headers = [("content-type", stored.content_type)] if stored.content_type else []
    headers += stored.headers
    body = b"" if bodiless(stored.status) else stored.body
    if not bodiless(stored.status):
        headers.append(("content-length", str(len(body))))
    return Response(stored.status, (*headers, ("idempotent-replayed", "true")), body)
