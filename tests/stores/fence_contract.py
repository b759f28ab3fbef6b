"""The part of the LeaseStore suite about the fence: a worker that has lost the saga writes nothing (L2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from idemconsumer.errors import Fenced
from idemconsumer.rules.values import State, StepKind, StepState
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.stores.lease_harness import (
    APP,
    HANDLER,
    OUTPUT,
    PATIENCE,
    REJECTION,
    LeaseFixtures,
    LeaseHarness,
    LeaseWorker,
    begin,
    finish_step,
    record,
    step_row,
    take_one,
    waits,
)
from tests.stores.store_contract import letter_of

Write = Callable[[LeaseHarness, LeaseWorker, LeasedSaga], Awaitable[object]]


async def _step(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    async with worker.leases.step(saga, "s", has_undo=False, undo=False) as step:
        await harness.write(step.tx(), "step")
        await step.finish(None, overlapped=False)


async def _undo_step(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    async with worker.leases.step(saga, "before", has_undo=True, undo=True) as step:
        await harness.write(step.tx(), "undo")
        await step.finish(None, overlapped=False)


async def _intend(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.intend(saga, "s", has_undo=False, undo=False)


async def _record(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.record(saga, "s", StepKind.CALL, StepState.DONE, OUTPUT, has_undo=False, overlapped=False)


async def _complete(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.complete(saga, State.COMPLETED, OUTPUT)


async def _completion(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    async with worker.leases.completion(saga) as completion:
        await harness.write(completion.tx(), "completion")
        await completion.finish(OUTPUT)


async def _undo(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.undo(saga, REJECTION)


async def _release(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.release(saga, 0.0, None, count=True)


async def _park(harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga) -> None:
    await worker.leases.park(saga, letter_of("a"))


def _each(*writes: Write) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("write", writes, ids=lambda write: write.__name__.strip("_"))


every_write = _each(_step, _undo_step, _intend, _record, _complete, _completion, _undo, _release, _park)


@pytest.mark.asyncio
class FenceContract(LeaseFixtures):
    @pytest.fixture
    async def saga(self, one: LeaseWorker) -> LeasedSaga:
        """Held by the first worker, with a finished step."""
        saga = await begin(one, "a")
        await finish_step(one, saga, "before", has_undo=True)
        return saga

    async def refused(self, harness: LeaseHarness, worker: LeaseWorker, saga: LeasedSaga, write: Write) -> None:
        """The write is fenced, and nothing of it stays."""

        async def contents() -> list[object]:
            found = await record(worker, saga.key), await worker.leases.steps(saga.key)
            return [*found, await harness.effects(), await harness.letters()]

        before = await contents()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(Fenced):
                await write(harness, worker, saga)
        assert await contents() == before

    @every_write
    async def test_no_write_passes_after_a_takeover(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga, write: Write
    ) -> None:
        await one.expire()
        taken = await take_one(two)
        await self.refused(harness, one, saga, write)
        await write(harness, two, taken)

    @every_write
    async def test_no_write_passes_after_what_was_left_is_taken_again(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga, write: Write
    ) -> None:
        """A run that its own worker took to be gone."""
        (taken,) = await one.leases.take(APP, [HANDLER], 1, unheld=await one.leases.own())
        await self.refused(harness, one, saga, write)
        await write(harness, one, taken)

    @every_write
    async def test_no_write_passes_with_the_token_of_before_a_retake(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga, write: Write
    ) -> None:
        """After an unknown COMMIT: same worker, same phase, and only the token tells the two runs apart."""
        retaken = await one.leases.retake(saga.key, saga.token)
        assert retaken is not None
        await self.refused(harness, one, saga, write)
        await write(harness, one, retaken)

    @every_write
    async def test_no_write_of_the_phase_before_the_undos_passes(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga, write: Write
    ) -> None:
        """Same worker and same token: a branch that did not notice that its saga is being undone."""
        undoing = await one.leases.undo(saga, REJECTION)
        assert undoing is not None
        assert undoing.token == saga.token
        await self.refused(harness, one, saga, write)

    @every_write
    @pytest.mark.parametrize("end", [_complete, _park, _release], ids=["complete", "park", "release"])
    async def test_no_write_passes_once_the_saga_was_given_away(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga, end: Write, write: Write
    ) -> None:
        await end(harness, one, saga)
        await self.refused(harness, one, saga, write)

    @_each(_complete, _completion, _undo, _release, _park)
    async def test_what_ends_a_phase_waits_for_an_open_step(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga, write: Write
    ) -> None:
        async with one.leases.step(saga, "open", has_undo=False, undo=False) as step:
            ending = asyncio.ensure_future(write(harness, one, saga))
            assert await waits(ending)
            await harness.write(step.tx(), "step")
            await step.finish(None, overlapped=False)
        async with asyncio.timeout(PATIENCE):
            await ending
        assert "step" in await harness.effects()
        assert (await step_row(one, saga, "open")).state is StepState.DONE

    async def test_a_fenced_write_does_not_touch_those_beside_it(self, one: LeaseWorker, two: LeaseWorker) -> None:
        sagas = [await begin(one, f"{n}") for n in range(12)]
        lost = sagas[::3]
        for saga in lost:
            assert await one.leases.retake(saga.key, saga.token) is not None
        answers = await asyncio.gather(
            *(one.leases.intend(saga, "s", has_undo=False, undo=False) for saga in sagas), return_exceptions=True
        )
        fenced = [saga for saga, answer in zip(sagas, answers, strict=True) if isinstance(answer, Fenced)]
        assert fenced == lost
        for saga in sagas:
            assert [row.name for row in await two.leases.steps(saga.key)] == ([] if saga in lost else ["s"])

    async def test_a_saga_that_is_being_written_to_does_not_hold_up_the_others(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        held, free = await begin(one, "held"), await begin(one, "free")
        async with one.leases.step(held, "open", has_undo=False, undo=False) as step:
            ending = asyncio.create_task(one.leases.complete(held, State.COMPLETED, None))
            async with asyncio.timeout(PATIENCE):
                await one.leases.complete(free, State.COMPLETED, None)
            assert await waits(ending)
            await step.finish(None, overlapped=False)
        await ending
        assert await one.leases.own() == []
