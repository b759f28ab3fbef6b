"""What a resumed handler's steps get, and what it must have asked for (L6)."""

from __future__ import annotations

import pytest

from idemconsumer.rules.replay import StepAnswer, Unasked, answer, asked_by_branches, recovery_point
from idemconsumer.rules.values import State, StepKind, StepRow, StepState


def row(
    name: str = "s",
    state: StepState = StepState.DONE,
    *,
    position: int | None = 1,
    overlapped: bool = False,
    has_undo: bool = True,
) -> StepRow:
    return StepRow(name, StepKind.CALL, state, has_undo, overlapped, position, 1, None)


# ---- what a step gets
@pytest.mark.parametrize("phase", [State.PROCESSING, State.UNDOING])
@pytest.mark.parametrize("state", [StepState.DONE, StepState.UNDO_INTENT, StepState.UNDONE])
def test_a_step_that_has_finished_is_not_run_again(state: StepState, phase: State) -> None:
    assert answer(row(state=state), phase) is StepAnswer.OUTPUT


@pytest.mark.parametrize("phase", [State.PROCESSING, State.UNDOING])
def test_a_step_that_was_refused_is_refused_again(phase: State) -> None:
    assert answer(row(state=StepState.REJECTED), phase) is StepAnswer.REJECTION


@pytest.mark.parametrize("open_step", [None, row(state=StepState.INTENT, position=None)])
def test_a_step_without_an_outcome_is_run(open_step: StepRow | None) -> None:
    assert answer(open_step, State.PROCESSING) is StepAnswer.RUN


@pytest.mark.parametrize("open_step", [None, row(state=StepState.INTENT, position=None)])
def test_nothing_is_run_while_the_saga_is_undone(open_step: StepRow | None) -> None:
    assert answer(open_step, State.UNDOING) is StepAnswer.END


# ---- what must have been asked for
def test_a_recorded_step_that_was_not_asked_for_is_passed_over() -> None:
    first, second = row("first"), row("second", position=2)
    unasked = Unasked([first, second])
    unasked.ask("first")
    assert unasked.passed_over(at_end=False) is second
    unasked.ask("second")
    assert unasked.passed_over(at_end=True) is None
    assert not unasked


@pytest.mark.parametrize("state", [StepState.DONE, StepState.INTENT])
def test_a_step_without_a_fixed_place_may_be_asked_for_until_the_end(state: StepState) -> None:
    movable = row(state=state, overlapped=True)
    unasked = Unasked([movable])
    assert unasked.passed_over(at_end=False) is None
    assert unasked.passed_over(at_end=True) is movable


@pytest.mark.parametrize("state", [StepState.REJECTED, StepState.INTENT])
def test_a_refused_step_and_an_open_call_must_be_asked_for_as_well(state: StepState) -> None:
    assert Unasked([row(state=state)]).passed_over(at_end=False) is not None


def test_open_calls_are_told_until_they_are_asked_for() -> None:
    unasked = Unasked([row("done"), row("placed", StepState.INTENT), row("beside", StepState.INTENT, overlapped=True)])
    assert set(unasked.calls) == {"placed", "beside"}
    unasked.ask("placed")
    unasked.ask("beside")
    assert not unasked.calls


# ---- what branches may still ask for
def test_the_end_of_a_replay_waits_for_steps_that_overlapped_and_may_have_to_be_undone() -> None:
    """Whether one has to be is known once it is asked for: its undo may have been added since (L25)."""
    rows = [
        row("beside", overlapped=True),
        row("undoing", StepState.UNDO_INTENT, overlapped=True),
        row("no undo yet", overlapped=True, has_undo=False),
    ]
    assert asked_by_branches(rows, None, in_branch=False) == {"beside", "undoing", "no undo yet"}


def test_it_does_not_wait_for_what_is_not_to_be_undone() -> None:
    rows = [
        row("undone", StepState.UNDONE, overlapped=True),
        row("refused", StepState.REJECTED, overlapped=True),
        row("open", StepState.INTENT, overlapped=True),
    ]
    assert asked_by_branches(rows, None, in_branch=False) == set()


def test_the_handlers_own_task_has_asked_for_its_own_steps_before() -> None:
    assert asked_by_branches([row("own")], None, in_branch=False) == set()


def test_a_branch_that_ends_the_replay_waits_for_the_handlers_own_task_too() -> None:
    assert asked_by_branches([row("own")], None, in_branch=True) == {"own"}


def test_it_does_not_wait_for_what_finished_later_and_may_depend_on_it() -> None:
    before, reached, after = (row(name, position=n, overlapped=True) for n, name in enumerate("abc", 1))
    assert asked_by_branches([before, reached, after], reached, in_branch=False) == {"a"}


# ---- the recovery point
def test_the_recovery_point_is_the_step_that_finished_last() -> None:
    rows = [row("b", position=2), row("c", position=3), row("a", position=1), row("open", position=None)]
    assert recovery_point(rows) == "c"


@pytest.mark.parametrize("rows", [[], [row(state=StepState.INTENT, position=None)]], ids=["no step", "an open call"])
def test_before_the_first_step_there_is_no_recovery_point(rows: list[StepRow]) -> None:
    assert recovery_point(rows) is None
