"""R30: scopes come without a commit each, are forgotten by processes, and pruned when nothing refers to them."""

from __future__ import annotations

import asyncio
import contextlib

import psycopg
import pytest

from idemconsumer.errors import StoreUnavailable
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark
from idemconsumer.stores.columns import claimed
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.stores.signals import Signal
from idemconsumer.worker.retention import prune_once
from tests.support.ledger import SCHEMA, Ledger
from tests.support.sagas import Lease, order
from tests.support.tuning import tuned
from tests.support.waiting import until


def claim_of(tenant: str, key: str = "k") -> Claim:
    return Claim(f"{tenant} {key}".encode().ljust(32), f"shop/{tenant}/take", None, 3600.0)


async def take(store: PostgresStore, *claims: Claim) -> None:
    async with store.transaction(group=len(claims)) as transaction:
        assert await transaction.claim(claims) == [Mark.CLAIMED] * len(claims)
        await transaction.complete([], [])


def scopes(ledger: Ledger) -> list[tuple[str, bool]]:
    """Those in the table, and whether they are retired."""
    rows = ledger.run("select split_part(name, '/', 2), retired_at is not null from idemconsumer.scope order by 1")
    return [(str(name), bool(retired)) for name, retired in rows]


def later(ledger: Ledger, days: int) -> None:
    """As if so many days had gone by, in which passes have looked at everything."""
    ledger.run(
        "update idemconsumer.scope set seen_at = seen_at - make_interval(days => %s),"
        " retired_at = retired_at - make_interval(days => %s)",
        [days, days],
    )


async def test_a_scope_goes_when_no_record_of_it_was_seen_for_a_month(ledger: Ledger, store: PostgresStore) -> None:
    await take(store, claim_of("gone"), claim_of("kept"))
    ledger.run("delete from idemconsumer.record where key = %s", [claim_of("gone").key])
    await prune_once(ledger.dsn, SCHEMA)
    assert scopes(ledger) == [("gone", False), ("kept", False)]

    later(ledger, 3)
    await prune_once(ledger.dsn, SCHEMA)
    assert scopes(ledger) == [("gone", True), ("kept", False)]

    later(ledger, 31)
    await prune_once(ledger.dsn, SCHEMA)
    assert scopes(ledger) == [("kept", False)]


async def test_nothing_goes_before_each_range_was_looked_at(ledger: Ledger, store: PostgresStore) -> None:
    await take(store, claim_of("kept"))
    ledger.run("update idemconsumer.scope set retired_at = clock_timestamp() - interval '31 days'")
    await prune_once(ledger.dsn, SCHEMA)
    assert scopes(ledger) == [("kept", False)], "a record brings its scope back"

    ledger.run("update idemconsumer.scope set retired_at = clock_timestamp() - interval '31 days'")
    ledger.run("update idemconsumer.upkeep_range set looked_at = clock_timestamp() - interval '40 days'")
    ledger.run("update idemconsumer.upkeep set until = clock_timestamp()")
    await prune_once(ledger.dsn, SCHEMA, every=60.0)  # in which no range is to be looked at
    assert scopes(ledger) == [("kept", True)]


@pytest.mark.parametrize("what", ["an attempt", "a signal"])
async def test_what_else_refers_to_a_scope_keeps_it(ledger: Ledger, store: PostgresStore, what: str) -> None:
    claim = claim_of("tried")
    if what == "an attempt":
        await store.count_attempt(claim, "boom")
    else:
        await store.pool.alone("send_signal", Signal(claim.key, claim.scope, "go", None).params)
    later(ledger, 3)
    await prune_once(ledger.dsn, SCHEMA)
    later(ledger, 31)
    await prune_once(ledger.dsn, SCHEMA)
    assert scopes(ledger) == [("tried", True)]


async def claim_at_once(connection: psycopg.AsyncConnection, key: str, scope: int) -> None:
    """As that of a saga, in a scope that it has looked up at some time."""
    claim = "select idemconsumer.claim(%s::idemconsumer.claim[], 3::smallint, false)"
    await connection.execute("select set_config('idemconsumer.open', 'o', true)")
    await connection.execute(claim, [claimed([Claim(key.encode(), "", None)], [scope])])


async def test_a_claim_brings_its_scope_back_and_is_waited_for_by_nobody(ledger: Ledger) -> None:
    ((scope,),) = ledger.run(
        "insert into idemconsumer.scope (name, seen_at, retired_at) values ('shop/a/take', '2000-01-01', '2000-01-01')"
        " returning id"
    )
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as worker:
        await claim_at_once(worker, "k", scope)
        await prune_once(ledger.dsn, SCHEMA)
        await worker.execute("select idemconsumer.seal('o')")
    assert scopes(ledger) == [("a", False)]


