"""R37: a record that has expired is none, though it is there, and its key is claimed by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from msgspec.structs import replace as changed

from idemconsumer.message.message import StoredResult
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.worker.retention import prune_once
from tests.stores.lease_harness import message_of
from tests.stores.store_contract import JSON, claim_of, complete
from tests.support.ledger import SCHEMA, Ledger
from tests.support.sagas import Lease
from tests.support.waiting import until

HOUR = 3600.0
A, B, C, D = (changed(claim_of(name), expires=HOUR) for name in "abcd")
ANEW = StoredResult(b"anew", "text/plain", 201)


@pytest.fixture
async def shared(book: Ledger) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=4, longest_run=30.0)
    yield store
    await store.close()


def later(ledger: Ledger, *claims: Claim, hours: int = 2) -> None:
    """As if so many hours had gone by for these records. No trigger is to think that they have changed."""
    ledger.run("select set_config('session_replication_role', 'replica', false)")
    ledger.run(
        "update idemconsumer.record set changed_at = changed_at - make_interval(hours => %s),"
        " expires_at = expires_at - make_interval(hours => %s) where key = any(%s)",
        [hours, hours, [claim.key for claim in claims]],
    )
    ledger.run("select set_config('session_replication_role', 'origin', false)")


def lives(ledger: Ledger, claim: Claim) -> float:
    """How many seconds from its last change its record counts."""
    query = "select extract(epoch from expires_at - changed_at)::float8 from idemconsumer.record where key = %s"
    return float(ledger.run(query, [claim.key])[0][0])


async def found(store: PostgresStore, *claims: Claim) -> list[Record | Mark]:
    async with store.transaction(group=1) as open_:
        return await open_.claim(claims)


async def test_a_record_counts_until_it_expires_and_then_its_key_is_new(book: Ledger, shared: PostgresStore) -> None:
    await complete(shared, [A], [(A.key, JSON)])
    assert await found(shared, A) == [Record(State.COMPLETED, A.fingerprint, JSON)]
    assert lives(book, A) == pytest.approx(HOUR, abs=1)

    later(book, A)
    assert await shared.peek([A.key]) == [None]
    async with shared.transaction(group=1) as open_:
        assert await open_.claim([A]) == [Mark.CLAIMED]
        await open_.complete([(A.key, ANEW)], [])
    assert await found(shared, A) == [Record(State.COMPLETED, A.fingerprint, ANEW)]


async def test_whoever_claims_it_without_a_time_of_its_own_finds_it_expired_too(
    book: Ledger, shared: PostgresStore
) -> None:
    await complete(shared, [A], [(A.key, JSON)])
    later(book, A)
    assert await shared.reject(changed(A, expires=None), ANEW) is None
    later(book, A)
    assert await shared.peek([A.key]) == [Record(State.FAILED, A.fingerprint, ANEW)], "for as long as it is there"


async def test_of_a_group_only_the_expired_are_claimed_anew(book: Ledger, shared: PostgresStore) -> None:
    await complete(shared, [A, B], [(A.key, JSON), (B.key, JSON)])
    later(book, A)
    async with shared.transaction(group=1) as rival:
        await rival.claim([C])
        assert await found(shared, B, A, C, D) == [
            Record(State.COMPLETED, B.fingerprint, JSON), Mark.CLAIMED, Mark.BUSY, Mark.CLAIMED,
        ]  # fmt: skip


async def test_a_rollback_brings_it_back_expired(book: Ledger, shared: PostgresStore) -> None:
    await complete(shared, [A], [(A.key, JSON)])
    later(book, A)
    assert await found(shared, A) == [Mark.CLAIMED]
    assert book.states == [State.COMPLETED]
    assert book.run("select body from idemconsumer.result") == [(JSON.body,)]
    assert await found(shared, A) == [Mark.CLAIMED]


async def test_of_two_that_claim_it_one_runs_and_the_other_gets_what_that_left(
    book: Ledger, shared: PostgresStore
) -> None:
    await complete(shared, [A], [(A.key, JSON)])
    later(book, A)
    async with shared.transaction(group=1) as first:
        assert await first.claim([A]) == [Mark.CLAIMED]
        async with asyncio.timeout(30):
            assert await found(shared, A) == [Mark.BUSY], "neither waited for, nor answered with what has expired"
        await first.complete([(A.key, ANEW)], [])
    assert await found(shared, A) == [Record(State.COMPLETED, A.fingerprint, ANEW)]


async def test_one_that_is_claimed_anew_between_two_statements_of_a_claim_is_found(
    book: Ledger, shared: PostgresStore
) -> None:
    """The claim waits for a stranger, in its insert; when it goes on, what it then reads has been replaced."""
    await complete(shared, [A], [(A.key, JSON)])
    later(book, A)
    async with await psycopg.AsyncConnection.connect(book.dsn) as stranger:
        await stranger.execute(
            "insert into idemconsumer.record (key, scope_id, state, changed_at) values (%s, 1, 3, clock_timestamp())",
            [B.key],
        )
        claiming = asyncio.create_task(found(shared, B, A))
        blocked = "select 1 from pg_stat_activity where wait_event = 'transactionid' and query ~ 'claim'"
        await until(lambda: book.run(blocked))
        async with shared.transaction(group=1) as rival:
            assert await rival.claim([A]) == [Mark.CLAIMED]
            await rival.complete([(A.key, ANEW)], [])
        await stranger.rollback()
        assert await claiming == [Mark.CLAIMED, Record(State.COMPLETED, A.fingerprint, ANEW)]


async def test_one_that_is_claimed_anew_before_it_is_deleted_stays(book: Ledger, shared: PostgresStore) -> None:
    """The claim has found that it had expired, and waits for a stranger before it deletes it."""
    await complete(shared, [A], [(A.key, JSON)])
    later(book, A)
    async with await psycopg.AsyncConnection.connect(book.dsn) as stranger:
        await stranger.execute("lock table idemconsumer.history in access exclusive mode")
        claiming = asyncio.create_task(found(shared, A))
        await until(lambda: book.run("select 1 from pg_locks where not granted"))
        later(book, A, hours=-2)
        await stranger.rollback()
        assert await claiming == [Record(State.COMPLETED, A.fingerprint, JSON)]


@pytest.mark.parametrize("state", [State.PENDING, State.PROCESSING, State.UNDOING, State.DEAD])
async def test_only_what_is_completed_or_failed_expires(book: Ledger, shared: PostgresStore, state: State) -> None:
    async with shared.transaction(group=1) as open_:
        await open_.claim([A], state=state)
        await open_.complete([], [])
    later(book, A)
    assert await found(shared, A) == await shared.peek([A.key]) == [Record(state, A.fingerprint)]
    await prune_once(book.dsn, SCHEMA)
    assert book.states == ([] if state is State.DEAD else [state]), "DEAD, without a letter"


async def test_a_saga_expires_so_long_after_its_end(book: Ledger, shared: PostgresStore) -> None:
    ((worker,),) = book.run(
        "insert into idemconsumer.worker (name, lease, until, runs)"
        " values ('test', '1 hour', clock_timestamp() + interval '1 hour', '[]') returning id"
    )
    leases = PostgresLeases(shared.pool, Lease(worker))
    saga = await leases.begin(A, message_of("a"), "pay", None)
    assert isinstance(saga, LeasedSaga)
    async with leases.step(saga, "one", has_undo=False, undo=False) as step:
        await step.finish(None, overlapped=False)
    later(book, A)
    undoing = await leases.undo(saga, JSON)
    assert undoing is not None
    await leases.complete(undoing, State.FAILED, ANEW)
    assert await found(shared, A) == [Record(State.FAILED, A.fingerprint, ANEW)]
    assert lives(book, A) == pytest.approx(HOUR, abs=1)

    later(book, A)
    again = await leases.begin(A, message_of("a"), "pay", None)
    assert isinstance(again, LeasedSaga)
    assert await leases.steps(A.key) == [], "those of the former one are not its own"


async def test_pruning_goes_by_the_time_of_the_record(book: Ledger, shared: PostgresStore) -> None:
    await complete(shared, [A, B], [(A.key, JSON), (B.key, JSON)])
    book.run("update idemconsumer.scope set retain = '0 seconds'")
    later(book, B)
    assert await prune_once(book.dsn, SCHEMA) == 1
    assert book.run("select key from idemconsumer.record natural join idemconsumer.result") == [(A.key,)]


async def test_a_range_is_looked_at_again_as_soon_as_what_comes_to_it_may_expire(
    book: Ledger, shared: PostgresStore
) -> None:
    async with shared.transaction(group=1) as open_:
        await open_.claim([A], state=State.PENDING)
        await open_.complete([], [])
    await prune_once(book.dsn, SCHEMA)
    soon = "select bool_and(look_at <= looked_at + interval '61 minutes') from idemconsumer.upkeep_range"
    assert book.run(soon) == [(True,)]
