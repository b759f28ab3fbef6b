"""When what repeats itself is said (O10)."""

from __future__ import annotations

from idemconsumer.rules.repeats import QUIET, Repeats, came


def test_the_first_is_said_and_the_others_are_counted_until_they_are_due() -> None:
    first = came(None, 100.0)
    assert (first.unsaid, first.due) == (0, None)
    third = came(came(first, 101.0), 109.0)
    assert (third.unsaid, third.due) == (2, 110.0)
    told = third.told(110.0)
    assert (told.unsaid, told.due) == (0, None)
    assert came(told, 111.0).due == 130.0


def test_lines_about_what_goes_on_grow_rarer_up_to_five_minutes() -> None:
    kind, now, pauses = came(None, 0.0), 0.0, list[float]()
    for _ in range(8):
        kind = came(kind, now)
        assert kind.due is not None
        pauses.append(kind.due - now)
        now = kind.due
        kind = kind.told(now)
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_after_a_quiet_time_it_is_a_first_one_again() -> None:
    kind = came(came(None, 0.0), 5.0).told(10.0)
    assert came(kind, 5.0 + QUIET - 1).unsaid == 1
    assert came(kind, 5.0 + QUIET) == Repeats(5.0 + QUIET, 5.0 + QUIET)


def test_what_is_not_said_yet_is_not_forgotten_for_a_first_one() -> None:
    unsaid = came(came(None, 0.0), 5.0)
    assert came(unsaid, 5.0 + 2 * QUIET).unsaid == 2
