"""One request of WSGI: the application runs in the thread of its caller, and what decides about it in the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from io import BytesIO
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, TypeAlias

from idemconsumer import forks
from idemconsumer.http.current import Slot, slot_in_thread, slot_of_task
from idemconsumer.http.exchanged import Headers, Response
from idemconsumer.http.frameworks import COVERED, covered
from idemconsumer.http.modes import Answer, CutOff, Open
from idemconsumer.http.policy import Policy
from idemconsumer.rules.http import bodiless, content_type, streams

Environ: TypeAlias = dict[str, Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write: TypeAlias = Callable[[bytes], object]
StartResponse: TypeAlias = Callable[..., Write]
Wsgi: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_PHRASES: Final = {each.value: each.phrase for each in HTTPStatus}

_Order = Future["Response | Exception"]
"""To run the application once. It is taken by the thread, which then runs it, or by the loop, which gives it up. What
the application raises is its result: as an exception it might become one of asyncio's."""


class ThreadExchange:
    """Runs the application in the thread that calls `serve`, as often as the loop calls `run`.

    A thread cannot be cancelled. A run that is cancelled is over for the loop: the transaction is rolled back, or the
    key was lost, and its Tx refuses whatever the thread still asks of it (H51). An order for a thread that has ended
    fails, so that its key is given back.
    """

    def __init__(self, app: Wsgi, environ: Environ, body: bytes, policy: Policy) -> None:
        self._app = app
        self._environ = environ
        self._body = body
        self._policy = policy
        self._orders: SimpleQueue[tuple[_Order, Slot] | None] = SimpleQueue()
        self._thread_ended = False
        self._last: _Call | None = None

    async def run(self, limit: float | None = None) -> Response:
        """See `modes.Run`, in the loop. Raises RuntimeError if it ends without a response, or its thread has ended.
        `limit` is not obeyed: the thread that would tell the client is the one that runs."""
        order = _Order()
        self._orders.put((order, slot_of_task()))
        if self._thread_ended:
            self._refuse()
        ended = await asyncio.wrap_future(order)  # cancelled, it gives up an order that the thread has not taken
        if isinstance(ended, Exception):
            raise ended
        return ended

    def serve(self, answering: Future[Answer], start_response: StartResponse) -> Iterable[bytes]:
        """In the thread: run the application when that is asked for, until there is an answer, and send that."""
        answering.add_done_callback(lambda _: self._orders.put(None))
        try:
            while (given := self._orders.get()) is not None:
                order, slot = given
                if order.set_running_or_notify_cancel():
                    self._obey(order, slot)
        except BaseException:  # the server ends this thread
            self._thread_ended = True  # before it looks: `run` looks after it has ordered
            self._refuse()
            self._discard()
            raise
        answer = answering.result()
        if answer.live and self._last is not None:
            return self._last.live(start_response, answer)
        self._discard()
        return respond(start_response, answer.response)

    def _refuse(self) -> None:
        with suppress(Empty):
            while True:
                given = self._orders.get_nowait()
                if given is not None and given[0].set_running_or_notify_cancel():
                    given[0].set_result(RuntimeError("the thread of the request has ended before it was run"))

    def _obey(self, order: _Order, slot: Slot) -> None:
        self._discard()
        missed = covered(self._app)
        environ = {**self._environ, "HTTP_ACCEPT_ENCODING": "identity", COVERED: missed}  # H5
        # Of a body that was read: its length is known, and it ends.
        environ |= {"CONTENT_LENGTH": str(len(self._body)), "wsgi.input_terminated": True}
        environ["wsgi.input"] = BytesIO(self._body)
        self._last = call = _Call(self._app, environ, self._policy)
        try:
            with slot_in_thread(slot), forks.never_in_a_child():
                response = call.response()
        except Exception as error:  # noqa: BLE001 - of the application: it is raised where the run was asked for
            order.set_result(error)
        except BaseException as error:
            order.set_result(CutOff(f"the application was ended with its thread, by {type(error).__name__}"))
            raise
        else:
            order.set_result(replace(response, routed=not missed or slot.asked))

    def _discard(self) -> None:
        """End the last run, of which nothing is sent."""
        last, self._last = self._last, None
        if last is not None:
            last.close()


