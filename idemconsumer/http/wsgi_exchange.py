"""One request of WSGI: the application runs in the thread of its caller, and what decides about it in the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from idemconsumer import forks
from idemconsumer.http.current import Slot, slot_in_thread, slot_of_task
from idemconsumer.http.frameworks import COVERED, covered
from idemconsumer.http.messages import Headers, Response
from idemconsumer.http.modes import Answer, CutOff, Open
from idemconsumer.rules.http import content_type, streams

T = TypeVar("T")
Environ: TypeAlias = dict[str, Any]
ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write: TypeAlias = Callable[[bytes], object]
StartResponse: TypeAlias = Callable[..., Write]
Wsgi: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class Exchange:
    """Runs the application in the thread that calls `follow`, as often as the loop calls `run`.

    A thread cannot be cancelled. A run that is cancelled is over for the loop: the transaction is rolled back, or the
    key was lost, and its Tx refuses whatever the thread still asks of it (H51). An order for a thread that has ended
    fails, so that its key is given back.
    """

    def __init__(self, app: Wsgi, environ: Environ, body: bytes, *, cap: int, stream: bool) -> None:
        self._app = app
        self._environ = environ
        self._body = body
        self._cap = cap
        self._stream = stream
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._thread_ended = False
        self.last: Run | None = None

    async def run(self, limit: float | None = None) -> Response:
        """See `modes.Run`, in the loop. Raises RuntimeError if it ends without a response, or its thread has ended.
        `limit` is not obeyed: the thread that would tell the client is the one that runs."""
        order = _Order(slot_of_task())
        self._orders.put(order)
        if self._thread_ended:
            self._refuse()
        try:
            return await order.response
        except asyncio.CancelledError:
            order.take()
            raise

    def follow(self, answering: Future[T]) -> T:
        """In the thread: run the application when that is asked for, until there is an answer."""
        answering.add_done_callback(lambda _: self._orders.put(None))
        try:
            while (order := self._orders.get()) is not None:
                if order.take():
                    self._obey(order)
        except BaseException:  # the server ends this thread
            self._thread_ended = True  # before it looks: `run` looks after it has ordered
            self._refuse()
            self.discard()
            raise
        return answering.result()

    def _refuse(self) -> None:
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if order is not None and order.take():
                    order.failed(RuntimeError("the thread of the request has ended before it was run"))

    def _obey(self, order: _Order) -> None:
        self.discard()
        view = covered(self._app)
        plain = {"HTTP_ACCEPT_ENCODING": "identity"}  # H5
        environ = {**self._environ, **_input(self._body), **plain, COVERED: view}
        self.last = run = Run(self._app, environ, self._cap, stream=self._stream)
        try:
            with slot_in_thread(order.slot), forks.never_in_a_child():
                response = run.response()
        except Exception as error:  # noqa: BLE001 - of the application: it is raised where the run was asked for
            order.failed(error)
        except BaseException as error:
            order.failed(CutOff(f"the application was ended with its thread, by {type(error).__name__}"))
            raise
        else:
            order.ended(replace(response, routed=not view.missed or order.slot.asked))

    def discard(self) -> None:
        """End the last run, of which nothing is sent."""
        last, self.last = self.last, None
        if last is not None:
            last.close()


class _Order:
    """To run the application once. It is taken by the thread, which then runs it, or by the loop, which gives it up."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._loop = asyncio.get_running_loop()
        self.response: asyncio.Future[Response] = self._loop.create_future()
        self._taken = threading.Lock()

    def take(self) -> bool:
        """True once, for whoever comes first."""
        return self._taken.acquire(blocking=False)

    def ended(self, response: Response) -> None:
        self._tell(lambda: self.response.set_result(response))

    def failed(self, error: Exception) -> None:
        self._tell(lambda: self.response.set_exception(error))

    def _tell(self, settle: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(lambda: None if self.response.done() else settle())


class Run:
    """One call of the application, whose response is held back (PEP 3333)."""

    def __init__(self, app: Wsgi, environ: Environ, cap: int, *, stream: bool) -> None:
        self._app = app
        self._environ = environ
        self._cap = cap
        self._stream = stream
        self.status = ""
        self.headers: Headers = ()
        self._held: list[bytes] = []
        self._size = 0
        self._parts: Iterable[bytes] = ()
        self._rest: Iterator[bytes] = iter(())
        self._ended = False
        self._server: StartResponse | None = None  # once nothing is held back any more
        self._write: Write | None = None

    def response(self) -> Response:
        """Whole, or its beginning: a stream, or more than `cap` bytes. What the application gives to `write` is held
        in memory until it returns, whatever its size."""
        try:
            self._parts = self._app(self._environ, self._start_response)
            self._rest = iter(self._parts)
            while not self._begins():
                part = next(self._rest, None)
                if part is None:
                    return self._whole()
                self._hold(part)
            return Response(_code(self.status), self.headers, b"", whole=False)
        except BaseException:
            self.close()
            raise

    def _begins(self) -> bool:
        return self._size > self._cap or (bool(self.status) and (self._stream or streams(content_type(self.headers))))

    def _whole(self) -> Response:
        self.close()  # what it still does belongs to the request, and may fail
        self._ended = True
        if not self.status:
            raise RuntimeError("the application has ended without a response")
        return Response(_code(self.status), self.headers, b"".join(self._held))

    def live(self, start_response: StartResponse, answer: Answer) -> Iterable[bytes]:
        """Send what was held back, with the marks of the answer as more headers, then everything as it comes."""
        self._server = start_response
        live = _Live(self._held, self._rest, self.close, answer.open)
        try:
            self._write = start_response(self.status, [*self.headers, *answer.marks])
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
        if exc_info is None and self.status:
            raise AssertionError("the application has called start_response twice, without exc_info")
        self.status, self.headers = status, tuple(headers)
        return self._hold_or_write

    def _hold_or_write(self, part: bytes) -> None:
        if self._write is not None:
            self._write(part)
        else:
            self._hold(part)

    def _hold(self, part: bytes) -> None:
        if part and not self.status:
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


def _input(body: bytes) -> Environ:
    """Of a body that was read: its length is known, and it ends."""
    return {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body)), "wsgi.input_terminated": True}


def _code(status: str) -> int:
    return int(status.split(" ", 1)[0])
