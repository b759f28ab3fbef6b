"""A saga whose functions lose their connection each time fails in the end, and is no outage (B13)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemconsumer import Done, NotDone, Outcome, OutcomeKind, Reject, Saga, Tx, Unknown
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from tests.support.sagas import Bench, Station, lost, order, put, saga
from tests.support.waiting import PATIENCE


async def ends_its_session(tx: Tx, *of: object) -> None:
    await put(tx, "lost")
    await tx.execute("select pg_terminate_backend(pg_backend_pid())")


async def ends_its_session_and_looks(tx: Tx) -> None:
    rows = await tx.execute("insert into effect (name) values (pg_terminate_backend(pg_backend_pid())) returning name")
    await rows.first()


async def presented(station: Station, work: Work) -> tuple[Outcome, int]:
    """As a lane does, until something is decided; and how often nothing was."""
    for outages in range(20):
        try:
            return await station.run(work), outages
        except StoreUnavailable:
            continue
    raise AssertionError("it is an outage for ever")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("what", ["a step", "a step that looks", "an undo", "a question"])
async def test_three_losses_in_a_row_and_each_further_one_cost_an_attempt(
    bench: Bench, one: Station, two: Station, what: str
) -> None:
    async def ask(order: dict[str, Any], tx: Tx) -> Done[str] | NotDone | Unknown:
        await ends_its_session(tx)
        return NotDone()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if what == "an undo":
            await saga.tx("a", put, "a", undo=ends_its_session)
            raise Reject("no")
        await saga.tx("s", ends_its_session if what == "a step" else ends_its_session_and_looks)

    options: Any = {"reconcile": ask} if what == "a question" else {}
    handler = saga(book, max_attempts=2, **options)
    async with asyncio.timeout(PATIENCE):
        if what == "a question":
            await lost(bench, one, handler)
            holding = await two.take(handler)
            assert holding is not None
            work = Work.of(handler, holding.message, leased=holding)
        else:
            work = Work.of(handler, order())
        outcome, outages = await presented(two, work)
        counts = [outages]
        while outcome.kind is OutcomeKind.RETRYING:
            holding = None
            while holding is None:
                holding = await two.take(handler)
            outcome, outages = await presented(two, Work.of(handler, holding.message, leased=holding))
            counts.append(outages)
    reason = {"an undo": "undo_failed", "a question": "unknown_effect"}.get(what, "attempts_exhausted")
    assert (outcome.kind, outcome.reason, counts) == (OutcomeKind.DEAD, reason, [3, 1])
    assert "the connection broke while the handler ran" in bench.letter
    assert bench.effects == (["a"] if what == "an undo" else [])
