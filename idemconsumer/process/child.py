"""One worker process: how it is asked to stop, and how it ends in time.

The environment of a supervised process names the read end of a pipe whose only writer is the parent. End of file there
means that the parent has ended, in whatever way; the worker then drains and leaves, so that no worker outlives a
SIGKILL of its launcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NoReturn, Protocol

from idemconsumer import forks
from idemconsumer.channel import CHANNEL, VARIABLE
from idemconsumer.logs import log
from idemconsumer.observe.logging import log_unhandled
from idemconsumer.observe.summing import say_all
from idemconsumer.redaction import error_text
from idemconsumer.user_code.cancellation import EXITS

LIFELINE = "IDEMCONSUMER_LIFELINE"  # the pipe's file descriptor, in a child's environment
WORKER = "IDEMCONSUMER_WORKER"  # the child's index, from 0
DEV = "IDEMCONSUMER_DEV"  # set while somebody develops

# Seconds. A worker ends its drain by itself at the deadline, and leaves its brokers. One GRACE later the whole worker
# is cancelled, and one more GRACE later the process exits without waiting for it.
GRACE = 1.5

# From the parent to its children: stop now. Not a second SIGTERM, since two pending signals of one kind merge into one.
STOP_NOW = signal.SIGQUIT


class Exit(IntEnum):
    """How a process reports its end: the exit codes."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    CRASHED = 3
    CUT_OFF = 4
    PENDING = 5
    NEWER = 6
    DRAINED = 7


MEANINGS: Mapping[Exit, str] = {
    Exit.DONE: "drained, or every source is empty (--until-empty)",
    Exit.ERROR: "an error while running, or a server that the command needs is unreachable",
    Exit.USAGE: "wrong usage or configuration; nothing was started, and a restart would not help",
    Exit.CRASHED: "a worker crashed too often (--max-restarts)",
    Exit.CUT_OFF: "the drain deadline passed, or a second signal stopped it; runs in progress were rolled back",
    Exit.PENDING: "migrations are pending (migrate status), or a migration did not get a lock in time (migrate up)",
    Exit.NEWER: "the schema has migrations that this version does not know (migrate status)",
    Exit.DRAINED: "only from a worker to its launcher: a person requested the drain, and no other worker is started in "
    "its place",
}


class ChildWorker(Protocol):
    """What a process needs from the worker that it runs."""

    async def run(self) -> None:
        """Return when drained, or when every source is empty under --until-empty."""
        ...

    def drain(self) -> None: ...
    def abort(self) -> None: ...
    def when_asked(self, leave: Callable[[], None]) -> None:
        """Set the function to call when a person asks this worker to leave (O15)."""
        ...


def launch(make: Callable[[], ChildWorker], drain_timeout: float) -> Exit:
    """Run one worker in this process until it is asked to stop; `make` is called inside the loop.

    The first SIGTERM or SIGINT, or the parent's end, requests a drain. A second one cancels what runs, as a drain
    beyond its deadline does. Code that ignores even that (a thread, a handler that swallows its cancellation) ends with
    the process, 1.5 seconds later; by the store's protocol nothing of it has been committed.
    """
    stop = _Stop(drain_timeout)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            with forks.never_in_a_child():
                code = runner.run(stop.serve(make))
        except EXITS as error:
            stop.leave_as_killed(error)
            raise
        except Exception as error:
            CHANNEL.last_words(f"{type(error).__name__}: {error_text(error)}")
            raise
        # The runner now waits for the threads of handlers that are not async; the timers still apply.
    stop.dismiss()
    return code


def leave_as_killed(event: str, **more: str) -> NoReturn:
    """Log the reason and end the process at once: what runs is on record, and the launcher starts another worker."""
    log.critical(event, **more)
    CHANNEL.last_words(", ".join([event, *(f"{name}: {text}" for name, text in more.items())]))
    say_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.ERROR)


class _Stop:
    """The ways in which one worker process ends."""

    def __init__(self, drain_timeout: float) -> None:
        self._drain_timeout = drain_timeout
        self._worker: ChildWorker | None = None
        self._deadline: float | None = None
        self._cut_off = False
        self._asked = False
        self._timers: list[threading.Timer] = []

    def leave_as_killed(self, error: BaseException) -> None:
        """Exit as if killed after a task or callback of user code ended the event loop (B18).

        It is unknown which message started it. If the lanes were cancelled in order, what ran would be returned as if
        nothing had happened. After a kill it is on record.
        """
        if self._worker is not None:
            leave_as_killed(
                "a task or callback ended the event loop, exiting as if killed",
                error=type(error).__name__,
                hint="only the launcher ends a worker; raise another exception",
            )

    async def serve(self, make: Callable[[], ChildWorker]) -> Exit:
        loop = asyncio.get_running_loop()
        forks.use_worker_loop(signal.SIGTERM, signal.SIGINT, STOP_NOW)
        loop.set_exception_handler(log_unhandled)
        self._worker = make()
        self._worker.when_asked(self._leave_as_asked)
        loop.add_signal_handler(signal.SIGTERM, self._request_drain, "SIGTERM")
        # Both are removed: they are not meant for processes that a handler may start.
        if (given := os.environ.pop(VARIABLE, None)) is not None:
            CHANNEL.attach(given)
        if (lifeline := os.environ.pop(LIFELINE, None)) is None:
            loop.add_signal_handler(signal.SIGINT, self._request_drain, "SIGINT")
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_signal_handler(STOP_NOW, self._abort, STOP_NOW.name)
            loop.add_reader(int(lifeline), self._orphaned, int(lifeline))
        try:
            await self._worker.run()
        except asyncio.CancelledError:
            if not self._cut_off:
                raise
        if self._deadline is None:
            self._exit_after(self._drain_timeout)  # for threads that do not return
        late = self._deadline is not None and loop.time() >= self._deadline
        if self._asked:
            return Exit.DRAINED
        return Exit.CUT_OFF if late or self._cut_off else Exit.DONE

    def dismiss(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _orphaned(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        if self._deadline is None:
            self._request_drain("parent gone")

    def _leave_as_asked(self) -> None:
        """Drain at a person's request. The exit code tells the launcher, which would otherwise start another worker at
        once (O15)."""
        if self._deadline is None:
            self._asked = True
            self._request_drain("asked by a person")

    def _request_drain(self, why: str) -> None:
        assert self._worker is not None
        if self._deadline is not None:
            self._abort(why)
            return
        log.info("drain requested", why=why, deadline=self._drain_timeout)
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._drain_timeout
        loop.call_at(self._deadline + GRACE, self._abort, "deadline passed")
        self._exit_after(self._drain_timeout + 2 * GRACE)
        self._worker.drain()

    def _abort(self, why: str) -> None:
        assert self._worker is not None
        if not self._cut_off:
            self._cut_off = True
            log.warning("stopping now", why=why)
            self._exit_after(GRACE)
            self._worker.abort()

    def _exit_after(self, seconds: float) -> None:
        # In a thread, since the blocked part may be the loop itself.
        timer = threading.Timer(seconds, os._exit, [Exit.DRAINED if self._asked else Exit.CUT_OFF])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
