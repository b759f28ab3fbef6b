"""Observers of the engine, and an exception that looks like the death of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from idemconsumer.errors import OfTheEngine
from idemconsumer.ports.observer import Point, SagaPoint


class Points:
    """Remembers each point that was passed and how many messages passed it, and acts at a chosen one, once."""

    def __init__(self) -> None:
        self.seen: list[tuple[Point | SagaPoint, int]] = []
        self._acts: dict[Point | SagaPoint, Callable[[], object]] = {}

    def on(self, point: Point | SagaPoint, act: Callable[[], object]) -> None:
        self._acts[point] = act

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        self.seen.append((point, len(keys)))
        if (act := self._acts.pop(point, None)) is not None:
            act()

    def count(self, point: Point | SagaPoint) -> int:
        return sum(passed is point for passed, _ in self.seen)


class Killed(OfTheEngine):
    """As far as the database can tell, the process is gone."""
