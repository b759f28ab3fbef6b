"""Who began a child, and what others who started it may do to it (L80)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from idemconsumer import Message, Outcome, OutcomeKind, Reject, Saga
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.message import keys
from idemconsumer.rules.values import State
from tests.support.families import RIDE, Body, Family, compensate, drive, nap
from tests.support.sagas import SCHEMA, Bench, Station, order

ANN, BOB = keys.digest("shop", None, "book", "ann"), keys.digest("shop", None, "book", "bob")
SEA = {"to": "sea", "id": "r"}


def books(family: Family, to: str = "sea", **more: Any) -> Body:
    """Each parent starts the same child, and is told when it is to fail."""

    async def book(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, SEA | {"to": to}, key="r", undo=compensate, **more)
        await saga.wait("fail")
        await saga.result("done", child)
        raise Reject("no")

    return book


async def start(family: Family, who: str, body: Body | None = None, station: Station | None = None) -> Outcome:
    family.book = body or books(family)
    return await (station or family.station).deliver(family.bound["book"], order(who))


async def fail(family: Family, who: str) -> Outcome:
    """Its parent is rejected, once it has looked at the child's end, or cancelled before that."""
    parent = family.app.handlers["book"]
    if family.states().get("ride") in (State.COMPLETED, State.FAILED):
        await family.app.signal(parent, key=who, name="fail")
    else:
        assert (await family.app.cancel(parent, key=who, undo=True)).accepted
    return await family.resume()


def begun_by(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.run("select parent from idemconsumer.saga where handler = 'ride'")


async def test_what_ended_long_ago_is_not_undone_by_who_joined_it(family: Family, bench: Bench) -> None:
    """An undo ran for a child that code had started and that had ended before the parent began."""
    await family.app.start(family.handler, SEA, key="r")
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    await start(family, "ann")
    assert (await fail(family, "ann")).kind is OutcomeKind.FAILED
    assert bench.effects == ["driven"]


async def test_only_who_began_a_completed_child_undoes_it(family: Family, bench: Bench) -> None:
    await start(family, "ann")
    await start(family, "bob")
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await fail(family, "bob")).kind is OutcomeKind.FAILED
    assert bench.effects == ["driven"]
    assert (await fail(family, "ann")).kind is OutcomeKind.FAILED
    assert bench.effects == ["driven", "compensated sea"]


async def test_only_who_began_a_child_that_runs_cancels_it(family: Family, bench: Bench, two: Station) -> None:
    family.ride = nap
    await start(family, "ann")
    await start(family, "bob", station=two)
    await family.deliver()
    assert begun_by(bench) == [(ANN,)]
    assert (await fail(family, "bob")).kind is OutcomeKind.FAILED
    assert bench.run("select cancel from idemconsumer.saga where handler = 'ride'") == [(None,)]
    assert (await fail(family, "ann")).kind is OutcomeKind.BUSY
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["driven", "undo:driven:out:driven"]


@pytest.mark.parametrize("first", ["ann", "bob"])
async def test_of_two_who_wait_for_a_child_to_begin_the_first_decides(family: Family, bench: Bench, first: str) -> None:
    await start(family, "ann")
    await start(family, "bob")
    assert (await fail(family, first)).kind is OutcomeKind.FAILED
    assert (await family.deliver()).kind is (OutcomeKind.DUPLICATE if first == "ann" else OutcomeKind.APPLIED)
    assert bench.effects == ([] if first == "ann" else ["driven"])


async def test_who_was_not_the_first_ends_no_child_whose_message_is_on_its_way(family: Family, bench: Bench) -> None:
    """Somebody has moved the messages to another queue."""
    await start(family, "ann")
    await start(family, "bob")
    bench.run("update idemconsumer.queue set name = 'elsewhere'")
    assert (await fail(family, "bob")).kind is OutcomeKind.FAILED
    assert "ride" not in family.states()


async def test_a_child_is_the_firsts_whoevers_message_begins_it(family: Family, bench: Bench) -> None:
    family.ride = nap
    await start(family, "ann")
    await start(family, "bob")
    bench.run("delete from idemconsumer.queue where id = (select min(id) from idemconsumer.queue)")
    await family.deliver()
    assert begun_by(bench) == [(ANN,)]


