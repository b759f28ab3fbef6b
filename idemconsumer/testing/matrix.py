"""`crash_matrix`: tests that a consumer applies each message once, whichever process is killed, and wherever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Final, Literal

from idemconsumer.app.app import App
from idemconsumer.errors import ConfigurationError
from idemconsumer.message.codecs import encode
from idemconsumer.message.message import Message
from idemconsumer.settings import Settings, load
from idemconsumer.stores.checks import check_database
from idemconsumer.stores.migrations import migrate
from idemconsumer.testing.matrix_database import Contents, MatrixDatabase
from idemconsumer.testing.matrix_process import Consume
from idemconsumer.testing.matrix_report import MatrixReport, WrongRun, compared
from idemconsumer.testing.matrix_running import Delivered, Process, Processes
from idemconsumer.testing.matrix_worker import Queued, RunsWorker, check_sent

_FIRST_PAUSE: Final = 0.02  # seconds before an unacknowledged message is delivered again
_LONGEST_PAUSE: Final = 0.5
_POLL: Final = 0.01
_HOW: Final = "write @pytest.mark.crash_matrix(tables=['stock'])"

_What = Literal["killed", "rival", "duplicate", "fresh process"]


async def crash_matrix(
    consume: Consume | App,
    message: object,
    *,
    dsn: str,
    tables: Sequence[str],
    ignore: Collection[str] = (),
    timeout: float = 10.0,
) -> MatrixReport:
    """Run a message through `consume`, with a crash and with a rival process at every point, and compare `tables`.

        report = await crash_matrix(reserve, b'{"id": "o-1"}', dsn=dsn, tables=["stock"])
        assert not report.wrong, str(report)

    `async def consume(delivery, dsn)` is any consumer. It connects to `dsn` with any driver, and acknowledges by
    `await delivery.ack()` or by returning. `message` is the body, an idemconsumer `Message`, or an object to send as
    JSON. The points are: before the first statement and after each one, commits too; before and after the
    acknowledgement; before the return.

    At each point, one run kills the process; unless it had acknowledged the message, a fresh process then gets it.
    Another run pauses the process there while a rival, another process, gets the same message. Two more runs deliver
    the message a second time, to the same process and to a fresh one. After each of these runs, the tables must have
    the same rows as after an undisturbed run.

    For an App, and a `Message` from one of its sources, the app's own worker runs, and the points are each `Point` and
    `SagaPoint`.

    It works in a copy of the database. That requires a superuser, and no open connection to the original. It does not
    compare columns of sequences, nor columns in `ignore` ("table.column"), such as times. A run that is not over within
    `timeout` seconds counts as stuck. Not covered: effects elsewhere, and effects after `consume` has returned. Raises
    ConfigurationError for anything that cannot be run, if the undisturbed run fails, and if that run changes none of
    the tables.
    """
    _check_names(tables, ignore)
    if isinstance(consume, App):
        return await _of_app(consume, message, load(), {}, dsn, tables, ignore, timeout)
    sent = _as_message(message)
    async with (
        MatrixDatabase(dsn, tables, ignore) as database,
        Processes(consume, sent, database, wired=True) as processes,
    ):
        return await _Matrix(database, processes, timeout, Delivered()).run()


def _check_names(tables: Sequence[str], ignore: Collection[str]) -> None:
    """Raise ConfigurationError for values that name no tables."""
    if not tables or isinstance(tables, str) or isinstance(ignore, str):
        raise ConfigurationError("crash_matrix: tables and ignore are lists of names; write tables=['stock']")


async def _of_app(
    app: App,
    message: object,
    settings: Settings,
    resources: Mapping[type, object],
    dsn: str,
    tables: Sequence[str],
    ignore: Collection[str],
    timeout: float,
) -> MatrixReport:
    """The matrix with the app's worker. It gets these `settings`, without addresses, and `resources` for the app's."""
    sent, schema = check_sent(app, message), settings.schema
    runs = RunsWorker(app, settings, resources)

    def prepare(copy: str) -> None:
        migrate(copy, schema)
        runs.locks = asyncio.run(check_database(copy, schema, require_standby=settings.require_synchronous_standby))

    async with (
        MatrixDatabase(dsn, tables, ignore, prepare) as database,
        Processes(runs, sent, database, wired=False) as processes,
    ):
        return await _Matrix(database, processes, timeout, Queued(database, schema, sent)).run()


class MarkedTest:
    """The options of a test's mark. The matrix runs only the first message of the test."""

    def __init__(
        self,
        *more: object,
        tables: Sequence[str] = (),
        ignore: Collection[str] = (),
        timeout: float = 10.0,
        **unknown: object,
    ) -> None:
        if more or unknown:
            given = ", ".join([*map(repr, more), *(f"{name}=" for name in unknown)])
            raise ConfigurationError(f"the mark crash_matrix has tables=, ignore= and timeout=, not {given}; {_HOW}")
        _check_names(tables, ignore)
        self._tables, self._ignore, self._timeout = tables, ignore, timeout
        self.due = True

    async def run(
        self, app: App, message: Message, settings: Settings, resources: Mapping[type, object], dsn: str
    ) -> None:
        """Run the matrix. No connection to `dsn` may be open meanwhile. Raises AssertionError with the report."""
        self.due = False
        report = await _of_app(app, message, settings, resources, dsn, self._tables, self._ignore, self._timeout)
        if report.wrong:
            raise AssertionError(str(report))

    def check(self) -> None:
        """Raise AssertionError for a marked test that has sent no message: it would have shown nothing."""
        if self.due:
            raise AssertionError("the test is marked crash_matrix, and no kit of it has sent a message")


