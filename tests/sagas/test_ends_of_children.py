"""How a child ended is told to its parent once (L48)."""

from __future__ import annotations

import json
from typing import Any

from idemconsumer import (
    OutcomeKind,
    Reject,
    Saga,
    SignalTimeout,
)
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.rules.values import State
from idemconsumer.worker.retention import prune_once
from tests.support.families import (
    RIDE,
    Family,
    refuse,
    simple,
)
from tests.support.sagas import SCHEMA, Bench


async def test_a_rejected_child_rejects_its_parent_and_stays_so(family: Family, bench: Bench) -> None:
    caught: list[Reject] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child)
        except Reject as refused:
            caught.append(refused)
        if len(caught) == 1:
            raise ValueError("once more")
        raise caught[-1]

    family.ride = refuse
    await family.begin(book)
    assert (await family.deliver()).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.RETRYING
    bench.run("delete from idemconsumer.child")  # nothing but the parent's own record is asked
    ended = await family.resume()
    assert [(each.code, each.body) for each in caught] == [("no_driver", {"at": 7})] * 2
    assert (ended.kind, ended.result) == (OutcomeKind.FAILED, b'{"code":"no_driver","body":{"at":7}}')


async def test_a_child_that_was_pruned_before_its_parent_looked(family: Family, bench: Bench) -> None:
    await family.begin(simple(family))
    await family.deliver()
    bench.script(
        "begin; select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.record set changed_at = changed_at - interval '100 d' where state = 3;"
        "select idemconsumer.seal('t'); commit"
    )
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert family.states() == {"book": State.PROCESSING}
    assert (await family.resume()).result == b'"with Ann"'
    bench.script(
        "begin; select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.record set changed_at = changed_at - interval '100 d';"
        "select idemconsumer.seal('t'); commit"
    )
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert bench.run("select 1 from idemconsumer.child") == []


async def test_a_parent_waits_while_its_child_waits_for_a_person(family: Family, bench: Bench) -> None:
    async def broken(payload: dict[str, Any], saga: Saga) -> None:
        raise ValueError("never")

    family.ride = broken
    await family.begin(simple(family))
    assert (await family.deliver()).kind is OutcomeKind.RETRYING
    assert (await family.resume("ride")).kind is OutcomeKind.DEAD
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    admin = SagaAdmin(bench.dsn, SCHEMA)
    (parent,) = await admin.sagas(handler="book")
    ((child,),) = bench.run("select key from idemconsumer.saga where handler = 'ride'")
    assert parent.waits == [f"child {child.hex()[:12]}"]
    detail = await admin.look_up(bytes.fromhex(parent.key))
    assert detail is not None
    assert any(event.what == f"step ride_done waits for child {child.hex()[:12]}" for event in detail.timeline)
    await admin.abandon(child, undo=False, by="ann")
    assert b'"code":"abandoned"' in ((await family.resume()).result or b"")


async def test_a_child_that_takes_too_long(family: Family, bench: Bench) -> None:
    caught: list[Reject] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child, timeout=0)
        except SignalTimeout as late:
            caught.append(late)
        await saga.sleep("nap", "3d")

    assert (await family.begin(book)).kind is OutcomeKind.BUSY
    await family.deliver()
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert len(caught) == 2


async def test_a_child_that_was_late_itself_is_no_time_out_of_its_parent(family: Family) -> None:
    async def late(payload: dict[str, Any], saga: Saga) -> None:
        await saga.wait("paid", timeout=0)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child)
        except SignalTimeout:
            return "its own"
        except Reject as refused:
            return refused.code
        return ""

    family.ride = late
    await family.begin(book)
    assert (await family.deliver()).kind is OutcomeKind.FAILED
    assert (await family.resume()).result == b'"signal_timeout"'


async def test_a_key_that_has_begun_with_another_payload_is_refused(family: Family, bench: Bench) -> None:
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.deliver()
    ended = await family.begin(simple(family, "r"))
    assert ended.kind is OutcomeKind.FAILED
    assert json.loads(ended.result or b"") == {"code": "conflict", "body": {"child": RIDE.hex()}}
    assert (family.queued, bench.effects) == (0, ["driven", "noted", "undo:noted:out:noted"])


async def test_one_parent_gives_a_key_one_payload(family: Family) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("one", family.handler, {"to": "sea"}, key="r")
        await saga.start("same", family.handler, {"to": "sea"}, key="r")
        await saga.start("other", family.handler, {"to": "hills"}, key="r")

    ended = await family.begin(book)
    assert json.loads(ended.result or b"")["code"] == "conflict"


async def test_a_key_that_begins_with_another_payload_is_no_result(family: Family, bench: Bench) -> None:
    """Both were queued when neither had begun."""
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.begin(simple(family, "r"))
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.deliver()).kind is OutcomeKind.CONFLICT
    ended = await family.resume()
    assert json.loads(ended.result or b"") == {"code": "conflict", "body": {"child": RIDE.hex()}}


async def test_what_has_begun_with_the_same_payload_is_the_child(family: Family) -> None:
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    await family.deliver()
    assert (await family.begin(simple(family, "r"))).result == b'"with Ann"'
    assert (await family.deliver()).kind is OutcomeKind.DUPLICATE
