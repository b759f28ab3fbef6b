"""The launcher: keeps N worker processes alive, stops them together, restarts them when code changes.

A child is a fresh interpreter, never a fork: a fork would copy locks, threads and connections in any state. `child.py`
describes how a child lives and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from idemconsumer.channel import Ear
from idemconsumer.duty import within
from idemconsumer.errors import ConfigurationError, IdemConsumerError
from idemconsumer.logs import log
from idemconsumer.missing import cannot_import
from idemconsumer.process.child import GRACE, LIFELINE, STOP_NOW, WORKER, Exit
from idemconsumer.process.notify import ServiceManager
from idemconsumer.process.pulse import PulseWatch
from idemconsumer.rules.backoff import backoff
from idemconsumer.user_code.cancellation import end

if TYPE_CHECKING:
    from idemconsumer.observe.fleet import Fleet

# Seconds from the deadline to SIGKILL, which is for a worker that cannot even end itself.
_KILL_AFTER = 2 * GRACE + 1.0
_FIRST_WORD = 5.0  # seconds that a usage error waits for worker 0, which prints it
_BURIAL = 10.0  # seconds to leave the consumer groups of a dead worker
_SETTLED = 30.0  # seconds beyond a drain that a renewal waits for the new child's first sign of life
_FIRST_PAUSE = 0.5  # seconds, after the second crash; after the first one, the worker is restarted at once
_LONGEST_PAUSE = 30.0
_STEADY = 60.0  # seconds of life after which the backoff of a worker starts anew
_WINDOW = 600.0
_SIGNALS: Mapping[int, str] = {each.value: each.name for each in signal.Signals}


@dataclass(frozen=True, slots=True)
class Restarts:
    """After a worker crashed: how long to wait, or whether to give up. Times are monotonic seconds."""

    limit: int
    crashes: tuple[float, ...] = ()
    soon: int = 0  # crashes in a row, each after a life shorter than _STEADY

    def crashed(self, now: float, lived: float) -> Restarts:
        """The state after a crash at `now` of a process that had lived for `lived` seconds."""
        recent = tuple(at for at in self.crashes if now - at < _WINDOW)
        soon = self.soon + 1 if self.crashes and lived < _STEADY else 0
        return Restarts(self.limit, (*recent, now), soon)

    @property
    def pause(self) -> float:
        return backoff(self.soon, first=_FIRST_PAUSE, cap=_LONGEST_PAUSE) if self.soon else 0.0

    @property
    def exhausted(self) -> bool:
        return len(self.crashes) > self.limit


class Supervisor:
    """Runs `command` `workers` times and keeps it running. Times are seconds.

    Guaranteed: a stop reaches all children at the same moment and they share one deadline. Children end with this
    process, even when it gets SIGKILL. A child that crashes is restarted at once; after the next crash in 0.5 s,
    doubling to 30 s, and at once again if it lived for a minute. More than `max_restarts` crashes of one child in ten
    minutes end everything, and the last line of the log says how the last one ended. A child that is silent for longer
    than it announced gets SIGKILL (L56).

    With `changes`, a stream of names of changed files, each change restarts all children, and a crashed child waits for
    the next change. `execute` gets the consumer groups of a child that has ended, while another one takes its place;
    `prepare` is called in a thread before, once a child is in a group. `crew` receives the reports of the children;
    without it they report nothing (O11).

    A child that left because a person asked for it (O15) has no successor until a SIGHUP, which replaces all children
    one after the other (O17). `reread` is called in a thread before; if it raises ConfigurationError, nothing is
    replaced. If stdin is a terminal, SIGHUP ends this process: the terminal is gone. A service manager that the
    environment names is notified when all children consume, of the stop, and regularly while they live (O18).

    Not guaranteed: that grandchildren end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int,
        drain_timeout: float,
        max_restarts: int,
        until_empty: bool = False,
        environment: Mapping[str, str] | None = None,
        changes: AsyncIterator[str] | None = None,
        execute: Callable[[Mapping[str, str]], Awaitable[None]] | None = None,
        prepare: Callable[[], None] | None = None,
        reread: Callable[[], None] | None = None,
        crew: Fleet | None = None,
    ) -> None:
        self._command = list(command)
        self._workers = workers
        self._drain_timeout = drain_timeout
        self._max_restarts = max_restarts
        self._until_empty = until_empty
        self._environment = dict(os.environ if environment is None else environment)
        self._changes = changes
        self._execute = execute
        self._prepare = prepare
        self._reread = reread
        self._hangups = asyncio.Event()
        self._renewed: dict[int, asyncio.Event] = {}  # by place: set when its child is to be replaced
        self._begun: dict[int, asyncio.Event] = {}  # by place: set when its child has shown a sign of life
        self._crew = crew
        self._preparing: asyncio.Future[None] | None = None
        self._manager = ServiceManager(self._environment)
        self._worked: set[int] = set()  # places whose child has consumed
        self._watches: dict[int, PulseWatch] = {}
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._lifeline = -1
        self._burials: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # replaced at each change, so that no child can miss one
        self._code = Exit.DONE
        self._crashed = ""  # how the worker ended whose crashes end everything

    async def run(self) -> Exit:
        """Start the children; return when all have ended for good. Handles SIGINT, SIGTERM and, without a terminal,
        SIGHUP."""
        loop = asyncio.get_running_loop()
        self._lifeline, write_end = os.pipe()
        signals = [signal.SIGINT, signal.SIGTERM]
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        if not os.isatty(0):
            loop.add_signal_handler(signal.SIGHUP, self._hangups.set)
            signals.append(signal.SIGHUP)
        coroutines = (self._reload(), self._renew(), self._manager.watch(self._is_well))
        beside = [asyncio.create_task(each) for each in coroutines]
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._workers):
                    group.create_task(self._keep(index))
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            await end(*beside)
            await asyncio.gather(*self._burials, return_exceptions=True)
            os.close(write_end)  # the children that are left drain
            os.close(self._lifeline)
        if self._crashed:
            log.critical("cannot run", error=self._crashed)
        return self._code

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            log.info("stopping", signal=number.name, deadline=self._drain_timeout)
            self._stop(Exit.DONE)
        else:
            log.warning("stopping now", signal=number.name)
            self._blame(Exit.CUT_OFF)
            self._end(self._children, 0.0, STOP_NOW)

    def _stop(self, code: Exit) -> None:
        if not self._stopping.is_set():
            self._blame(code)
            self._manager.stopping()
            self._stopping.set()
            if self._crew is not None:
                self._crew.stopping = True
            self._changed.set()
            self._end(self._children, self._drain_timeout)

    def _blame(self, code: Exit) -> None:
        """Keep the first failure as the exit code."""
        self._code = self._code or code

    def _end(
        self,
        children: Mapping[int, asyncio.subprocess.Process],
        seconds: float,
        number: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Send one signal to all of them at once. They share one deadline, and get SIGKILL if they miss it."""
        targets = dict(children)
        _signal(targets.values(), number)

        def deadline() -> None:
            late = {index: child for index, child in targets.items() if child.returncode is None}
            if late:
                log.error("deadline passed, killing", workers=sorted(late))
                _signal(late.values(), signal.SIGKILL)

        asyncio.get_running_loop().call_later(seconds + _KILL_AFTER, deadline)

    async def _reload(self) -> None:
        if self._changes is None:
            return
        try:
            async for path in self._changes:
                log.info("reloading", changed=path)
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
                self._end(self._children, self._drain_timeout)
        except (OSError, RuntimeError) as error:
            log.error("file changes are no longer watched", error=str(error))

    async def _renew(self) -> None:
        """After each SIGHUP, replace one child after the other, each once the new child before it works (O17)."""
        while True:
            await self._hangups.wait()
            self._hangups.clear()
            try:
                if self._reread is not None:
                    await asyncio.to_thread(self._reread)
            except ConfigurationError as error:
                log.error("settings cannot be read, the workers keep theirs", error=str(error))
                continue
            log.info("starting all workers again, one after the other", signal="SIGHUP")
            for index in range(self._workers):
                if self._stopping.is_set():
                    return
                if (renewed := self._renewed.get(index)) is None:  # its sources were empty, and it has ended
                    continue
                self._begun[index] = asyncio.Event()
                renewed.set()
                if (child := self._children.get(index)) is not None:
                    self._end({index: child}, self._drain_timeout)
                await within(self._drain_timeout + _SETTLED, self._begun[index])

    async def _keep(self, index: int) -> None:
        """Keep a child running in one worker's place until the place may stay empty."""
        restarts = Restarts(self._max_restarts)
        while not self._stopping.is_set():
            changed, renewed = self._changed, asyncio.Event()
            self._renewed[index] = renewed
            born = time.monotonic()
            pid, code, words = await self._live(index, changed)
            lived = time.monotonic() - born
            if self._stopping.is_set():
                # Killed by SIGTERM: it had no signal handler yet, so it had not started to work.
                if code not in (Exit.DONE, Exit.DRAINED, -signal.SIGTERM):
                    self._blame(Exit.ERROR if code == Exit.ERROR else Exit.CUT_OFF)
                return
            if changed.is_set() or renewed.is_set():
                continue
            if code == Exit.DRAINED and not self._until_empty:
                log.warning("worker drained on request, not restarted until SIGHUP", worker=index, pid=pid)
                await _first_of(changed, renewed)
                continue
            if code in (Exit.DONE, Exit.DRAINED) and self._until_empty:
                log.info("worker finished", worker=index, pid=pid)
                del self._renewed[index]
                return
            how = {"signal": _SIGNALS.get(-code, -code)} if code < 0 else {"code": code}
            how |= {"error": words} if words else {}
            if code != Exit.USAGE:  # worker 0 has logged the reason, in one line
                log.error("worker died", worker=index, pid=pid, lived=round(lived, 3), **how)
            if self._crew is not None:
                self._crew.deaths += 1
            if self._changes is not None:
                log.info("waiting for a file change", worker=index)
                await changed.wait()
            elif code == Exit.USAGE:
                # All of them fail alike, and worker 0 logs the reason: it must not be cut off before.
                if (first := self._children.get(0)) is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_FIRST_WORD):
                            await first.wait()
                self._stop(Exit.USAGE)
            else:
                restarts = restarts.crashed(time.monotonic(), lived)
                if restarts.exhausted:
                    log.error("worker crashed too often", worker=index, crashes=len(restarts.crashes))
                    if not self._stopping.is_set():
                        self._crashed = _last_line(index, len(restarts.crashes), lived, code, words)
                        if self._crew is not None:
                            self._crew.given_up = self._crashed
                    self._stop(Exit.CRASHED)
                else:
                    log.info("worker restarting", worker=index, after=restarts.pause)
                    await within(restarts.pause, self._stopping)

    async def _live(self, index: int, changed: asyncio.Event) -> tuple[int, int, str]:
        """Start a child and wait for its end. Returns its pid, its exit code and the reason that it gave."""
        begun = self._begun.setdefault(index, asyncio.Event())  # this event: the next child gets one of its own
        watch = self._watches[index] = PulseWatch(lambda seconds: self._end_silent(index, seconds))

        def told(kind: str, value: bytes) -> None:
            if kind == "beat":
                self._at_work(index, begun)
                watch.hear(float(value))
            elif kind == "end":
                watch.hear(0.0)  # a child that announces its end may be silent
            elif kind == "report" and self._crew is not None:
                self._crew.told(index, value)
            elif kind == "members" and self._prepare is not None and self._preparing is None:
                self._preparing = asyncio.get_running_loop().run_in_executor(None, self._prepare)

        ear = Ear(told)
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment
                | {LIFELINE: str(self._lifeline), WORKER: str(index)}
                | ear.variable(reports=self._crew is not None),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(self._lifeline, ear.theirs),
                process_group=0,  # the terminal's Ctrl-C is only for the parent, which passes it on once
            )
        except OSError as error:
            log.error("worker could not start", worker=index, error=str(error))
            del self._watches[index]
            ear.close()
            return 0, Exit.ERROR, str(error)
        finally:
            os.close(ear.theirs)
        self._children[index] = child
        if self._crew is not None:
            self._crew.begun(index)
        try:
            log.info("worker started", worker=index, pid=child.pid)
            if self._stopping.is_set() or changed.is_set():  # both signal only children that existed then
                self._end({index: child}, 0.0)
            code = await child.wait()
        finally:
            del self._children[index], self._watches[index]
            ear.close()
            watch.close()
            if self._crew is not None:
                self._crew.ended(index)
            if self._execute is not None and (members := ear.said("members")):
                self._burials.add(asyncio.create_task(self._bury(index, self._execute(members))))
        return child.pid, code, ear.said("words") or ""

    def _at_work(self, index: int, begun: asyncio.Event) -> None:
        begun.set()
        if len(self._worked) < self._workers:
            self._worked.add(index)
            if len(self._worked) == self._workers:
                self._manager.ready()

    def _is_well(self) -> bool:
        """Whether no child has been silent for too long (O18). The launcher is well: its event loop runs this."""
        return not any(watch.overdue for watch in self._watches.values())

    def _end_silent(self, index: int, seconds: float) -> None:
        """Kill a silent worker: only its end counts what ran, and makes room for another worker (L56)."""
        if (child := self._children.get(index)) is not None:
            log.error("worker shows no sign of life, killing", worker=index, pid=child.pid, seconds=round(seconds, 1))
            _signal([child], signal.SIGKILL)

    async def _bury(self, index: int, executing: Awaitable[None]) -> None:
        """Leave the groups of a dead child, beside the start of the next child, which takes longer (K15)."""
        try:
            async with asyncio.timeout(_BURIAL):
                await executing
        except (IdemConsumerError, TimeoutError) as error:
            text = str(error) or f"no answer in {_BURIAL:.0f} s"
            log.warning("could not leave the consumer groups of a dead worker", worker=index, error=text)


def python_changes(folder: Path) -> AsyncIterator[str]:
    """The Python files below `folder` as they change. Raises ConfigurationError without `watchfiles`."""
    try:
        import watchfiles
    except ImportError as error:
        raise cannot_import("what --reload needs", error) from error

    async def stream() -> AsyncIterator[str]:
        async for changes in watchfiles.awatch(folder, watch_filter=watchfiles.PythonFilter()):
            yield min(path for _, path in changes)

    return stream()


def _last_line(worker: int, crashes: int, lived: float, code: int, words: str) -> str:
    how = f"by {_SIGNALS.get(-code, -code)}" if code < 0 else f"with code {code}"
    if code == -signal.SIGKILL and not words:
        words = "killed from outside, perhaps by the out-of-memory killer"
    text = f"worker {worker} died {crashes} times in ten minutes, the last time after {lived:.1f} s, {how}"
    return f"{text}: {words}" if words else text


def _signal(children: Iterable[asyncio.subprocess.Process], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
