"""What holds up a handler, in words (O34)."""

from __future__ import annotations

import pytest

from idemconsumer.redaction import without_values
from idemconsumer.rules.held_up import Condition, Failures, HeldUp, Holder, conditions, paused, together

SINCE = "2026-11-26 23:50:01"
LOCKS = Holder(4711, "psql", "ann", "active", "LOCK TABLE orders", SINCE)


@pytest.mark.parametrize(
    ("holder", "text"),
    [
        (LOCKS, f"pid 4711 (psql, ann), running `LOCK TABLE orders`, in a transaction since {SINCE}"),
        (
            Holder(7, "psql", "ann", "idle in transaction", "update orders set n = 1", SINCE),
            f"pid 7 (psql, ann), idle in transaction after `update orders set n = ?`, in a transaction since {SINCE}",
        ),
        (Holder(7, "report"), "pid 7 (report), in a state that this role may not see"),
        (Holder(0), "a prepared transaction, see pg_prepared_xacts"),
    ],
)
def test_who_holds_a_lock(holder: Holder, text: str) -> None:
    assert str(holder) == text


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("select *\n  from orders2 where id = $1", "select * from orders2 where id = $1"),
        ("update a set b = 17, c = 1.5", "update a set b = ?, c = ?"),
        ("update a set card = '4111'", "update a set card =…"),
        ("do $x$ secret $x$", "do…"),
        ("select 1 -- secret", "select ?…"),
        ("select a /* secret */", "select a…"),
    ],
)
def test_no_value_of_a_statement_is_shown(statement: str, shown: str) -> None:
    assert without_values(statement) == shown
    assert len(without_values("x" * 1_000)) < 130


def test_each_cause_is_a_condition_of_its_own() -> None:
    failing = Failures("all messages fail", 12, "ZeroDivisionError at shop.py:7 take", 30.0)
    found = conditions(database=1.0, away={"kafka:b": 2.0, "kafka:a": 3.0}, holder=LOCKS, waits=4.0, failing=failing)
    assert [(each.by, each.seconds) for each in found] == [
        (HeldUp.DATABASE_AWAY, 1.0), (HeldUp.SOURCE_AWAY, 3.0), (HeldUp.LOCKED, 4.0), (HeldUp.FAILS, 30.0),
    ]  # fmt: skip
    assert found[1].text == "kafka:a and kafka:b are unreachable"
    assert found[2].text == f"waits for a lock, held by {LOCKS}; it has waited"
    assert found[3].text == (
        "all messages fail: 12 runs in a row, the last one with ZeroDivisionError at shop.py:7 take; they have failed"
    )
    assert conditions(away={}) == []
    assert paused("ann", "wrong prices", 9.0, 2) == Condition(HeldUp.PAUSED, "paused by ann (wrong prices)", 9.0, 2)


def test_of_several_workers_what_has_lasted_for_longest() -> None:
    short, long = Condition(HeldUp.FAILS, "short", 1.0), Condition(HeldUp.FAILS, "long", 2.0)
    away = Condition(HeldUp.SOURCE_AWAY, "away", 1.5)
    assert together([short, away, long]) == [Condition(HeldUp.FAILS, "long", 2.0, 2), away]
