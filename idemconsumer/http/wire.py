"""ASGI's messages: a request and its body, and a response that is whole."""

from __future__ import annotations

from idemconsumer.http.exchange import Receive, Scope, Send
from idemconsumer.http.messages import Request, Response
from idemconsumer.http.problems import BODY_TOO_LARGE, Problem
from idemconsumer.rules.http import MOST_DIGITS, bodiless


def request_of(scope: Scope) -> Request:
    """The request, without its body."""
    headers = tuple((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"])
    method, query = scope["method"].upper(), scope.get("query_string", b"")
    return Request(method, path_of(scope), query, headers, scope, root_of(scope))


async def read_body(request: Request, receive: Receive, cap: int) -> bytes | Problem | None:
    """The whole body; a problem if it is too large; None if the client has gone."""
    length = request.header("content-length") or ""
    if length.isdecimal() and (len(length) > MOST_DIGITS or int(length) > cap):
        return BODY_TOO_LARGE
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > cap:
            return BODY_TOO_LARGE
        if not message.get("more_body", False):
            return b"".join(parts)


async def respond(send: Send, response: Response) -> None:
    """Send all of it."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if bodiless(response.status) else response.body
    await send({"type": "http.response.body", "body": body, "more_body": False})


def path_of(scope: Scope) -> str:
    """As the app's routes have it: without what the server or a mount has put before it."""
    path, root = str(scope["path"]), root_of(scope)
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def root_of(scope: Scope) -> str:
    """Where the app is mounted."""
    return str(scope.get("root_path", ""))
