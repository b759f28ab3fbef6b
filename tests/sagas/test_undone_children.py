"""A start is undone by how its child ended (L49)."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import (
    Cancellation,
    OutcomeKind,
    StoreUnavailable,
)
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.errors import Fenced
from idemconsumer.rules.values import State, StepKind
from tests.support.families import (
    CLAIM_LOCK,
    RIDE,
    Family,
    compensate,
    nap,
    refuse,
    simple,
    undo_of,
    undone,
)
from tests.support.sagas import SCHEMA, Bench
from tests.support.waiting import until


async def test_a_child_that_still_runs_is_cancelled_and_waited_for(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(undone(family, undo=compensate))
    await family.deliver()
    waits = await undo_of(family, bench)
    assert (waits.kind, waits.state) == (OutcomeKind.BUSY, State.UNDOING)
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    (parent,) = await SagaAdmin(bench.dsn, SCHEMA).sagas(handler="book")
    assert [each.split()[0] for each in parent.waits] == ["child"]
    assert bench.effects == ["noted", "driven"]
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]
    assert family.states() == {"book": State.FAILED, "ride": State.FAILED}


async def test_a_cancelled_child_that_ends_before_its_parent_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, undo=compensate))
    await family.deliver()

    async def meanwhile(*given: Any) -> float:
        assert (await family.resume("ride")).kind is OutcomeKind.FAILED
        return await pause(*given)

    family.station.leases.pause_undo = meanwhile  # type: ignore[assignment, method-assign]
    assert (await undo_of(family, bench)).due <= 0
    assert (await family.resume()).kind is OutcomeKind.FAILED


async def test_an_end_that_is_being_committed_while_an_undo_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, key="r", undo=compensate))
    await family.deliver()

    async def beside(*given: Any) -> float:
        async with family.ending(RIDE) as rival:
            pausing = asyncio.create_task(pause(*given))
            await until(lambda: bench.waiting() == 1, "the parent waits for who ends the child")
            await rival.commit()
            return await pausing

    family.station.leases.pause_undo = beside  # type: ignore[assignment, method-assign]
    assert (await undo_of(family, bench)).due <= 0
    assert (await family.resume()).kind is OutcomeKind.FAILED


async def test_an_undo_waits_for_a_claim_of_its_childs_key(family: Family, bench: Bench) -> None:
    """Else it would take a child that is beginning for one that has not."""
    family.ride = nap
    await family.begin(undone(family, key="r", undo=compensate))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(CLAIM_LOCK, (RIDE,))
        undoing = asyncio.create_task(undo_of(family, bench))
        await until(lambda: bench.waiting() == 1, "the undo waits")
        await rival.commit()
    assert (await undoing).kind is OutcomeKind.FAILED
    assert (await family.deliver()).kind is OutcomeKind.DUPLICATE


async def test_a_worker_that_is_lost_behind_the_request_leaves_an_undo_that_goes_on(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, undo=compensate))
    await family.deliver()

    async def lost(*given: Any) -> float:
        raise StoreUnavailable("the server is away")

    family.station.leases.pause_undo = lost  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailable):
        await undo_of(family, bench)
    family.station.leases.pause_undo = pause  # type: ignore[method-assign]
    bench.expire(family.station)
    family.station.register(bench)
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


async def test_a_child_that_completes_before_the_request_is_compensated_for(
    family: Family, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.ride, cancel = nap, SagaAdmin.cancel
    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()

    async def late(*given: Any, **more: Any) -> Cancellation:
        async with family.ending(RIDE) as rival:
            await rival.commit()
        return await cancel(*given, **more)

    monkeypatch.setattr(SagaAdmin, "cancel", late)
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "compensated sea", "undo:noted:out:noted"]


async def test_for_a_child_that_has_completed_the_undo_compensates(family: Family, bench: Bench) -> None:
    await family.begin(undone(family, undo=compensate))
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "compensated sea", "undo:noted:out:noted"]
    assert family.states() == {"book": State.FAILED, "ride": State.COMPLETED}


async def test_for_a_child_that_has_failed_nothing_is_undone(family: Family, bench: Bench) -> None:
    family.ride = refuse
    await family.begin(undone(family, undo=compensate))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "undo:noted:out:noted"]


async def test_a_child_that_has_not_begun_never_does(family: Family, bench: Bench) -> None:
    await family.begin(undone(family, undo=compensate))
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    late = await family.deliver()
    assert (late.kind, late.result) == (OutcomeKind.DUPLICATE, b'{"code":"cancelled","body":null}')
    assert (family.rides, bench.effects) == ([], ["noted", "undo:noted:out:noted"])


async def test_what_runs_under_its_key_with_another_payload_is_left_alone(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.begin(undone(family, key="r", undo=compensate))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.PROCESSING}
    assert bench.run("select cancel from idemconsumer.saga") == [(None,)]


async def test_a_child_without_an_undo_goes_on_alone(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(undone(family))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.PROCESSING}


async def test_a_parent_that_is_cancelled_while_it_waits_takes_its_child_with_it(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(simple(family, undo=compensate))
    await family.deliver()
    parent = family.app.handlers["book"]
    assert (await family.app.cancel(parent, key="k", undo=True)).accepted
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).result == b'{"code":"cancelled","body":null}'
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


async def test_nothing_of_a_child_is_decided_under_an_old_token(family: Family, bench: Bench) -> None:
    await family.begin(simple(family, "r"))
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    held, leases = await family.station.take(family.bound["book"]), family.station.leases
    assert held is not None
    former = replace(held, token=held.token - 1)
    for begun in (
        leases.wait(former, "ride_done", StepKind.WAIT, 1.0, "child:", child=RIDE, overlapped=False),
        leases.stop_child(former, RIDE, "shop/-/ride", ("~shop/ride", "r")),
        leases.pause_undo(former, RIDE),
    ):
        with pytest.raises(Fenced):
            await begun
    assert bench.run("select worker from idemconsumer.saga") == [(held.worker,)]
    assert family.states() == {"book": State.PROCESSING}
