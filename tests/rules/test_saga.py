"""What an attempt of a saga begins with, and what a failed one leads to."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer.errors import (
    BrokerUnavailable,
    Contention,
    Reject,
    Retry,
    SelfCancelled,
    StoreUnavailable,
    UnknownEffect,
)
from idemconsumer.rules.saga import (
    ANY_VERSION,
    LastResort,
    Start,
    after_last_attempt,
    attempts_of_step,
    attempts_of_undo,
    may_try_again,
    out_of_group,
    refusal,
    start,
    to_undo,
)
from idemconsumer.rules.values import State, StepKind, StepRow, StepState


class Declined(Exception):
    """An error that handlers of these tests name in fail_on."""


def begin(**changes: Any) -> Start:
    usual: dict[str, Any] = {
        "stale": False, "phase": State.PROCESSING, "reconciles": False, "suspect": False,
        "attempt": 1, "max_attempts": 3, "begun_with": "1", "version": "1",
    }  # fmt: skip
    return start(**(usual | changes))


def row(
    name: str = "s", state: StepState = StepState.DONE, *, position: int | None = 1, has_undo: bool = True
) -> StepRow:
    return StepRow(name, StepKind.CALL, state, has_undo, False, position, 1, None)


# ---- what an attempt begins with
def test_a_saga_runs_when_nothing_speaks_against_it() -> None:
    assert begin() is Start.RUN


@pytest.mark.parametrize(("attempt", "expected"), [(3, Start.RUN), (4, Start.KILLED_WORKER)])
def test_a_saga_that_ended_worker_after_worker_runs_no_more(attempt: int, expected: Start) -> None:
    assert begin(suspect=True, attempt=attempt) is expected


def test_attempts_that_a_step_of_its_own_allowed_end_no_saga_at_its_start() -> None:
    assert begin(suspect=False, attempt=4) is Start.RUN


def test_a_handler_of_another_version_is_not_run() -> None:
    assert begin(begun_with="1", version="2") is Start.OTHER_VERSION
    assert begin(begun_with=None, version="2") is Start.OTHER_VERSION
    assert begin(begun_with="1", version=None) is Start.OTHER_VERSION


def test_a_person_can_let_it_go_on_with_any_version() -> None:
    assert begin(begun_with=ANY_VERSION, version="2") is Start.RUN


def test_a_handler_that_reconciles_is_asked_first_and_only_about_a_lost_worker() -> None:
    assert begin(stale=True, reconciles=True) is Start.RECONCILE
    assert begin(stale=False, reconciles=True) is Start.RUN


def test_an_undoing_saga_is_not_asked_about_since_its_end_is_decided() -> None:
    assert begin(stale=True, reconciles=True, phase=State.UNDOING) is Start.RUN


def test_a_handler_of_another_version_is_not_asked_either() -> None:
    assert begin(stale=True, reconciles=True, begun_with="1", version="2") is Start.OTHER_VERSION
    assert begin(stale=True, reconciles=True, suspect=True, attempt=4) is Start.KILLED_WORKER


# ---- another attempt
@pytest.mark.parametrize(("attempt", "expected"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_failed_attempt_is_followed_by_another_while_some_are_left(attempt: int, expected: bool) -> None:
    assert may_try_again(attempt=attempt, max_attempts=3) is expected


def test_an_attempt_that_finished_a_step_was_the_first_one_of_what_failed_then() -> None:
    assert may_try_again(attempt=3, max_attempts=3, progressed=True)
    assert not may_try_again(attempt=1, max_attempts=1, progressed=True)


# ---- after the last one
def test_after_the_last_attempt_finished_steps_are_undone() -> None:
    assert after_last_attempt([row("a"), row("b", has_undo=False)]) is LastResort.UNDO


def test_a_step_that_has_an_undo_by_now_is_undone() -> None:
    later = row("a", has_undo=False)
    assert after_last_attempt([later], ["a"]) is LastResort.UNDO
    assert to_undo([later, row("b", StepState.REJECTED, has_undo=False)], ["a", "b"]) == [later]


@pytest.mark.parametrize(
    "rows", [[], [row(has_undo=False)], [row(state=StepState.REJECTED)]], ids=["no step", "no undo", "refused"]
)
def test_with_nothing_to_undo_the_saga_is_put_aside(rows: list[StepRow]) -> None:
    assert after_last_attempt(rows) is LastResort.EXHAUSTED


def test_nothing_is_undone_while_a_call_has_no_known_outcome() -> None:
    open_call = row("b", StepState.INTENT, position=None)
    assert after_last_attempt([row("a"), open_call]) is LastResort.UNKNOWN_EFFECT


# ---- the order of undoing
def test_the_step_that_finished_last_is_undone_first() -> None:
    rows = [row("b", position=2), row("a", position=1), row("c", position=3)]
    assert [step.name for step in to_undo(rows)] == ["c", "b", "a"]


def test_what_has_an_undo_and_is_not_undone_yet_is_undone() -> None:
    rows = [
        row("done"),
        row("begun", StepState.UNDO_INTENT, position=2),
        row("undone", StepState.UNDONE, position=3),
        row("refused", StepState.REJECTED, position=4),
        row("no undo", has_undo=False, position=5),
    ]
    assert [step.name for step in to_undo(rows)] == ["begun", "done"]


# ---- refusals
def test_a_reject_is_a_refusal_as_it_is() -> None:
    error = Reject("sold_out", {"seat": 7})
    assert refusal(error, ()) is error


def test_an_error_of_fail_on_is_refused_by_its_name_and_what_it_says() -> None:
    error = Declined("card 4711")
    refused = refusal(error, (Declined,))
    assert refused is not None
    assert (refused.code, refused.body, refused.__cause__) == ("Declined", "card 4711", error)


def test_another_error_is_no_refusal() -> None:
    assert refusal(ValueError(), (Declined,)) is None
    assert refusal(ValueError(), ()) is None


@pytest.mark.parametrize(
    "error", [StoreUnavailable(), BrokerUnavailable(), Contention(""), UnknownEffect(), SelfCancelled()]
)
def test_what_tells_nothing_of_the_step_is_never_a_refusal(error: Exception) -> None:
    assert refusal(error, (Exception,)) is None


def test_a_group_of_refusals_alone_is_its_first_one() -> None:
    first = Reject("first")
    inner = ExceptionGroup("inner", [first, Declined()])
    assert out_of_group(ExceptionGroup("outer", [inner, Reject("other")]), (Declined,)) is first


def test_a_group_with_another_error_in_it_stays_that_group() -> None:
    group = ExceptionGroup("outer", [Reject("first"), ExceptionGroup("inner", [ValueError()])])
    assert out_of_group(group, ()) is group


def test_a_retry_is_no_refusal_whatever_fail_on_names() -> None:
    group = ExceptionGroup("outer", [Declined(), again := Retry()])
    assert refusal(again, (Exception,)) is None
    assert refusal(group, (Exception,)) is None
    assert out_of_group(group, (Exception,)) is again


def test_an_error_of_its_own_stays_as_it_is() -> None:
    error = ValueError()
    assert out_of_group(error, ()) is error


# ---- a step's own limits
@pytest.mark.parametrize(("own", "step", "undo"), [(None, 3, 3), (1, 1, 3), (3, 3, 3), (9, 9, 9)])
def test_a_step_has_its_own_attempts_and_its_undo_never_fewer_than_the_handlers(
    own: int | None, step: int, undo: int
) -> None:
    assert (attempts_of_step(own, 3), attempts_of_undo(own, 3)) == (step, undo)
