"""K21: whether what is fetched is of the log that was read."""

from __future__ import annotations

import struct

import pytest

from idemconsumer.brokers.kafka.batches import leaders_of
from idemconsumer.brokers.kafka.low_water import Leaders
from idemconsumer.brokers.kafka.start import PartitionLog, PartitionStart, start_at


def batch(base: int, leader: int, magic: int = 2, more: int = 60) -> bytes:
    return struct.pack(">qiib", base, 5 + more, leader, magic) + bytes(more)


def test_whose_epoch_what_was_fetched_is_of() -> None:
    data = batch(10, 3) + batch(12, 3) + batch(13, 5)
    assert list(leaders_of(data)) == [(10, 3), (13, 5)]
    assert list(leaders_of(data[:-30])) == [(10, 3), (13, 5)]  # the last batch comes in part
    assert list(leaders_of(data[: -5 - 60])) == [(10, 3)]
    assert list(leaders_of(batch(1, 1234, magic=1))) == []  # an old format has a checksum there
    assert list(leaders_of(b"")) == []


def test_the_same_leader_goes_on() -> None:
    leaders = Leaders(3)
    assert leaders.follow(10, [(8, 3)])
    assert leaders.follow(20, [(20, 3), (25, 4)])
    assert [leaders.of(position) for position in (10, 20, 25, 26)] == [3, 3, 3, 4]
    assert leaders.follow(30, [(30, 4)])


def test_another_leader_has_to_be_proven() -> None:
    leaders = Leaders(3)
    assert not leaders.follow(10, [(10, 4)])
    assert leaders.of(11) == 3
    leaders.proven(10)
    assert leaders.follow(10, [(10, 4)])
    assert not leaders.follow(12, [(12, 5)])
    assert leaders.of(12) == 4


def test_what_was_dropped_and_is_fetched_again_counts_for_nothing() -> None:
    leaders = Leaders(3)
    assert leaders.follow(10, [(10, 3), (15, 4)])
    assert not leaders.follow(12, [(12, 5)])  # from another leader, before 15 was reached
    assert leaders.of(12) == 3


def test_what_is_kept_grows_with_the_leaders_and_not_with_what_is_fetched() -> None:
    leaders = Leaders()
    for position in range(0, 1_000, 10):
        assert leaders.follow(position, [(position, 3)])
    assert leaders.follow(1_000, [(1_000, 3), (1_005, 4), (1_006, 5)])
    assert (len(leaders), leaders.of(995), leaders.of(1_006)) == (4, 3, 4)
    leaders.finished(1_006)
    assert (len(leaders), leaders.of(1_006), leaders.of(1_007)) == (2, 4, 5)


def test_below_what_is_finished_nothing_is_known() -> None:
    leaders = Leaders(3)
    assert leaders.follow(10, [(10, 3), (15, 4)])
    leaders.finished(20)
    assert leaders.follow(12, [(12, 3)])  # the reader was set back
    assert (leaders.of(12), leaders.of(13)) == (None, 3)


def test_nobody_is_doubted_where_nothing_was_read() -> None:
    assert Leaders().follow(10, [(10, 4)])


@pytest.mark.parametrize(
    ("shared", "start"),
    [
        (None, PartitionStart(15)),
        (15, PartitionStart(15)),
        (99, PartitionStart(15)),
        (12, PartitionStart(12, beyond=3)),
        (-1, PartitionStart(10, beyond=5)),  # the log knows only older leaders
    ],
)
def test_a_reader_begins_where_the_log_is_another_one(shared: int | None, start: PartitionStart) -> None:
    assert start_at(15, PartitionLog(10, 20, shared), latest=True) == start
