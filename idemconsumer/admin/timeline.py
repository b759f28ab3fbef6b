"""What happened to a saga, in chronological order: from its row, its history, its steps and its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from idemconsumer.rules.values import StepState


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `owner` is the worker concerned and `token` its fence token; `seconds` is how long a step took, from
    its first start to its end."""

    at: datetime
    what: str
    owner: str | None = None
    token: int | None = None
    attempt: int | None = None
    seconds: float | None = None
    detail: str | None = None


_CHILD: Final = "child:"  # prefix of the recorded signal of a wait for a child's end
_STEP_SAYS = {
    StepState.INTENT: "called, outcome unknown",
    StepState.DONE: "done",
    StepState.REJECTED: "rejected",
}


def timeline(
    running: Mapping[str, Any] | None,
    history: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    end: tuple[datetime, str],
) -> list[Event]:
    """The events of a saga. `running` is the saga's row, None once the saga has ended; `end` is when its record last
    changed, and its state.

    The worker that began the saga is known until the saga ends; after that, only if the history names it.
    """
    events = [Event(**row) for row in history]
    if running is not None:
        first = next((event for event in events if event.token is not None), None)
        owner, token = (running["owner"], running["token"]) if first is None else (first.owner, first.token)
        origin = f"{running['source']} {running['position']}"
        events.append(Event(at=running["started_at"], what="begun", owner=owner, token=token, attempt=1, detail=origin))
    else:
        events.append(Event(at=end[0], what=end[1]))
    for step in steps:
        events += _of_step(step)
    return sorted(events, key=lambda event: event.at)


def _says(step: Mapping[str, Any]) -> str:
    if waiting(step):
        return "waits" if step["signal"] is None else f"waits for {_awaited(step['signal'])}"
    if step["until"] is not None and step["state"] == StepState.REJECTED and not step["signal"].startswith(_CHILD):
        return "timed out"
    return _STEP_SAYS.get(StepState(step["state"]), "done")


def _awaited(signal: str) -> str:
    if signal.startswith(_CHILD):
        return f"child {signal.removeprefix(_CHILD)[:12]}"
    return f"signal {signal}"


def waiting(step: Mapping[str, Any]) -> bool:
    """Whether a step is a wait that is not over (L40)."""
    return step["until"] is not None and step["finished_at"] is None


def _of_step(step: Mapping[str, Any]) -> Iterator[Event]:
    name, began, ended = f"step {step['name']}", step["started_at"], step["finished_at"]
    undoes = step["undo_at"] is not None  # token and attempts are then those of the undo
    yield Event(
        at=ended or began,
        what=f"{name} {_says(step)}",
        token=None if undoes else step["token"],
        attempt=None if undoes else step["attempt"],
        seconds=None if ended is None else (ended - began).total_seconds(),
    )
    if undoes:
        began, ended = step["undo_at"], step["undone_at"]
        yield Event(
            at=ended or began,
            what=f"{name} {'undo called, outcome unknown' if ended is None else 'undone'}",
            token=step["token"],
            seconds=None if ended is None else (ended - began).total_seconds(),
        )