class _Matrix:
    def __init__(
        self, database: MatrixDatabase, processes: Processes, timeout: float, broker: Delivered | Queued
    ) -> None:
        self._broker = broker
        self._database = database
        self._processes = processes
        self._timeout = timeout
        self._wrong: list[WrongRun] = []
        self._missed: list[tuple[str, str]] = []
        self._runs = 0

    async def run(self) -> MatrixReport:
        await self._database.put_back()
        self._before = await self._database.contents()
        names, self._expected = await self._undisturbed()
        _, again = await self._undisturbed()
        if self._expected == self._before:
            raise ConfigurationError(
                f"crash_matrix: {self._processes.name} does not change {', '.join(self._before)}, so no effect could "
                "be lost or doubled there; name in tables= the tables that it changes"
            )
        if differs := sorted(_differing(self._expected, again)):
            raise ConfigurationError(
                f"crash_matrix: two undisturbed runs of {self._processes.name} differ in {', '.join(differs)}; leave "
                f"them out with ignore={differs!r}"
            )
        for number, name in enumerate(names):
            await self._one("killed", name, self._killed(number))
            await self._one("rival", name, self._rival(number))
        await self._one("duplicate", "", self._duplicate(fresh=False))
        await self._one("fresh process", "", self._duplicate(fresh=True))
        return MatrixReport(self._processes.name, names, self._wrong, self._missed, self._runs)

    async def _undisturbed(self) -> tuple[list[str], Contents]:
        await self._database.put_back()
        process = await self._processes.start()
        try:
            async with asyncio.timeout(self._timeout):
                self._runs += 1
                await self._broker.send()
                ending = await process.deliver()
        except TimeoutError:
            ending = "killed"
        contents = await self._database.contents()
        await self._processes.end_all()
        if ending != "done":
            how = "".join(process.errors) or f"it did not return within {self._timeout:g} s, or left its process"
            raise ConfigurationError(
                f"crash_matrix: {self._processes.name} did not process the message though nothing disturbed it:\n{how}"
            )
        return process.points, contents

    async def _one(self, what: _What, point: str, scenario: Awaitable[bool]) -> None:
        """One run from the start, and the error after it. `scenario` returns whether the run reached its point."""
        await self._database.put_back()
        wrong = None
        try:
            async with asyncio.timeout(self._timeout):
                if not await scenario:
                    self._missed.append((what, point))
        except TimeoutError:
            wrong = "stuck", f"  not acknowledged within {self._timeout:g} s\n{self._processes.last_error()}".rstrip()
        else:
            wrong = compared(self._before, self._expected, await self._database.contents())
        await self._processes.end_all()
        if wrong is not None:
            self._wrong.append(WrongRun(what, point, *wrong))

    async def _killed(self, point: int) -> bool:
        process = await self._processes.start((point, "kill"))
        await self._broker.send()
        await self._deliver(process)
        return process.stopped.is_set()

    async def _rival(self, point: int) -> bool:
        one, two = await self._processes.start((point, "pause")), await self._processes.start()
        await self._broker.send()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(self._deliver(one))
            stopped = group.create_task(one.stopped.wait())
            await asyncio.wait((first, stopped), return_when=asyncio.FIRST_COMPLETED)
            await self._broker.send()
            second = group.create_task(self._deliver(two))
            await self._until_it_waits(two, second)
            one.may_go_on.set()
            stopped.cancel()
        return one.stopped.is_set()

    async def _duplicate(self, *, fresh: bool) -> bool:
        process = await self._processes.start()
        for each in (process, await self._processes.start() if fresh else process):
            await self._broker.send()
            await self._deliver(each)
        return True

    async def _deliver(self, process: Process) -> None:
        """Deliver the message again and again, until it is done."""
        pause = _FIRST_PAUSE
        while True:
            self._runs += 1
            ending = await process.deliver()
            if self._broker.is_done(process, ending):
                return
            if ending == "killed":
                await process.end()
                await self._database.end_others()
                await self._broker.notice()
                process = await self._processes.start()
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _until_it_waits(self, rival: Process, its: asyncio.Task[None]) -> None:
        """Wait until the rival has come as far as it can while the other process is paused."""
        now = asyncio.get_running_loop().time
        while not its.done() and not rival.errors and now() - rival.heard < self._broker.quiet(rival):
            if await self._database.somebody_waits():
                return
            await asyncio.wait((its,), timeout=_POLL)


def _as_message(message: object) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, str):
        return Message("memory:crash_matrix", message.encode())
    try:
        encoded = encode(message, "message", "give it")
    except TypeError as error:
        raise ConfigurationError(f"crash_matrix: {error}") from None
    return Message("memory:crash_matrix", b"" if encoded is None else encoded.body)


def _differing(one: Contents, other: Contents) -> set[str]:
    """The columns in which two runs differ. If the rows of a table are not the same ones: all its columns."""
    return {
        f"{table}.{name}"
        for table, rows in one.items()
        for (name, value), (_, beside) in (
            pair
            for pairs in zip(sorted(rows.elements(), key=repr), sorted(other[table].elements(), key=repr), strict=False)
            for pair in zip(*pairs, strict=True)
        )
        if value != beside
    }
