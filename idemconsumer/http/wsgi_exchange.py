"""Runs a WSGI application (PEP 3333) as an ASGI one: the application in the thread of its request, the decisions about
it in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from http import HTTPStatus
from io import BytesIO
from itertools import chain
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, NoReturn, TypeAlias

from idemconsumer import forks
from idemconsumer.http.asgi_wire import Message, Receive, Scope, Send, decoded
from idemconsumer.http.background import background
from idemconsumer.http.current import slot_in_thread, slot_of_task
from idemconsumer.http.exchanged import CutOff, Headers, Response
from idemconsumer.http.frameworks import COVERED
from idemconsumer.http.policy import Policy
from idemconsumer.rules.http import bodiless

Environ: TypeAlias = dict[str, Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write: TypeAlias = Callable[[bytes], object]
StartResponse: TypeAlias = Callable[..., Write]
Wsgi: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_PHRASES: Final = {each.value: each.phrase for each in HTTPStatus}
_STATUS: Final = "idemconsumer.status"  # in the message that starts a response: the status line of the application

_Result = Future["bytes | Exception | None"]
"""An exception of the application is returned as a value: raised, asyncio might take it for one of its own."""


class RequestThread:
    """The thread of one request. It executes acts for the event loop, one after another: it runs the application until
    there is something to send, and passes to the server what is sent.

    A thread cannot be cancelled. For the loop, a cancelled act is over: the transaction is rolled back, or the key was
    lost, and its Tx refuses every further call of the thread (H51). An act for a thread that has ended fails, so that
    the key is released.
    """

    def __init__(self, app: Wsgi, environ: Environ, body: bytes, policy: Policy) -> None:
        self.app = app
        self._environ = environ
        self._body = body
        self._policy = policy
        self._given: SimpleQueue[tuple[_Result, Callable[[], bytes | None]] | Message | None] = SimpleQueue()
        self._ended = False
        self._call: _Call | None = None

    # ---------------------------------------------------------------------------------------------------- in the loop
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application once, with the interface of an ASGI app."""
        environ = self._environ | {
            COVERED: scope[COVERED],
            "HTTP_ACCEPT_ENCODING": "identity",  # H5
            "CONTENT_LENGTH": str(len(self._body)),  # the body has been read, so its length is known
            "wsgi.input_terminated": True,
            "wsgi.input": BytesIO(self._body),
        }
        slot, call = slot_of_task(), _Call(self.app, environ, self._policy)
        self._call = call

        def read() -> bytes:
            with slot_in_thread(slot), forks.never_in_a_child():
                return call.read()

        try:
            part = await self._done(read)
            await send(call.start)
            while not call.ended:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                part = await self._done(read)
            await send({"type": "http.response.body", "body": part, "more_body": False})
        finally:
            if not call.ended:
                self._given.put((_Result(), call.close))

    async def send(self, message: Message) -> None:
        """Pass a message to the server."""
        self._given.put(message)

    async def _done(self, act: Callable[[], bytes]) -> Any:
        result = _Result()
        self._given.put((result, act))
        if self._ended:
            self._refuse()
        got = await asyncio.wrap_future(result)  # a cancellation here also cancels an act that the thread has not begun
        if isinstance(got, Exception):
            raise got
        return got

    # -------------------------------------------------------------------------------------------------- in the thread
    def serve(self, answering: Coroutine[Any, Any, None], start_response: StartResponse) -> Iterable[bytes]:
        """Execute acts until there is an answer, and return it to the server."""
        sent = self._sent(background().start(answering), start_response)
        first = next(sent)
        if first["more_body"]:
            return _Parts(first, sent)
        return [first["body"]] if first["body"] else []  # with a single part the server knows the length

    def _sent(self, serving: Future[None], start_response: StartResponse) -> Generator[Message]:
        """The parts of the body. The generator ends if the thread ends, if the server closes it, or if it is
        garbage-collected. The last may happen in any thread, even the loop's, so only the request's own thread waits
        for the release of the key."""
        thread, more = threading.get_ident(), False
        serving.add_done_callback(lambda _: self._given.put(None))
        try:
            while (given := self._given.get()) is not None:
                if isinstance(given, tuple):
                    _do(*given)
                elif given["type"] == "http.response.start":
                    line = given.get(_STATUS) or _status_line(given["status"])
                    start_response(line, list(decoded(given["headers"])))
                else:
                    more = given["more_body"]
                    yield given
            serving.result()
        except BaseException as error:
            self._ended = True  # before the queue is emptied: `_done` checks it after it has queued an act
            self._refuse()
            if self._call is not None:
                self._call.close()
            if more and isinstance(error, GeneratorExit) and threading.get_ident() == thread:
                wait([serving])
            raise

    def _refuse(self) -> None:
        def refuse() -> NoReturn:
            raise RuntimeError("the thread of the request has ended before it was run")

        with suppress(Empty):
            while True:
                if isinstance(given := self._given.get_nowait(), tuple):
                    _do(given[0], refuse)


