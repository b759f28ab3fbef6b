"""What a joined store must do, as tests.

It tests the rules that the engine relies on with any store. What only one database must do is tested with that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import sha256
from typing import Protocol

import pytest

from idemconsumer.errors import CommitUnknown, ConfigurationError, Contention, HandlerFault, StoreUnavailable
from idemconsumer.handlers.arguments import Tx
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.columns import NewDeadLetter
from idemconsumer.stores.joined import PostgresStore

PATIENCE = 10.0  # seconds allowed for anything that must not wait for a rival

JSON = StoredResult(b'{"charged": 1}')
SEE_OTHER = StoredResult(b"", "text/html", 303, (("Location", "/a?b=ü"), ("Set-Cookie", "b"), ("Set-Cookie", "a\0")))


class StoreHarness(Protocol):
    """How the suite reaches one database."""

    async def store(self) -> PostgresStore:
        """One more store on the same database, as another worker has it. The suite closes it."""
        ...

    async def write(self, tx: Tx, effect: str) -> None:
        """An effect of a handler. Written twice it must be found twice."""
        ...

    async def break_transaction(self, tx: Tx) -> None:
        """A statement that fails, and fails the transaction; its error is swallowed."""
        ...

    async def effects(self) -> list[str]:
        """The effects that are committed, sorted."""
        ...

    async def letters(self) -> list[tuple[str, int]]:
        """Reason and number of arrivals of each dead letter, oldest first."""
        ...


def claim_of(text: str, *, fingerprint: bytes | None = b"f" * 32) -> Claim:
    return Claim(sha256(text.encode()).digest(), "shop/-/pay", fingerprint)


def letter_of(text: str, *, reason: str = "attempts_exhausted") -> NewDeadLetter:
    identity = sha256(f"{reason} {text}".encode()).digest()
    return NewDeadLetter(
        identity, "pay", "shop/-/pay", "memory:orders", "orders-1", reason, "boom\x00", b"\x00\xff", {"h": b"\xff"}
    )


A, B, C = claim_of("a"), claim_of("b"), claim_of("c")


@pytest.mark.asyncio
class JoinedStoreContract:
    """What a joined store must do. See the module for how to run it."""

    @pytest.fixture
    async def stores(self, harness: StoreHarness) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
        """Two workers."""
        async with AsyncExitStack() as stack:
            pair = await harness.store(), await harness.store()
            for store in pair:
                stack.push_async_callback(store.close)
            yield pair

    @pytest.fixture
    def store(self, stores: tuple[PostgresStore, PostgresStore]) -> PostgresStore:
        return stores[0]

    @pytest.fixture
    def rival(self, stores: tuple[PostgresStore, PostgresStore]) -> PostgresStore:
        return stores[1]

    # --------------------------------------------------------------------------------------------------- claiming
    async def test_a_new_key_is_claimed_and_a_committed_one_is_its_record(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        async with store.transaction(group=1) as claims:
            assert await claims.claim([A]) == [Mark.CLAIMED]
            await claims.complete([(A.key, JSON)], [])

        async with rival.transaction(group=1) as claims:
            assert await claims.claim([A]) == [Record(State.COMPLETED, A.fingerprint, JSON)]

    async def test_findings_come_in_the_order_of_the_claims(self, store: PostgresStore, rival: PostgresStore) -> None:
        await complete(store, [B])
        async with rival.transaction(group=1) as held:
            await held.claim([C])
            async with store.transaction(group=3) as claims:
                found = await claims.claim([C, B, A])
        assert found == [Mark.BUSY, Record(State.COMPLETED, B.fingerprint), Mark.CLAIMED]

    async def test_a_record_remembers_the_value_beside_the_bytes(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        valued = Claim(A.key, A.scope, A.fingerprint, canonical=b"c" * 16)
        await complete(store, [valued, B])
        found = [Record(State.COMPLETED, A.fingerprint, None, b"c" * 16), Record(State.COMPLETED, B.fingerprint)]
        async with rival.transaction(group=2) as claims:
            assert await claims.claim([valued, B]) == found
        assert await rival.peek([A.key, B.key]) == found

    async def test_a_message_without_a_fingerprint_is_remembered_without_one(self, store: PostgresStore) -> None:
        bare = claim_of("bare", fingerprint=None)
        await complete(store, [bare])
        assert await store.peek([bare.key]) == [Record(State.COMPLETED, None)]

    async def test_what_is_not_completed_leaves_neither_claim_nor_effect(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        with suppress(ZeroDivisionError):
            async with store.transaction(group=1) as claims:
                await claims.claim([A])
                await harness.write(claims.tx(), "half")
                raise ZeroDivisionError
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
            await harness.write(claims.tx(), "left")

        assert await harness.effects() == []
        async with rival.transaction(group=1) as claims:
            assert await claims.claim([A]) == [Mark.CLAIMED]

    async def test_effects_records_and_results_are_one_commit(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        async with store.transaction(group=2) as claims:
            await claims.claim([A, B])
            await harness.write(claims.tx(), "a")
            await harness.write(claims.tx(), "b")
            assert await rival.peek([A.key, B.key]) == [None, None]
            assert await harness.effects() == []
            await claims.complete([(B.key, JSON)], [])

        assert await harness.effects() == ["a", "b"]
        assert await rival.peek([B.key, A.key]) == [
            Record(State.COMPLETED, B.fingerprint, JSON),
            Record(State.COMPLETED, A.fingerprint),
        ]

    async def test_a_rivals_uncommitted_key_is_busy_and_is_not_waited_for(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        async with rival.transaction(group=1) as held:
            assert await held.claim([A]) == [Mark.CLAIMED]
            async with asyncio.timeout(PATIENCE), store.transaction(group=1) as claims:
                assert await claims.claim([A]) == [Mark.BUSY]
            async with asyncio.timeout(PATIENCE), store.transaction(group=2) as claims:
                assert await claims.claim([B, A]) == [Mark.CLAIMED, Mark.BUSY]

        async with store.transaction(group=1) as claims:
            assert await claims.claim([A]) == [Mark.CLAIMED]

    async def test_those_with_one_gate_take_turns_and_others_pass(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        turns: list[str] = []

        async def second() -> None:
            async with rival.transaction(group=2, gate="shop") as claims:
                assert await claims.claim([B]) == [Mark.CLAIMED]
                turns.append("second")
                await claims.complete([], [])

        async with asyncio.timeout(PATIENCE), store.transaction(group=2, gate="shop") as claims:
            await claims.claim([A])
            waiting = asyncio.create_task(second())
            for gate in ["another", None] * 10:  # time enough for one that does not wait
                async with rival.transaction(group=2, gate=gate) as passing:
                    assert await passing.claim([C]) == [Mark.CLAIMED]
            turns.append("first")
            await claims.complete([], [])
            await waiting
        assert turns == ["first", "second"]

    async def test_a_committed_record_wins_over_a_key_not_free(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        # Two keys that share their first eight bytes also share the lock that makes a claim not wait.
        twin = Claim(A.key[:8] + bytes(24), A.scope, A.fingerprint)
        await complete(store, [A])
        async with rival.transaction(group=1) as held:
            assert await held.claim([twin]) == [Mark.CLAIMED]
            async with store.transaction(group=1) as claims:
                assert await claims.claim([A]) == [Record(State.COMPLETED, A.fingerprint)]

    async def test_of_many_that_claim_at_once_one_has_the_key(
        self, stores: tuple[PostgresStore, PostgresStore], harness: StoreHarness
    ) -> None:
        over = asyncio.Event()
        claimed: list[object] = []

        async def rivalry(store: PostgresStore) -> None:
            async with store.transaction(group=1) as claims:
                claimed.extend(await claims.claim([A]))
                if len(claimed) == 8:
                    over.set()
                await over.wait()

        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(rivalry(stores[n % 2]) for n in range(8)))
        assert sorted(map(str, claimed)) == ["Mark.BUSY"] * 7 + ["Mark.CLAIMED"]

    async def test_peeking_claims_nothing_and_answers_in_order(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        await complete(store, [B])
        assert await store.peek([A.key, B.key, C.key]) == [None, Record(State.COMPLETED, B.fingerprint), None]
        assert await store.peek([]) == []
        async with rival.transaction(group=2) as claims:
            assert await claims.claim([A, C]) == [Mark.CLAIMED, Mark.CLAIMED]

    # ---------------------------------------------------------------------------------------------------- results
    @pytest.mark.parametrize(
        "result",
        [
            StoredResult(b""),
            StoredResult(b'{ "a" :1.0e0,"a":\t2}'),
            StoredResult(bytes(range(256)), "application/octet-stream"),
            StoredResult(b"x" * 1_000_000, "text/plain"),
            StoredResult(b"", "", 204),
            SEE_OTHER,
        ],
        ids=["empty", "odd JSON", "all bytes", "a megabyte", "no content", "headers in order"],
    )
    async def test_a_result_is_given_back_byte_for_byte(self, store: PostgresStore, result: StoredResult) -> None:
        await complete(store, [A], [(A.key, result)])
        assert await store.peek([A.key]) == [Record(State.COMPLETED, A.fingerprint, result)]
        async with store.transaction(group=1) as claims:
            assert await claims.claim([A]) == [Record(State.COMPLETED, A.fingerprint, result)]

    async def test_results_with_a_status_and_without_are_stored_together(self, store: PostgresStore) -> None:
        results = [(A.key, SEE_OTHER), (B.key, JSON), (C.key, StoredResult(b"", "", 204))]
        await complete(store, [A, B, C], results)
        found = await store.peek([A.key, B.key, C.key])
        assert [each.result for each in found if each is not None] == [result for _, result in results]

    async def test_a_transaction_that_claimed_nothing_new_may_be_completed(self, store: PostgresStore) -> None:
        await complete(store, [A])
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
            await claims.complete([], [])

    # ------------------------------------------------------------------------------------------------------------ tx
    async def test_a_tx_ends_when_the_next_one_is_handed_out(self, store: PostgresStore, harness: StoreHarness) -> None:
        async with store.transaction(group=2) as claims:
            await claims.claim([A, B])
            first = claims.tx()
            await harness.write(first, "in time")
            second = claims.tx()
            with pytest.raises(HandlerFault, match="after its handler returned"):
                await harness.write(first, "late")
            await harness.write(second, "next")
            await claims.complete([], [])
        with pytest.raises(HandlerFault, match="after its handler returned"):
            await harness.write(second, "far too late")
        assert await harness.effects() == ["in time", "next"]

    async def test_a_swallowed_database_error_is_found_after_its_handler(
        self, store: PostgresStore, harness: StoreHarness
    ) -> None:
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
            await harness.write(claims.tx(), "lost")
            claims.check()
            await harness.break_transaction(claims.tx())
            with pytest.raises(HandlerFault, match="swallowed"):
                claims.check()
        assert await harness.effects() == []

    async def test_a_failed_transaction_cannot_be_completed(self, store: PostgresStore, harness: StoreHarness) -> None:
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
            await harness.break_transaction(claims.tx())
            with pytest.raises(Exception, match=r".+") as refused:
                await claims.complete([], [])
        # Those blame no message, so the group would run again for ever.
        assert not isinstance(refused.value, (CommitUnknown, ConfigurationError, Contention, StoreUnavailable))
        assert await store.peek([A.key]) == [None]

    # --------------------------------------------------------------------------------------------------- attempts
    async def test_attempts_are_counted_taken_back_and_forgotten(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        assert await store.count_attempt(A, None) == 1
        assert await rival.count_attempt(A, "boom\x00") == 2
        await rival.uncount_attempt(A)
        assert await store.note_error(A, "boom again") == 1
        assert await store.count_attempt(A, "a third time") == 2
        assert await store.count_attempt(B, None) == 1

        await complete(store, [A], forget=[A.key])

        assert await store.count_attempt(A, None) == 1
        assert await store.count_attempt(B, None) == 2

    async def test_marks_are_no_attempts_and_belong_to_who_comes_first(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        await store.count_attempt(A, "counted")
        assert await store.mark_attempts([A, B, C]) == {B.key, C.key}
        assert await rival.mark_attempts([C, B, A]) == set()
        assert await rival.count_attempt(B, None) == 1

        await store.unmark_attempts([A.key, B.key, C.key])

        assert await rival.mark_attempts([A, B, C]) == {C.key}
        assert [await store.count_attempt(claim, None) for claim in (A, B, C)] == [2, 2, 1]

    async def test_marks_are_forgotten_with_what_they_were_made_for(self, store: PostgresStore) -> None:
        await store.mark_attempts([A, B])
        await complete(store, [A, B], forget=[A.key])
        assert await store.mark_attempts([A, B]) == {A.key}

    async def test_marks_made_at_once_belong_to_one_of_two(self, store: PostgresStore, rival: PostgresStore) -> None:
        for n in range(10):
            claims = [claim_of(f"{n} {each}") for each in range(50)]
            ours, theirs = await asyncio.gather(store.mark_attempts(claims), rival.mark_attempts(claims[::-1]))
            assert (ours | theirs, ours & theirs) == ({claim.key for claim in claims}, set())

    async def test_what_is_being_read_was_not_begun(self, store: PostgresStore, rival: PostgresStore) -> None:
        async with store.reading([A, B, A], 1) as ours:
            assert (ours.ours, ours.begun) == ({A.key, B.key}, set())
            async with rival.reading([C, B], 2) as theirs:
                assert (theirs.ours, theirs.begun) == ({C.key}, set())
                await theirs.end()
            async with rival.reading_alone(A, 3) as alone:
                assert (alone.ours, alone.attempts) == (set(), 0)
                await alone.end()
            await ours.end()
        async with rival.reading([A, B], 4) as theirs:
            assert (theirs.ours, theirs.begun) == ({A.key, B.key}, set())

    async def test_what_was_not_read_to_the_end_is_counted_by_one_of_two(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        async with rival.reading([A, B], 1):
            pass
        async with store.reading([C, A], 2) as ours:
            assert (ours.ours, ours.begun) == ({C.key}, {A.key})
        async with store.reading_alone(A, 3) as ours:
            assert ours.attempts == 1
            async with rival.reading_alone(A, 4) as theirs:
                assert (theirs.ours, theirs.attempts) == (set(), 0)
        async with rival.reading_alone(A, 5) as theirs:
            assert theirs.attempts == 2
            await store.end_reading([A, B], 3)  # which lost its connection, perhaps, and is late
            async with store.reading([A], 6) as ours:
                assert (ours.ours, ours.begun) == (set(), set())
            await theirs.end()
        await store.end_reading([B], 1)
        async with store.reading([A, B], 7) as ours:
            assert (ours.ours, ours.begun) == ({A.key, B.key}, set())

    async def test_what_a_process_did_not_read_to_the_end_is_no_death_while_it_lives(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        """Its connection was lost, and then it had to give the delivery up. To a rival it has died."""
        async with store.reading([A], 1):
            pass
        for reader in (2, 3):
            async with store.reading([A], 9) as again:
                assert again.begun == {A.key}
            async with store.reading_alone(A, reader) as alone:
                assert (alone.ours, alone.attempts) == ({A.key}, 0)
        async with rival.reading_alone(A, 4) as theirs:
            assert theirs.attempts == 1
        async with store.reading_alone(A, 5) as ours:
            assert ours.attempts == 2
            await ours.end()

    async def test_a_reading_may_be_begun_again_by_the_same_reader(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        """Whose first answer was lost, perhaps."""
        for _ in range(2):
            async with store.reading([A], 1) as ours:
                assert (ours.ours, ours.begun) == ({A.key}, set())
        await store.end_reading([A], 1)
        async with rival.reading([A], 7):
            pass
        for _ in range(2):
            async with store.reading_alone(A, 2) as ours:
                assert ours.attempts == 1

    async def test_an_attempt_of_another_message_is_counted_with_a_commit_or_not_at_all(
        self, store: PostgresStore, rival: PostgresStore
    ) -> None:
        for expected in (1, 2):
            async with store.transaction(group=2) as claims:
                await claims.claim([claim_of(f"{expected}"), C])
            async with store.transaction(group=1) as claims:
                await claims.claim([claim_of(f"{expected}")])
                assert await claims.complete([], [], failed=(C, "boom\x00")) == expected
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
        assert await rival.note_error(C, "the same one") == 2

    async def test_no_more_is_taken_back_than_was_counted(self, store: PostgresStore) -> None:
        await store.uncount_attempt(A)
        await store.count_attempt(A, None)
        for _ in range(3):
            await store.uncount_attempt(A)
        assert await store.count_attempt(A, None) == 1

    async def test_noting_an_error_of_an_attempt_that_is_gone_counts_it(self, store: PostgresStore) -> None:
        assert await store.note_error(A, "its row was pruned") == 1

    async def test_an_attempt_outlives_the_rollback_of_what_failed(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        async with rival.transaction(group=1) as claims:
            await claims.claim([A])
            await harness.write(claims.tx(), "rolled back")
            async with asyncio.timeout(PATIENCE):
                assert await store.count_attempt(A, "counted meanwhile") == 1
        assert await store.count_attempt(A, None) == 2

    # --------------------------------------------------------------------------------------- rejections, dead letters
    async def test_a_rejection_is_final_and_given_back(self, store: PostgresStore, rival: PostgresStore) -> None:
        await store.count_attempt(A, "first it failed")
        assert await store.reject(A, JSON) is None
        rejected = Record(State.FAILED, A.fingerprint, JSON)
        assert await rival.peek([A.key]) == [rejected]
        assert await rival.reject(A, StoredResult(b"another")) == rejected
        assert await store.reject(B, SEE_OTHER) is None
        assert await rival.reject(B, JSON) == Record(State.FAILED, B.fingerprint, SEE_OTHER)
        assert await store.count_attempt(A, None) == 1

    async def test_a_rejection_is_judged_again(self, store: PostgresStore, rival: PostgresStore) -> None:
        await complete(rival, [A], [(A.key, JSON)])
        assert await store.reject(A, StoredResult(b"too late")) == Record(State.COMPLETED, A.fingerprint, JSON)
        async with rival.transaction(group=1) as held:
            await held.claim([B])
            with pytest.raises(Contention):
                await store.reject(B, JSON)
        assert await store.peek([B.key]) == [None]

    async def test_a_dead_letter_and_its_record_are_one_commit(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        await store.count_attempt(A, "boom")
        assert isinstance(await store.bury(letter_of("a"), A), int)
        assert await harness.letters() == [("attempts_exhausted", 1)]
        dead = Record(State.DEAD, A.fingerprint)
        assert await rival.peek([A.key]) == [dead]
        assert await rival.bury(letter_of("a", reason="killed_worker"), A) == dead
        assert await harness.letters() == [("attempts_exhausted", 1)]
        assert await store.count_attempt(A, None) == 1

    async def test_nothing_is_buried_that_somebody_has_applied_or_holds(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        await complete(rival, [A])
        assert await store.bury(letter_of("a"), A) == Record(State.COMPLETED, A.fingerprint)
        async with rival.transaction(group=1) as held:
            await held.claim([B])
            with pytest.raises(Contention):
                await store.bury(letter_of("b"), B)
        assert await harness.letters() == []

    async def test_a_letter_of_the_same_identity_is_counted_once_more(
        self, store: PostgresStore, rival: PostgresStore, harness: StoreHarness
    ) -> None:
        for arrival in (store, rival, store):
            assert isinstance(await arrival.bury(letter_of("x", reason="undecodable"), None), int)
        await store.bury(letter_of("y", reason="undecodable"), None)
        assert await harness.letters() == [("undecodable", 3), ("undecodable", 1)]

    async def test_a_later_arrival_of_a_dead_message_is_counted(
        self, store: PostgresStore, harness: StoreHarness
    ) -> None:
        await store.bury(letter_of("a"), A)
        await store.bury(letter_of("b", reason="killed_worker"), B)
        await store.count_dead(A.key)
        await store.count_dead(A.key)
        await store.count_dead(C.key)
        assert await harness.letters() == [("attempts_exhausted", 3), ("killed_worker", 1)]

    async def test_a_store_says_how_many_keys_may_be_held_at_once(self, store: PostgresStore) -> None:
        assert store.most_locks >= 1


async def complete(
    store: PostgresStore,
    claims: Sequence[Claim],
    results: Sequence[tuple[bytes, StoredResult]] = (),
    forget: Sequence[bytes] = (),
) -> None:
    """Claim and commit, as for handlers that do nothing."""
    async with store.transaction(group=len(claims)) as open_:
        await open_.claim(claims)
        await open_.complete(results, forget)