@pytest.mark.parametrize("begun", ["no", "by code", "by the parent"])
async def test_what_code_has_started_too_is_cancelled_only_if_the_parent_began_it(
    family: Family, bench: Bench, begun: str
) -> None:
    family.ride = nap
    if begun != "by the parent":
        await family.app.start(family.handler, SEA, key="r")
    await start(family, "ann")
    if begun == "by the parent":
        await family.app.start(family.handler, SEA, key="r")
    if begun != "no":
        await family.deliver()
    outcome = await fail(family, "ann")
    if begun == "by the parent":
        assert outcome.kind is OutcomeKind.BUSY
        return
    assert outcome.kind is OutcomeKind.FAILED
    if begun == "no":
        assert (await family.deliver()).kind is OutcomeKind.BUSY
    assert family.states() == {"book": State.FAILED, "ride": State.PROCESSING}
    assert bench.run("select cancel from idemconsumer.saga where handler = 'ride'") == [(None,)]


async def by_broker(family: Family) -> Outcome:
    headers = {"idemconsumer-parent": ANN.hex()}  # nor does it begin a child for whom its sender likes
    began = Message("memory:rides", json.dumps(SEA).encode(), headers, position="1")
    return await family.station.deliver(family.bound["ride"], began)


async def test_what_a_message_of_a_broker_began_first_is_not_cancelled(family: Family, bench: Bench) -> None:
    family.ride = nap
    await start(family, "ann")
    await by_broker(family)
    assert begun_by(bench) == [(None,)]
    assert (await family.deliver()).kind is not OutcomeKind.APPLIED
    assert (await fail(family, "ann")).kind is OutcomeKind.FAILED
    assert family.states()["ride"] is State.PROCESSING
    assert bench.run("select cancel from idemconsumer.saga where handler = 'ride'") == [(None,)]


async def test_what_a_message_of_a_broker_began_first_is_not_undone_when_it_has_ended(
    family: Family, bench: Bench
) -> None:
    await start(family, "ann")
    assert (await by_broker(family)).kind is OutcomeKind.APPLIED
    assert (await fail(family, "ann")).kind is OutcomeKind.FAILED
    assert bench.effects == ["driven"]


@pytest.mark.parametrize("there", ["another's start", "code's message", "runs", "ended", "its own"])
async def test_what_is_there_already_may_be_refused(family: Family, bench: Bench, there: str) -> None:
    refusing = books(family, on_existing="reject")

    async def twice(order: dict[str, Any], saga: Saga) -> None:
        for name in ("one", "two"):
            await saga.start(name, family.handler, SEA, key="r", on_existing="reject")

    if there == "another's start":
        await start(family, "ann")
    elif there != "its own":
        family.ride = nap if there == "runs" else drive
        await family.app.start(family.handler, SEA, key="r")
        if there != "code's message":
            await family.deliver()
    refused = await start(family, "bob", twice if there == "its own" else refusing)
    assert refused.kind is OutcomeKind.FAILED
    assert json.loads(refused.result or b"") == {"code": "already_exists", "body": {"child": RIDE.hex()}}
    assert bench.run("select 1 from idemconsumer.child where parent = %s and not began", (BOB,)) == []


async def test_what_is_new_is_not_refused(family: Family, bench: Bench) -> None:
    await family.app.start(family.handler, SEA, key="another")
    assert (await start(family, "ann", books(family, on_existing="reject"))).kind is OutcomeKind.BUSY
    assert family.queued == 2


async def test_what_another_started_with_another_payload_is_a_conflict_before_it_begins(family: Family) -> None:
    await start(family, "ann")
    refused = await start(family, "bob", books(family, "hills"))
    assert json.loads(refused.result or b"")["code"] == "conflict"
    assert family.queued == 1


async def test_another_word_for_what_is_to_be_done_is_refused(family: Family, bench: Bench) -> None:
    await start(family, "ann", books(family, on_existing="ignore"))
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "step 'ride': on_existing is 'ignore'; write \"join\" or \"reject\"" in error


@pytest.mark.parametrize("ended", [False, True])
async def test_a_saga_says_who_began_it(family: Family, bench: Bench, ended: bool) -> None:
    family.ride = drive if ended else nap
    await start(family, "ann")
    await family.deliver()
    await start(family, "bob")
    admin = SagaAdmin(bench.dsn, SCHEMA)
    assert (await admin.saga(RIDE)).parent == ANN.hex()
    assert (await admin.saga(ANN)).parent is None
