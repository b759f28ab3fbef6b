"""Every interleaving of the leased protocol's model keeps its promises, and none of its rules can be spared."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest

from idemconsumer.rules.values import State, StepState
from tests.model import leased
from tests.model.explorer import Violation
from tests.model.leased import COMPLETED, DEAD, FAILED, Rules, explore

BROKEN_WITHOUT = {
    "token": "an effect happened twice",
    "fence_lock": "an effect happened twice",
    "fence_counted": "an effect happened twice",
    "checkpoint_first": "an effect happened twice",
    "intent": "failed, and an effect survives",
    "undoing_first": "completed without each step's effect once",
    "undo_key": "failed, and an effect survives",
    "same_key": "an effect happened twice",
    "new_token": "an effect happened twice",
    "doubt_kept": "an effect happened twice",
    "unheld_taken": "no end can be reached",
    "told_if_stored": "the broker was told of a message that is not stored",
}

# With workers of two versions.
BROKEN_AMONG_VERSIONS_WITHOUT = {
    "own_version": "put aside, though a worker of its version lives",
    "gone_taken": "no end can be reached",
    "version_checked": "went on with another version",
}


@pytest.mark.parametrize(("faults", "least"), [(2, 10_000), pytest.param(3, 50_000, marks=pytest.mark.long)])
def test_every_interleaving_keeps_the_promises_and_can_end(
    capsys: pytest.CaptureFixture[str], faults: int, least: int
) -> None:
    """With that many faults, of any kind and at any moment."""
    before = time.monotonic()
    explored = explore(Rules(), faults=faults)
    with capsys.disabled():
        print(
            f"\nleased model: {explored.states:,} states, {explored.transitions:,} transitions, up to {faults} faults,"
            f" {time.monotonic() - before:.1f} s"
        )
    assert explored.ends == {COMPLETED, FAILED, DEAD}
    assert explored.states > least


def test_the_model_is_not_true_for_want_of_trouble() -> None:
    actions = explore(Rules(), faults=2).actions
    kinds = ("do 0", "intend 1", "output 1", "rejected 1", "do 2", "rejected 2", "undoing 2", "complete 0",
             "undo 2", "undo_intend 1", "undo_output 1", "undo 0", "fail 0", "release 2", "park 1")  # fmt: skip
    for kind in kinds:
        missing = {f"commits {kind}", f"loses the answer to {kind}"} - actions
        assert not missing, missing
    assert {
        "crashes", "is paused beyond its lease", "notices that its lease is over", "takes the saga over",
        "takes over from itself", "finds that it is not its own", "is fenced at do", "is fenced at undo",
        "is fenced at complete", "gets the remembered answer", "is refused again by the remote", "finds it busy",
        "takes, the answer is lost", "is drained", "answers a duplicate", "sees a redelivery, and claims",
    } <= actions  # fmt: skip


@pytest.mark.parametrize("rule", BROKEN_WITHOUT)
def test_without_this_rule_a_promise_is_broken(rule: str) -> None:
    with pytest.raises(Violation, match=BROKEN_WITHOUT[rule]):
        explore(replace(Rules(), **{rule: False}), faults=2)


def test_workers_of_two_versions_keep_the_promises_and_can_end() -> None:
    explored = explore(Rules(), faults=2, versions=(0, 1))
    assert explored.ends == {COMPLETED, FAILED, DEAD}
    assert {"leaves for good", "takes a saga of another version", "takes the saga over", "commits park 0"} <= (
        explored.actions
    )


@pytest.mark.parametrize("rule", BROKEN_AMONG_VERSIONS_WITHOUT)
def test_without_this_rule_a_deployment_breaks_a_promise(rule: str) -> None:
    with pytest.raises(Violation, match=BROKEN_AMONG_VERSIONS_WITHOUT[rule]):
        explore(replace(Rules(), **{rule: False}), faults=2, versions=(0, 1))


def test_each_rule_is_taken_out_once() -> None:
    assert {*BROKEN_WITHOUT, *BROKEN_AMONG_VERSIONS_WITHOUT} == {field.name for field in fields(Rules)}


def test_the_model_speaks_of_the_states_that_the_tables_hold() -> None:
    assert [State[name] for name in ("PROCESSING", "UNDOING", "COMPLETED", "FAILED", "DEAD")] == [1, 2, 3, 4, 5]
    assert {state.name: getattr(leased, state.name) for state in StepState} == {s.name: s.value for s in StepState}
