"""A server that has answered, and forks its workers then: `python -m tests.http.forking_door KIND STORE`.

As gunicorn with --preload and uWSGI do it, and with a first request before.
"""

from __future__ import annotations

import asyncio
import os
import sys
from io import BytesIO
from typing import Any

from anyio import to_thread

from idemconsumer import App
from idemconsumer.http import Idempotency, IdempotencyMiddleware, Route, wsgi
from tests.support.pids import connected, ended

KIND, STORE = sys.argv[1:]
ROUTES = {"POST /orders": Route(tx=True), "POST /calls": Route()} if STORE != "redis" else {"POST /calls": Route()}
idempotency = Idempotency(App("forks"), tenant=lambda request: "acme", routes=ROUTES, store=STORE)  # type: ignore[arg-type]


def place(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("201 Made", [])
    return [fork() if environ["PATH_INFO"] == "/forks" else b"%d" % os.getpid()]


async def place_async(scope: Any, receive: Any, send: Any) -> None:
    match scope["path"]:
        case "/forks":
            body = fork()
        case "/forks-in-a-thread":  # as FastAPI calls a `def` endpoint
            body = await to_thread.run_sync(fork)
        case _:
            body = b"%d" % os.getpid()
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": body})


def fork() -> bytes:
    if (pid := os.fork()) == 0:
        sys.exit(7)
    return ended(pid).encode()


behind_wsgi: Any = wsgi.IdempotencyMiddleware(place, idempotency)
behind_asgi: Any = IdempotencyMiddleware(place_async, idempotency)


def ask(path: str, key: str) -> bytes:
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": path, "HTTP_IDEMPOTENCY_KEY": key, "wsgi.input": BytesIO()}
    return b"".join(behind_wsgi(environ, lambda status, headers: None))


async def ask_async(path: str, key: str) -> bytes:
    body = b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal body
        body += message.get("body", b"")

    headers = [(b"idempotency-key", key.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "headers": headers}
    await behind_asgi(scope, receive, send)
    return body


def answer(path: str, name: str, loop: asyncio.AbstractEventLoop) -> bytes:
    return ask(path, name) if KIND == "wsgi" else loop.run_until_complete(ask_async(path, name))


def serve(name: str, loop: asyncio.AbstractEventLoop) -> None:
    for path in [route.split()[1] for route in ROUTES]:
        for _ in range(2):
            answered = answer(path, name, loop)
            assert answered == b"%d" % os.getpid(), (name, path, answered)


def main() -> None:
    loop = asyncio.new_event_loop()
    serve("before", loop)
    assert connected()
    children = []
    for number in range(2):
        if (pid := os.fork()) == 0:
            assert not connected(), connected()
            of_the_child = asyncio.new_event_loop()
            for path in [route.split()[1] for route in ROUTES]:
                replayed = answer(path, "before", of_the_child)
                assert replayed == b"%d" % os.getppid(), replayed
            serve(f"child-{number}", of_the_child)
            sys.exit(0)
        children.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert ends == [0, 0], ends
    serve("after", loop)
    for path in ("/forks", "/forks-in-a-thread")[: 1 if KIND == "wsgi" else 2]:
        assert (path, answer(path, "after", loop)) == (path, b"7")
    print("served")


if __name__ == "__main__":
    main()
