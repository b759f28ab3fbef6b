"""Every interleaving of sagas that wait, are signalled, cancelled and decided about, in small scenarios, each complete.

Each rule is taken out once, and then a promise is broken. What the model cannot see of these rules is shown elsewhere.
L28 is in `test_leased_model`. In `tests/sagas/test_waits.py`: a pause costs no attempt
(`test_sleeping_costs_no_attempt_and_its_end_begins_them_anew`), and counts the waits of all branches
(`test_the_saga_is_due_when_the_first_of_its_waits_is_over`), L41; the oldest signal is taken first
(`test_each_wait_takes_one_signal_and_the_first_the_oldest`), L42; and a signal for a saga that never begins is pruned
(`test_signals_that_nobody_takes_are_pruned`), L43. That an answer gives a new token (L52) is in
`tests/sagas/test_decide.py::test_a_call_that_was_done_is_not_made_again`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import fields, replace

import pytest

from tests.model.explorer import Violation
from tests.model.scripts import Ask, Refused, call, sleep, tx, wait
from tests.model.waiting import explore
from tests.model.waiting_world import COMPLETED, FAILED, PARKED, Rules, Scenario

Steps = Generator[Ask, None, None]
NAP, BOOKED, EXPIRED = sleep("nap", 1), tx("booked"), tx("expired")
APPROVED, IN_TIME, SECOND = wait("approved"), wait("in time", 1), wait("second", 1)
CREATED, CHARGED, ONLY = tx("created"), call("charged"), tx("approved only")


def naps() -> Steps:
    yield NAP
    yield BOOKED


def waits() -> Steps:
    yield APPROVED
    yield BOOKED


def waits_in_time() -> Steps:
    try:
        yield IN_TIME
    except Refused:
        yield EXPIRED
    else:
        yield BOOKED


def waits_twice() -> Steps:
    yield APPROVED
    try:
        yield SECOND
    except Refused:
        yield EXPIRED


def charges() -> Steps:
    yield CREATED
    yield CHARGED


def charges_only() -> Steps:
    yield CHARGED


def newer() -> Steps:
    yield CREATED
    yield BOOKED
    yield ONLY


def older() -> Steps:
    yield CREATED
    yield ONLY


def newer_waits() -> Steps:
    yield CREATED
    yield APPROVED
    yield ONLY


SCENARIOS = {
    "sleep": Scenario((NAP, BOOKED), (naps, naps), clock=2),
    "signal": Scenario((APPROVED, BOOKED), (waits, waits), messages=1),
    "signal or time-out": Scenario((IN_TIME, BOOKED, EXPIRED), (waits_in_time,) * 2, clock=1, messages=1, faults=2),
    "two waits, one message": Scenario((APPROVED, SECOND, EXPIRED), (waits_twice,) * 2, clock=2, messages=1, faults=1),
    "key used again": Scenario((APPROVED, BOOKED), (waits, waits), messages=2, reused=True, faults=1),
    "cancel": Scenario((CHARGED,), (charges_only,) * 2, cancel=1, rejects=True),
    "cancel and undo": Scenario((CREATED, CHARGED), (charges, charges), cancel=2, rejects=True, faults=1),
    "cancel what waits": Scenario((APPROVED, BOOKED), (waits, waits), cancel=2),
    "cancel, a person is to decide": Scenario((CREATED, CHARGED), (charges, charges), cancel=2, asks_a_person=True),
    "decide": Scenario((CREATED, CHARGED), (charges, charges), decides=True, unsure=True, rejects=True),
    "decide and cancel": Scenario((CHARGED,), (charges_only,) * 2, decides=True, cancel=1),
    "a step more": Scenario((CREATED, BOOKED, ONLY), (older, newer)),
    "a wait more": Scenario((CREATED, APPROVED, ONLY), (older, newer_waits), messages=1),
}

# The rule taken out, the smallest scenario that needs it, and the promise that is broken then.
BROKEN_WITHOUT = {
    "end_once": ("sleep", "a sleep ends later than it was to"),
    "ending_once": ("signal or time-out", "put aside, though nothing has failed or changed"),
    "seen_by_older": ("a wait more", "it went on without its wait"),
    "due_at_end": ("sleep", "no end can be reached"),
    "pause_fenced": ("signal", "no end can be reached"),
    "key_locked": ("signal", "no end can be reached"),
    "look_after_lock": ("signal", "no end can be reached"),
    "woken": ("signal", "no end can be reached"),
    "taken_with_end": ("signal", "no end can be reached"),
    "ended_refused": ("key used again", "a signal was stored for a saga that had ended"),
    "pruned_together": ("key used again", "a signal for a former saga answered this one"),
    "signal_in_claim": ("two waits, one message", "one message answered two waits"),
    "request_seen": ("cancel", "it ended otherwise than was asked for before"),
    "request_locks": ("cancel", "it ended otherwise than was asked for before"),
    "calls_learnt": ("cancel", "failed, and an effect survives or is not known"),
    "request_due": ("cancel what waits", "no end can be reached"),
    "nobody_asked": ("cancel, a person is to decide", "put aside, though it was to be cancelled"),
    "only_open": ("decide and cancel", "how a step ended was changed"),
    "decided_alone": ("decide and cancel", "an effect after the end"),
    "decision_recorded": ("decide", "no end can be reached"),
    "left_to_newer": ("a step more", "put aside by an older worker, though a newer one lives"),
    "newest_parks": ("a step more", "no end can be reached"),
}

ENDS = {
    "cancel": {COMPLETED, FAILED, PARKED},
    "cancel and undo": {COMPLETED, FAILED, PARKED},
    "cancel what waits": {FAILED},
    "cancel, a person is to decide": {COMPLETED, FAILED, PARKED},
    "decide": {COMPLETED, FAILED},
    "decide and cancel": {COMPLETED, FAILED},
    "a step more": {COMPLETED, PARKED},
    "a wait more": {COMPLETED, PARKED},
}

# A scenario in which these never happen shows nothing.
TROUBLE = {
    "sleep": {"time passes", "commits pause", "loses the answer to pause", "takes over from itself"},
    "signal": {"sender wakes", "sender commits", "sender crashes", "is fenced at pause", "server drops the lost look"},
    "signal or time-out": {"time passes", "sender is told that it has ended", "commits do", "takes the saga"},
    "two waits, one message": {"sender commits", "time passes"},
    "key used again": {"the record is pruned, and a saga begins"},
    "cancel": {"finds the request", "hears of the request", "canceller is told", "gets the remembered answer"},
    "cancel and undo": {"finds the request", "undoes the call", "commits undo", "commits fail"},
    "cancel what waits": {"commits pause", "canceller commits", "is fenced at pause"},
    "cancel, a person is to decide": {"commits park", "canceller commits", "commits undo_output"},
    "decide": {"somebody answers", "commits park", "fails to undo, for the last time"},
    "decide and cancel": {"somebody answers", "somebody's answer is void", "canceller commits", "commits intend"},
    "a step more": {"leaves for good", "commits release", "commits park"},
    "a wait more": {"leaves for good", "commits release", "sender wakes", "commits pause"},
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_keeps_the_promises_and_can_end(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _explored(name, SCENARIOS[name], capsys)


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_so_does_every_interleaving_of_one_more_fault(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _explored(name, replace(SCENARIOS[name], faults=SCENARIOS[name].faults + 1), capsys)


def _explored(name: str, scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    before = time.monotonic()
    explored = explore(Rules(), scenario)
    with capsys.disabled():
        print(
            f"\n{name}: {explored.states:,} states, {explored.transitions:,} transitions,"
            f" up to {scenario.faults} faults, {time.monotonic() - before:.1f} s"
        )
    assert explored.ends == ENDS.get(name, {COMPLETED})
    assert TROUBLE[name] <= explored.actions, TROUBLE[name] - explored.actions


@pytest.mark.parametrize("rule", BROKEN_WITHOUT)
def test_without_this_rule_a_promise_is_broken(rule: str) -> None:
    name, promise = BROKEN_WITHOUT[rule]
    with pytest.raises(Violation, match=f"^{promise}"):
        explore(replace(Rules(), **{rule: False}), SCENARIOS[name])


def test_each_rule_is_taken_out_once() -> None:
    assert BROKEN_WITHOUT.keys() == {field.name for field in fields(Rules)}
