"""Requests to a WSGI app, as a server makes them."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any
from wsgiref.util import setup_testing_defaults

from idemconsumer.http.wsgi_exchange import Environ, Wsgi


class Answer:
    """What a server would have sent."""

    def __init__(self) -> None:
        self.status = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.closed = 0

    def start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info is not None and self.body:
            raise exc_info[1].with_traceback(exc_info[2])
        self.status, self.headers = status, {name.lower(): value for name, value in headers}
        return self.write

    def write(self, part: bytes) -> None:
        self.body += part

    @property
    def replayed(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


def ask(app: Wsgi, key: str | None = "k-1", body: bytes = b"{}", *, method: str = "POST", **changes: Any) -> Answer:
    """`changes` of the environ; None leaves it out."""
    environ: Environ = {
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": "/orders", "QUERY_STRING": "",
        "HTTP_X_TENANT": "acme", "CONTENT_LENGTH": str(len(body)), "wsgi.input": BytesIO(body),
    }  # fmt: skip
    if key is not None:
        environ["HTTP_IDEMPOTENCY_KEY"] = key
    environ |= {name.replace("__", "."): value for name, value in changes.items()}
    setup_testing_defaults(environ)
    environ = {name: value for name, value in environ.items() if value is not None}
    answer = Answer()
    parts = app(environ, answer.start)
    try:
        for part in parts:
            answer.write(part)
    finally:
        if hasattr(parts, "close"):
            parts.close()
    return answer
