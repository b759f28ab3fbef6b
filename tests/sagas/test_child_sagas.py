"""Sagas that start others, and wait for their ends (L47)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import psycopg
import pytest

from idemconsumer import (
    Message,
    OutcomeKind,
    Saga,
)
from idemconsumer.app.saga_calls import AppStarter
from idemconsumer.message import keys
from idemconsumer.rules.values import State
from idemconsumer.settings import Settings
from tests.support.families import (
    CLAIM_LOCK,
    RIDE,
    Family,
    Ride,
    nap,
    simple,
)
from tests.support.inside import sagas_in_hand
from tests.support.sagas import Bench, locked, order, put, take_back
from tests.support.waiting import until


# ------------------------------------------------------------------------------------------------- start and end (L47)
async def test_a_parent_is_in_no_process_until_its_child_has_ended(family: Family, bench: Bench) -> None:
    waits = await family.begin(simple(family))
    assert (waits.kind, waits.state, family.queued) == (OutcomeKind.BUSY, State.PROCESSING, 1)
    assert bench.run("select worker from idemconsumer.saga") == [(None,)]
    assert not sagas_in_hand(family.station.engine)
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.station.leases.look("shop", ["book"])).due["book"] <= 0
    assert (await family.resume()).result == b'"with Ann"'
    assert (bench.effects, family.rides) == (["noted", "driven", "billed Ann"], [{"to": "sea"}])


async def test_workers_run_a_parent_and_its_child(family: Family, bench: Bench) -> None:
    family.book, parent = simple(family), family.app.handlers["book"]
    await family.app.start(parent, {"id": "t"}, key="t")
    worker = family.app.worker(Settings(dsn=bench.dsn, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        outcome = await family.app.result(parent, key="t", wait="25s")
    finally:
        worker.drain()
        await running
    assert (outcome.state, outcome.result) == (State.COMPLETED, b'"with Ann"')
    assert bench.effects == ["noted", "driven", "billed Ann"]


async def test_a_child_begins_with_the_step_that_starts_it_and_once(
    family: Family, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, fails = AppStarter.start, [ValueError("after it"), ValueError("after it")]

    async def failing(*given: Any, **more: Any) -> None:
        await start(*given, **more)
        if fails:
            raise fails.pop()

    monkeypatch.setattr(AppStarter, "start", failing)
    assert (await family.begin(simple(family))).kind is OutcomeKind.RETRYING
    assert (family.queued, bench.run("select 1 from idemconsumer.child")) == (0, [])
    assert (await family.resume()).kind is OutcomeKind.RETRYING
    assert (await family.resume()).kind is OutcomeKind.BUSY
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert family.queued == 1


async def test_a_child_that_ends_before_its_parent_gives_itself_up_is_not_missed(family: Family) -> None:
    """The parent has looked, and found that the child runs; it ends, and finds nobody who waits."""
    pause = family.station.leases.pause

    async def meanwhile(*given: Any) -> float:
        assert (await family.deliver()).kind is OutcomeKind.APPLIED
        return await pause(*given)

    family.station.leases.pause = meanwhile  # type: ignore[assignment, method-assign]
    assert (await family.begin(simple(family))).due <= 0
    family.station.leases.pause = pause  # type: ignore[method-assign]
    assert (await family.resume()).result == b'"with Ann"'


async def test_an_end_that_is_being_committed_while_the_parent_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    pause, family.ride = family.station.leases.pause, nap
    gave_up = asyncio.Event()

    async def beside(*given: Any) -> float:
        assert (await family.deliver()).kind is OutcomeKind.BUSY
        async with family.ending(RIDE) as rival:
            pausing = asyncio.create_task(pause(*given))
            gave_up.set()
            await until(lambda: bench.waiting() == 1, "the parent waits for who ends the child")
            await rival.commit()
            return await pausing

    def once(*given: Any) -> Awaitable[float]:
        return pause(*given) if gave_up.is_set() or given[0].handler == "ride" else beside(*given)

    family.station.leases.pause = once  # type: ignore[assignment, method-assign]
    assert (await family.begin(simple(family, "r"))).due <= 0
    assert (await family.resume()).result == b'"with Ann"'


async def test_who_ends_a_child_waits_for_a_parent_that_gives_itself_up(family: Family, bench: Bench) -> None:
    """The other way round: the parent waits as soon as the child's end looks for it."""
    family.ride = nap
    await family.begin(simple(family, "r"))
    await family.deliver()
    ((parent,),) = bench.run("select key from idemconsumer.saga where handler = 'book'")
    bench.run("update idemconsumer.saga set signals = null where handler = 'book'")
    lock = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea from 9 for 8), 'hex'))::bit(64)::bigint)"

    async def end() -> None:
        async with family.ending(RIDE) as rival:
            await rival.commit()

    async with await psycopg.AsyncConnection.connect(bench.dsn) as worker:
        await worker.execute(lock, (parent,))
        ends = asyncio.create_task(end())
        await until(lambda: bench.waiting() == 1, "who ends the child waits")
        await worker.execute(
            "update idemconsumer.saga set signals = array['child:' || encode(%s, 'hex')] where key = %s",
            (RIDE, parent),
        )
        await worker.commit()
    await ends
    assert (await family.resume()).result == b'"with Ann"'


