"""What every LeaseStore must do, as tests.

Here: who holds a saga, from its claim to its end. The steps in between are in `step_contract`, the fence that every
write has to pass in `fence_contract`.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from idemconsumer.errors import Fenced
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.stores.fence_contract import FenceContract
from tests.stores.lease_harness import (
    APP,
    HANDLER,
    OUTPUT,
    PATIENCE,
    REJECTION,
    LeaseHarness,
    LeaseWorker,
    begin,
    finish_call,
    finish_step,
    message_of,
    record,
    record_call,
    take,
    take_one,
    waits,
)
from tests.stores.step_contract import StepContract
from tests.stores.store_contract import SEE_OTHER, A, B, claim_of, complete, letter_of


class LeaseStoreContract(StepContract, FenceContract):
    """All that a LeaseStore must do. See the module for how to run it."""

    # ------------------------------------------------------------------------------------------------------ the claim
    async def test_a_saga_is_begun_in_one_commit_with_its_record(self, one: LeaseWorker, two: LeaseWorker) -> None:
        saga = await one.leases.begin(A, message_of("a"), HANDLER, "v1")
        assert isinstance(saga, LeasedSaga)
        assert (saga.key, saga.scope, saga.handler, saga.version) == (A.key, A.scope, HANDLER, "v1")
        assert (saga.state, saga.attempt, saga.rejection) == (State.PROCESSING, 1, None)
        assert (saga.new, saga.stale) == (True, False)
        assert await record(two, A.key) == Record(State.PROCESSING, A.fingerprint)
        assert await one.leases.own() == [(A.key, saga.token)]

    async def test_any_worker_can_go_on_with_the_message_as_it_was(self, one: LeaseWorker, two: LeaseWorker) -> None:
        first = await begin(one, "a")
        await one.expire()
        second = await take_one(two)
        assert second.message == message_of("a")
        assert (second.key, second.scope, second.handler, second.version) == (A.key, A.scope, HANDLER, "v1")
        assert (second.state, second.rejection, second.new) == (State.PROCESSING, None, False)
        assert second.token > first.token
        assert second.worker != first.worker

    async def test_a_duplicate_is_given_the_record_and_changes_nothing(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        saga = await begin(one, "a")
        for worker in (one, two):
            found = await worker.leases.begin(A, message_of("again"), HANDLER, "v2")
            assert found == Record(State.PROCESSING, A.fingerprint)
        await one.leases.intend(saga, "still ours", has_undo=False, undo=False)
        await complete(two.joined, [B], [(B.key, OUTPUT)])
        assert await one.leases.begin(B, message_of("b"), HANDLER, None) == Record(
            State.COMPLETED, B.fingerprint, OUTPUT
        )

    async def test_another_payload_under_a_key_is_seen_by_the_fingerprint_of_the_first(self, one: LeaseWorker) -> None:
        await begin(one, "a")
        other = Claim(A.key, A.scope, b"g" * 32)
        assert await one.leases.begin(other, message_of("a"), HANDLER, "v1") == Record(State.PROCESSING, A.fingerprint)
        assert await record(one, A.key) == Record(State.PROCESSING, A.fingerprint)

    async def test_a_key_that_a_rival_holds_uncommitted_is_busy_and_is_not_waited_for(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        async with two.joined.transaction(group=1) as claims:
            await claims.claim([A])
            async with asyncio.timeout(PATIENCE):
                assert await one.leases.begin(A, message_of("a"), HANDLER, None) is Mark.BUSY
        assert await one.leases.own() == []
        await begin(one, "a")

    async def test_of_many_that_begin_one_key_at_once_one_holds_it(self, one: LeaseWorker, two: LeaseWorker) -> None:
        found = await asyncio.gather(
            *(worker.leases.begin(A, message_of("a"), HANDLER, None) for worker in (one, two) * 4)
        )
        (saga,) = [each for each in found if isinstance(each, LeasedSaga)]
        rest = [each for each in found if each is not saga]
        assert all(each in (Mark.BUSY, Record(State.PROCESSING, A.fingerprint)) for each in rest)
        assert sorted([*await one.leases.own(), *await two.leases.own()]) == [(A.key, saga.token)]

    async def test_sagas_that_begin_at_once_have_tokens_of_their_own(self, one: LeaseWorker) -> None:
        sagas = await asyncio.gather(*(begin(one, f"{n}") for n in range(20)))
        assert len({saga.token for saga in sagas}) == 20
        assert sorted(await one.leases.own()) == sorted((saga.key, saga.token) for saga in sagas)

    async def test_a_workers_own_are_those_that_it_has_not_given_away(self, one: LeaseWorker, two: LeaseWorker) -> None:
        kept, other, released, parked, ended = [await begin(one, text) for text in ("k", "o", "r", "p", "e")]
        await begin(two, "theirs")
        await one.leases.release(released, 60.0, None, count=True)
        await one.leases.park(parked, letter_of("p"))
        await one.leases.complete(ended, State.COMPLETED, None)
        assert sorted(await one.leases.own()) == sorted((saga.key, saga.token) for saga in (kept, other))
        assert await one.leases.own(kept.key) == [(kept.key, kept.token)]
        assert await one.leases.own(released.key) == []

    # ------------------------------------------------------------------------------------------------------- take over
    async def test_a_saga_is_not_taken_while_its_owners_lease_holds(self, one: LeaseWorker, two: LeaseWorker) -> None:
        saga = await begin(one, "a")
        for worker in (one, two):
            assert await take(worker) == []
            assert await take(worker, key=saga.key) == []
        await one.expire()
        assert (await take_one(two)).stale
        assert await take(two) == []
        assert await two.leases.own(saga.key) != []

    async def test_a_released_saga_is_taken_when_it_is_due_and_no_sooner(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        later, soon = await begin(one, "later"), await begin(one, "soon")
        await one.leases.release(later, 60.0, "boom\x00", count=True)
        began = time.monotonic()
        await one.leases.release(soon, 0.3, None, count=True)
        while not (taken := await take(two)):
            assert time.monotonic() < began + PATIENCE
            await asyncio.sleep(0.01)
        assert time.monotonic() >= began + 0.3
        assert [saga.key for saga in taken] == [soon.key]
        assert not taken[0].stale
        assert await take(two, key=later.key) == []

    async def test_only_what_was_asked_for_is_taken(self, one: LeaseWorker, two: LeaseWorker) -> None:
        ours = [await begin(one, "a"), await begin(one, "b")]
        others = [
            await begin(one, "another handler", scope="shop/-/refund", handler="refund"),
            await begin(one, "another app", scope="shopping/-/pay"),
            await begin(one, "an app whose name begins so", scope="shop-2/-/pay"),
        ]
        await one.expire()
        assert await take(two, key=others[1].key) == []
        (first,) = await take(two, 1, key=ours[1].key)
        assert first.key == ours[1].key
        assert [saga.key for saga in await take(two)] == [ours[0].key]
        refunds = await two.leases.take(APP, ["refund", "unknown"], 10)
        assert [saga.key for saga in refunds] == [others[0].key]

    async def test_no_more_are_taken_than_the_limit(self, one: LeaseWorker, two: LeaseWorker) -> None:
        sagas = [await begin(one, f"{n}") for n in range(5)]
        await one.expire()
        counts = [await take(two, 2) for _ in range(4)]
        assert [len(taken) for taken in counts] == [2, 2, 1, 0]
        assert {saga.key for taken in counts for saga in taken} == {saga.key for saga in sagas}

    async def test_takers_at_once_share_the_sagas_and_each_has_one_owner(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        lost = await harness.worker()
        before = {(await begin(lost, f"{n}")).key for n in range(20)}
        await lost.expire()
        await lost.joined.close()
        taken = await take(one, 1)
        for sagas in await asyncio.gather(*(take(worker, 3) for worker in (one, two) * 5)):
            taken += sagas
        taken += await take(one, 20)
        assert sorted(saga.key for saga in taken) == sorted(before)
        assert len({saga.token for saga in taken}) == 20

    async def test_a_saga_with_an_open_step_is_passed_over(self, one: LeaseWorker, two: LeaseWorker) -> None:
        saga, free = await begin(one, "a"), await begin(one, "b")
        await one.expire()
        async with one.leases.step(saga, "open", has_undo=False, undo=False):
            assert [each.key for each in await take(two)] == [free.key]
            assert await take(two, key=saga.key) == []
        assert (await take_one(two)).key == saga.key

    async def test_a_saga_that_was_left_is_taken_again_at_no_cost_under_the_token_that_was_seen(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        left, held = await begin(one, "left"), await begin(one, "held")
        seen = await one.leases.own(left.key)
        assert await two.leases.take(APP, [HANDLER], 10, unheld=seen) == [], "it is not theirs"
        (found,) = await one.leases.take(APP, [HANDLER], 10, unheld=seen)
        assert (found.key, found.attempt, found.stale) == (left.key, 1, False)
        assert found.token > left.token
        assert await one.leases.take(APP, [HANDLER], 10, unheld=seen) == [], "it has another token by now"
        mixed = [(left.key, held.token), (held.key, found.token)]
        assert await one.leases.take(APP, [HANDLER], 10, unheld=mixed) == [], "each token belongs to its key"

    async def test_attempts_are_failures_since_the_last_finished_step_and_the_one_to_come(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        saga = await begin(one, "a")
        attempts = []
        for finish in (None, None, finish_step, None, finish_call, None):
            if finish is not None:
                await finish(one, saga, finish.__name__)
            else:
                await one.leases.intend(saga, "never ends", has_undo=False, undo=False)
            await one.leases.release(saga, 0.0, None, count=True)
            saga = await take_one(one)
            attempts.append(saga.attempt)
        assert attempts == [2, 3, 2, 3, 2, 3]

    async def test_a_lost_worker_costs_an_attempt_only_where_the_saga_was_counted(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        """Lost twice without a finished step in between, it is a suspect; what is finished clears it."""
        saga, found, dying, rising = await begin(one, "a"), list[tuple[int, bool]](), one, two
        for before in (
            "",
            "",
            "count",
            "count",
            "",
            "count and finish",
            "",
            "count and retake",
            "finish and retake",
            "",
        ):
            if "count" in before:
                await dying.leases.count(saga)
                await dying.leases.count(saga)
            if "finish" in before:
                await finish_step(dying, saga, f"step {len(found)}")
            if "retake" in before:
                retaken = await dying.leases.retake(saga.key, saga.token)
                assert retaken is not None
            await dying.expire()
            saga = await take_one(rising)
            found.append((saga.attempt, saga.suspect))
            dying, rising = rising, dying
        lost = [(1, False), (1, True), (2, True), (3, True), (3, True)]
        assert found == [*lost, (1, False), (1, True), (2, True), (1, False), (1, True)]

    async def test_a_suspect_that_ran_and_was_released_is_none_any_more(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        await begin(one, "a")
        await one.expire()
        await take_one(two)
        await two.expire()
        saga = await take_one(one)
        await one.leases.release(saga, 0.0, None, count=False)
        saga = await take_one(one)
        assert (saga.attempt, saga.suspect, saga.stale) == (1, True, True), "it did not run"
        await one.leases.count(saga)
        await one.leases.release(replace(saga, stale=False), 0.0, None, count=False)
        assert not (await take_one(one)).suspect

    async def test_an_undo_that_only_began_is_no_finished_step(self, one: LeaseWorker) -> None:
        saga = await begin(one, "a")
        await finish_call(one, saga, "charged", has_undo=True)
        await one.leases.release(saga, 0.0, None, count=True)
        undoing = await one.leases.undo(await take_one(one), REJECTION)
        assert undoing is not None
        await one.leases.intend(undoing, "charged", has_undo=True, undo=True)
        await one.leases.release(undoing, 0.0, None, count=True)
        assert (await take_one(one)).attempt == 2

    async def test_a_release_gives_its_attempt_back_if_it_is_not_to_count(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        saga = await begin(one, "a")
        await one.leases.release(saga, 0.0, None, count=False)
        saga = await take_one(two)
        assert saga.attempt == 1
        await two.leases.release(saga, 0.0, None, count=True)
        assert (await take_one(one)).attempt == 2

    async def test_a_release_keeps_what_was_taken_from_a_lost_worker_stale(
        self, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        await begin(one, "a")
        await one.expire()
        saga = await take_one(two)
        await two.leases.release(saga, 0.0, None, count=True)
        assert (await take_one(two)).stale

    # ---------------------------------------------------------------------------------------------------- from oneself
    @pytest.mark.parametrize("known", [True, False], ids=["token", "no token"])
    async def test_a_retake_is_a_new_token_at_no_cost(self, one: LeaseWorker, known: bool) -> None:
        old = await begin(one, "a")
        new = await one.leases.retake(old.key, old.token if known else None)
        assert new is not None
        assert new.token > old.token
        assert (new.attempt, new.state, new.message, new.stale) == (1, State.PROCESSING, old.message, False)
        assert await one.leases.own() == [(new.key, new.token)]

    async def test_what_is_not_ours_cannot_be_retaken(self, one: LeaseWorker, two: LeaseWorker) -> None:
        saga = await begin(one, "a")
        for token in (saga.token, None):
            assert await two.leases.retake(saga.key, token) is None
        assert await one.leases.retake(saga.key, saga.token - 1) is None
        await one.leases.release(saga, 0.0, None, count=True)
        assert await one.leases.retake(saga.key, saga.token) is None
        again = await take_one(one)
        await one.leases.complete(again, State.COMPLETED, None)
        for token in (again.token, None):
            assert await one.leases.retake(saga.key, token) is None

    async def test_a_retake_waits_for_what_is_in_flight_and_then_sees_it(self, one: LeaseWorker) -> None:
        saga = await begin(one, "a")
        await one.leases.release(saga, 0.0, None, count=True)
        saga = await take_one(one)
        async with one.leases.step(saga, "in flight", has_undo=False, undo=False) as step:
            retake = asyncio.create_task(one.leases.retake(saga.key, saga.token))
            assert await waits(retake)
            await step.finish(None, overlapped=False)
        async with asyncio.timeout(PATIENCE):
            retaken = await retake
        assert retaken is not None
        assert retaken.token > saga.token
        assert retaken.attempt == 1, "a step has finished"
        assert [row.name for row in await one.leases.steps(saga.key)] == ["in flight"]

    # ---------------------------------------------------------------------------------------------------------- the end
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    @pytest.mark.parametrize(
        "result",
        [OUTPUT, StoredResult(b"\x00\xff", "x/y"), SEE_OTHER, None],
        ids=["JSON", "bytes", "response", "none"],
    )
    async def test_an_end_is_the_record_its_result_and_no_saga(
        self, one: LeaseWorker, two: LeaseWorker, state: State, result: StoredResult | None
    ) -> None:
        saga = await begin(one, "a")
        await finish_step(one, saga, "kept")
        await one.leases.complete(saga, state, result)
        assert await two.leases.begin(A, message_of("a"), HANDLER, None) == Record(state, A.fingerprint, result)
        assert await one.leases.own() == []
        await one.expire()
        assert await take(two, key=saga.key) == []
        assert [row.name for row in await two.leases.steps(saga.key)] == ["kept"], "for people to look at"

    async def test_sagas_that_end_at_once_have_their_own_results(self, one: LeaseWorker) -> None:
        sagas = [await begin(one, f"{n}") for n in range(10)]
        results = [StoredResult(b"%d" % n) for n in range(10)]
        states = [(State.COMPLETED, State.FAILED)[n % 2] for n in range(10)]
        await asyncio.gather(*(one.leases.complete(*end) for end in zip(sagas, states, results, strict=True)))
        found = await one.joined.peek([saga.key for saga in sagas])
        assert found == [Record(s, A.fingerprint, result) for s, result in zip(states, results, strict=True)]
        assert await one.leases.own() == []

    async def test_a_parked_saga_waits_for_a_person(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        saga = await begin(one, "a")
        await finish_call(one, saga, "kept")
        await one.leases.park(saga, letter_of("a", reason="unknown_effect"))
        assert await harness.letters() == [("unknown_effect", 1)]
        assert await two.leases.begin(A, message_of("a"), HANDLER, None) == Record(State.DEAD, A.fingerprint)
        await one.expire()
        for key in (None, saga.key):
            assert await take(two, key=key) == []
            assert await take(one, key=key) == []
        assert await one.leases.retake(saga.key, saga.token) is None
        assert [row.name for row in await two.leases.steps(saga.key)] == ["kept"]

    async def test_a_call_that_ended_is_recorded_before_the_saga_is_released(self, one: LeaseWorker) -> None:
        """Writes of one saga that are asked for one after another are committed in that order."""
        saga = await begin(one, "a")
        for n in range(10):
            await one.leases.intend(saga, f"{n}", has_undo=False, undo=False)
            await record_call(one, saga, f"{n}")
        await one.leases.release(saga, 0.0, None, count=True)
        with pytest.raises(Fenced):
            await one.leases.intend(saga, "late", has_undo=False, undo=False)
        assert [row.name for row in await one.leases.steps(saga.key)] == [f"{n}" for n in range(10)]

    async def test_a_note_is_added_by_any_worker_until_the_end(
        self, harness: LeaseHarness, one: LeaseWorker, two: LeaseWorker
    ) -> None:
        saga = await begin(one, "a")
        await one.leases.note(saga.key, "redelivered", None)
        await two.leases.note(saga.key, "reconciled", "not done\x00")
        noted = await harness.history(saga.key)
        assert [what for what, _ in noted] == ["redelivered", "reconciled"]
        assert (noted[1][1] or "").startswith("not done")
        await one.leases.complete(saga, State.COMPLETED, None)
        before = await harness.history(saga.key)
        await two.leases.note(saga.key, "redelivered", "late")
        assert await harness.history(saga.key) == before
        unknown = claim_of("unknown").key
        await two.leases.note(unknown, "redelivered", None)
        assert await harness.history(unknown) == []
