"""Pipelined statements (J26): sent and not waited for, in libpq's pipeline mode, on the connection of a transaction.

psycopg's own pipeline sends a Flush after its Sync, and then the server stops counting idle time (J11). This module
sends only Syncs, so the server still cuts off a worker that freezes between two statements. The task that has to wait
for an answer reads all answers. It keeps sending while it reads, since a server whose answers are not read reads no
statements either.
"""

from __future__ import annotations

from asyncio import Timeout, get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from psycopg import Error, OperationalError, generators
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from idemconsumer.errors import RunEagerly
from idemconsumer.rules.habits import Habits
from idemconsumer.sql.answering import Exchange

_TOGETHER: Final = 16  # statements after which a Sync follows, so that the server answers while more are made
_BYTES: Final = 6_000  # at 8,192 libpq sends a first part by itself, and the server counts no idle time after a part
_AROUND: Final = 64  # bytes of a statement's messages besides those that are counted
_PARAM: Final = 10  # bytes of the type, the format and the length of a parameter
_NO_SUCH_NAME: Final = "26000"  # a DEALLOCATE or DISCARD was executed, perhaps in a function of the database
_NAME_IS_TAKEN: Final = "42P05"
_NOT_SUPPORTED: Final = "0A000"
_FINDS_OTHER_COLUMNS: Final = "RevalidateCachedQuery"  # in the server; its text may be in any language


class Sent:
    """A pipelined statement; `result` is its answer, once there is one. `run`: the number of the handler's run that
    sent it; None for a statement of the engine."""

    __slots__ = ("_habits", "_query", "result", "run")

    def __init__(self, run: int | None = None, query: str = "", habits: Habits | None = None) -> None:
        self.run = run
        self.result: PGresult | None = None
        self._query = query
        self._habits = habits

    def failed(self) -> None:
        if self._habits is not None:
            self._habits.failed(self._query)


class Ahead:
    """The statements in flight on one connection, in the order in which they were sent.

    `on`: there are answers to read. `full`: the server does not keep up, so the answers are read before more is sent.
    `reads`: how often answers were waited for. `signal`: the exception that told a run to end, which user code may have
    swallowed. `seconds`: for how long the statements of one run may execute. `outdated`: the server refused a prepared
    statement. `abandoned`: the transaction is rolled back, so the answers do not matter. `heard` is called at each
    answer.
    """

    def __init__(self, pgconn: PGconn, heard: Callable[[], None]) -> None:
        self._pgconn = pgconn
        self._heard = heard
        self._expected: deque[Sent | None] = deque()  # None: a Sync
        self._unsynced = self._bytes = self.reads = 0
        self._failed: tuple[Sent, PGresult] | None = None
        self.abandoned = False
        self.on = self.full = self.outdated = False
        self.signal: RunEagerly | None = None
        self.seconds: float | None = None

    def begin(self) -> None:
        """A new transaction begins."""
        self._failed = self.signal = self.seconds = None
        self.abandoned = False

    def send(
        self, sent: Sent, query: bytes, converted: Any = None, *, prepare: bool = False, name: bytes = b""
    ) -> None:
        """Send one statement: unprepared, by the `name` it is prepared under, or with `prepare` after preparing it."""
        pgconn = self._pgconn
        if not self.on:
            pgconn.enter_pipeline_mode()
            self.on = True
        if prepare:
            pgconn.send_prepare(name, query, converted.types)
            self._expected.append(sent)
        if converted is None:
            pgconn.send_query_params(query, None)
        elif name:
            pgconn.send_query_prepared(name, converted.params, param_formats=converted.formats)
        else:
            pgconn.send_query_params(query, converted.params, converted.types, converted.formats)
        self._expected.append(sent)
        self._unsynced += 1
        self._bytes += _AROUND
        if prepare or not name:
            self._bytes += len(query)
        if converted is not None:
            self._bytes += _size(converted.params)
        if self._unsynced >= _TOGETHER or self._bytes >= _BYTES:
            self.push()

    @property
    def pushed(self) -> bool:
        """Whether the last statement has a Sync behind it."""
        return self._unsynced == 0

    def push(self) -> None:
        """Add a Sync, and write to the socket as much as it takes."""
        if not self._unsynced or self._pgconn.status != ConnStatus.OK:
            return
        self._pgconn.pipeline_sync()
        self._expected.append(None)
        self._unsynced = self._bytes = 0
        self.full = bool(self._pgconn.flush())

    def answers(self, last: Sequence[tuple[Sent, bytes]] = (), timer: Timeout | None = None) -> Exchange[None]:
        """Send the `last` ones, read all answers, and leave pipeline mode. `timer` is set to cut that off when the
        answers to statements of handlers are late."""
        pgconn, expected = self._pgconn, self._expected
        self.reads += 1
        self.push()
        for sent, statement in last:  # without a Sync between them: after a failure the server skips the rest
            pgconn.send_query_params(statement, None)
            expected.append(sent)
            self._unsynced += 1
        self.push()
        self._expect(timer)
        while pgconn.flush():
            while not (ready := (yield Wait.RW)):  # not ready: at intervals, and when the wait is cut off
                pass
            if ready & Ready.R:
                pgconn.consume_input()
        while expected:
            results = yield from generators.fetch_many(pgconn)
            self._heard()
            answered = expected.popleft()
            if not results or (answered is None) != (results[-1].status == ExecStatus.PIPELINE_SYNC):
                pgconn.finish()  # the session has ended, which libpq notices once it has read to the end
                raise error_from_result(results[-1]) if results else OperationalError("the connection is lost")
            if answered is None:
                if expected:
                    self._expect(timer)
                continue
            answered.result = result = results[-1]
            if result.status == ExecStatus.FATAL_ERROR and self._failed is None:
                self._failed = answered, result
        pgconn.exit_pipeline_mode()
        self.on = self.full = False

    def _expect(self, timer: Timeout | None) -> None:
        """Set the timer for the next answers. The server answers all statements before a Sync at once, and each run has
        its own time for the statements it sent. The engine's own have no limit here (R20)."""
        if timer is None or self.seconds is None or timer.expired():
            return
        runs = set()
        for sent in self._expected:
            if sent is None:
                break
            runs.add(sent.run)
        if runs and None not in runs:
            timer.reschedule(get_running_loop().time() + self.seconds * len(runs))
        elif timer.when() is not None:
            timer.reschedule(None)

    def check(self, own: Sent | None = None) -> None:
        """Raise the first failure: the error itself if it is of `own` or of the engine, else RunEagerly."""
        if self._failed is None or self.abandoned:
            return
        sent, result = self._failed
        error = error_from_result(result)
        if sent is own or sent.run is None:
            self._failed = None
            raise error
        sent.failed()
        raise self.end_run(RunEagerly(sent.run, error))

    def end_run(self, signal: RunEagerly) -> RunEagerly:
        """Return the exception to raise: the first one given in this transaction."""
        self.outdated |= is_outdated(signal.error)
        self.signal = self.signal or signal
        return self.signal


def is_outdated(error: Exception | None) -> bool:
    """Whether it is an error of a statement that was prepared without the handler's request, so that the engine is at
    fault (J28)."""
    if not isinstance(error, Error):
        return False
    state = error.sqlstate
    changed = state == _NOT_SUPPORTED and error.diag.source_function == _FINDS_OTHER_COLUMNS
    return changed or state in (_NO_SUCH_NAME, _NAME_IS_TAKEN)


def _size(params: Sequence[Any] | None) -> int:
    return 0 if params is None else sum(map(len, filter(None, params))) + _PARAM * len(params)
