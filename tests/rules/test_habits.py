"""What is sent ahead is learnt from what handlers do with answers (J26)."""

from __future__ import annotations

from idemconsumer.rules.habits import Habits
from tests.support.inside import texts_known


def test_what_nobody_looked_at_three_times_is_sent_ahead() -> None:
    habits, sent = Habits(), []
    for _ in range(5):
        sent.append(habits.sends("insert"))
        habits.ran("insert")
    assert sent == [False, False, False, True, True]
    assert not habits.sends("update")


def test_what_was_looked_at_once_is_always_waited_for() -> None:
    habits = Habits()
    for _ in range(3):
        habits.ran("insert")
    habits.looked("insert")
    for _ in range(10):
        habits.ran("insert")
    assert not habits.sends("insert")


def test_texts_that_are_made_up_for_each_message_are_not_kept() -> None:
    habits = Habits()
    for number in range(5_000):
        habits.ran(f"insert {number}")
        habits.looked(f"select {number}")
    for _ in range(3):
        habits.ran("insert")
    assert len(texts_known(habits)) == 1_000
    assert not habits.sends("insert")


def test_long_texts_are_not_kept_without_end() -> None:
    habits = Habits()
    for number in range(90):
        habits.ran(f"insert {number} {'x' * 20_000}")
    assert sum(map(len, texts_known(habits))) <= 1_000_000
    for _ in range(3):
        habits.ran("insert")
    assert habits.sends("insert"), "there is room for short ones"


def test_what_failed_is_waited_for_a_hundred_times() -> None:
    habits = Habits()
    for _ in range(3):
        habits.ran("insert")
    habits.failed("insert")
    waited = 0
    while not habits.sends("insert"):
        habits.ran("insert")
        waited += 1
    assert waited == 100


def test_what_was_looked_at_and_failed_is_still_waited_for() -> None:
    habits = Habits()
    habits.looked("insert")
    habits.failed("insert")
    for _ in range(200):
        habits.ran("insert")
    assert not habits.sends("insert")
