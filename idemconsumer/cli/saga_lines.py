"""Sagas, their steps and their history as people read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from idemconsumer.admin.hints import hint
from idemconsumer.admin.saga_views import SagaDetail, SagaLine, StepLine
from idemconsumer.admin.timeline import Event

SHORT: Final = 12  # hexadecimal digits of a key
_ERROR_WIDTH: Final = 60


def in_list(line: SagaLine) -> Iterator[str]:
    yield line.key[:SHORT]
    yield f"{line.started_at:%Y-%m-%d %H:%M:%S}"
    yield line.handler
    yield _state(line) + _waits(line)
    yield line.recovery_point or "-"
    yield _owner(line)
    yield str(line.attempt)
    yield (line.error or "")[:_ERROR_WIDTH]


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


def of_step(step: StepLine) -> Iterator[str]:
    yield step.name
    yield step.kind
    yield step.state + (", overlapped" if step.overlapped else "") + (", has undo" if step.has_undo else "")
    yield str(step.attempts)
    yield str(step.token)
    yield _time(step.started_at)
    if step.state == "waiting" and step.until is not None:
        yield f"by {_time(step.until)}"
    else:
        yield "-" if step.finished_at is None else _time(step.finished_at)
    yield "-" if step.seconds is None else f"{step.seconds * 1000:.0f} ms"
    yield (step.undo_key if step.state.startswith("und") else step.key) or "-"


def of_event(event: Event) -> Iterator[str]:
    yield _time(event.at)
    yield event.what
    yield event.owner or "-"
    yield "-" if event.token is None else str(event.token)
    yield "-" if event.attempt is None else str(event.attempt)
    yield "-" if event.seconds is None else f"{event.seconds * 1000:.0f} ms"
    yield event.detail or "-"


def _time(at: Any) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"


def _state(line: SagaLine) -> str:
    return f"{line.state} ({line.parked})" if line.parked else line.state


def _waits(line: SagaLine) -> str:
    if not line.waits or line.owner is not None or line.parked is not None:
        return ""
    return f", {' and '.join(line.waits)} until {line.due:%Y-%m-%d %H:%M:%S}"


def _owner(line: SagaLine) -> str:
    if line.owner is None:
        return "a lost worker" if line.stale else "none"
    return f"{line.owner} (lost)" if line.stale else line.owner
