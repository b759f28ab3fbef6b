"""The event loop for threads without one: one per process, made by the first thread that needs it (H50)."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SECONDS_TO_CLOSE: Final = 5.0


class Background:
    """The loop, in a daemon thread. `closing`: coroutine functions that run in it when the process exits, as far as
    Python runs exit handlers: not after SIGKILL."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.closing: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        threading.Thread(target=self.loop.run_forever, name="idemconsumer-http", daemon=True).start()
        atexit.register(self._close)

    def start(self, act: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(act, self.loop)

    def _close(self) -> None:
        if _background is not self:
            return  # this one is the parent's
        for close in self.closing:
            future = self.start(close())
            try:
                future.result(_SECONDS_TO_CLOSE)
            except Exception:  # noqa: BLE001 - at exit, no caller is left for the error
                future.cancel()
        self.loop.call_soon_threadsafe(self.loop.stop)


_lock = threading.Lock()
_background: Background | None = None
_inherited: Final[list[Background | None]] = []


def background() -> Background:
    """The Background of this process."""
    global _background
    with _lock:
        if _background is None:
            _background = Background()
        return _background


def _forked() -> None:
    """A child has none of its parent's threads. The parent's Background is kept and not closed: closing it would remove
    the parent's sockets from the epoll that both processes share."""
    global _background, _lock
    _inherited.append(_background)
    _background, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
