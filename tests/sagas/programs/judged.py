"""Judges what has become of random programs, whoever ran them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from idemconsumer.message import keys
from idemconsumer.rules.values import State, StepState
from tests.sagas.programs.interpreter import Seen
from tests.sagas.programs.source import Program, open_ended
from tests.support.sagas import Bench


@dataclass
class End:
    """What has become of one program and its children."""

    state: State
    result: bytes | None
    effects: Counter[str]
    undone: list[str]
    rows: list[tuple[str, StepState, int | None, bool, bool, bytes | None]]
    runs: list[Seen]
    letters: list[str]


def ends(
    bench: Bench,
    programs: Collection[str],
    calls: Collection[tuple[UUID, str]],
    seen: Mapping[str, Sequence[Seen]],
) -> dict[str, End]:
    """Of the programs with these ids. `calls`: of a remote that counts each key once."""
    owners = {keys.digest("programs", None, "book", saga): saga for saga in programs}
    states = {owners.get(key): state for key, state in bench.run("select key, state from idemconsumer.record")}
    results = {owners.get(key): body for key, body in bench.run("select key, body from idemconsumer.result")}
    children = bench.run("select key, parent from idemconsumer.child")
    owners |= {key: owners[parent] for key, parent in children if parent in owners}
    effects, undone = defaultdict[str, Counter[str]](Counter), defaultdict[str, list[str]](list)
    for name in [*bench.effects, *(name for _, name in dict.fromkeys(calls))]:
        saga, entry = name.removeprefix("undo ").split("/", 1)
        if name.startswith("undo "):
            undone[saga].append(entry)
        else:
            effects[saga][entry] += 1
    rows, letters = defaultdict[str | None, list[Any]](list), defaultdict[str | None, list[str]](list)
    for key, name, state, *rest in bench.run(
        "select key, name, state, position, has_undo, until is not null, output from idemconsumer.step"
        " order by position"
    ):
        rows[owners.get(key)].append((name, StepState(state), *rest))
    for key, *letter in bench.run("select key, reason, error from idemconsumer.dead_letter"):
        letters[owners.get(key)].append(str(letter))
    return {
        saga: End(
            State(states[saga]), results.get(saga), effects[saga], undone[saga], rows[saga],
            sorted(seen[saga], key=lambda run: (run.token, run.number)), letters[saga],
        )
        for saga in programs
    }  # fmt: skip


def wrong(program: Program, straight: End, end: End) -> list[str]:
    """What is not as it should be at `end`."""
    found = consistent(end)
    if end.state is not straight.state:
        found.append(f"state {straight.state} straight, {end.state} disturbed")
    if not open_ended(program):
        if straight.effects != end.effects:
            found.append(f"effects: missing {straight.effects - end.effects}, more {end.effects - straight.effects}")
        if sorted(straight.undone) != sorted(end.undone):
            found.append(f"undone: {sorted(straight.undone)} straight, {sorted(end.undone)} disturbed")
        if _sorted(straight.result) != _sorted(end.result):
            found.append(f"result: {straight.result!r} straight, {end.result!r} disturbed")
    return found


def _sorted(result: bytes | None) -> Any:
    if result is None:
        return None
    value = json.loads(result)
    return sorted(value) if isinstance(value, list) else value


def consistent(end: End) -> list[str]:
    """What does not fit together at `end` alone."""
    found = [f"dead: {letter}" for letter in end.letters]
    positions = {name: position for name, _, position, *_ in end.rows if position is not None}
    done, undone = Counter[str](), list[tuple[int, str]]()
    for name, state, position, has_undo, waits, output in end.rows:
        if waits or name.startswith("patch:") or state is StepState.REJECTED:
            continue
        value = json.loads(output) if output else None
        if not isinstance(value, str):  # a child: what it left is undone
            continue
        done[value] += 1
        if state is StepState.UNDONE:
            undone.append((position or 0, value))
        elif state is not StepState.DONE:
            found.append(f"step {name} ends as {state.name}")
        elif has_undo and end.state is State.FAILED and not name.endswith("_driven"):
            found.append(f"step {name} is not undone")
    if done != end.effects:
        found.append(f"effects without a record {end.effects - done}, records without an effect {done - end.effects}")
    compensated = {name for name, *_ in end.rows} - {name for _, name in undone}
    if sorted(name for _, name in undone) != sorted(name for name in end.undone if name not in compensated):
        found.append(f"recorded as undone {sorted(undone)}, undone {end.undone}")
    if end.result is not None and end.state is State.COMPLETED:
        given = json.loads(end.result)
        if given != end.runs[-1].done:
            found.append(f"result {given}, last run {end.runs[-1].done}")
    for number, run in enumerate(end.runs):
        places = [positions[name] for name in run.given if name in positions]
        if len(places) < len(run.given):
            found.append(f"run {number} was given what is not recorded: {set(run.given) - positions.keys()}")
        if places != sorted(places):
            found.append(f"run {number} was given {run.given} at positions {places}")
    longest = max(end.runs, key=lambda run: len(run.given))
    for number, run in enumerate(end.runs):
        if run.given != longest.given[: len(run.given)]:
            found.append(f"run {number} was given {run.given}, another one {longest.given}")
    return found
