"""The part of the LeaseStore suite about steps: checkpoints, calls, undos, and the completion in doubt."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from idemconsumer.errors import CommitUnknown, Contention, Fenced, HandlerFault, StoreUnavailable
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Record, State, StepKind, StepRow, StepState
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.stores.lease_harness import (
    OUTPUT,
    PATIENCE,
    REJECTION,
    LeaseFixtures,
    LeaseHarness,
    LeaseWorker,
    begin,
    finish_call,
    finish_step,
    record,
    record_call,
    step_row,
    take_one,
)
from tests.stores.store_contract import A

OUTPUTS = pytest.mark.parametrize(
    "output",
    [None, StoredResult(b""), StoredResult(b'{ "a" :1.0e0}'), StoredResult(bytes(range(256)), "x/bytes")],
    ids=["none", "empty", "odd JSON", "all bytes"],
)


@pytest.mark.asyncio
class StepContract(LeaseFixtures):
    @pytest.fixture
    async def saga(self, one: LeaseWorker) -> LeasedSaga:
        return await begin(one, "a")

    # -------------------------------------------------------------------------------------------------------- tx steps
    async def test_a_steps_effect_output_and_checkpoint_are_one_commit(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        assert await one.leases.steps(saga.key) == []
        async with one.leases.step(saga, "reserved", has_undo=True, undo=False) as step:
            await harness.write(step.tx(), "effect")
            step.check()
            assert await two.leases.steps(saga.key) == []
            assert await harness.effects() == []
            await step.finish(OUTPUT, overlapped=True)
        assert await harness.effects() == ["effect"]
        (row,) = await two.leases.steps(saga.key)
        assert row == StepRow("reserved", StepKind.TX, StepState.DONE, True, True, row.position, 1, OUTPUT)
        assert row.position is not None

    async def test_a_step_that_is_left_leaves_nothing(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga
    ) -> None:
        with suppress(ZeroDivisionError):
            async with one.leases.step(saga, "s", has_undo=False, undo=False) as step:
                await harness.write(step.tx(), "half")
                raise ZeroDivisionError
        async with one.leases.step(saga, "s", has_undo=False, undo=False) as step:
            await harness.write(step.tx(), "left")
        assert (await one.leases.steps(saga.key), await harness.effects()) == ([], [])
        await finish_step(one, saga, "s")
        assert (await step_row(one, saga, "s")).attempt == 1

    async def test_the_fence_comes_before_the_functions_first_statement(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await one.expire()
        await take_one(two)
        with pytest.raises(Fenced):
            async with one.leases.step(saga, "s", has_undo=False, undo=False):
                pytest.fail("the function was run")

    async def test_the_checkpoint_comes_before_the_functions_first_statement(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga
    ) -> None:
        """So not even a COMMIT by the function itself can make an effect last without it (L3)."""
        async with one.leases.step(saga, "s", has_undo=False, undo=False) as step:
            await harness.write(step.tx(), "effect")
            await harness.commit(step.tx())
            with pytest.raises(HandlerFault):
                step.check()
        assert (await one.leases.steps(saga.key), await harness.effects()) == ([], [])
        await finish_step(one, saga, "s")

    async def test_a_swallowed_database_error_is_found_and_cannot_be_committed(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga
    ) -> None:
        async with one.leases.step(saga, "s", has_undo=False, undo=False) as step:
            await harness.write(step.tx(), "lost")
            await harness.break_transaction(step.tx())
            with pytest.raises(HandlerFault, match="swallowed"):
                step.check()
            with pytest.raises(Exception, match=r".+") as refused:
                await step.finish(None, overlapped=False)
        # Those would run the step again at no cost, and so for ever.
        assert not isinstance(refused.value, (CommitUnknown, Contention, StoreUnavailable))
        assert (await one.leases.steps(saga.key), await harness.effects()) == ([], [])

    async def test_a_steps_tx_ends_with_it(self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga) -> None:
        async with one.leases.step(saga, "s", has_undo=False, undo=False) as step:
            tx = step.tx()
            await step.finish(None, overlapped=False)
            with pytest.raises(HandlerFault, match="after its handler returned"):
                await harness.write(tx, "late")
        assert await harness.effects() == []

    async def test_what_has_ended_is_not_begun_again(
        self, harness: LeaseHarness, one: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await finish_step(one, saga, "tx")
        await finish_call(one, saga, "call")
        with pytest.raises(Fenced):
            await finish_step(one, saga, "tx")
        with pytest.raises(Fenced):
            await one.leases.intend(saga, "call", has_undo=False, undo=False)
        with pytest.raises(Fenced):
            await record_call(one, saga, "call", StepState.REJECTED, REJECTION)
        assert {row.name: row.attempt for row in await one.leases.steps(saga.key)} == {"tx": 1, "call": 1}

    async def test_steps_of_one_saga_may_be_open_at_once_and_stand_in_the_order_of_their_ends(
        self, one: LeaseWorker, saga: LeasedSaga
    ) -> None:
        async with asyncio.timeout(PATIENCE):
            await one.leases.intend(saga, "unfinished", has_undo=False, undo=False)
            async with one.leases.step(saga, "last", has_undo=False, undo=False) as last:
                async with one.leases.step(saga, "first", has_undo=False, undo=False) as first:
                    await first.finish(None, overlapped=True)
                await finish_call(one, saga, "second")
                await last.finish(None, overlapped=True)
        rows = await one.leases.steps(saga.key)
        assert [row.name for row in rows] == ["first", "second", "last", "unfinished"]
        assert rows[-1].position is None
        positions = [row.position or 0 for row in rows[:-1]]
        assert positions == sorted(set(positions))
        assert [row.overlapped for row in rows] == [True, False, True, False]

    @OUTPUTS
    async def test_an_output_is_given_back_byte_for_byte(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga, output: StoredResult | None
    ) -> None:
        await finish_step(one, saga, "tx", output)
        await finish_call(one, saga, "call", output)
        assert [row.output for row in await two.leases.steps(saga.key, 1 << 20)] == [output, output]
        for row in await two.leases.steps(saga.key):
            assert row.output == output or (row.output, row.left) == (None, len(output.body if output else b""))
        if output is not None:
            assert await two.leases.outputs(saga.key, ["tx", "call"]) == {"tx": output, "call": output}

    async def test_outputs_beyond_the_window_are_left_in_the_store(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        small, large = StoredResult(b"1", "application/json"), StoredResult(b"2" * 1000, "application/json")
        for name, output in [("first", large), ("second", large), ("third", large), ("last", small)]:
            await finish_call(one, saga, name, output)
        rows = await two.leases.steps(saga.key, 2000)
        assert [(row.output, row.left) for row in rows] == [(large, 0), (large, 0), (None, 1000), (small, 0)]

    # ----------------------------------------------------------------------------------------------------------- calls
    async def test_an_intent_is_committed_and_counts_how_often_the_remote_will_have_been_called(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        for attempt in (1, 2, 3):
            assert await one.leases.intend(saga, "charged", has_undo=True, undo=False) == attempt
            (row,) = await two.leases.steps(saga.key)
            assert row == StepRow("charged", StepKind.CALL, StepState.INTENT, True, False, None, attempt, None)
        await record_call(one, saga, "charged", StepState.DONE, OUTPUT, has_undo=True, overlapped=True)
        (row,) = await two.leases.steps(saga.key)
        assert row == StepRow("charged", StepKind.CALL, StepState.DONE, True, True, row.position, 3, OUTPUT)
        assert row.position is not None

    async def test_intents_of_the_owners_before_are_counted_too(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await one.leases.intend(saga, "charged", has_undo=False, undo=False)
        await one.expire()
        assert await two.leases.intend(await take_one(two), "charged", has_undo=False, undo=False) == 2

    @pytest.mark.parametrize("kind", [StepKind.TX, StepKind.CALL])
    async def test_a_rejection_is_recorded_whether_its_step_was_begun_or_rolled_back(
        self, one: LeaseWorker, saga: LeasedSaga, kind: StepKind
    ) -> None:
        if kind is StepKind.CALL:
            await one.leases.intend(saga, "s", has_undo=True, undo=False)
        await one.leases.record(saga, "s", kind, StepState.REJECTED, REJECTION, has_undo=True, overlapped=False)
        row = await step_row(one, saga, "s")
        assert (row.kind, row.state, row.output) == (kind, StepState.REJECTED, REJECTION)
        assert row.position is not None

    async def test_calls_of_many_sagas_at_once_have_their_own_outputs(self, one: LeaseWorker) -> None:
        sagas = [await begin(one, f"{n}") for n in range(10)]
        await asyncio.gather(
            *(finish_call(one, saga, f"{m}", StoredResult(saga.key + b"%d" % m)) for saga in sagas for m in range(3))
        )
        for saga in sagas:
            rows = await one.leases.steps(saga.key)
            expected = {f"{m}": StoredResult(saga.key + b"%d" % m) for m in range(3)}
            assert {row.name: row.output for row in rows} == expected

    # ----------------------------------------------------------------------------------------------------------- undos
    async def test_undoing_is_committed_with_its_rejection(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await finish_step(one, saga, "s")
        undoing = await one.leases.undo(saga, REJECTION)
        assert undoing is not None
        assert (undoing.state, undoing.rejection) == (State.UNDOING, REJECTION.body)
        assert await record(two, saga.key) == Record(State.UNDOING, A.fingerprint)
        await one.expire()
        taken = await take_one(two)
        assert (taken.state, taken.rejection) == (State.UNDOING, REJECTION.body)
        await two.leases.complete(taken, State.FAILED, REJECTION)
        assert await record(two, saga.key) == Record(State.FAILED, A.fingerprint, REJECTION)

    async def test_nothing_is_undone_while_the_end_of_a_call_is_not_known(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await finish_step(one, saga, "s")
        await one.leases.intend(saga, "charged", has_undo=True, undo=False)
        assert await one.leases.undo(saga, REJECTION) is None
        assert await record(two, saga.key) == Record(State.PROCESSING, A.fingerprint)
        await record_call(one, saga, "charged", StepState.REJECTED, REJECTION, has_undo=True)
        assert await one.leases.undo(saga, REJECTION) is not None

    async def test_an_intent_and_the_undos_never_begin_both(self, one: LeaseWorker) -> None:
        """Otherwise a saga could make a call after its undos have begun without it (L7)."""
        for n in range(20):
            saga = await begin(one, f"{n}")

            async def intend(saga: LeasedSaga = saga) -> bool:
                try:
                    return bool(await one.leases.intend(saga, "charged", has_undo=True, undo=False))
                except Fenced:
                    return False

            begun, undoing = await asyncio.gather(intend(), one.leases.undo(saga, REJECTION))
            assert begun is (undoing is None)

    async def test_a_step_is_undone_in_one_commit_and_keeps_its_output_and_its_place(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await finish_step(one, saga, "s", OUTPUT, has_undo=True)
        before = await step_row(one, saga, "s")
        undoing = await one.leases.undo(saga, REJECTION)
        assert undoing is not None
        async with one.leases.step(undoing, "s", has_undo=True, undo=True) as step:
            await harness.write(step.tx(), "rolled back")
        assert await step_row(one, saga, "s") == before
        async with one.leases.step(undoing, "s", has_undo=True, undo=True) as step:
            await harness.write(step.tx(), "undone")
            assert await step_row(two, saga, "s") == before
            await step.finish(None, overlapped=False)
        assert await harness.effects() == ["undone"]
        after = await step_row(two, saga, "s")
        assert (after.state, after.output, after.position) == (StepState.UNDONE, OUTPUT, before.position)
        with pytest.raises(Fenced):
            async with one.leases.step(undoing, "s", has_undo=True, undo=True):
                pytest.fail("it was undone twice")

    async def test_a_call_is_undone_between_an_intent_and_its_record(
        self, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        await finish_call(one, saga, "charged", OUTPUT, has_undo=True)
        before = await step_row(one, saga, "charged")
        undoing = await one.leases.undo(saga, REJECTION)
        assert undoing is not None

        with pytest.raises(Fenced):
            await record_call(one, undoing, "charged", StepState.UNDONE, None, has_undo=True)
        first = await one.leases.intend(undoing, "charged", has_undo=True, undo=True)
        assert (await step_row(two, saga, "charged")).state is StepState.UNDO_INTENT
        assert await one.leases.intend(undoing, "charged", has_undo=True, undo=True) == first + 1
        await record_call(one, undoing, "charged", StepState.UNDONE, None, has_undo=True)
        after = await step_row(two, saga, "charged")
        assert (after.state, after.output, after.position) == (StepState.UNDONE, OUTPUT, before.position)
        with pytest.raises(Fenced):
            await one.leases.intend(undoing, "charged", has_undo=True, undo=True)

    # ------------------------------------------------------------------------------------------------- the completion
    async def test_a_completion_is_one_commit_with_what_was_done_to_find_out(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        async with one.leases.completion(saga) as completion:
            await harness.write(completion.tx(), "repaired")
            completion.check()
            assert await record(two, saga.key) == Record(State.PROCESSING, A.fingerprint)
            await completion.finish(OUTPUT)
        assert await harness.effects() == ["repaired"]
        assert await record(two, saga.key) == Record(State.COMPLETED, A.fingerprint, OUTPUT)
        assert await one.leases.own() == []

    async def test_a_completion_that_is_left_leaves_nothing_and_the_saga_goes_on(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        async with one.leases.completion(saga) as completion:
            await harness.write(completion.tx(), "looked")
        assert await harness.effects() == []
        assert await record(two, saga.key) == Record(State.PROCESSING, A.fingerprint)
        await finish_step(one, saga, "s")

    async def test_a_commit_inside_a_completion_fails(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker, saga: LeasedSaga
    ) -> None:
        async with one.leases.completion(saga) as completion:
            await harness.write(completion.tx(), "effect")
            await harness.commit(completion.tx())
            with pytest.raises(HandlerFault):
                completion.check()
        assert await harness.effects() == []
        assert await record(two, saga.key) == Record(State.PROCESSING, A.fingerprint)
