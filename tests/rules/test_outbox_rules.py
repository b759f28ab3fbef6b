"""Which outgoing messages are sent together, and when one that was refused is tried again."""

from __future__ import annotations

from idemconsumer.rules.outbox import TRIES, holdable, next_look, next_try, together, waves


def test_a_refused_message_is_tried_for_about_a_minute_and_then_parked() -> None:
    pauses = [next_try(tries) for tries in range(1, TRIES + 1)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, None]


def test_what_is_held_fits_its_index() -> None:
    assert holdable("kafka:b", None)
    assert holdable("kafka:b", "\u00e9" * 1_296)
    assert not holdable("kafka:b", "\u00e9" * 1_297)


def test_a_destination_that_is_away_is_left_alone_for_longer_each_time() -> None:
    assert [next_look(failures, 0.0) for failures in (1, 2, 3, 50)] == [0.25, 0.5, 1.0, 30.0]


def test_a_wave_has_one_of_an_order_at_most_and_keeps_their_sequence() -> None:
    assert waves(["a", None, "b", "a", None, "a"]) == [[0, 1, 2, 4], [3], [5]]
    assert waves([]) == []


def test_what_was_refused_goes_alone_and_what_is_behind_it_waits() -> None:
    assert together(["a", "b", None], [0, 0, 0]) == [[0, 1, 2]]
    # Of `a` the first one goes out, the refused one alone, and the last one later.
    assert together(["a", "a", "b", "a"], [0, 2, 0, 0]) == [[0, 2], [1]]
    assert together([None, None], [1, 1]) == [[0], [1]]
    assert together(["a", "a"], [1, 1]) == [[0]]
