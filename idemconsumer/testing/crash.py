"""Kills a worker at a named point, to show that a crash there loses nothing and applies nothing twice.

Give it to a worker in a process of its own: `app.worker(settings, CrashAt(Point.COMMITTED))`. Nothing that runs in
production reads a variable or a flag for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from idemconsumer.ports.observer import Point, SagaPoint


class CrashAt:
    """An Observer that sends its own process SIGKILL when `point` is reached for the `nth` time.

    SIGKILL runs no handler, closes no connection and flushes nothing. So the servers see the same as with any killed
    worker.
    """

    def __init__(self, point: Point | SagaPoint, nth: int = 1) -> None:
        self._point = point
        self._left = nth

    @classmethod
    def parse(cls, text: str) -> CrashAt:
        """Parse `committed` or `intended:3`. Raises ValueError for a point that does not exist."""
        point, _, nth = text.partition(":")
        return cls(SagaPoint(point) if point in set(SagaPoint) else Point(point), int(nth or 1))

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        """Kill the process if this is the point. Called by the engine, as for every Observer."""
        if point is self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
