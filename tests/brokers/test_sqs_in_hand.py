"""What may be deleted, with which handle, and what is given back."""

from __future__ import annotations

import itertools

import pytest

from idemconsumer.brokers.sqs.received import Received


def holding(*messages: str, group: str | None = None) -> Received:
    held = Received()
    for message in messages:
        held.arrive(message, f"{message}/1", group, 30.0)
    return held


def test_a_standard_message_is_due_when_it_is_finished() -> None:
    held = holding("a", "b")
    assert held.finish(["b"]) == ["b"]
    assert held.finish(["b", "unknown"]) == []
    held.deleted({"b": "b/1"})
    assert held.rest() == ["a"]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_group_is_due_in_its_order_whatever_order_it_is_finished_in(order: tuple[str, ...]) -> None:
    held = holding("a", "b", "c", group="g")
    due = [message for finished in order for message in held.finish([finished])]
    assert due == ["a", "b", "c"]


def test_groups_do_not_wait_for_each_other() -> None:
    held = holding("a", "b", group="g")
    held.arrive("z", "z/1", "h", 30.0)
    assert held.finish(["b", "z"]) == ["z"]


def test_what_is_finished_behind_an_unfinished_one_is_given_back_with_it() -> None:
    held = holding("a", "b", "c", group="g")
    assert held.finish(["a", "c"]) == ["a"]
    held.deleted({"a": "a/1"})
    assert held.give_back(["b"]) == ["b"]
    assert held.rest() == ["b", "c"]


def test_a_second_arrival_brings_the_handle_that_counts() -> None:
    held = holding("a")
    held.arrive("a", "a/2", None, 60.0)
    assert held.finish(["a"]) == ["a"]
    assert held.handles(["a"]) == {"a": "a/2"}
    assert held.deleted({"a": "a/2"}) == []
    assert held.finish(["a"]) == ["a"], "the second arrival deletes once more"
    assert held.deleted({"a": "a/2"}) == []
    assert len(held) == 0


def test_a_message_that_arrived_and_was_finished_while_it_was_deleted_is_deleted_again() -> None:
    held = holding("a")
    held.finish(["a"])
    held.arrive("a", "a/2", None, 60.0)
    assert held.finish(["a"]) == [], "a deletion is under way"
    assert held.deleted({"a": "a/1"}) == ["a"]
    assert held.deleted({"a": "a/2"}) == []
    assert len(held) == 0


def test_giving_back_a_second_arrival_leaves_the_first_alone() -> None:
    held = holding("a")
    held.arrive("a", "a/2", None, 60.0)
    assert held.give_back(["a"]) == []
    assert held.finish(["a"]) == ["a"]


def test_what_lapsed_is_not_extended_until_it_arrives_again() -> None:
    held = holding("a", "b")
    held.extended({"a": "a/1"}, ["a"], 60.0)
    assert held.expiring(before=31.0) == ["b"]
    held.extended({"b": "b/1"}, [], 60.0)
    assert held.expiring(before=31.0) == []
    held.arrive("a", "a/2", None, 30.0)
    assert held.expiring(before=31.0) == ["a"]


@pytest.mark.parametrize("refused", [[], ["a"]])
def test_an_extension_says_nothing_of_a_message_that_arrived_meanwhile(refused: list[str]) -> None:
    held = holding("a")
    held.arrive("a", "a/2", None, 30.0)
    held.extended({"a": "a/1"}, refused, 60.0)
    assert held.expiring(before=31.0) == ["a"]
