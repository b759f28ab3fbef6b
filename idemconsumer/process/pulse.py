"""A worker's signs of life, and its launcher, which ends a worker that shows none (L56).

Code that holds the interpreter's lock, such as an endless regular expression, stops every thread of a worker, including
the one that ends a worker with a blocked event loop. Only another process can notice that.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from idemconsumer.channel import CHANNEL
from idemconsumer.user_code.place import place

_BEATS: Final = 10  # signs of life within the time that a worker may be silent


class Pulse:
    """The signs of life of this process. Without a launcher nothing is written."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._unheard = 0  # beats in a row that the event loop has not answered

    def begin(self, limit: float, stuck: Callable[[str], None] = lambda _: None) -> None:
        """From now on the launcher ends this process when it can run no Python code for `limit` seconds.

        `stuck` is called, in a thread, with the line that the running event loop is at, when the loop has been blocked
        for that long.
        """
        if CHANNEL.open:
            self._stopping.clear()
            self._unheard = 0
            beat = partial(self._beat, limit, asyncio.get_running_loop(), threading.get_ident(), stuck)
            threading.Thread(target=beat, name="idemconsumer-pulse", daemon=True).start()

    def end(self) -> None:
        self._stopping.set()

    def _beat(self, limit: float, loop: asyncio.AbstractEventLoop, thread: int, stuck: Callable[[str], None]) -> None:
        _say(limit)
        while not self._stopping.wait(limit / _BEATS):
            _say(limit)
            self._unheard += 1
            if self._unheard > _BEATS:
                stuck(place(thread))
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._hear)
        _say(0.0)

    def _hear(self) -> None:
        self._unheard = 0


def _say(limit: float) -> None:
    CHANNEL.tell("beat", b"%.3f" % limit)


PULSE: Final = Pulse()


class PulseWatch:
    """Watches one worker, in its launcher.

    When the worker has been silent for too long it is `overdue`, and `silent` is called with the seconds. It counts
    checks in a row without a sign, not seconds: a machine that was suspended misses only one check.
    """

    def __init__(self, silent: Callable[[float], None]) -> None:
        self.overdue = False
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        self._limit = 0.0
        self._missed = 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        self._expect(0.0)

    def hear(self, limit: float) -> None:
        """Record a sign of life: the worker may be silent for `limit` seconds now."""
        self._missed = 0
        self._expect(limit)

    def _expect(self, limit: float) -> None:
        if limit == self._limit:
            return
        self._limit = limit
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(limit / _BEATS, self._look) if limit else None

    def _look(self) -> None:
        self._missed += 1
        if self._missed > _BEATS:
            self._timer = None
            self.overdue = True
            self._silent(self._limit)
            return
        self._timer = self._loop.call_later(self._limit / _BEATS, self._look)
