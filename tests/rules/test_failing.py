"""When a handler counts as failing: never because of single messages, and always until something succeeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.rules.breaker import FREE, IN_A_ROW, MOST, NEXT, HandlerHealth

ENDS = st.lists(st.sampled_from(["success", "first failure", "failure again"]), max_size=60)


def after(*ends: str, now: float = 0.0) -> HandlerHealth:
    health = HandlerHealth()
    for end in ends:
        health = health.succeeded() if end == "success" else health.failed(now, first=end == "first failure")
    return health


@given(ENDS)
def test_it_is_probed_exactly_if_so_many_messages_failed_since_the_last_success(ends: list[str]) -> None:
    last = len(ends) - ends[::-1].index("success") if "success" in ends else 0
    assert after(*ends).probing == (ends[last:].count("first failure") >= after(*ends[:last]).needed)


@given(st.lists(st.integers(0, IN_A_ROW - 1), max_size=20))
def test_poison_among_good_messages_never_slows_it_down(runs: list[int]) -> None:
    """However often each of them is tried again."""
    ends: list[str] = []
    for poison in runs:
        ends += ["first failure"] * poison + ["failure again"] * 4 * poison + ["success"]
        assert not after(*ends[:-1]).probing


@given(st.integers(0, 30))
def test_a_success_ends_it_at_once(more: int) -> None:
    health = after(*["first failure"] * (IN_A_ROW + more), "success")
    assert not health.probing
    assert health == after(*["first failure"] * IN_A_ROW, "success"), "how long it took tells nothing"
    assert health.needed == IN_A_ROW + 1


def test_five_in_a_row_are_needed_at_first_and_again_once_it_works() -> None:
    assert HandlerHealth().needed == IN_A_ROW
    stream = after(*(["first failure"] * 20 + ["success"]) * 50)
    assert stream.needed == MOST
    assert after_successes(stream, 40).needed == IN_A_ROW


def test_a_stream_of_bad_ones_is_soon_no_sign() -> None:
    """Of nineteen in twenty."""
    health, opened = HandlerHealth(), 0
    for _ in range(200):
        for _ in range(19):
            before, health = health, health.failed(0.0, first=True)
            opened += health.probing and not before.probing
        health = health.succeeded()
    assert opened <= 5


@given(st.floats(0.0, 0.99))
def test_as_many_are_needed_as_come_in_a_row_once_in_three_thousand(bad: float) -> None:
    needed = HandlerHealth(bad=bad).needed
    assert IN_A_ROW <= needed <= MOST
    assert needed == MOST or bad**needed <= 1 / 3000 + 1e-9
    assert needed == IN_A_ROW or bad ** (needed - 1) > 1 / 3000 - 1e-9


def after_successes(health: HandlerHealth, number: int) -> HandlerHealth:
    for _ in range(number):
        health = health.succeeded()
    return health


@pytest.mark.parametrize(("seconds", "free"), [(0.0, True), (FREE - 1, True), (FREE, False)])
def test_failures_are_free_for_a_day(seconds: float, free: bool) -> None:
    failing = after(*["first failure"] * IN_A_ROW)
    assert failing.is_free(seconds) is free
    assert failing.failed(seconds, first=True).probing, "one at a time even then"


def test_nothing_is_free_before() -> None:
    assert not after(*["first failure"] * (IN_A_ROW - 1)).is_free(0.0)


def test_the_next_one_is_tried_soon() -> None:
    health, now = after(*["first failure"] * IN_A_ROW), 0.0
    for first in (True, True, False, False, True):
        assert health.next_run - now == pytest.approx(NEXT)
        now = health.next_run
        health = health.failed(now, first=first)
