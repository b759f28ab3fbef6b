"""The lease of this process: one row, renewed by a thread, so that a step that blocks the loop does not lose its
sagas.

The lease is lost when the row can no longer be renewed, or when its time is over, counted from just before the last
successful renewal. The clock is CLOCK_BOOTTIME, which keeps running while the machine is suspended. Then every saga is
cancelled and the process registers a new lease: by then the fence has ended whatever it held, whether the process knew
or not (L5).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import psycopg
import structlog

from idemconsumer.errors import StoreUnavailable
from idemconsumer.redaction import error_text
from idemconsumer.sql.connecting import own_session
from idemconsumer.sql.queries import load

log = structlog.get_logger("idemconsumer")

_MARGIN: Final = 0.2  # of the lease: cancelled sagas must have ended before other workers may take them
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Heartbeat:
    """`worker` is the id of the lease. Renewal stops while the loop has not ticked for `patience` seconds."""

    def __init__(self, dsn: str, schema: str, *, lease: float, patience: float) -> None:
        self.worker = 0
        self._dsn = dsn
        self._queries = load(schema)
        self._lease = lease
        self._patience = patience
        self._lost: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._ticked = _now()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._beat, name="idemconsumer-heartbeat", daemon=True)
        self._good = _now()

    async def start(self, lost: Callable[[], None]) -> None:
        """Register and start to renew; `lost` is called in the loop when the lease is lost. Raises StoreUnavailable."""
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._register)
        except psycopg.Error as error:
            raise StoreUnavailable(f"no lease: {error_text(error)}") from error
        self._ticking = asyncio.create_task(self._tick())
        self._thread.start()

    async def stop(self) -> None:
        """End the lease at once, with whatever is still held."""
        self._stopping.set()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.to_thread(self._thread.join, 5.0)

    async def _tick(self) -> None:
        """Also watches the deadline, since the thread may hang in a renewal that gets no answer."""
        reported: float | None = None  # the renewal after which the loss was reported
        while True:
            self._ticked = _now()
            if self._left() <= 0 and reported != self._good:
                reported = self._good
                self._lost()
            await asyncio.sleep(self._lease / 20)

    def _left(self) -> float:
        """Seconds until the sagas have to be cancelled."""
        return self._good + self._lease * (1 - _MARGIN) - _now()

    # ------------------------------------------------------------------------------------------------------ the thread
    def _beat(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._stopping.wait(max(0.0, min(self._lease / 3, self._left()))):
            if _now() - self._ticked > self._patience:
                log.warning("event loop blocked, lease not renewed", seconds=round(_now() - self._ticked, 1))
            else:
                try:
                    connection = connection or self._connect()
                    self._renew(connection)
                except psycopg.Error as error:
                    log.debug("lease not renewed", error=error_text(error))
                    _close(connection)
                    connection = None
            if self._left() <= 0:
                _close(connection)
                connection = None
                self._lose()
        with suppress(psycopg.Error):
            connection = connection or self._connect()
            connection.execute(self._queries["forget_workers"], {"worker": self.worker})
        _close(connection)

    def _connect(self) -> psycopg.Connection[Any]:
        # A statement must time out early enough to notice that the lease is over.
        milliseconds = max(200, int(self._lease * 1000 / 3))
        return psycopg.connect(
            **own_session(self._dsn, {"statement_timeout": str(milliseconds)}),
            connect_timeout=max(2, int(self._lease / 3)),
            tcp_user_timeout=milliseconds,
            application_name="idemconsumer-heartbeat",
        )

    def _register(self) -> None:
        before = _now()
        with self._connect() as connection:
            name = f"{socket.gethostname()}:{os.getpid()}"
            cursor = connection.execute(self._queries["register_worker"], {"name": name, "lease": self._lease})
            row = cursor.fetchone()
        assert row is not None
        self.worker, self._good = int(row[0]), before

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        before = _now()
        if connection.execute(self._queries["renew_worker"], {"worker": self.worker}).fetchone() is None:
            self._good = before - 2 * self._lease  # the database says that the lease is over
        else:
            self._good = before

    def _lose(self) -> None:
        log.error("lease lost, sagas cancelled", worker=self.worker)
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._lost)
        while not self._stopping.is_set():
            try:
                self._register()
            except psycopg.Error:
                self._stopping.wait(min(1.0, self._lease / 3))
            else:
                log.info("lease registered again", worker=self.worker)
                return


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _close(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        with suppress(psycopg.Error):
            connection.close()
