"""A call that a refusal or the handler's end would cut off comes to its end, so that its outcome is known (L75)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from tests.support.sagas import Bench, Remote, Station, put, saga, take_back


class Slow:
    """A call that goes on until it is let go, or for 50 ms from its second time on."""

    def __init__(self, remote: Remote) -> None:
        self.begun = asyncio.Event()
        self._remote = remote
        self._times = 0

    async def call(self, step: Step, name: str) -> str:
        self._times += 1
        self.begun.set()
        await (asyncio.Event().wait() if self._times == 1 else asyncio.sleep(0.05))
        return await self._remote.charge(step, name)


async def test_a_task_group_beside_a_call_ends_though_it_is_caught(bench: Bench, one: Station, remote: Remote) -> None:
    """In each run it cut off the call again, until the saga was put aside as an unknown effect."""
    slow, fails, caught = Slow(remote), [ValueError("once")], list[str]()

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def last(tx: Tx) -> str:
        if fails:
            raise fails.pop()
        return await put(tx, "last")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("charged", slow.call, "card", undo=remote.refund))
                group.create_task(saga.tx("refused", refuse))
        except* Reject as refused:
            caught.extend(str(each) for each in refused.exceptions)
        await saga.tx("last", last)

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert (remote.effects, bench.effects) == (["card"], ["last"])
    assert caught == ["no"] * 3, "each run has gone the same way"


async def test_what_it_has_done_is_undone_with_the_saga(bench: Bench, one: Station, remote: Remote) -> None:
    slow = Slow(remote)

    async def refuse(tx: Tx) -> None:
        await slow.begun.wait()
        raise Reject("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(saga.call("charged", slow.call, "card", undo=remote.refund))
                group.create_task(saga.tx("refused", refuse))
        await saga.tx("put", put, "put", undo=take_back)
        raise Reject("after all")

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert outcomes[-1].kind is OutcomeKind.FAILED
    assert remote.effects == ["card", "refund:card:charged:card"]
    assert bench.effects == ["put", "undo:put:out:put"]


async def test_a_call_that_the_handler_stopped_waiting_for_is_known_at_its_end(
    bench: Bench, one: Station, remote: Remote
) -> None:
    async def slow(step: Step, name: str) -> str:
        await asyncio.sleep(0.1)
        return await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            return await asyncio.wait_for(asyncio.shield(saga.call("charged", slow, "card")), 0.02)
        except TimeoutError:
            return "too late"

    handler = saga(book, max_attempts=2)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert [each.kind for each in outcomes] == [OutcomeKind.RETRYING, OutcomeKind.APPLIED]
    assert outcomes[0].error == "SagaMisused"
    assert (outcomes[-1].result, len(remote.calls)) == (b'"charged:card"', 1)
