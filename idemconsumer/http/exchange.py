"""One request of ASGI and the application's response to it, which is held back until what it says is certain (H3)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from idemconsumer import forks
from idemconsumer.http.covered import COVERED, Covered, covered
from idemconsumer.http.current import asked, slot_of_task
from idemconsumer.http.marked import routed
from idemconsumer.http.messages import Headers, Response
from idemconsumer.logs import log
from idemconsumer.rules.http import streams
from idemconsumer.user_code.cancellation import leave_behind, uninterrupted, until_done

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Asgi: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

_GRACE: Final = 5.0  # seconds for an application that was cancelled
_STREAMS: Final = ("text/event-stream", "multipart/x-mixed-replace")


class Exchange:
    """Runs the application in a task of its own, as often as `run` is called, with the same body each time.

    A response is whole, or it is the beginning of one: a stream, or more than `cap` bytes. The application waits in
    its `send` then, until `go_on` or the next `run`. It does not learn that the client has gone before it may go on:
    what has begun comes to its end (H8). `begun` has the limit that the first `run` was given.
    """

    def __init__(self, app: Asgi, scope: Scope, body: bytes, receive: Receive, send: Send, *, cap: int, stream: bool):
        self._app = app
        self._scope = scope
        self._body = body
        self._client = _Client(receive, send)
        self._cap = cap
        self._stream = stream
        self._run: _Run | None = None
        self.begun: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

    def run(self, limit: float | None = None) -> Awaitable[Response]:
        """See `modes.Run`. The run before is cancelled. Raises RuntimeError if it ends without a response."""
        if not self.begun.done():  # at once: who finds that nothing has begun may cancel what would begin it
            self.begun.set_result(limit)
        return self._response()

    async def _response(self) -> Response:
        await self.discard()
        run = self._run = _Run(self._body, self._client, self._cap, stream=self._stream)
        view = covered(self._app)
        scope = _inner(self._scope, view)
        run.task = asyncio.create_task(_called(self._app, scope, run))
        try:
            await until_done(run.task, run.response)
        except asyncio.CancelledError:
            await self.discard()
            raise
        if run.response.done():
            # Middleware around this one looks there for the route.
            known = {*self._scope, COVERED}
            self._scope.update({name: given for name, given in scope.items() if name not in known})
            found = (routed(scope) and not view.missed) or asked(slot_of_task())
            return replace(run.response.result(), routed=found)
        self._run = None
        run.task.result()
        raise RuntimeError("the application has ended without a response")

    @property
    def send(self) -> Send:
        return self._client.send

    def leave(self) -> None:
        """There is no client any more: what is sent goes nowhere."""
        self._client.receive, self._client.send = _gone, _nowhere

    async def go_on(self, marks: Headers = ()) -> None:
        """Send what was held back, with `marks` as more headers, then everything as it comes. Returns when the
        application does, raises what it raises. What has more to send to nobody is ended."""
        run = self._run
        assert run is not None
        if self.send is _nowhere and not run.complete:
            await self.discard()
            return
        run.held[0] = _marked(run.held[0], marks)
        try:
            for message in run.held:
                await self.send(message)
        except BaseException:
            await self.discard()
            raise
        self._run = None
        run.held.clear()
        run.open.set()
        await run.task  # which is cancelled with this one

    async def discard(self) -> None:
        """End the last run. One that does not end within five seconds is left behind, and can do nothing any more."""
        run, self._run = self._run, None
        if run is None:
            return
        run.over = True
        run.task.cancel()
        # Whoever cancels may do so again at each step of the loop, as anyio does.
        await uninterrupted(asyncio.wait({run.task}, timeout=_GRACE))
        if not run.task.done():
            leave_behind(run.task)
            log.warning("an endpoint did not end after its cancellation", seconds=_GRACE)
        elif not run.task.cancelled():
            run.task.exception()


@dataclass(slots=True)
class _Client:
    receive: Receive
    send: Send


class _Run:
    """The `receive` and `send` of one run."""

    task: asyncio.Task[None]

    def __init__(self, body: bytes, client: _Client, cap: int, *, stream: bool) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.open = asyncio.Event()
        self.held: list[Message] = []
        self.over = False
        self._body: bytes | None = body
        self._client = client
        self._cap = cap
        self._stream = stream
        self._size = 0

    @property
    def complete(self) -> bool:
        """Whether all of the response is held back, also where it is not kept."""
        last = self.held[-1]
        return bool(last["type"] == "http.response.body") and not last.get("more_body", False)

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.open.wait()
        return await self._client.receive()

    async def send(self, message: Message) -> None:
        if self.open.is_set():
            await self._client.send(message)
            return
        if self.over:  # it did not end though it was cancelled, and would wait for ever
            raise OSError("the request was cut off, and no client waits for its response")
        starts = message["type"] == "http.response.start"
        if starts is bool(self.held):
            raise RuntimeError(f"the application has sent {message['type']!r} at the wrong place in its response")
        if starts:  # they may be read only once
            message = {**message, "headers": list(message.get("headers", ()))}
        self.held.append(message)
        if starts:
            if self._stream or streams(_content_type(message)):
                await self._hold(whole=False)
        elif message["type"] == "http.response.body":
            self._size += len(message.get("body", b""))
            if self._size > self._cap:
                await self._hold(whole=False)
            elif not message.get("more_body", False):
                await self._hold(whole=True)

    async def _hold(self, *, whole: bool) -> None:
        start, *parts = self.held
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"])
        body = b"".join(part.get("body", b"") for part in parts) if whole else b""
        if not self.response.done():
            self.response.set_result(Response(start["status"], headers, body, whole))
        await self.open.wait()


async def _called(app: Asgi, scope: Scope, run: _Run) -> None:
    with forks.never_in_a_child():
        await app(scope, run.receive, run.send)


def _marked(start: Message, marks: Headers) -> Message:
    more = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in marks]
    return {**start, "headers": [*start["headers"], *more]} if more else start


async def _gone() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(message: Message) -> None:
    return


def _content_type(start: Mapping[str, Any]) -> str:
    types = (value for name, value in start["headers"] if name.lower() == b"content-type")
    return str(next(types, b"").decode("latin-1"))


def _inner(scope: Scope, view: Covered) -> Scope:
    """As `scope`, but with only those ways to send that are held back here, of which a file by its path is none, and
    asking for no encoding (H5)."""
    extensions = scope.get("extensions") or {}
    kept = {name: given for name, given in extensions.items() if not name.startswith("http.response.")}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
    headers.append((b"accept-encoding", b"identity"))
    return {**scope, "headers": headers, "extensions": kept, COVERED: view}
