"""What became of a parent, or of a child, while the other went on (L31, L48)."""

from __future__ import annotations

from typing import Any

import pytest

from idemconsumer import (
    App,
    OutcomeKind,
    Saga,
)
from idemconsumer.admin.orphans import find_orphans
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.message import keys
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from tests.support.families import (
    Family,
    Ride,
    compensate,
    drive,
    nap,
    simple,
    undo_of,
    undone,
)
from tests.support.sagas import SCHEMA, Bench


async def expire(bench: Bench, family: Family) -> None:
    """The parent is put aside: somebody has changed its handler."""
    family.book = drive
    bench.run("update idemconsumer.saga set due = clock_timestamp() where handler = 'book'")
    assert (await family.resume()).kind is OutcomeKind.DEAD


async def test_a_parent_that_was_put_aside_when_its_child_ended_goes_on_with_that(family: Family, bench: Bench) -> None:
    await family.begin(book := simple(family))
    await expire(bench, family)
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    family.book = book
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    await SagaAdmin(bench.dsn, SCHEMA).resume(keys.digest("shop", None, "book", "k"), by="ann")
    assert (await family.resume()).result == b'"with Ann"'


@pytest.mark.parametrize("undo", [True, False])
async def test_a_child_ends_whatever_became_of_its_abandoned_parent(family: Family, bench: Bench, undo: bool) -> None:
    await family.begin(book := simple(family))
    await expire(bench, family)
    family.book = book
    await SagaAdmin(bench.dsn, SCHEMA).abandon(keys.digest("shop", None, "book", "k"), undo=undo, by="ann")
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    if undo:
        assert (await family.resume()).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.COMPLETED}
    assert bench.effects == ["noted", "driven", "undo:noted:out:noted"][: 3 if undo else 2]


@pytest.mark.parametrize("moved", ["book", "ride"])
async def test_a_parent_and_its_child_find_each_other_after_a_move(family: Family, bench: Bench, moved: str) -> None:
    """Of the parent while it waits, or of the child while it runs: to a handler of another app."""
    family.ride = nap
    await family.begin(simple(family, "r"))
    assert (await family.deliver()).kind is OutcomeKind.BUSY
    other = Family(bench, family.station)
    other.app = App("fleet")
    handler = other.app.idempotent_handler("memory:moved", key="id", name="moved", backoff="1ms, 1ms")(
        simple(family, "r") if moved == "book" else nap
    )
    assert await SagaAdmin(bench.dsn, SCHEMA).move(("shop", moved), ("fleet", "moved"), by="ann") == (1, 0)
    other.bound = {handler.name: other.app.bound_handlers(Settings(dsn=bench.dsn))[0]}
    bench.script(
        "begin; update idemconsumer.saga set due = clock_timestamp() where signals is null;"
        "select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.step set until = clock_timestamp() where name = 'nap';"
        "select idemconsumer.seal('t'); commit"
    )
    if moved == "ride":
        assert (await other.resume("moved")).kind is OutcomeKind.APPLIED
        assert (await family.resume()).result == b'"with Ann"'
    else:
        assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
        assert (await other.resume("moved")).result == b'"with Ann"'
    assert bench.effects == ["noted", "driven", "billed Ann"]


async def test_a_child_that_was_moved_is_cancelled_with_its_parent(family: Family, bench: Bench) -> None:
    """Its stored key is that of its former handler, which the code no longer names."""
    family.ride = nap

    @family.app.idempotent_handler("memory:moved", key="id", name="moved", backoff="1ms, 1ms")
    async def moved(payload: dict[str, Any], saga: Saga) -> Ride:
        return await nap(payload, saga)

    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()
    await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "ride"), ("shop", "moved"), by="ann")
    family.handler = moved
    family.bound = {each.name: each for each in family.app.bound_handlers(Settings(dsn=bench.dsn))}
    assert (await undo_of(family, bench)).kind is OutcomeKind.BUSY
    assert (await family.resume("moved")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


@pytest.mark.parametrize("key", [None, "r"])
async def test_children_that_nobody_begins_are_told(family: Family, bench: Bench, key: str | None) -> None:
    await family.begin(simple(family, key))
    bench.run("update idemconsumer.worker set runs = '[]'")
    await family.app.start(family.handler, {"to": "hills"}, key="begun from code, by nobody who waits")
    assert await find_orphans(bench.dsn, SCHEMA, "shop", {("shop", "book"): None, ("shop", "ride"): None}) == []
    (found,) = await find_orphans(bench.dsn, SCHEMA, "shop", {("shop", "book"): None})
    assert (found.waiting.handler, found.waiting.sagas, found.waiting.begun) == ("ride", 1, False)
    await family.deliver()
    assert await find_orphans(bench.dsn, SCHEMA, "shop", {("shop", "book"): None}) == []
