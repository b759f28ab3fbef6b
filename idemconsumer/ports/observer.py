"""Who may watch: the named points that a message and a saga pass."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol


class Observer(Protocol):
    """Told of every named point, once a group; of FETCHED, DISPATCHED and a single message's HANDLED once a message.
    It decides nothing and must not raise."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None: ...


class NullObserver:
    """The observer that does nothing."""

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        return


class Point(StrEnum):
    """Named places on the straight line of one message; a crash at any of them must lose and double nothing."""

    FETCHED = "fetched"
    DISPATCHED = "dispatched"
    SUSPECTS_MARKED = "suspects_marked"
    SUSPECT_COUNTED = "suspect_counted"
    CLAIMED = "claimed"
    HANDLED = "handled"
    SEALING = "sealing"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    ATTEMPT_COUNTED = "attempt_counted"
    REJECTING = "rejecting"
    REJECTED = "rejected"
    DEAD_LETTERING = "dead_lettering"
    DEAD_LETTERED = "dead_lettered"
    SETTLING = "settling"
    SETTLED = "settled"


class SagaPoint(StrEnum):
    """As `Point`, for the steps of a saga."""

    STEP_OPENING = "step_opening"
    STEP_COMMITTING = "step_committing"
    STEP_COMMITTED = "step_committed"
    INTENDING = "intending"
    INTENDED = "intended"
    CALLED = "called"
    STEP_RECORDED = "step_recorded"
    UNDOING = "undoing"
    UNDONE = "undone"
    RELEASED = "released"