class _Parts:
    """The iterable for the server, with a `close` that works even if iteration has not begun."""

    def __init__(self, first: Message, sent: Generator[Message]) -> None:
        self._sent = sent
        self._bodies = (message["body"] for message in chain([first], sent) if message["body"])

    def __iter__(self) -> Iterator[bytes]:
        return self._bodies

    def close(self) -> None:
        self._sent.close()


def respond(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    """Send a complete response."""
    start_response(_status_line(response.status), list(response.headers))
    return [] if bodiless(response.status) else [response.body]


def _do(result: _Result, act: Callable[[], bytes | None]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(act())
    except Exception as error:  # noqa: BLE001 - an error of the application; it is raised in the loop, in `_done`
        result.set_result(error)
    except BaseException as error:
        result.set_result(CutOff(f"the application was ended with its thread, by {type(error).__name__}"))
        raise


def _latin(text: object) -> bytes:
    """Encode as Latin-1, and replace other characters. A header that no server can send must not fail the request: the
    application has had its effect (H52)."""
    return str(text).encode("latin-1", "replace")


def _status_line(status: int) -> str:
    return f"{status} {_PHRASES.get(status, 'Unknown')}"


class _Call:
    """One call of the application (PEP 3333). What it passes to `write` is held in memory until it returns."""

    def __init__(self, app: Wsgi, environ: Environ, policy: Policy) -> None:
        self.ended = False
        self._app = app
        self._environ = environ
        self._policy = policy
        self._status = ""
        self._headers: Headers = ()
        self._begun = False
        self._held: list[bytes] = []
        self._size = 0
        self._parts: Iterable[bytes] = ()
        self._rest: Iterator[bytes] | None = None

    def read(self) -> bytes:
        """The whole body, or more than the policy keeps. Of a stream: nothing at first, then each part."""
        try:
            if self._rest is None:
                self._parts = self._app(self._environ, self._start_response)
                self._rest = iter(self._parts)
            while not (self.ended or self._enough):
                if (part := next(self._rest, None)) is not None:
                    self._hold(part)
                else:
                    self.close()  # `close` may still run code of the request, and fail
                    self.ended = True
            if not self._status:
                raise RuntimeError("the application has ended without a response")
        except BaseException:
            self.close()
            raise
        self._begun = True
        held, self._held = b"".join(self._held), []
        return held

    @property
    def _enough(self) -> bool:
        if self._begun:
            return any(self._held)
        return self._size > self._policy.route.max_response or (
            bool(self._status) and self._policy.streams(self._headers)
        )

    @property
    def start(self) -> Message:
        status = int(self._status.split(" ", 1)[0])
        headers = [(_latin(name), _latin(value)) for name, value in self._headers]
        return {"type": "http.response.start", "status": status, "headers": headers, _STATUS: self._status}

    def close(self) -> None:
        """Close the application's iterable once, as the server would."""
        parts, self._parts = self._parts, ()
        if (close := getattr(parts, "close", None)) is not None:
            close()

    def _start_response(self, status: str, headers: Any, exc_info: ExcInfo | None = None) -> Write:
        if exc_info is not None and exc_info[1] is not None and (self._size or self._begun):
            raise exc_info[1].with_traceback(exc_info[2])  # PEP 3333: the headers would have been sent already
        if exc_info is None and self._status:
            raise AssertionError("the application has called start_response twice, without exc_info")
        self._status, self._headers = status, tuple(headers)
        return self._hold

    def _hold(self, part: bytes) -> None:
        if part and not self._status:
            raise AssertionError("the application has given a body before it has called start_response")
        self._held.append(part)
        self._size += len(part)
