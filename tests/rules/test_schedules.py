"""Slots of schedules, and which of them are started (L53)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemconsumer.errors import ConfigurationError
from idemconsumer.rules.schedules import MOST_AT_ONCE, CatchUp, Schedule, checked_schedule, due


def schedule(expression: str = "0 * * * *", timezone: str = "UTC", catch_up: CatchUp = "last") -> Schedule:
    return Schedule("s", expression, timezone, catch_up, "h")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def first(count: int, schedule: Schedule, after: str) -> list[str]:
    return [f"{slot:%d %H:%M}" for slot in islice(schedule.slots(at(after)), count)]


@pytest.mark.parametrize(
    ("expression", "after", "slots"),
    [
        ("30 2 * * *", "2026-03-28 12:00", ["29 01:00", "30 00:30"]),  # 02:30 is left out: right after the gap
        ("30 2 * * *", "2026-10-24 12:00", ["25 00:30", "26 01:30"]),  # 02:30 comes twice: the first of them
        ("30 2 * * *", "2026-10-25 00:30", ["26 01:30"]),
        ("*/30 * * * *", "2026-10-25 00:00", ["25 00:30", "25 01:00", "25 01:30", "25 02:00"]),
        ("0 3 * * *", "2026-11-21 12:00", ["22 02:00", "23 02:00"]),
        ("30 2 * * *", "2026-10-25 01:15", ["26 01:30"]),  # asked within the second of these hours
        ("30 2 * * *", "2026-10-25 01:30", ["26 01:30"]),
        ("0 */2 * * *", "2026-10-24 23:00", ["25 00:00", "25 03:00"]),  # as 0 0,2,4,… would
        ("0 */2 * * *", "2026-03-29 00:00", ["29 01:00", "29 02:00"]),
        ("*/30 2 * * *", "2026-10-24 12:00", ["25 00:00", "25 00:30", "26 01:00"]),
        ("* 2 * * *", "2026-10-25 00:58", ["25 00:59", "26 01:00"]),
        ("*/20 */1 * * *", "2026-10-25 00:30", ["25 00:40", "25 01:00", "25 01:20"]),
    ],
)
def test_slots_are_those_of_the_time_zone_through_clock_changes(expression: str, after: str, slots: list[str]) -> None:
    assert first(len(slots), schedule(expression, "Europe/Berlin"), after) == slots


@given(st.sampled_from(["30 2 * * *", "0 */2 * * *", "*/20 * * * *", "5 1-3 * * *"]), st.integers(0, 60 * 24 * 400))
def test_a_slot_is_never_before_what_it_was_asked_for(expression: str, minutes: int) -> None:
    """Else it would be started at each look, for an hour."""
    after = at("2026-01-01 00:00") + timedelta(minutes=minutes)
    found = list(islice(schedule(expression, "Europe/Berlin").slots(after), 3))
    assert after < found[0] < found[1] < found[2]


@pytest.mark.parametrize(
    ("catch_up", "now", "started"),
    [
        ("last", "2026-11-22 05:59", []),
        ("last", "2026-11-22 06:00", ["06:00"]),
        ("last", "2026-11-22 09:30", ["09:00"]),
        ("all", "2026-11-22 09:30", ["06:00", "07:00", "08:00", "09:00"]),
        ("skip", "2026-11-22 09:30", []),
        ("skip", "2026-11-22 09:00:59", ["09:00"]),
        ("skip", "2026-11-22 06:00", ["06:00"]),
    ],
)
def test_what_is_caught_up_with(catch_up: CatchUp, now: str, started: list[str]) -> None:
    slots, dealt_with = due(schedule(catch_up=catch_up), at("2026-11-22 05:00"), at(now))
    assert [f"{slot:%H:%M}" for slot in slots] == started
    assert dealt_with == at(now)


@pytest.mark.parametrize("away", [timedelta(hours=5), timedelta(days=20), timedelta(days=300), timedelta(days=3000)])
def test_the_last_slot_is_found_however_long_nobody_looked(away: timedelta) -> None:
    now = at("2026-11-22 09:30")
    slots, _ = due(schedule("0 0 29 2 *"), now - timedelta(days=3000), now)
    assert slots == [at("2024-02-29 00:00")]
    slots, _ = due(schedule(), now - away, now)
    assert slots == [at("2026-11-22 09:00")]


def test_many_missed_slots_are_started_some_at_a_time_and_none_twice() -> None:
    last, now, started = at("2026-11-12 09:30"), at("2026-11-22 09:30"), list[datetime]()
    while last < now:
        slots, last = due(schedule(catch_up="all"), last, now)
        assert len(slots) <= MOST_AT_ONCE
        started += slots
    assert (len(started), len(set(started))) == (240, 240)


def test_a_clock_that_was_set_back_starts_nothing_again() -> None:
    last = at("2026-11-22 09:30")
    assert due(schedule(catch_up="all"), last, last - timedelta(hours=5)) == ([], last)


def test_the_key_is_the_same_wherever_the_slot_is_seen_from() -> None:
    berlin = next(schedule("0 3 * * *", "Europe/Berlin").slots(at("2026-11-21 12:00")))
    assert schedule().key(berlin) == "s@2026-11-22T02:00Z" == schedule().key(at("2026-11-22 02:00"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"expression": "0 3 * *"}, "does not have five fields"),
        ({"expression": "0 3 * * * *"}, "does not have five fields"),
        ({"expression": "61 3 * * *"}, "Bad minute"),
        ({"expression": "0 0 30 2 *"}, "'0 0 30 2"),
        ({"timezone": "Europe/Atlantis"}, "no time zone 'Europe/Atlantis'"),
        ({"timezone": "../etc"}, "no time zone"),
        ({"catch_up": "some"}, 'write "all", "last" or "skip"'),
        ({"name": ""}, "a printable text"),
    ],
)
def test_what_can_never_be_is_refused(given: dict[str, Any], says: str) -> None:
    sound = {"name": "s", "expression": "0 3 * * *", "timezone": "UTC", "catch_up": "last", "handler": "h"}
    with pytest.raises(ConfigurationError, match=says):
        checked_schedule(Schedule(**{**sound, **given}))
