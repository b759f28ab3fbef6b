"""Sagas as they are shown to a person: plain structs, built from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from idemconsumer.admin.timeline import Event, timeline, waiting
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.sagas.step import step_key

Row = Mapping[str, Any]


class SagaLine(msgspec.Struct, frozen=True, kw_only=True):
    """A saga that has not ended. `state` is processing, undoing or dead (`parked` says why it waits for a person).

    `owner` is the worker that holds it, None between attempts; `stale` means that its lease has expired. `attempt`
    counts takeovers since the last finished step; `token`, the fence token, increases with each takeover. `cancel`: it
    is to be cancelled, and whether its finished steps are to be undone then; None if nobody has requested that.
    `waits`: what it sleeps or waits for, such as "signal approved"; then `due` is until when.
    """

    key: str
    scope: str
    handler: str
    state: str
    parked: str | None
    owner: str | None
    token: int
    attempt: int
    due: datetime
    stale: bool
    recovery_point: str | None
    version: str | None
    error: str | None
    source: str
    position: str
    message_id: str | None
    started_at: datetime
    cancel: bool | None
    waits: list[str]


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded step. `token` is the fence token of the owner that last wrote it; `attempts` includes those of its
    undo; `seconds` is the time from its first start to its end, `undo_seconds` the same for its undo. `key` is what a
    call gives its remote, and `undo_key` what its undo does; None for steps in a transaction.

    In the states `intent` and `undo intent` the outcome is not known yet. A `sleep` or a `wait` has an end, `until`,
    and a wait its `signal`; the state is `waiting` until it is over.
    """

    name: str
    kind: str
    key: str | None
    undo_key: str | None
    state: str
    has_undo: bool
    overlapped: bool
    token: int
    attempts: int
    started_at: datetime
    finished_at: datetime | None
    seconds: float | None
    undo_seconds: float | None
    output: str | None
    until: datetime | None
    signal: str | None


class SignalLine(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one name that no wait has taken. `awaited`: a wait is for them, and takes one when the saga runs."""

    name: str
    signals: int
    first_at: datetime
    awaited: bool


class SagaDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A saga's record, its row until it ends, its steps in the order of their starts, and its timeline. `parent`: the
    key of the saga whose start began it; None if a message or code did, or the parent's record is pruned."""

    key: str
    scope: str
    state: str
    changed_at: datetime
    parent: str | None
    result: str | None
    running: SagaLine | None
    steps: list[StepLine]
    signals: list[SignalLine]
    timeline: list[Event]

    @property
    def open_intents(self) -> list[str]:
        """Calls with an unknown outcome; nothing undoes them."""
        return [step.name for step in self.steps if step.state == "intent"]


def detail(
    key: bytes,
    record: Row,
    parent: str | None,
    running: SagaLine | None,
    steps: Sequence[Row],
    history: Sequence[Row],
    signals: Sequence[Row],
) -> SagaDetail:
    """Built from the rows of `saga_record`, `saga_parent`, `saga_steps`, `saga_history` and `saga_signals`."""
    state = _word(State(record["state"]))
    row = None if running is None else msgspec.structs.asdict(running)
    return SagaDetail(
        key=key.hex(),
        scope=record["scope"],
        state=state,
        changed_at=record["changed_at"],
        parent=parent,
        result=_text(record["result"]),
        running=running,
        steps=[_step(record["scope"], key, step) for step in steps],
        signals=[SignalLine(**each) for each in signals],
        timeline=timeline(row, history, steps, (record["changed_at"], state)),
    )


def _step(scope: str, key: bytes, row: Row) -> StepLine:
    name, called = row["name"], StepKind(row["kind"]) is StepKind.CALL
    return StepLine(
        name=name,
        key=str(step_key(scope, key, name)) if called else None,
        undo_key=str(step_key(scope, key, name, undo=True)) if called else None,
        kind=_word(StepKind(row["kind"])),
        state="waiting" if waiting(row) else _word(StepState(row["state"])),
        has_undo=row["has_undo"],
        overlapped=row["overlapped"],
        token=row["token"],
        attempts=row["attempt"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        seconds=_seconds(row["started_at"], row["finished_at"]),
        undo_seconds=_seconds(row["undo_at"], row["undone_at"]),
        output=_text(row["output"]),
        until=row["until"],
        signal=row["signal"],
    )


def _seconds(began: datetime | None, ended: datetime | None) -> float | None:
    return None if began is None or ended is None else (ended - began).total_seconds()


def _word(value: State | StepKind | StepState) -> str:
    return value.name.lower().replace("_", " ")


def _text(body: bytes | None) -> str | None:
    return None if body is None else body.decode("utf-8", "backslashreplace")
