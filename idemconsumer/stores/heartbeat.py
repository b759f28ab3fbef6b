"""The lease of this process: one row, renewed by a thread, so that a step that blocks the loop does not lose its
sagas.

The lease is lost when the row cannot be renewed any more, or when its time is over, counted from just before the last
successful renewal. The clock is CLOCK_BOOTTIME, which keeps running while the machine is suspended. Then every saga is
cancelled and the process registers a new lease: by then the fence has ended the old lease's ownership of all sagas,
whether this process knew it or not (L5).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final

import psycopg

from idemconsumer.duty import Duty, joined, within
from idemconsumer.errors import Fenced, StoreUnavailable
from idemconsumer.logs import log
from idemconsumer.redaction import error_text
from idemconsumer.rules.lease import MARGIN, may_begin
from idemconsumer.sql.answering import BlockingConnection
from idemconsumer.sql.connecting import connect
from idemconsumer.sql.queries import load
from idemconsumer.stores.leased_saga import Runs
from idemconsumer.user_code.place import place

_Connection = BlockingConnection[Any]
_AGAIN: Final = 1.0  # seconds until the next renewal after a failed one
_STATEMENTS: Final = 60.0  # seconds that a step's statements may take besides its function, and the work after it (R20)
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Heartbeat:
    """`worker` is the id of the lease. Renewal stops while the event loop has not ticked for `patience` seconds, or
    while the running sagas have made no progress for twice that and a minute. It ends with `stop`, which ends the lease
    too. It also ends when the loop is closed or cancels its tasks; then the lease runs out by itself (H15).

    `stuck` is called, in the thread, with the current place of the loop's code, once the loop has been blocked for so
    long that the lease is over too: nothing else can end this worker. `left_open` is called when the loop ends without
    `stop`.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        *,
        lease: float,
        patience: float,
        runs: Sequence[Runs] = (),
        build: str | None = None,
        stuck: Callable[[str], None] = lambda _: None,
        left_open: Callable[[], None] = lambda: None,
    ) -> None:
        """`runs`: the saga handlers that this process runs, for others to read (L28). `build`: that of its code, if it
        takes sagas by itself (L29)."""
        self.worker = 0
        self._abandoned: int | None = None
        self._build = build
        self._runs = json.dumps([{"app": each.app, "handler": each.handler, "version": each.version} for each in runs])
        self._dsn = dsn
        self._queries = load(schema)
        self._lease = lease
        self._patience = patience
        self._stuck = stuck
        self._left_open = left_open
        self._loop_ends = False
        self._standing: Callable[[], float] = lambda: 0.0
        self._longer: Callable[[], float] = lambda: 0.0
        self._loops_thread = threading.get_ident()
        self._lost: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._wanted = threading.Event()  # set to request a renewal now
        self._renewed = asyncio.Event()
        self._ticked = _now()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._beat, name="idemconsumer-heartbeat", daemon=True)
        self._good = _now()

    async def start(
        self,
        lost: Callable[[], None],
        standing: Callable[[], float] = lambda: 0.0,
        longer: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Register and start to renew; `lost` is called in the loop when the lease is lost. `standing` returns for how
        many seconds the running sagas have made no progress. `longer` returns the `patience` that they need now, if it
        is longer (L45). Raises StoreUnavailable."""
        self._lost, self._standing, self._longer = lost, standing, longer
        self._loops_thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._register)
        except psycopg.Error as error:
            raise StoreUnavailable(f"no lease: {error_text(error)}") from error
        self._ticking = asyncio.create_task(Duty(self._tick, self._lease / 20).run())
        self._ticking.add_done_callback(self._ticked_last)
        self._thread.start()

    async def stop(self) -> None:
        """End the lease at once, with all that is still held under it."""
        self._stopping.set()
        self._wanted.set()
        if self._ticking is not None:
            self._ticking.cancel()
            await joined(self._thread, 5.0)

    async def _tick(self) -> None:
        """Record that the loop runs. Also checks the deadline, since the thread may hang in a renewal without an
        answer."""
        self._ticked = _now()
        if self._left() <= 0 and not self.over:
            self._abandoned = self.worker
            self._lost()

    def _ticked_last(self, ticking: asyncio.Task[None]) -> None:
        """Report the end of the loop: one that ends cancels all tasks, and then waits for those that take longer."""
        if ticking.cancelled() and not self._stopping.is_set():
            self._loop_ends = True
            self._wanted.set()
            self._left_open()

    async def good(self, timeout: float) -> None:
        """Return when a step that may run for `timeout` seconds may begin, after a renewal if that needs one (L59). If
        the lease is lost meanwhile, the caller is cancelled; raises Fenced if a new lease is registered before that."""
        now = asked = _now()
        worker = self.worker
        while not may_begin(timeout, left=self._left(now), lease=self._lease, renewed=self._good >= asked):
            self._renewed.clear()
            self._wanted.set()
            await within(self._lease / 20, self._renewed)
            if self.worker != worker or self._ends:
                raise Fenced("the lease of this worker was lost")
            now = _now()

    @property
    def over(self) -> bool:
        """Whether the lease was given up and there is no new one yet: its sagas were told that it is lost. A renewal
        that succeeds afterwards would keep other workers from them."""
        return self._abandoned == self.worker

    def _left(self, now: float | None = None) -> float:
        """Seconds until the sagas have to be cancelled."""
        return self._good + self._lease * (1 - MARGIN) - (_now() if now is None else now)

    # ------------------------------------------------------------------------------------------------------ the thread
    def _beat(self) -> None:
        connection: _Connection | None = None
        pause = self._lease / 3
        while not self._stops_within(max(0.0, min(pause, self._left()))):
            pause = self._lease / 3
            still = _now() - self._ticked
            patience = max(self._patience, self._longer())
            if still > patience:
                log.warning("event loop blocked, lease not renewed", seconds=round(still, 1))
                if self._left() <= 0:
                    self._stuck(place(self._loops_thread))
            elif self._standing() > 2 * patience + _STATEMENTS:
                log.warning("no saga makes progress, lease not renewed", seconds=round(self._standing(), 1))
            else:
                try:
                    connection = connection or self._connect()
                    self._renew(connection)
                except BaseException as error:  # noqa: BLE001 - what is not renewed in time is lost, whatever it is (H52)
                    log.debug("lease not renewed", error=error_text(error))
                    _close(connection)
                    connection, pause = None, min(_AGAIN, pause)  # the next one is new, and may renew at once
            if self._left() <= 0 or self.over:
                _close(connection)
                connection = None
                self._lose()
        if self._stopping.is_set() and not self._loop_ends:
            with suppress(psycopg.Error):
                connection = connection or self._connect()
                _write(connection, self._queries["forget_workers"], {"worker": self.worker})
        _close(connection)

    def _stops_within(self, seconds: float) -> bool:
        """Wait until this time is over, a step requests a renewal, or the end. Returns whether the thread is to end."""
        self._wanted.wait(seconds)
        self._wanted.clear()
        return self._ends

    @property
    def _ends(self) -> bool:
        """Whether to end. A loop that ended without `stop`, as with test clients, will never call it (H15)."""
        return self._stopping.is_set() or self._loop_ends or (self._loop is not None and self._loop.is_closed())

    def _connect(self) -> _Connection:
        # A statement must time out early enough for the end of the lease to be noticed.
        milliseconds = max(200, int(self._lease * 1000 / 3))
        connection = connect(
            self._dsn,
            {"statement_timeout": str(milliseconds)},
            connect_timeout=max(2, int(self._lease / 3)),
            tcp_user_timeout=milliseconds,
            purpose="heartbeat",
        )
        connection.patience = milliseconds / 1000
        return connection

    def _register(self) -> None:
        before = _now()
        with self._connect() as connection:
            name = f"{socket.gethostname()}:{os.getpid()}"
            params = {"name": name, "lease": self._lease, "runs": self._runs, "build": self._build}
            row = _write(connection, self._queries["register_worker"], params)
        assert row is not None
        self.worker, self._good = int(row[0]), before

    def _renew(self, connection: _Connection) -> None:
        before = _now()
        if _write(connection, self._queries["renew_worker"], {"worker": self.worker}) is None:
            self._good = before - 2 * self._lease  # the database says that the lease is over
        else:
            self._good = before
            self._in_loop(self._renewed.set)

    def _lose(self) -> None:
        log.error("lease lost, sagas cancelled", worker=self.worker)
        self._abandoned = self.worker
        self._in_loop(self._lost)
        while not self._ends:
            try:
                self._register()
            except BaseException:  # noqa: BLE001 - of whatever type
                self._stopping.wait(min(1.0, self._lease / 3))
            else:
                log.info("lease registered again", worker=self.worker)
                return

    def _in_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)


def _write(connection: psycopg.Connection[Any], query: bytes, params: dict[str, Any]) -> tuple[Any, ...] | None:
    # One round trip if possible. Behind a pooler the role may make a session read-only outside of a transaction (R18).
    writable = connection.info.parameter_status("default_transaction_read_only") == "off"
    with nullcontext() if writable else connection.transaction():
        cursor = connection.execute(query, params)
        return cursor.fetchone() if cursor.description else None


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _close(connection: _Connection | None) -> None:
    if connection is not None:
        with suppress(psycopg.Error):
            connection.close()
