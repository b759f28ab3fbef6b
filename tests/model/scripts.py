"""Handlers of the model, replayed by the rules of the engine itself (`idemconsumer/rules`)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from typing import Final, NamedTuple

from idemconsumer.rules import saga as rules
from idemconsumer.rules.replay import StepAnswer, Unasked, answer
from idemconsumer.rules.values import State, StepKind, StepRow, StepState

WAITING: Final = 6  # beside the values of StepState: a wait that was begun, and is not over
NEVER: Final = 9  # a time that does not come


class Refused(Exception):
    """What a handler sees of a rejection, and of a wait whose time is over."""


class Ask(NamedTuple):
    """A step that a handler requests. `seconds`: of a wait, until its end."""

    name: str
    kind: StepKind
    seconds: int = 0


Script = Callable[[], Generator[Ask, None, None]]


def tx(name: str) -> Ask:
    return Ask(name, StepKind.TX)


def call(name: str) -> Ask:
    return Ask(name, StepKind.CALL)


def sleep(name: str, seconds: int) -> Ask:
    return Ask(name, StepKind.SLEEP, seconds)


def wait(name: str, seconds: int = NEVER) -> Ask:
    return Ask(name, StepKind.WAIT, seconds)


def rows_of(asks: tuple[Ask, ...], states: tuple[int, ...]) -> list[StepRow]:
    """What is recorded, in the order of `asks`, which is the order of finishing."""
    rows = []
    for place, (ask, state) in enumerate(zip(asks, states, strict=True)):
        if state:
            done = StepState.DONE if state == WAITING else StepState(state)
            position = None if state in (WAITING, StepState.INTENT) else place
            has_undo = ask.kind in (StepKind.TX, StepKind.CALL)
            rows.append(StepRow(ask.name, ask.kind, done, has_undo, False, position, 1, None))
    return rows


class Reached(NamedTuple):
    """How far a replay came: `run` the step of this index, or `complete`, `rejected`, `end`, or `changed`."""

    what: str
    step: int = 0


@cache
def replay(script: Script, asks: tuple[Ask, ...], states: tuple[int, ...]) -> Reached:
    """The handler from its start, in PROCESSING, as `SagaRun` answers its requests."""
    recorded = rows_of(asks, states)
    rows, unasked = {row.name: row for row in recorded}, Unasked(recorded)
    handler = script()
    try:
        ask = next(handler)
        while True:
            row = rows.get(ask.name)
            unasked.ask(ask.name)
            match answer(row, State.PROCESSING):
                case StepAnswer.OUTPUT:
                    ask = handler.send(None)
                case StepAnswer.REJECTION:
                    ask = handler.throw(Refused)
                case _:
                    if unasked.passed_over(at_end=False) is not None or (row is None and unasked.calls):
                        return Reached("changed")
                    return Reached("run", next(i for i, each in enumerate(asks) if each.name == ask.name))
    except StopIteration:
        return Reached("changed" if unasked.passed_over(at_end=True) else "complete")
    except Refused:
        return Reached("changed" if unasked.passed_over(at_end=True) else "rejected")


@cache
def next_undo(asks: tuple[Ask, ...], states: tuple[int, ...]) -> int | None:
    """The step to undo next."""
    todo = rules.to_undo(rows_of(asks, states))
    return None if not todo else [ask.name for ask in asks].index(todo[0].name)


@cache
def unknown_call(asks: tuple[Ask, ...], states: tuple[int, ...]) -> int | None:
    """The call of unknown outcome."""
    names = rules.unknown_calls(rows_of(asks, states))
    return None if not names else [ask.name for ask in asks].index(names[0])


@cache
def last_resort(asks: tuple[Ask, ...], states: tuple[int, ...]) -> rules.LastResort:
    return rules.after_last_attempt(rows_of(asks, states))
