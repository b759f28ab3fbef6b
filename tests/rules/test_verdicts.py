"""The rules of one message, without a database, a clock or chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.backoff import backoff
from idemconsumer.rules.values import Mark, Outcome, OutcomeKind, Record, State
from idemconsumer.rules.verdicts import (
    Failure,
    Settlement,
    Verdict,
    after_failure,
    judge,
    settle,
)
from tests.support import ROOT
from tests.support.transitions import TRANSITIONS, diagram

FINAL = (State.COMPLETED, State.FAILED, State.DEAD)


# ---- transitions
def test_nothing_leaves_a_final_state() -> None:
    assert not [start for start, _ in TRANSITIONS if start in FINAL]


def test_every_state_can_be_reached_and_ends_in_a_final_one() -> None:
    reached: set[State | None] = {None}
    while new := {after for (start, _), after in TRANSITIONS.items() if start in reached} - reached:
        reached |= new
    assert reached == {None, *State}
    ending = set(FINAL)
    while new_ending := {s for (s, _), after in TRANSITIONS.items() if after in ending and s is not None} - ending:
        ending |= new_ending
    assert ending == set(State)


def test_numbers_of_states_are_stored_and_never_change() -> None:
    assert {state.name: state.value for state in State} == {
        "PENDING": 0,
        "PROCESSING": 1,
        "UNDOING": 2,
        "COMPLETED": 3,
        "FAILED": 4,
        "DEAD": 5,
    }


def test_the_docs_hold_the_diagram_and_it_shows_every_arrow() -> None:
    docs = ROOT / "docs" / "protocol.md"
    assert f"```mermaid\n{diagram()}\n```" in docs.read_text("utf-8")
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert "    [*] --> PROCESSING: claim" in lines
    assert "    PROCESSING --> COMPLETED: complete" in lines
    assert len(lines) == 1 + len(TRANSITIONS) + len(FINAL)


# ---- verdicts
@pytest.mark.parametrize(
    ("stored", "arrived", "same"),
    [
        ((b"bytes", b"value"), (b"bytes", b"value"), True),
        ((b"bytes", b"value"), (b"other bytes", b"value"), True),
        ((b"bytes", b"value"), (b"other bytes", b"other value"), False),
        ((b"bytes", None), (b"bytes", b"value"), True),  # the handler compared bytes alone
        ((b"bytes", None), (b"other bytes", b"value"), False),
        ((b"bytes", b"value"), (b"bytes", None), True),  # the handler compares bytes by now
        ((b"bytes", b"value"), (b"other bytes", None), False),
        ((b"bytes", None), (b"other bytes", None), False),
        ((None, None), (b"bytes", b"value"), True),
        ((b"bytes", b"value"), (None, None), True),
    ],
)
@pytest.mark.parametrize("state", State)
def test_a_payload_is_the_same_by_its_bytes_or_else_by_its_value(
    stored: tuple[bytes | None, bytes | None], arrived: tuple[bytes | None, bytes | None], same: bool, state: State
) -> None:
    record = Record(state, stored[0], None, stored[1])
    assert (judge(record, *arrived) is not Verdict.CONFLICT) is same


def test_what_is_claimed_runs_and_what_a_rival_holds_is_busy() -> None:
    assert judge(Mark.CLAIMED, b"f") is Verdict.RUN
    assert judge(Mark.BUSY, b"f") is Verdict.BUSY


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (State.PENDING, Verdict.DUPLICATE),
        (State.PROCESSING, Verdict.BUSY),
        (State.UNDOING, Verdict.BUSY),
        (State.COMPLETED, Verdict.DUPLICATE),
        (State.FAILED, Verdict.DUPLICATE),
        (State.DEAD, Verdict.DEAD),
    ],
)
def test_a_record_is_judged_by_its_state_and_before_that_by_its_fingerprint(state: State, verdict: Verdict) -> None:
    assert judge(Record(state, b"same"), b"same") is verdict
    assert judge(Record(state, b"same", StoredResult(b"1")), b"same") is verdict
    assert judge(Record(state, b"one"), b"another") is Verdict.CONFLICT


def test_the_message_that_a_pending_record_waits_for_is_no_duplicate_of_itself() -> None:
    assert judge(Record(State.PENDING, b"same"), b"same", pending=True) is Verdict.BUSY  # a rival has it in its hands
    assert judge(Record(State.COMPLETED, b"same"), b"same", pending=True) is Verdict.DUPLICATE


@pytest.mark.parametrize(("stored", "arrived"), [(None, b"f"), (b"f", None), (None, None)])
def test_without_two_fingerprints_there_is_no_conflict(stored: bytes | None, arrived: bytes | None) -> None:
    assert judge(Record(State.COMPLETED, stored), arrived) is Verdict.DUPLICATE


# ---- settlement
@pytest.mark.parametrize("kind", OutcomeKind)
def test_only_what_is_committed_is_finished_with_the_broker(kind: OutcomeKind) -> None:
    finished = {"applied", "duplicate", "conflict", "failed", "dead"}
    assert (settle(Outcome(kind)) is Settlement.FINISH) == (kind in finished)


def test_what_is_not_finished_is_held_or_forgotten() -> None:
    assert {
        str(kind): settle(Outcome(kind)) for kind in OutcomeKind if settle(Outcome(kind)) is not Settlement.FINISH
    } == {
        "busy": Settlement.WAITING_ROOM,
        "retrying": Settlement.HOLD,
        "fenced": Settlement.HOLD,
        "unknown": Settlement.HOLD,
        "cancelled": Settlement.DROP,
        "absent": Settlement.DROP,
    }


# ---- failures
@pytest.mark.parametrize(
    ("attempts", "most", "expected"),
    [
        (1, 5, Failure.RETRY),
        (4, 5, Failure.RETRY),
        (5, 5, Failure.DEAD),
        (6, 5, Failure.DEAD),
        (1, 1, Failure.DEAD),
    ],
)
def test_a_failure_is_retried_while_attempts_are_left(attempts: int, most: int, expected: Failure) -> None:
    assert after_failure(attempts=attempts, max_attempts=most) is expected


def test_backoff_doubles_up_to_its_cap_and_jitter_only_shortens_it() -> None:
    pauses = [backoff(n, first=0.5, factor=2, cap=5, jitter=0) for n in range(1, 7)]
    assert pauses == [0.5, 1, 2, 4, 5, 5]
    assert backoff(1, first=1, factor=2, cap=5, jitter=0.999) > 0.75


@given(st.integers(1, 10**9), st.floats(0.001, 60), st.floats(1.01, 10), st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded_for_any_attempt(attempt: int, first: float, factor: float, jitter: float) -> None:
    pause = backoff(attempt, first=first, factor=factor, cap=60, jitter=jitter)
    assert 0 < first * 0.75 <= pause <= 60
