"""How long the machine stood still, which a test that compares two times has to leave out."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final

_TICK: Final = 0.01
_LATE: Final = 0.1  # seconds: less is a busy machine


class Pauses:
    """A thread that does nothing else adds up by how much it went on late."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK):
            now = time.monotonic()
            if now - before > _LATE:
                self.seconds += now - before
            before = now
