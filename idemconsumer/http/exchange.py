"""One request and the application's response to it. The response is held back until its outcome is certain (H3), and
then sent. A route without Tx runs to its end even if the client disconnects (H13). A WSGI application is wrapped as an
ASGI one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import Any, Final

from idemconsumer import forks
from idemconsumer.http.asgi_wire import Asgi, Message, Receive, Scope, Send, decoded, encoded, respond
from idemconsumer.http.current import slot_of_task
from idemconsumer.http.exchanged import Answer, CutOff, Headers, Open, Response
from idemconsumer.http.frameworks import COVERED, covered, routed
from idemconsumer.http.policy import Policy
from idemconsumer.http.problems import GOES_ON
from idemconsumer.logs import log
from idemconsumer.user_code.cancellation import leave_behind, uninterrupted, until_done

_GRACE: Final = 5.0  # seconds within which a cancelled application must end
_GOING_ON: Final[set[asyncio.Task[None]]] = set()  # references, since Python would otherwise collect the tasks


class Exchange:
    """Runs the application in a task of its own, once for each call of `run`, with the same body each time.

    A response is complete, or it is only the beginning: of a stream, or of a body larger than the policy keeps. In both
    cases the application then waits in its `send` until the response is released or the next `run` begins. Until the
    release it does not learn that the client has disconnected: a run that has begun comes to its end (H8).
    """

    def __init__(self, app: Asgi, scope: Scope, body: bytes, receive: Receive, send: Send, policy: Policy) -> None:
        self.receive = receive
        self.send = send
        self.body = body
        self.policy = policy
        self._app = app
        self._scope = scope
        self._run: _Run | None = None
        self._begun: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()  # the first run's limit

    # -------------------------------------------------------------------------------------------------- the application
    def run(self, limit: float | None = None) -> Awaitable[Response]:
        """See RunApplication. The previous run is cancelled. Raises RuntimeError if the run ends without a response."""
        if not self._begun.done():  # before any await: until it is set, `serve_to_its_end` may cancel the run
            self._begun.set_result(limit)
        return self._response()

    async def _response(self) -> Response:
        await self._discard()
        run = self._run = _Run(self)
        missed = covered(self._app)
        scope = _inner(self._scope, missed)
        run.task = asyncio.create_task(run.call(self._app, scope))
        try:
            await until_done(run.task, run.response)
        except asyncio.CancelledError:
            await self._discard()
            raise
        if run.response.done():
            # Outer middleware reads the route from this scope.
            known = {*self._scope, COVERED}
            self._scope.update({name: given for name, given in scope.items() if name not in known})
            found = (routed(scope) and not missed) or slot_of_task().asked
            return replace(run.response.result(), routed=found)
        self._run = None
        run.task.result()
        raise RuntimeError("the application has ended without a response")

    async def _discard(self) -> None:
        """End the previous run. If it takes more than five seconds it is left behind, and can send nothing any more."""
        run, self._run = self._run, None
        if run is None:
            return
        run.over = True
        run.task.cancel()
        # Code such as anyio cancels again at each step of the loop.
        await uninterrupted(asyncio.wait({run.task}, timeout=_GRACE))
        if not run.task.done():
            leave_behind(run.task)
            log.warning("an endpoint did not end after its cancellation", seconds=_GRACE)
        elif not run.task.cancelled():
            run.task.exception()

    # ------------------------------------------------------------------------------------------------------- the answer
    async def serve(self, answering: Awaitable[Answer]) -> None:
        """Send the answer. An error, or a cancellation of this task, ends the application."""
        try:
            answer = await answering
        except BaseException:
            await self._discard()
            raise
        if answer.live and answer.open is not None:
            await self._go_on_under_its_key(answer.marks, answer.open)
        elif answer.live:
            await self._go_on(answer.marks)
        else:
            await self._discard()
            await respond(self.send, answer.response)

    async def _go_on(self, marks: Headers) -> None:
        """Send the held messages, with `marks` as additional headers, then everything else as the application sends it.
        Returns when the application returns, and raises what it raises. If the client is gone and the response is not
        complete, the application is ended."""
        run = self._run
        assert run is not None
        if self.send is _nowhere and not run.complete:
            await self._discard()
            return
        run.held[0]["headers"] += encoded(marks)
        try:
            for message in run.held:
                await self.send(message)
        except BaseException:
            await self._discard()
            raise
        self._run = None
        run.held.clear()
        run.open.set()
        await run.task  # awaiting it passes a cancellation on to it

    async def _go_on_under_its_key(self, marks: Headers, held: Open) -> None:
        """Like `_go_on`, while the key is held. Raises CutOff if the key is lost: the client gets no end of the
        response."""
        going = asyncio.ensure_future(self._go_on(marks))
        try:
            await asyncio.wait([going, held.lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not going.done():
                going.cancel()
                await uninterrupted(asyncio.wait({going}))
            await uninterrupted(held.end())
        if going.cancelled():
            raise CutOff("the key of a request was lost in the middle of its response")
        going.result()

    async def serve_to_its_end(self, answering: Coroutine[Any, Any, Answer]) -> None:
        """Like `serve`, but an application that has begun is never cancelled: it may still run, such as in a thread,
        and its key would be released too early. After its timeout, or if this task is cancelled, the application goes
        on alone, and its answer is only stored."""
        task, begun = asyncio.create_task(answering), self._begun
        try:
            await until_done(task, begun)
            limit = begun.result() if begun.done() else None
            await (until_done(task) if limit is None else asyncio.wait([task], timeout=limit))
        except asyncio.CancelledError:
            try:
                if not begun.done():
                    task.cancel()
                    await uninterrupted(until_done(task, begun))
            finally:
                self._leave(task)
            raise
        if task.done():
            await self.serve(task)
            return
        log.warning("a request exceeded its timeout and still runs", route=self.policy.name, timeout=limit)
        send = self.send
        self._leave(task)
        await respond(send, GOES_ON.response)

    def _leave(self, answering: asyncio.Task[Answer]) -> None:
        """The client has no connection any more: go on, and discard everything that is sent."""
        self.receive, self.send = gone, _nowhere
        task = asyncio.create_task(self._serve_nobody(answering))
        _GOING_ON.add(task)
        task.add_done_callback(_GOING_ON.discard)

    async def _serve_nobody(self, answering: asyncio.Task[Answer]) -> None:
        try:
            await self.serve(answering)
        except Exception as error:  # noqa: BLE001 - no server would log it any more
            log.error("a request failed after its client had left", route=self.policy.name, exc_info=error)


class _Run:
    """The `receive` and `send` of one run."""

    task: asyncio.Task[None]

    def __init__(self, exchange: Exchange) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.open = asyncio.Event()
        self.held: list[Message] = []
        self.over = False
        self._exchange = exchange
        self._body: bytes | None = exchange.body
        self._size = 0

    @property
    def complete(self) -> bool:
        """Whether the whole response is held, even if it is too large to be kept."""
        last = self.held[-1]
        return bool(last["type"] == "http.response.body") and not last.get("more_body", False)

    async def call(self, app: Asgi, scope: Scope) -> None:
        with forks.never_in_a_child():
            await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.open.wait()
        return await self._exchange.receive()

    async def send(self, message: Message) -> None:
        if self.open.is_set():
            await self._exchange.send(message)
            return
        if self.over:  # it did not end after its cancellation, and would wait here for ever
            raise OSError("the request was cut off, and no client waits for its response")
        starts = message["type"] == "http.response.start"
        if starts is bool(self.held):
            raise RuntimeError(f"the application has sent {message['type']!r} at the wrong place in its response")
        if starts:  # the headers may be an iterator
            message = {**message, "headers": list(message.get("headers", ()))}
        self.held.append(message)
        policy = self._exchange.policy
        if starts:
            if policy.streams(decoded(message["headers"])):
                await self._hold(whole=False)
        elif message["type"] == "http.response.body":
            self._size += len(message.get("body", b""))
            if self._size > policy.route.max_response:
                await self._hold(whole=False)
            elif not message.get("more_body", False):
                await self._hold(whole=True)

    async def _hold(self, *, whole: bool) -> None:
        start, *parts = self.held
        body = b"".join(part.get("body", b"") for part in parts) if whole else b""
        if not self.response.done():
            self.response.set_result(Response(start["status"], decoded(start["headers"]), body, whole))
        await self.open.wait()


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(message: Message) -> None:
    return


def _inner(scope: Scope, missed: set[str]) -> Scope:
    """A copy of `scope` for the application. Its extensions offer only ways to send that can be held back (not, for
    example, a file by its path), and it accepts no content encoding (H5)."""
    extensions = scope.get("extensions") or {}
    kept = {name: given for name, given in extensions.items() if not name.startswith("http.response.")}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
    headers.append((b"accept-encoding", b"identity"))
    return {**scope, "headers": headers, "extensions": kept, COVERED: missed}
