"""A psycopg connection that waits for the server with less work of its own.

psycopg registers the socket with the event loop for each wait, with a timer beside it, and takes it out again. A group
waits once for each statement of its handlers, and that was a fifth of all client CPU. Here the socket stays registered
from the first wait until `unwatch`, and what has arrived is read in the loop's callback; the caller wakes up once the
answer is whole. Whatever is not a plain wait for an answer goes psycopg's own way.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from idemconsumer.stores.prepared import PreparedStatements

RV = TypeVar("RV")
Answer = Generator[Wait, Ready | int, RV]  # psycopg's steps of one exchange with the server

_INTERVAL = 0.1  # psycopg's own default
_LOOK_OUT = 1.0  # seconds between two looks for an error of the socket that the loop does not report
_READING = int(Wait.R)  # its compiled generators yield plain numbers


class Connection(psycopg.AsyncConnection[Any]):
    """`unwatch` must be called before the connection is given back or closed: a socket that is closed while it is
    registered would shadow the next one with its number."""

    _watched: int | None = None
    _lookout: asyncio.TimerHandle | None = None
    _answer: Answer[Any] | None = None
    _waiter: asyncio.Future[Any] | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.statements = PreparedStatements(self)

    async def simple(self, statements: bytes) -> list[PGresult]:
        """Several statements as one simple query, and their results. psycopg's cursors take twice as long for that."""
        async with self.lock:
            return await self.wait(self._simple(statements))

    def _simple(self, statements: bytes) -> Answer[list[PGresult]]:
        self.pgconn.send_query(statements)
        results: list[PGresult] = yield from generators.execute(self.pgconn)
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result, encoding=self.info.encoding)
        return results

    async def wait(self, gen: Answer[RV], interval: float = _INTERVAL, timeout: float | None = None) -> RV:
        """See `psycopg.AsyncConnection.wait`."""
        if timeout is not None:
            self.unwatch()
            return await super().wait(gen, interval, timeout)
        try:
            state = next(gen)
        except StopIteration as end:
            return await super().wait(_returned(end.value), interval)
        except BaseException:
            self.unwatch()
            raise
        if state == _READING:
            try:
                ended, value = await self._read(gen)
            except asyncio.CancelledError:
                # psycopg cancels the statement on the server, waits for its end and raises this again.
                self.unwatch()
                return await super().wait(_Cancelled(gen), interval)
            if ended:
                return value  # type: ignore[no-any-return]
            state = value
        self.unwatch()
        return await super().wait(_resumed(gen, state), interval)

    def _read(self, answer: Answer[Any]) -> asyncio.Future[Any]:
        """Done when the answer is whole: (True, what it returned), or (False, what else it has to wait for)."""
        self._watch()
        self._answer, self._waiter = answer, asyncio.get_running_loop().create_future()
        return self._waiter

    def _watch(self) -> None:
        if self._watched is None:
            loop = asyncio.get_running_loop()
            self._watched = self.pgconn.socket
            loop.add_reader(self._watched, self._readable)
            if not isinstance(loop, asyncio.BaseEventLoop):
                self._lookout = loop.call_later(_LOOK_OUT, self._look_out)

    def _look_out(self) -> None:
        """For uvloop: after an error of a socket libuv stops polling it for good, and calls no reader (uv__poll_io)."""
        if self._watched is None:
            return
        self._lookout = asyncio.get_running_loop().call_later(_LOOK_OUT, self._look_out)
        socket = select.poll()
        socket.register(self._watched, 0)  # errors and the end are reported without being asked for
        if socket.poll(0):
            self._readable()

    def _readable(self) -> None:
        waiter, answer = self._waiter, self._answer
        if waiter is None or answer is None or waiter.done():  # no statement waits: a notice, or the end
            self.unwatch()
            return
        try:
            state = answer.send(Ready.R)
            if state != _READING:
                waiter.set_result((False, state))
        except StopIteration as end:
            waiter.set_result((True, end.value))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            waiter.set_exception(error)
        if waiter.done():
            self._answer = self._waiter = None
            if self.pgconn.status != ConnStatus.OK:  # libpq may have closed the socket already
                self.unwatch()

    def unwatch(self) -> None:
        """Take the socket out of the event loop; the next wait puts it back."""
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = None
        if self._lookout is not None:
            self._lookout.cancel()
            self._lookout = None

    async def close(self) -> None:
        """See `psycopg.AsyncConnection.close`."""
        self.unwatch()
        await super().close()


def _returned(value: RV) -> Answer[RV]:
    """Ended without a wait. psycopg then sees to it that the loop is not starved, as by a long COPY."""
    return value
    yield


def _resumed(answer: Answer[RV], state: Wait) -> Answer[RV]:
    while True:
        try:
            ready = yield state
            state = answer.send(ready)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class _Cancelled(Generator[Wait, Ready | int, Any]):
    """Raises the cancellation at its first step, as if it had come there, and then goes on."""

    def __init__(self, answer: Answer[Any]) -> None:
        self._answer = answer
        self._raised = False

    def send(self, value: Ready | int) -> Wait:
        if not self._raised:
            self._raised = True
            raise asyncio.CancelledError
        return self._answer.send(value)

    def throw(self, *error: Any) -> Wait:
        return self._answer.throw(*error)
