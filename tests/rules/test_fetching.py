"""How much a worker takes from a broker: little ahead, never nothing for ever, never above the bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.rules.fetching import (
    ASSUMED,
    allowance,
    at_once,
    expected_size,
    in_lanes,
    may_hold,
    may_take,
    next_prefetch,
    per_lane,
)

MESSAGES = st.integers(1, 100_000)
BYTES = st.integers(0, 2**31)
SIZES = st.floats(0, 2.0**28)


def test_a_slow_handler_has_one_message_in_front_and_a_fast_one_three_groups() -> None:
    assert per_lane(1, 1.0) == 2
    assert per_lane(1, 600.0) == 2
    assert per_lane(1, 0.1) == 1 + 2
    assert per_lane(128, 0.0004) == 4 * 128
    assert per_lane(1, None) == 2
    assert per_lane(64, 1.0) == 64 + 1


@given(st.integers(1, 1_000), st.integers(0, 3_000))
def test_of_slow_messages_a_source_takes_at_once_what_its_lanes_run(lanes: int, held: int) -> None:
    wanted = lanes * per_lane(1, 1.0)
    assert at_once(max(0, wanted - held), held) == max(0, lanes - held)


def test_what_full_lanes_hold_is_made_up_for_within_limits() -> None:
    assert in_lanes(16, 0) == 16
    assert in_lanes(16, 10) == 26
    assert in_lanes(16, 10_000) == 4 * 16


def test_the_largest_message_of_late_is_expected_and_slowly_forgotten() -> None:
    assert expected_size(None, ()) == ASSUMED
    assert expected_size(None, (100,)) == 100
    assert expected_size(100, (2_000_000, 100, 100)) > 1_990_000
    assert expected_size(2_000_000, [100] * 40_000) < 101


@given(MESSAGES, BYTES, SIZES)
def test_there_is_always_room_for_one(messages: int, allowed: int, size: float) -> None:
    assert may_hold(messages, allowed, size) >= 1
    assert may_take(messages, 0, allowed, 0, size) >= 1


@given(MESSAGES, st.integers(1, 1_000), BYTES, BYTES, st.integers(1, 2**28))
def test_what_is_taken_stays_within_both_bounds(
    messages: int, held: int, allowed: int, held_bytes: int, size: int
) -> None:
    taken = may_take(messages, held, allowed, held_bytes, size)
    assert taken >= 0
    assert taken == 0 or (held + taken <= messages and held_bytes + taken * size <= allowed)
    one_too_large = may_hold(messages, allowed, size) == 1
    assert one_too_large or may_hold(messages, allowed, size) * size <= allowed


@given(st.integers(1, 2**31), st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=200), st.data())
def test_all_sources_together_stay_below_the_bound_and_one_that_begins_finds_room(
    bound: int, turns: list[tuple[int, bool]], data: st.DataObject
) -> None:
    held = [0] * 8
    for source, finished in turns:
        others = sum(held) - held[source]
        if finished:
            held[source] = data.draw(st.integers(0, held[source]))
        else:
            held[source] = max(held[source], allowance(bound, others))
        assert sum(held) <= bound
    idle = [source for source in range(8) if held[source] == 0]
    if idle and bound >= 2**9:
        assert allowance(bound, sum(held)) > 0


@given(MESSAGES, MESSAGES, MESSAGES)
def test_a_prefetch_settles_and_is_never_above_what_memory_allows(now: int, wanted: int, most: int) -> None:
    wanted = min(wanted, most)
    changed = next_prefetch(now, wanted, most)
    assert 1 <= changed <= most
    assert next_prefetch(changed, wanted, most) == changed
    assert wanted / 2 <= changed <= 2 * wanted


def test_a_prefetch_follows_only_what_is_worth_a_change() -> None:
    assert [next_prefetch(100, wanted, 1_000) for wanted in (40, 60, 140, 160)] == [40, 100, 100, 160]
    assert next_prefetch(100, 90, 90) == 90
