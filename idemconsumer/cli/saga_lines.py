"""Sagas, their steps and their history as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from idemconsumer.admin.hints import hint
from idemconsumer.admin.saga_views import SagaDetail, SagaLine, StepLine
from idemconsumer.admin.timeline import Event
from idemconsumer.cli.verbs import SHORT, time_of

LINES: Final = "key, begun, handler, state, at, owner, attempt, error"
EVENTS: Final = "at, what, owner, token, attempt, took, detail"
STEPS: Final = "step, kind, state, attempts, token, started, ended, took, key"
_ERROR_WIDTH: Final = 60


def in_list(line: SagaLine) -> tuple[object, ...]:
    """A row of `LINES`."""
    state, error = _state(line) + _waits(line), (line.error or "")[:_ERROR_WIDTH]
    at = line.recovery_point or None
    return line.key[:SHORT], line.started_at, line.handler, state, at, _owner(line), line.attempt, error


def facts(detail: SagaDetail) -> Iterator[tuple[str, str]]:
    yield "key", detail.key
    yield "scope", detail.scope
    if detail.parent is not None:
        yield "begun by", f"saga {detail.parent[:SHORT]}"
    line = detail.running
    if line is not None:
        for each in detail.signals:
            awaited = "waited for" if each.awaited else "no wait has asked for it"
            yield "signal", f"{each.name}: {each.signals} since {_time(each.first_at)}, {awaited}"
    if line is None:
        yield "state", f"{detail.state} since {_time(detail.changed_at)}"
        if detail.result is not None:
            yield "result", detail.result
        return
    yield "state", _state(line)
    yield "message", f"{line.source} {line.position}" + (f", id {line.message_id}" if line.message_id else "")
    yield "begun", _time(line.started_at) + (f", version {line.version}" if line.version else "")
    yield "owner", f"{_owner(line)}, token {line.token}, attempt {line.attempt}"
    if line.owner is None and line.parked is None:
        yield "due", _time(line.due)
    if line.waits:
        yield "waits for", ", ".join(line.waits)
    yield "at", line.recovery_point or "no finished step"
    if line.error is not None:
        yield "error", line.error
    if line.cancel is not None and line.state != "undoing":
        yield "cancel", "requested, " + ("to be undone" if line.cancel else "its effects stand")
    if detail.open_intents:
        yield "unknown", f"whether {', '.join(detail.open_intents)} was done"
    if line.parked is not None:
        yield "what to do", hint(line.parked)


def of_step(step: StepLine) -> tuple[object, ...]:
    """A row of `STEPS`."""
    state = step.state + (", overlapped" if step.overlapped else "") + (", has undo" if step.has_undo else "")
    ended = None if step.finished_at is None else _time(step.finished_at)
    if step.state == "waiting" and step.until is not None:
        ended = f"by {_time(step.until)}"
    key = (step.undo_key if step.state.startswith("und") else step.key) or None
    began, took = _time(step.started_at), _took(step.seconds)
    return step.name, step.kind, state, step.attempts, step.token, began, ended, took, key


def of_event(event: Event) -> tuple[object, ...]:
    """A row of `EVENTS`."""
    at, took = _time(event.at), _took(event.seconds)
    return at, event.what, event.owner or None, event.token, event.attempt, took, event.detail or None


def _time(at: datetime) -> str:
    return f"{time_of(at)}.{at.microsecond // 1000:03}"


def _took(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.0f} ms"


def _state(line: SagaLine) -> str:
    return f"{line.state} ({line.parked})" if line.parked else line.state


def _waits(line: SagaLine) -> str:
    if not line.waits or line.owner is not None or line.parked is not None:
        return ""
    return f", {' and '.join(line.waits)} until {time_of(line.due)}"


def _owner(line: SagaLine) -> str:
    if line.owner is None:
        return "a lost worker" if line.stale else "none"
    return f"{line.owner} (lost)" if line.stale else line.owner
