"""Sagas as shown to people and to applications: plain structs, built from rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from idemconsumer.admin.sender import NamedRow
from idemconsumer.admin.timeline import Event, waiting
from idemconsumer.rules.replay import PATCH
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.sagas.step import step_key


class SagaDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A saga's record, its row until it ends, its steps in the order of their starts, and its timeline.

    `parent`: the key of the saga that started it; None if a message or code started it, or if the parent's record is
    pruned. `running` and `signals`: `saga_list` and `saga_signals` in `sql/admin.sql`; `steps`: see `step_line`.
    """

    key: str
    scope: str
    state: str
    changed_at: datetime
    parent: str | None
    result: str | None
    running: NamedRow | None
    steps: list[NamedRow]
    signals: Sequence[NamedRow]
    timeline: list[Event]

    @property
    def open_intents(self) -> list[str]:
        """Calls with an unknown outcome; they are not undone."""
        return [step.name for step in self.steps if step.state == "intent"]


def step_line(scope: str, key: bytes, row: NamedRow) -> NamedRow:
    """A recorded step. `token` is the fence token of the owner that last wrote it; `attempts` includes those of its
    undo; `seconds` is the time from its first start to its end, `undo_seconds` the same for its undo. `key` is the key
    that the call sends to the remote system, `undo_key` that of its undo; both are None for steps in a transaction.

    In the states `intent` and `undo intent` the outcome is not known yet. A `sleep` or a `wait` has an end, `until`,
    and a wait has a `signal`; the state is `waiting` until then.
    """
    kind = StepKind(row.kind)
    keys = [str(step_key(scope, key, row.name, undo=undo)) if kind is StepKind.CALL else None for undo in (False, True)]
    return NamedRow(
        name=row.name,
        kind=word_of(kind),
        key=keys[0],
        undo_key=keys[1],
        state="waiting" if waiting(row) else word_of(StepState(row.state)),
        has_undo=row.has_undo,
        overlapped=row.overlapped,
        token=row.token,
        attempts=row.attempt,
        started_at=row.started_at,
        finished_at=row.finished_at,
        seconds=_seconds(row.started_at, row.finished_at),
        undo_seconds=_seconds(row.undo_at, row.undone_at),
        output=readable(row.output),
        until=row.until,
        signal=row.signal,
    )


def _seconds(began: datetime | None, ended: datetime | None) -> float | None:
    return None if began is None or ended is None else (ended - began).total_seconds()


def word_of(value: State | StepKind | StepState) -> str:
    """The name of the value for people and in files."""
    return value.name.lower().replace("_", " ")


def readable(body: bytes | None) -> str | None:
    """Stored text, with bytes that are not text escaped."""
    return None if body is None else body.decode("utf-8", "backslashreplace")


class SagaStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that has begun.

    * `name`: its name.
    * `state`: `intent` (its outcome is not known yet), `done`, `rejected`, `undo intent` or `undone`.
    * `key`: the key that a call sends to the remote system; None for a step in a transaction.
    * `attempts`: how many attempts there were.
    * `started_at`, `finished_at`: times.
    """

    name: str
    state: str
    key: str | None
    attempts: int
    started_at: datetime
    finished_at: datetime | None


class SagaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a saga, at one moment. `app.result` returns its result.

    * `state`: PROCESSING, UNDOING, COMPLETED, FAILED or DEAD.
    * `recovery_point`: the step that finished last.
    * `steps`: in the order of their starts.
    * `waiting_until`: when the saga is due again, if no worker runs it: its next attempt, or the end of a sleep or of a
      wait for a signal.
    * `parked`: the reason why it waits for a person.
    * `error`: the error of its last failed attempt.
    * `cancelled`: a cancellation has been requested.
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
        steps=tuple(
            SagaStep(**{name: getattr(each, name) for name in SagaStep.__struct_fields__})
            for each in detail.steps
            if not each.name.startswith(PATCH)
        ),
        waiting_until=line.due if line is not None and waits else None,
        parked=None if line is None else line.parked,
        error=None if line is None else line.error,
        cancelled=line is not None and line.cancel is not None,
    )


def _recovery_point(steps: list[NamedRow]) -> str | None:
    finished = [(each.finished_at, each.name) for each in steps if each.finished_at and not each.name.startswith(PATCH)]
    return max(finished)[1] if finished else None
