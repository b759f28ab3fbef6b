"""Which offset may be committed, without a Kafka."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.brokers.kafka.low_water import Tracker


def tracker(*offsets: int) -> Tracker:
    made = Tracker()
    made.deliver(offsets)
    return made


def test_nothing_is_due_before_anything_is_known() -> None:
    assert Tracker().due(None) is None


def test_the_lowest_unfinished_delivery_holds_the_mark_whatever_finished_behind_it() -> None:
    t = tracker(5, 6, 7)
    assert t.finish(6)
    assert t.finish(7)
    assert t.due(8) == 5
    assert t.finish(5)
    assert t.due(8) == 8


def test_a_hole_between_deliveries_is_stepped_over() -> None:
    t = tracker(0, 2, 4)
    t.finish(0)
    assert t.due(8) == 2
    t.finish(2)
    assert t.due(8) == 4


def test_a_hole_behind_the_last_delivery_leaves_no_lag() -> None:
    t = tracker(0, 2, 4)
    for offset in (0, 2, 4):
        t.finish(offset)
    assert t.due(8) == 8


def test_without_a_position_the_mark_is_just_behind_the_last_delivery() -> None:
    t = tracker(3)
    t.finish(3)
    assert t.due(None) == 4


def test_a_partition_of_nothing_but_holes_is_committed_by_its_position() -> None:
    assert Tracker().due(8) == 8


def test_a_position_never_moves_the_mark_past_an_unfinished_delivery() -> None:
    assert tracker(3, 4).due(100) == 3


def test_what_was_committed_is_not_due_again() -> None:
    t = tracker(1, 2)
    t.finish(1)
    assert t.due(3) == 2
    t.committed(2)
    assert t.due(3) is None
    t.finish(2)
    assert t.due(3) == 3


def test_a_mark_for_something_not_outstanding_is_refused() -> None:
    t = tracker(1)
    assert not t.finish(0)
    assert t.finish(1)
    assert not t.finish(1)


def test_after_the_end_marks_are_refused_and_nothing_is_due() -> None:
    t = tracker(1, 2)
    t.finish(1)
    t.end()
    assert not t.finish(2)
    assert t.due(3) is None
    assert (t.outstanding, t.span) == (0, 0)


def test_deliveries_after_the_end_are_not_counted() -> None:
    t = tracker(1)
    t.end()
    t.deliver([2])
    assert t.outstanding == 0


@pytest.mark.parametrize("offset", [4, 5])
def test_an_offset_that_is_not_above_the_former_ones_is_a_new_reading(offset: int) -> None:
    with pytest.raises(ValueError, match="begin a new tracker"):
        tracker(5).deliver([offset])


def test_the_span_counts_offsets_and_not_deliveries() -> None:
    t = tracker(10, 500, 1_000)
    assert (t.span, t.outstanding) == (991, 3)
    t.finish(500)
    assert (t.span, t.outstanding) == (991, 2)
    t.finish(10)
    assert (t.span, t.outstanding) == (1, 1)


@given(st.sets(st.integers(0, 60), min_size=1), st.randoms(use_true_random=False), st.integers(0, 10))
def test_everything_below_the_mark_is_finished_and_the_mark_itself_is_not(
    offsets: set[int], chance: object, gap: int
) -> None:
    t = Tracker()
    order = sorted(offsets)
    t.deliver(order)
    position = order[-1] + 1 + gap
    waiting = list(order)
    chance.shuffle(waiting)  # type: ignore[attr-defined]
    done: set[int] = set()
    marks = [t.due(position)]
    for offset in waiting:
        assert t.finish(offset)
        done.add(offset)
        unfinished = [each for each in order if each not in done]
        assert t.low_water(position) == (unfinished[0] if unfinished else position)
        assert t.outstanding == len(unfinished)
        marks.append(t.low_water(position))
    assert marks == sorted(mark for mark in marks if mark is not None)