async def test_a_scope_that_is_pruned_as_it_is_claimed_stays(ledger: Ledger) -> None:
    """The claim waits for the pruner, which has the row, and finds that it is gone."""
    ((scope,),) = ledger.run(
        "insert into idemconsumer.scope (name, retired_at) values ('shop/a/take', '2000-01-01') returning id"
    )
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as pruner:
        await pruner.execute("delete from idemconsumer.scope")
        async with await psycopg.AsyncConnection.connect(ledger.dsn) as worker:
            claiming = asyncio.create_task(claim_at_once(worker, "k", scope))
            await until(lambda: ledger.run("select 1 from pg_locks where not granted"))
            await pruner.commit()
            with pytest.raises(psycopg.Error, match="pruned"):
                await claiming
            await worker.rollback()
    assert ledger.run("select key from idemconsumer.record") == []


async def test_a_saga_whose_scope_is_pruned_is_refused_and_begun_again(ledger: Ledger, store: PostgresStore) -> None:
    sagas = PostgresLeases(store.pool, Lease(1))
    await take(store, claim_of("a"))
    ledger.run("delete from idemconsumer.scope")
    saga = await sagas.begin(claim_of("a", "second"), order(), "take", None)
    assert isinstance(saga, LeasedSaga)
    of_saga = "select count(*) from idemconsumer.saga join idemconsumer.scope as s on s.id = scope_id"
    assert ledger.run(of_saga) == [(1,)]


async def test_an_id_is_not_used_long_after_its_scope_was_looked_up(
    ledger: Ledger, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await take(store, claim_of("a"))
    ledger.run("update idemconsumer.scope set retired_at = clock_timestamp()")
    await take(store, claim_of("a", "soon"))
    assert scopes(ledger) == [("a", True)], "looked at by no claim"
    tuned(monkeypatch, scopes_known_for=-1.0)
    await take(store, claim_of("a", "late"))
    assert scopes(ledger) == [("a", False)]


async def test_a_server_that_was_set_back_may_have_given_the_id_to_another_scope(
    ledger: Ledger, store: PostgresStore
) -> None:
    await take(store, claim_of("a"))
    ledger.run("truncate idemconsumer.scope, idemconsumer.record restart identity")
    ledger.run("insert into idemconsumer.scope (name, retain) values ('shop/other/take', '1 s')")
    ledger.run(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pid <> pg_backend_pid() and datname = current_database()"
    )
    with contextlib.suppress(StoreUnavailable):
        await take(store, claim_of("a"))
    await take(store, claim_of("a", "second"))
    assert ledger.run("select distinct name from idemconsumer.record join idemconsumer.scope on id = scope_id") == [
        ("shop/a/take",)
    ]


async def test_what_was_met_in_a_transaction_that_is_rolled_back_is_not_known(
    ledger: Ledger, store: PostgresStore
) -> None:
    """Its id may be another scope's by then."""
    ledger.run(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'no' using errcode = '53200'; end $$"
    )
    ledger.run(
        "create constraint trigger refuse after insert on idemconsumer.scope deferrable initially deferred"
        " for each row execute function refuse()"
    )
    with pytest.raises(Exception, match="no"):
        await take(store, claim_of("a"))
    ledger.run("drop trigger refuse on idemconsumer.scope")
    ledger.run("alter sequence idemconsumer.scope_id_seq restart")  # as a crash of the server may do
    ledger.run("insert into idemconsumer.scope (name) values ('shop/other/take')")

    await take(store, claim_of("a"))
    assert ledger.run("select distinct name from idemconsumer.record join idemconsumer.scope on id = scope_id") == [
        ("shop/a/take",)
    ]


async def test_scopes_that_are_new_to_a_group_are_one_commit(ledger: Ledger, store: PostgresStore) -> None:
    ledger.run("insert into idemconsumer.scope (name, retain) values ('shop/b/take', '1 day')")
    await take(store, *(claim_of(tenant) for tenant in "cab"))
    assert ledger.run("select count(distinct xmin::text), count(*), max(retain)::text from idemconsumer.scope") == [
        (1, 3, "01:00:00")
    ]


async def test_a_process_remembers_so_many_scopes(
    ledger: Ledger, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, known_scopes=2)
    await take(store, *(claim_of(tenant) for tenant in "abc"))
    await take(store, claim_of("b", "used"))
    await take(store, claim_of("d"), claim_of("b", "again"))
    assert list(store.pool._scopes) == ["shop/b/take", "shop/d/take"]

    async with store.transaction(group=1) as transaction:  # what has failed before may be of any of them
        await transaction.claim([claim_of("b", "last")])
        assert await transaction.complete([], [], failed=(claim_of("c", "failed"), "boom")) == 1
