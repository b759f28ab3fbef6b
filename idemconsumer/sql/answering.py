"""Connections whose server has to answer in time (R20).

A proxy, or a server that hangs, may keep a connection open and send nothing. TCP does not notice that, and psycopg
would wait for ever. Here each exchange has a timeout of `patience` seconds. Then the socket is shut down, which ends
the exchange with an OperationalError, and the connection is closed. No cancel request is sent first, since that would
get no answer either. The outcome of the statement is unknown.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import traceback
from collections.abc import Awaitable, Generator
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import psycopg
from psycopg.rows import Row
from psycopg.waiting import Ready, Wait

from idemconsumer import forks
from idemconsumer.certificates import whose

RV = TypeVar("RV")
Exchange = Generator[Wait, Ready | int, RV]  # psycopg's steps of one exchange with the server

PATIENCE: Final = 30.0  # seconds; no statement of ours may wait so long for a lock
INTERVAL: Final = 0.1  # psycopg's own default
_LOOK: Final = 1.0  # seconds between two checks whether `patience` was lowered meanwhile
_LEFT: Final = 1.0  # seconds for a task that waits on a socket that was shut down


def cut(descriptor: int) -> None:
    """Shut a socket down: each task that waits on it reads its end."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
        same.shutdown(socket.SHUT_RDWR)


def _name_certificate(error: BaseException, conninfo: str) -> None:
    if isinstance(error, psycopg.OperationalError) and (why := whose(str(error), conninfo)) is not None:
        error.args = (f"{error}; {why}",)


def silence(seconds: float) -> psycopg.OperationalError:
    return psycopg.OperationalError(f"no answer from the server within {seconds:g} s, connection closed")


class AnsweringConnection(psycopg.AsyncConnection[Row]):
    """Each exchange ends within `patience` seconds. `notifies()` needs a `timeout` of its own.

    `silent`: an exchange had to be ended after that time.
    """

    patience: float = PATIENCE
    silent = False
    _since = 0.0  # the loop's time at which the server last sent something

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        forks.not_inherited(self, _descriptors)

    @classmethod
    async def connect(cls, conninfo: str = "", **more: Any) -> Self:
        """See `psycopg.AsyncConnection.connect`. An attempt that is given up leaves no open socket behind."""
        while True:
            forked = forks.count()
            try:
                connection = await super().connect(conninfo, **more)
            except BaseException as error:
                # psycopg closes its socket with the last reference to it, and its frames have one, which the error
                # keeps. To the server that would be a client that is logging in, and for up to a minute it would block
                # DROP DATABASE.
                traceback.clear_frames(error.__traceback__)
                _name_certificate(error, conninfo)
                raise
            if forks.count() == forked:
                return connection
            await connection.close()  # O25: a child process that was forked meanwhile has the socket too

    async def wait(self, gen: Exchange[RV], interval: float = INTERVAL, timeout: float | None = None) -> RV:
        """See `psycopg.AsyncConnection.wait`."""
        if timeout is not None:
            return await super().wait(gen, interval, timeout)
        return await self.ended_within(self.patience, super().wait(gen, interval))

    async def close(self) -> None:
        """See `psycopg.AsyncConnection.close`. An exchange of another task ends with an error."""
        if self.lock.locked() and not self.closed:
            # Else its descriptor is free while the other task waits on it: the next connection gets it, and both hang.
            with suppress(psycopg.Error):
                cut(self.pgconn.socket)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEFT), self.lock:
                    pass
        await super().close()

    async def ended_within(self, seconds: float, exchange: Awaitable[RV]) -> RV:
        """The result of an exchange, which is ended once the server has sent nothing for so many seconds."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def wait() -> None:
            nonlocal timer
            if (left := self._since + min(seconds, self.patience) - loop.time()) > 0:
                timer = loop.call_later(min(left, _LOOK), wait)
                return
            self.silent = True
            with suppress(psycopg.Error):  # psycopg has closed it meanwhile
                cut(self.pgconn.socket)

        self._since = loop.time()
        wait()
        try:
            return await exchange
        except psycopg.OperationalError as error:
            if not self.silent:
                raise
            self.pgconn.finish()
            raise silence(min(seconds, self.patience)) from error
        finally:
            if timer is not None:
                timer.cancel()


class BlockingConnection(psycopg.Connection[Row]):
    """The same for a thread that may block."""

    patience: float = PATIENCE
    waited_on = -1  # a duplicate descriptor of the socket, during an exchange

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        forks.not_inherited(self, lambda connection: [*_descriptors(connection), connection.waited_on])

    @classmethod
    def connect(cls, conninfo: str = "", **more: Any) -> Self:
        """See `psycopg.Connection.connect`."""
        while True:
            forked = forks.count()
            try:
                connection = super().connect(conninfo, **more)
            except psycopg.OperationalError as error:
                _name_certificate(error, conninfo)
                raise
            if forks.count() == forked:
                return connection
            connection.close()  # O25: a child process that was forked meanwhile has the socket too

    def wait(self, gen: Exchange[RV], interval: float = INTERVAL, timeout: float | None = None) -> RV:
        """See `psycopg.Connection.wait`."""
        # The duplicate's number cannot become that of another socket before the timer is over.
        self.waited_on = ours = os.dup(self.pgconn.socket)
        seconds, late = self.patience, threading.Event()

        def give_up() -> None:
            late.set()
            cut(ours)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            return super().wait(gen, interval) if timeout is None else super().wait(gen, interval, timeout)
        except psycopg.OperationalError as error:
            if not late.is_set():
                raise
            self.pgconn.finish()
            raise silence(seconds) from error
        finally:
            timer.cancel()
            timer.join()
            self.waited_on = -1
            os.close(ours)


def _descriptors(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> list[int]:
    return [] if connection.closed else [connection.pgconn.socket]
