"""A saga as the application sees it: typed, and without what only operators need."""

from __future__ import annotations

from datetime import datetime

import msgspec

from idemconsumer.admin.saga_views import SagaDetail, StepLine
from idemconsumer.rules.replay import PATCH
from idemconsumer.rules.values import State


class SagaStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that has begun.

    * `name`: its name.
    * `state`: `intent` (its outcome is not known yet), `done`, `rejected`, `undo intent` or `undone`.
    * `key`: the key that a call gives its remote; None for a step in a transaction.
    * `attempts`: how many there were.
    * `started_at`, `finished_at`: times.
    """

    name: str
    state: str
    key: str | None
    attempts: int
    started_at: datetime
    finished_at: datetime | None


class SagaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a saga, at one moment. `app.result` has its result.

    * `state`: PROCESSING, UNDOING, COMPLETED, FAILED or DEAD.
    * `recovery_point`: the step that finished last.
    * `steps`: in the order of their starts.
    * `waiting_until`: when the saga is due again, if no worker runs it: its next attempt, or the end of a sleep or of a
      wait for a signal.
    * `parked`: the reason why it waits for a person.
    * `error`: the error of its last failed attempt.
    * `cancelled`: it is about to be cancelled.
    """

    state: State
    recovery_point: str | None
    steps: tuple[SagaStep, ...]
    waiting_until: datetime | None = None
    parked: str | None = None
    error: str | None = None
    cancelled: bool = False


def status(detail: SagaDetail) -> SagaStatus:
    line = detail.running
    waits = line is not None and line.owner is None and line.parked is None
    return SagaStatus(
        state=State[detail.state.upper()],
        recovery_point=_recovery_point(detail.steps),
        steps=tuple(_step(each) for each in detail.steps if not each.name.startswith(PATCH)),
        waiting_until=line.due if line is not None and waits else None,
        parked=None if line is None else line.parked,
        error=None if line is None else line.error,
        cancelled=line is not None and line.cancel is not None,
    )


def _recovery_point(steps: list[StepLine]) -> str | None:
    finished = [(each.finished_at, each.name) for each in steps if each.finished_at and not each.name.startswith(PATCH)]
    return max(finished)[1] if finished else None


def _step(step: StepLine) -> SagaStep:
    return SagaStep(
        name=step.name, state=step.state, key=step.key, attempts=step.attempts, started_at=step.started_at,
        finished_at=step.finished_at,
    )  # fmt: skip
