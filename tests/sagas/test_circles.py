"""No saga waits for one that waits for it (L65)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import (
    Child,
    OutcomeKind,
    Saga,
)
from idemconsumer.message import keys
from idemconsumer.stores.leased_saga import Kinship
from idemconsumer.stores.open_steps import PostgresStep
from tests.support.families import (
    RIDE,
    Family,
    Ride,
    compensate,
    nap,
    undo_of,
    undone,
)
from tests.support.sagas import Bench


async def circle(payload: dict[str, Any], saga: Saga, family: Family, *, key: str) -> Ride:
    return await saga.result("done", await saga.start("back", family.handler, {"depth": 2}, key=key))


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_saga_starts_none_that_has_started_it(family: Family, bench: Bench, depth: int) -> None:
    """Its parent under the same payload, or that one's parent; nothing of the start is left."""

    async def nested(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] > 2 - depth:
            child = await saga.start("next", family.handler, {"depth": payload["depth"] - 1})
            return await saga.result("done", child)
        return await circle(payload, saga, family, key="top")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", await saga.start("ride", family.handler, {"depth": 2}, key="top"))).driver

    family.ride = nested
    await family.begin(book)
    for _ in range(depth):
        assert (await family.deliver()).kind is OutcomeKind.BUSY
    assert (await family.deliver()).error == "SagaMisused"
    assert (await family.resume("ride")).reason == "attempts_exhausted"
    assert "or started it and has not ended" in bench.letter
    assert (family.queued, len(bench.run("select 1 from idemconsumer.child"))) == (0, depth + 1)


async def test_of_two_that_start_each_other_at_once_one_does_not_wait(family: Family, bench: Bench) -> None:
    """Neither start has seen the other one: whoever waits later sees both."""
    starting = asyncio.Barrier(2)
    kinship = PostgresStep.kinship

    async def together(step: PostgresStep, child: bytes) -> Kinship:
        found = await kinship(step, child)
        await starting.wait()
        return found

    async def each(payload: dict[str, Any], saga: Saga) -> Ride:
        other = "b" if payload["n"] == "a" else "a"
        child = await saga.start("other", family.handler, {"n": other}, key=other)
        return await saga.result("done", child)

    family.ride = each
    for key in "ab":
        await family.app.start(family.handler, {"n": key}, key=key)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PostgresStep, "kinship", together)
        outcomes = await asyncio.gather(family.deliver(), family.deliver())
    assert "SagaMisused" in {outcome.error for outcome in outcomes}


async def test_what_has_started_a_saga_and_has_ended_is_no_circle(family: Family) -> None:
    async def once(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] == 0:
            return await circle(payload, saga, family, key="top")
        await saga.start("next", family.handler, {"depth": 0})
        return Ride("first")

    family.ride = once
    await family.app.start(family.handler, {"depth": 2}, key="top")
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.deliver()).result == b'{"driver":"first"}'


async def test_an_undo_waits_for_no_saga_that_waits_for_it(family: Family, bench: Bench) -> None:
    """A circle that was begun before it was refused."""
    family.ride = nap
    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()
    insert = "insert into idemconsumer.child (parent, key) select key, %s from idemconsumer.saga where handler = 'ride'"
    bench.run(insert, (keys.digest("shop", None, "book", "k"),))
    assert (await undo_of(family, bench)).error == "SagaMisused"
    assert bench.run("select cancel from idemconsumer.saga where handler = 'ride'") == [(None,)]


async def test_nobody_waits_for_what_it_has_not_started(family: Family) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", Child(family.handler, "r", None, RIDE.hex()))).driver

    assert (await family.begin(book)).error == "SagaMisused"


async def test_a_child_whose_tenant_is_in_its_payload_is_not_another_saga(family: Family) -> None:
    """The parent would wait under one key, and the child begin under another."""

    @family.app.idempotent_handler("memory:fleet", key="id", tenant="of", name="fleet")
    async def fleet(payload: dict[str, Any], saga: Saga) -> str:
        return "ended"

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.result("done", await saga.start("fleet", fleet, {"id": 1, "of": "a"}))

    assert (await family.begin(book)).error == "SagaMisused"
    assert family.queued == 0
