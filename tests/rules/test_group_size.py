"""The size of a group and the gate, as numbers: no server, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.rules.group_size import GroupSize

FAST = 0.0001  # seconds a message


def adaptive(cap: int = 128) -> GroupSize:
    return GroupSize.start(None, lanes=1, most_locks=cap)


def fixed(asked: int) -> GroupSize:
    return GroupSize.start(asked, lanes=1, most_locks=10_000)


def clean(size: GroupSize, groups: int, *, each: float = FAST, now: float = 0.0, messages: int = 1) -> GroupSize:
    for _ in range(groups):
        size = size.clean_group(messages, messages * each, now)
    return size


# ---- time
def test_nothing_is_grouped_before_the_first_time_is_known() -> None:
    assert adaptive().size == 1
    assert clean(adaptive(), 1).size == 32


def test_a_group_of_duplicates_alone_tells_no_time() -> None:
    assert adaptive().clean_group(0, 0.0, 0.0).size == 1


def test_a_few_messages_among_many_duplicates_do_not_bear_the_time_of_the_whole_group() -> None:
    """Of 128 messages one was new, and COMMIT took 5 ms longer than it may; then all of them are slow."""
    size = clean(adaptive(), 1_000)
    for _ in range(8):
        assert size.size == 128
        size = size.clean_group(1, 0.005, 0.0, 127)
    for _ in range(8):
        size = size.clean_group(1, 1.0, 0.0, size.size - 1)
    assert size.size == 1


def test_more_is_read_after_duplicates_in_a_row_and_no_more_claimed() -> None:
    size = adaptive()
    for _ in range(10):
        size = size.repeated(10)
    assert (size.size, size.to_claim, size.reads_first) == (50, 1, True)
    assert (size.repeated(0).size, size.repeated(0).reads_first) == (1, False)
    assert not adaptive().repeated(31).reads_first
    assert adaptive().repeated(10_000).size == 128
    assert fixed(4).repeated(10_000).size == 4


@pytest.mark.parametrize(
    ("each", "size"), [(0.0, 32), (0.001, 32), (0.01, 5), (0.025, 2), (0.0251, 1), (30.0, 1)], ids=str
)
def test_the_handlers_of_one_group_take_fifty_milliseconds_together(each: float, size: int) -> None:
    assert clean(adaptive(), 1, each=each).size == size


def test_a_handler_that_becomes_slow_runs_in_small_groups_at_once_and_alone_soon() -> None:
    size = clean(adaptive(), 1_000)
    assert size.size == 128
    size = clean(size, 1, each=0.1, messages=128)
    assert size.size <= 4
    assert clean(size, 4, each=0.1).size == 1


def test_a_single_wait_is_forgotten_within_ten_groups() -> None:
    size = clean(clean(adaptive(), 100), 1, each=1.0)
    assert size.size == 1
    assert clean(size, 10).size >= 32


# ---- growing, and what shrinks
def test_a_group_begins_with_32_and_doubles_after_64_clean_ones() -> None:
    sizes = [size.size for size in (clean(adaptive(), n) for n in (1, 63, 64, 127, 128, 1_000))]
    assert sizes == [32, 32, 64, 64, 128, 128]


def test_a_lost_transaction_halves_what_was_possible_and_eight_clean_groups_double_it() -> None:
    size = clean(adaptive(), 1, each=0.005)
    assert size.size == 10
    size = size.lost()
    assert size.size == 5
    assert clean(size, 7, each=0.005).size == 5
    assert clean(size, 8, each=0.005).size == 10
    assert size.lost().lost().lost().lost().size == 1


def test_a_size_that_was_asked_for_is_the_first_and_the_most_and_knows_no_time() -> None:
    assert fixed(100).size == 100
    assert clean(fixed(100), 1_000, each=1.0).size == 100


def test_a_failure_halves_a_size_that_was_asked_for_and_eight_clean_groups_double_it() -> None:
    size = fixed(32).failed().failed()
    assert size.size == 8
    assert clean(size, 7).size == 8
    assert clean(clean(size, 7).failed(), 7).size == 4, "a failure starts the count of clean groups anew"
    assert (clean(size, 8).size, clean(size, 16).size) == (16, 32)


@pytest.mark.parametrize("size", [fixed(64), clean(adaptive(64), 1_000)], ids=["fixed", "adaptive"])
def test_running_out_of_locks_lowers_what_a_group_may_hold_until_it_was_enough_for_a_while(size: GroupSize) -> None:
    short = size.out_of_locks(10.0).out_of_locks(20.0)
    assert short.size == 16
    assert clean(short, 1_000, now=79.0).size == 16, "it may be as full as before"
    assert clean(short, 63, now=80.0).size == 16
    doubled = clean(clean(short, 63, now=79.0), 1, now=80.0)
    assert doubled.cap == 32
    assert clean(doubled, 1_000, now=139.0).size == 32, "not all at once"
    assert clean(doubled, 1_000, now=140.0).size == 64
    assert clean(clean(doubled, 1_000, now=140.0), 1_000, now=999.0).cap == 64, "what it began with"


def test_a_lock_table_that_is_full_again_is_believed_anew() -> None:
    short = clean(fixed(64).out_of_locks(0.0), 63, now=60.0).out_of_locks(60.0)
    assert clean(short, 63, now=120.0).cap == 16
    assert clean(short, 1_000, now=119.0).cap == 16


@pytest.mark.parametrize(
    ("asked", "lanes", "locks", "cap"),
    [(32, 8, 640, 32), (None, 1, 10_000, 128), (None, 8, 640, 80), (128, 1_000, 640, 1), (1, 0, 0, 1), (None, 0, 0, 1)],
)
def test_all_lanes_together_stay_within_their_share_of_the_locks(
    asked: int | None, lanes: int, locks: int, cap: int
) -> None:
    assert GroupSize.start(asked, lanes=lanes, most_locks=locks).cap == cap


# ---- failures
def cost(n: int, failing: float, transaction: float) -> float:
    """What a message costs, in handlers: a failed group costs half a transaction, what it ran, and a rerun."""
    good = 1 - failing
    spent, decided = good**n * (transaction + n), n * good**n
    for index in range(n):
        chance = good**index * failing
        rerun = transaction + index if index else 0.0
        spent += chance * (transaction / 2 + index + 1 + rerun + transaction)
        decided += chance * (index + 1)
    return spent / decided


@pytest.mark.parametrize("transaction", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("failing", [0.0005, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8])
def test_the_size_follows_the_share_of_failures_within_a_tenth_of_the_least_cost(
    failing: float, transaction: float
) -> None:
    size = GroupSize(128, True, 128, 128, failing=failing, seconds=FAST).size
    assert cost(size, failing, transaction) <= 1.1 * min(cost(n, failing, transaction) for n in range(1, 129))


@pytest.mark.parametrize(("every", "low", "high"), [(1, 3, 4), (10, 8, 13), (100, 24, 42), (1_000, 70, 128)])
def test_the_share_of_failures_is_learned_from_what_happens(every: int, low: int, high: int) -> None:
    size = clean(adaptive(), 1_000)
    for _ in range(max(20, 2_000 // every)):
        size = clean(size.failed(), 1, messages=every - 1)
    assert low <= size.size <= high


def test_a_single_failure_costs_little_and_is_soon_forgotten() -> None:
    size = clean(adaptive(), 1_000).failed()
    assert size.size == 35
    assert clean(size, 10, messages=35).size == 128


# ---- collisions
def test_a_large_group_that_collides_becomes_one_of_32_and_takes_no_turns() -> None:
    size = clean(adaptive(), 1_000).collided(10.0)
    assert (size.size, size.gated(10.0)) == (32, False)
    assert clean(size, 63).size == 32
    assert clean(size, 64).size == 64


def test_a_group_of_32_that_collides_takes_turns_for_two_seconds_at_its_full_size() -> None:
    size = clean(adaptive(), 1).collided(10.0)
    assert size.size == 32
    assert [size.gated(now) for now in (10.0, 11.9, 12.1)] == [True, True, False]
    assert clean(size, 200, now=11.0).size == 128, "groups that take turns grow like others"


def test_collisions_of_one_moment_count_once() -> None:
    size = clean(adaptive(), 1_000).collided(10.0).collided(10.1).collided(10.19)
    assert (size.size, size.gated(10.19)) == (32, False)
    assert size.collided(10.21).gated(10.21)


def test_turns_last_twice_as_long_each_time_up_to_a_minute() -> None:
    size, now, lasted = clean(adaptive(), 1), 10.0, []
    for _ in range(7):
        size = size.collided(now)
        lasted.append(size.gate.until - now)
        now = size.gate.until + 0.01
        size = clean(size, 63, now=now)  # not enough to believe that it is over
    assert lasted == pytest.approx([2, 4, 8, 16, 32, 60, 60])


def test_after_64_clean_groups_without_turns_a_collision_is_the_first_one_again() -> None:
    once = clean(adaptive(), 1).collided(10.0)
    assert clean(once, 200, now=11.0).gate == once.gate, "groups that take turns show nothing"
    again = clean(once, 64, now=20.0).collided(30.0)
    assert again.level == 32
    assert again.collided(31.0).gate.until == 33.0


def test_a_group_that_has_just_taken_turns_takes_them_again_however_large_it_is() -> None:
    size = clean(clean(adaptive(), 1).collided(10.0), 200, now=11.0)
    assert size.size == 128
    assert size.collided(20.0).gate.until == 24.0


def test_a_collision_with_somebody_who_takes_no_turns_changes_nothing() -> None:
    size = clean(adaptive(), 1).collided(10.0)
    after = size.collided(11.0)
    assert (after.size, after.gate) == (size.size, size.gate)


def test_a_slow_handler_never_takes_turns_nor_does_one_whose_groups_are_of_one() -> None:
    assert not clean(adaptive(), 1, each=1.0).collided(10.0).gated(10.0)
    assert not fixed(1).collided(10.0).gated(10.0)
    assert fixed(2).collided(10.0).gated(10.0)


# ---- whatever happens
@given(
    st.one_of(st.none(), st.integers(1, 128)),
    st.integers(1, 128),
    st.lists(st.tuples(st.sampled_from(["failed", "clean", "slow", "lost", "locks", "collided"]), st.floats(0, 9))),
)
def test_a_group_stays_between_one_and_its_cap(asked: int | None, locks: int, history: list[tuple[str, float]]) -> None:
    size, now = GroupSize.start(asked, lanes=1, most_locks=locks), 0.0
    most = size.cap
    for event, passed in history:
        now += passed
        match event:
            case "failed":
                size = size.failed()
            case "lost":
                size = size.lost()
            case "locks":
                size = size.out_of_locks(now)
            case "collided":
                size = size.collided(now)
            case _:
                size = size.clean_group(size.size, size.size * (FAST if event == "clean" else 1.0), now)
        assert 1 <= size.size <= size.level <= size.cap <= most
        assert 0 <= size.failing <= 1
        assert size.gate.until <= now + 60