async def test_ends_of_one_commit_are_told_to_all_their_parents(family: Family, bench: Bench) -> None:
    """As of workers that end many sagas in one statement; a child may have several parents."""
    family.ride, family.book = nap, simple(family, "r")
    for key in ("k1", "k2"):
        await family.station.deliver(family.bound["book"], order(key))
    family.book = simple(family, "s")
    await family.station.deliver(family.bound["book"], order("k3"))
    while family.queued:
        await family.deliver()
    other = keys.digest("shop", None, "ride", "s")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute("select set_config('idemconsumer.open', 't', true)")
        await rival.execute("update idemconsumer.record set state = 4 where key = any(%s)", ([RIDE, other],))
        await rival.execute("delete from idemconsumer.saga where key = any(%s)", ([RIDE, other],))
        await rival.execute("select idemconsumer.seal('t')")
    due = "select count(*) from idemconsumer.saga where handler = 'book' and due <= clock_timestamp()"
    assert bench.run(due) == [(3,)]
    assert bench.run("select count(*) from idemconsumer.child where ended and state = 4") == [(3,)]


async def test_parents_are_told_in_the_order_of_their_keys(family: Family, bench: Bench) -> None:
    """So that two who end several children do not wait for each other."""
    family.ride, family.book = nap, simple(family, "r")
    high, low = sorted(("k1", "k2"), key=lambda key: keys.digest("shop", None, "book", key), reverse=True)
    for key in (high, low):
        await family.station.deliver(family.bound["book"], order(key))
    await family.deliver()
    lock = "select 1 from idemconsumer.saga where key = %s for update"

    async def end() -> None:
        async with family.ending(RIDE) as rival:
            await rival.commit()

    async with locked(bench, lock, keys.digest("shop", None, "book", low)):
        ends = asyncio.create_task(end())
        await until(lambda: bench.waiting() == 1, "it waits for the first parent")
        assert bench.run(f"{lock} skip locked", (keys.digest("shop", None, "book", high),)) == [(1,)]
    await ends


async def test_a_start_waits_for_the_end_of_what_runs_under_its_key(family: Family, bench: Bench) -> None:
    """Else that end would not see who waits for it, and the parent not see the end."""
    family.ride = nap
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    await family.deliver()
    async with family.ending(RIDE) as rival:
        begins = asyncio.create_task(family.begin(simple(family, "r")))
        await until(lambda: bench.waiting() == 1, "the start waits")
        await rival.commit()
    assert (await begins).result == b'"with Ann"'


async def test_a_start_waits_for_a_claim_of_its_key(family: Family, bench: Bench) -> None:
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(CLAIM_LOCK, (RIDE,))
        begins = asyncio.create_task(family.begin(simple(family, "r")))
        await until(lambda: bench.waiting() == 1, "the start waits")
        await rival.commit()
    assert (await begins).kind is OutcomeKind.BUSY
    await family.deliver()
    assert (await family.resume()).result == b'"with Ann"'


# ------------------------------------------------------------------------------------------------------------ together
async def test_many_children_side_by_side(family: Family, bench: Bench) -> None:
    async def one(saga: Saga, n: int) -> str:
        child = await saga.start(f"ride_{n}", family.handler, {"to": str(n)})
        return (await saga.result(f"done_{n}", child)).driver

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return ",".join(await saga.all([one(saga, n) for n in range(4)]))

    async def named(payload: dict[str, Any], saga: Saga) -> Ride:
        return Ride(f"D{payload['to']}")

    family.ride = named
    assert (await family.begin(book)).kind is OutcomeKind.BUSY
    outcome = None
    for left in (3, 2, 1, 0):
        await family.deliver()
        outcome = await family.resume()
        assert family.queued == left
    assert outcome is not None
    assert outcome.result == b'"D0,D1,D2,D3"'


async def test_a_child_of_its_own_kind(family: Family) -> None:
    async def nested(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] == 0:
            return Ride("deep")
        child = await saga.start("next", family.handler, {"depth": payload["depth"] - 1})
        return await saga.result("done", child)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", await saga.start("ride", family.handler, {"depth": 2}))).driver

    family.ride = nested
    await family.begin(book)
    for kind in (OutcomeKind.BUSY, OutcomeKind.BUSY, OutcomeKind.APPLIED):
        assert (await family.deliver()).kind is kind
    assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
    assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
    assert (await family.resume()).result == b'"deep"'


async def test_a_child_has_the_tenant_of_its_parent(family: Family, bench: Bench) -> None:
    @family.app.idempotent_handler("memory:tenants", key="id", tenant="of", name="tenants")
    async def tenants(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        assert child.tenant == "a/b%"
        return (await saga.result("done", child)).driver

    family.bound = {each.name: each for each in family.app.bound_handlers(Settings(dsn=bench.dsn))}
    await family.station.deliver(family.bound["tenants"], Message("memory:tenants", b'{"id": "k", "of": "a/b%"}'))
    await family.deliver()
    scopes = {name for (name,) in bench.run("select name from idemconsumer.scope")}
    assert scopes >= {keys.scope_name("shop", "a/b%", "ride")}
    assert (await family.resume("tenants")).result == b'"Ann"'


async def test_what_cannot_be_started_or_waited_for(family: Family) -> None:
    async def plain(payload: object) -> None:
        return

    async def itself(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("again", family.app.handlers["book"], order, key="k")

    async def nothing(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("plain", plain, 1)

    async def no_child(order: dict[str, Any], saga: Saga) -> None:
        await saga.result("done", "ride")  # type: ignore[arg-type]

    for n, book in enumerate((itself, nothing, no_child)):
        family.book = book
        key = "k" if book is itself else f"k{n}"
        outcome = await family.station.deliver(family.bound["book"], order(key))
        assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "SagaMisused")


async def test_a_step_that_has_become_a_start_is_a_change(family: Family, bench: Bench) -> None:
    async def before(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("noted", put, "noted", undo=take_back)
        await saga.tx("ride", put, "ride", args_may_differ=True)
        raise ValueError("once")

    await family.begin(before)
    family.book = simple(family)
    outcome = await family.resume()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "recorded as something else" in bench.letter
