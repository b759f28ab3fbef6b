"""ASGI's messages: a request and its body, and a complete response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from idemconsumer.http.exchanged import Headers, Request, Response
from idemconsumer.http.problems import BODY_TOO_LARGE, Refused
from idemconsumer.rules.http import MOST_DIGITS, bodiless

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Asgi: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


def request_of(scope: Scope) -> Request:
    """The request, without its body. Its path is as in the app's routes: without the prefix of the server or of a
    mount."""
    headers = tuple((name.lower(), value) for name, value in decoded(scope["headers"]))
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    return Request(scope["method"].upper(), path, scope.get("query_string", b""), headers, scope, root)


async def read_body(request: Request, receive: Receive, cap: int) -> bytes | None:
    """The whole body; None if the client has disconnected. Raises Refused if it is too large."""
    length = request.header("content-length") or ""
    if length.isdecimal() and (len(length) > MOST_DIGITS or int(length) > cap):
        raise Refused(BODY_TOO_LARGE)
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > cap:
            raise Refused(BODY_TOO_LARGE)
        if not message.get("more_body", False):
            return b"".join(parts)


async def respond(send: Send, response: Response) -> None:
    """Send a complete response."""
    await send({"type": "http.response.start", "status": response.status, "headers": encoded(response.headers)})
    body = b"" if bodiless(response.status) else response.body
    await send({"type": "http.response.body", "body": body, "more_body": False})


def encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Headers in the form that ASGI uses."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def decoded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers from the form that ASGI uses."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