class _Call:
    """One of the application, whose response is held back (PEP 3333)."""

    def __init__(self, app: Wsgi, environ: Environ, policy: Policy) -> None:
        self._app = app
        self._environ = environ
        self._policy = policy
        self._status = ""
        self._headers: Headers = ()
        self._held: list[bytes] = []
        self._size = 0
        self._parts: Iterable[bytes] = ()
        self._rest: Iterator[bytes] = iter(())
        self._ended = False
        self._server: StartResponse | None = None  # once nothing is held back any more
        self._write: Write | None = None

    def response(self) -> Response:
        """Whole, or its beginning: a stream, or more than the policy keeps. What the application gives to `write` is
        held in memory until it returns, whatever its size."""
        try:
            self._parts = self._app(self._environ, self._start_response)
            self._rest = iter(self._parts)
            while not self._begins():
                part = next(self._rest, None)
                if part is None:
                    return self._whole()
                self._hold(part)
            return Response(self._code, self._headers, b"", whole=False)
        except BaseException:
            self.close()
            raise

    def _begins(self) -> bool:
        its = self._policy.route
        return self._size > its.max_response or (
            bool(self._status) and (its.stream or streams(content_type(self._headers)))
        )

    def _whole(self) -> Response:
        self.close()  # what it still does belongs to the request, and may fail
        self._ended = True
        if not self._status:
            raise RuntimeError("the application has ended without a response")
        return Response(self._code, self._headers, b"".join(self._held))

    @property
    def _code(self) -> int:
        return int(self._status.split(" ", 1)[0])

    def live(self, start_response: StartResponse, answer: Answer) -> Iterable[bytes]:
        """Send what was held back, with the marks of the answer as more headers, then everything as it comes."""
        self._server = start_response
        live = _Live(self._held, self._rest, self.close, answer.open)
        try:
            self._write = start_response(self._status, [*self._headers, *answer.marks])
        except BaseException:
            live.close()
            raise
        return [b"".join(self._held)] if self._ended else live  # of one part a server knows the length

    def close(self) -> None:
        """Once, as the server would."""
        parts, self._parts = self._parts, ()
        if (close := getattr(parts, "close", None)) is not None:
            close()

    def _start_response(self, status: str, headers: Any, exc_info: ExcInfo | None = None) -> Write:
        if self._server is not None:
            self._write = self._server(status, headers, exc_info) if exc_info else self._server(status, headers)
            return self._write
        if exc_info is not None and exc_info[1] is not None and self._size:
            raise exc_info[1].with_traceback(exc_info[2])  # a server would have sent the headers by now
        if exc_info is None and self._status:
            raise AssertionError("the application has called start_response twice, without exc_info")
        self._status, self._headers = status, tuple(headers)
        return self._hold_or_write

    def _hold_or_write(self, part: bytes) -> None:
        if self._write is not None:
            self._write(part)
        else:
            self._hold(part)

    def _hold(self, part: bytes) -> None:
        if part and not self._status:
            raise AssertionError("the application has given a body before it has called start_response")
        self._held.append(part)
        self._size += len(part)


class _Live:
    """What a server iterates over, and closes; its key is given back even if nobody does."""

    def __init__(
        self, held: list[bytes], rest: Iterator[bytes], close: Callable[[], None], under_key: Open | None
    ) -> None:
        self._held = iter(held)
        self._rest = rest
        self._close = close
        self._under_key = under_key

    def __iter__(self) -> Iterator[bytes]:
        yield from self._held
        while (part := self._next()) is not None:
            yield part
        self.close()

    def close(self) -> None:
        try:
            self._close()
        finally:
            if (ending := self._end()) is not None:
                ending.result()

    def __del__(self) -> None:
        """Nobody has closed it. In whatever thread, the loop's too: it waits for nothing."""
        with suppress(RuntimeError):  # the loop is closed
            self._end()

    def _end(self) -> Future[None] | None:
        ended, self._under_key = self._under_key, None
        return None if ended is None else asyncio.run_coroutine_threadsafe(ended.end(), ended.lost.get_loop())

    def _next(self) -> bytes | None:
        """Nothing more is asked of an application that has lost its key."""
        if self._under_key is not None and self._under_key.lost.done():
            raise CutOff("the key of a request was lost in the middle of its response")
        return next(self._rest, None)


def respond(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    """Send all of it."""
    start_response(f"{response.status} {_PHRASES.get(response.status, 'Unknown')}", list(response.headers))
    return [] if bodiless(response.status) else [response.body]
