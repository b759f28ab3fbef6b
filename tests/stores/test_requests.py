"""PostgresRequests passes the suite that ships with the library, and what Postgres alone must be asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer.admin.decisions import Deciding
from idemconsumer.admin.doctor import diagnose
from idemconsumer.admin.stored_keys import Keys
from idemconsumer.errors import ConfigurationError, StoreUnavailable
from idemconsumer.ports.requests import Held, Running
from idemconsumer.rules.values import Mark, Record, State
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.testing import RequestHarness, RequestProcess, RequestStoreContract
from idemconsumer.worker.retention import prune_once
from tests.support.foreign import FOREIGN
from tests.support.leases import STEADY, UnkeptLease
from tests.support.ledger import SCHEMA, Ledger, OpenStore
from tests.support.servers.proxy import Proxy
from tests.support.tuning import tuned
from tests.support.waiting import until

pytest.register_assert_rewrite("idemconsumer.testing.request_contract")

from idemconsumer.testing.request_contract import (  # noqa: E402
    CREATED,
    OTHER,
    PATIENCE,
    A,
    hold,
    never,
    replace_claim,
    until_completed,
    until_held,
)

B = replace_claim(A, key=b"b" * 32)

Open = Callable[..., Any]


@pytest.fixture
async def opened(book: Ledger) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_(dsn: str = "", ledger: Ledger = book) -> tuple[PostgresRequests, UnkeptLease]:
            store = await PostgresStore.open(dsn or ledger.dsn, SCHEMA, connections=8, longest_run=30.0)
            stack.push_async_callback(store.close)
            lease = UnkeptLease(ledger)
            return PostgresRequests(store.pool, lease), lease

        yield open_


class PostgresHarness:
    def __init__(self, opened: Open, ledger: Ledger) -> None:
        self._opened = opened
        self._ledger = ledger

    async def process(self) -> RequestProcess:
        store, lease = await self._opened(ledger=self._ledger)
        return RequestProcess(store, lease.expire)


class TestPostgres(RequestStoreContract):
    @pytest.fixture
    def harness(self, opened: Open, shared_ledger: Ledger) -> RequestHarness:
        return PostgresHarness(opened, shared_ledger)


async def test_of_two_that_claim_at_once_what_was_answered_and_forgotten_one_has_it(book: Ledger, opened: Open) -> None:
    store, _ = await opened()
    await store.complete(await hold(store, A), CREATED)
    assert await store.claim(A, never) == await store.peek(A.key)
    book.run("delete from idemconsumer.record")
    found = await asyncio.gather(store.claim(A, never), store.claim(A, never))
    assert [isinstance(each, Held) for each in found].count(True) == 1


async def test_a_claim_and_its_end_are_one_commit_each(book: Ledger, opened: Open) -> None:
    requests, _ = await opened()
    held = await hold(requests, A)
    rows = book.run("select xmin::text from idemconsumer.record union all select xmin::text from idemconsumer.request")
    assert (len(rows), len(set(rows))) == (2, 1)
    await requests.complete(held, CREATED)
    rows = book.run("select xmin::text from idemconsumer.record union all select xmin::text from idemconsumer.result")
    assert (len(rows), len(set(rows))) == (2, 1)
    assert book.run("select from idemconsumer.request") == []


async def test_a_joined_claim_and_a_leased_one_exclude_each_other(
    book: Ledger, opened: Open, open_store: OpenStore
) -> None:
    """H20."""
    requests, _ = await opened()
    joined = await open_store(book.dsn)
    async with joined.transaction(group=1) as claims:
        assert await claims.claim([A]) == [Mark.CLAIMED]
        async with asyncio.timeout(PATIENCE):
            assert await requests.claim(A, never) == Running()
    held = await requests.claim(A, never)
    assert isinstance(held, Held)
    async with joined.transaction(group=1) as claims:
        assert await claims.claim([A]) == [Record(State.PROCESSING, A.fingerprint)]


async def test_whoever_has_the_keys_lock_excludes_a_leased_claim_without_a_record(book: Ledger, opened: Open) -> None:
    """H20: a person who decides, or a claim that has not written its record yet."""
    requests, _ = await opened()
    async with Deciding(book.dsn, SCHEMA).transaction() as claims:
        await claims.send("lock_key", {"key": A.key})
        async with asyncio.timeout(PATIENCE):
            assert await requests.claim(A, never) == Running()
        assert book.states == []
    assert isinstance(await requests.claim(A, never), Held)


async def test_a_leased_claim_excludes_others_from_its_commit_on_and_not_before(
    book: Ledger, opened: Open, open_store: OpenStore
) -> None:
    """H20: record and row are one statement; of one that is rolled back nothing stays, and nobody has waited."""
    requests, _ = await opened()
    joined = await open_store(book.dsn)
    book.run("alter table idemconsumer.request add constraint no_row check (token < 0) not valid")
    with pytest.raises(Exception, match="no_row"):
        await requests.claim(A, never)
    book.run("alter table idemconsumer.request drop constraint no_row")
    assert book.states == []
    async with joined.transaction(group=1) as claims:
        assert await claims.claim([A]) == [Mark.CLAIMED]


async def test_nothing_is_held_under_a_lease_that_is_over(book: Ledger, opened: Open) -> None:
    """H22."""
    requests, lease = await opened()
    await requests.release(await requests.claim(A, never))
    await lease.expire()
    with pytest.raises(StoreUnavailable, match="lease of this process has ended"):
        await requests.claim(A, never)
    assert book.states == []
    lease.renew()
    assert isinstance(await requests.claim(A, never), Held)


async def test_whoever_holds_is_told_that_the_lease_is_lost(opened: Open) -> None:
    requests, lease = await opened()
    lost: list[str] = []
    held = await requests.claim(A, lambda: lost.append("a"))
    over = await requests.claim(B, lambda: lost.append("b"))
    await requests.complete(over, CREATED)
    await lease.expire()
    lease.lost()
    assert lost == ["a"]
    lease.renew()
    # It is of a former lease, so it is taken like anybody's.
    again = await requests.claim(A, never)
    assert isinstance(again, Held)
    assert again.again
    assert not await requests.complete(held, CREATED)


async def test_what_was_claimed_as_the_lease_was_lost_is_not_held(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, lease = await opened()
    claimed = requests._claimed

    async def as_it_is_lost(*given: Any) -> Any:
        found = await claimed(*given)
        lease.lost()
        return found

    monkeypatch.setattr(requests, "_claimed", as_it_is_lost)
    with pytest.raises(StoreUnavailable, match="was lost as the key was claimed"):
        await requests.claim(A, never)
    monkeypatch.undo()
    held = await until_held(requests, A)
    assert not held.again


async def test_nothing_is_claimed_under_a_lease_that_was_given_up(opened: Open) -> None:
    """H22: for the database it is good for some seconds more, and what still runs there would be taken for our own."""
    requests, lease = await opened()
    held = await hold(requests, A)
    lease.over = True
    lease.lost()
    with pytest.raises(StoreUnavailable, match="lease of this process has ended"):
        await requests.claim(A, never, again=False)
    assert await requests.complete(held, CREATED)


async def test_a_lease_is_asked_for_once_whoever_gives_up(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """H22: of two that register at once, one would not be renewed, and nobody told."""
    requests, lease = await opened()
    starts, go, start = 0, asyncio.Event(), lease.start

    async def slow(lost: Callable[[], None]) -> None:
        nonlocal starts
        starts += 1
        await go.wait()
        await start(lost)

    monkeypatch.setattr(lease, "start", slow)
    first = asyncio.create_task(requests.claim(A, never))
    await until(lambda: starts)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(requests.claim(A, never))
    await asyncio.sleep(0)
    go.set()
    assert isinstance(await second, Held)
    assert (first.cancelled(), starts) == (True, 1)


async def test_what_is_under_way_here_is_not_asked_for(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, _ = await opened()
    held = await hold(requests, A)
    monkeypatch.setattr(requests, "peek", None)
    assert [await requests.claim(A, never) for _ in range(2)] == [Running(requests._held[A.key].record)] * 2
    monkeypatch.undo()
    assert await requests.complete(held, CREATED)


async def test_an_end_that_the_database_refuses_for_now_is_made_up_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H23: as while it has no synchronous standby, and must have one."""
    requests, _ = await opened()
    held = await hold(requests, A)
    completed, asked = requests._completed, 0

    async def refused(*given: Any, **more: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ConfigurationError("no synchronous standby")
        return bool(await completed(*given, **more))

    monkeypatch.setattr(requests, "_completed", refused)
    with pytest.raises(ConfigurationError):
        await requests.complete(held, CREATED)
    await until_completed(requests, A)


async def test_of_two_that_saw_a_lost_key_the_second_finds_it_taken(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H22."""
    (owner, lease), (one, _), (two, _) = await opened(), await opened(), await opened()
    await owner.claim(A, never)
    await lease.expire()
    commit = one._commit
    found: list[Held | Running | Record] = []

    async def behind_a_rival(*statements: Any) -> Any:
        found.append(await two.claim(A, never))
        return await commit(*statements)

    monkeypatch.setattr(one, "_commit", behind_a_rival)
    assert isinstance(await one.claim(A, never), Running)
    (held,) = found
    assert isinstance(held, Held)
    assert await two.complete(held, CREATED)


async def test_when_a_lost_request_began_is_read_however_sessions_write_times(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H35. What cannot be read would be raised behind the commit that takes the key: it would be held for nobody."""
    monkeypatch.setenv("PGDATESTYLE", "German")
    (owner, lease), (other, _) = await opened(), await opened()
    await owner.claim(A, never)
    await lease.expire()
    (lost,) = await other.lost()
    held = await other.claim(A, never)
    assert isinstance(held, Held)
    assert held.since == lost.since
    assert timedelta() < datetime.now(UTC) - lost.since < timedelta(minutes=10)
    assert await other.complete(held, CREATED)


@pytest.fixture
async def proxy(book: Ledger) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(book.dsn)["port"]))) as proxy:
        yield proxy


@pytest.mark.parametrize("cut", ["before", "after"])
async def test_a_claim_whose_commit_is_unknown_is_held_once(book: Ledger, opened: Open, proxy: Proxy, cut: Any) -> None:
    """H23."""
    requests, _ = await opened(make_conninfo(book.dsn, host="127.0.0.1", port=proxy.port))
    await requests.release(await requests.claim(A, never))  # knows the scope by now
    trap = proxy.cut_at(mode=cut)
    held = await until_held(requests, A)
    assert trap.sprung.is_set()
    assert not held.again, "no handler has run"
    assert await requests.complete(held, CREATED)


@pytest.mark.parametrize("cut", ["before", "after"])
async def test_a_claim_that_nobody_hears_of_is_ended(book: Ledger, opened: Open, proxy: Proxy, cut: Any) -> None:
    """H23: nobody would end it while this process lives."""
    requests, _ = await opened(make_conninfo(book.dsn, host="127.0.0.1", port=proxy.port))
    rival, _ = await opened()
    await requests.release(await requests.claim(A, never))
    trap = proxy.cut_at(mode=cut)
    claiming = asyncio.create_task(requests.claim(A, never))
    await trap.sprung.wait()
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await claiming
    await proxy.restore()
    held = await until_held(rival, A)
    assert not held.again


@pytest.mark.parametrize("cut", ["before", "after"])
async def test_a_completion_whose_commit_is_unknown_is_stored_once(
    book: Ledger, opened: Open, proxy: Proxy, cut: Any
) -> None:
    """H23."""
    requests, _ = await opened(make_conninfo(book.dsn, host="127.0.0.1", port=proxy.port))
    rival, _ = await opened()
    held = await requests.claim(A, never)
    trap = proxy.cut_at(mode=cut)
    with pytest.raises(Exception, match="answer to COMMIT was lost"):
        await requests.complete(held, CREATED)
    assert trap.sprung.is_set()
    await until_completed(rival, A)
    assert await requests.complete(held, CREATED)
    assert not await requests.complete(held, OTHER)


async def test_a_release_during_an_outage_is_made_up_for(book: Ledger, opened: Open, proxy: Proxy) -> None:
    """H23."""
    requests, _ = await opened(make_conninfo(book.dsn, host="127.0.0.1", port=proxy.port))
    rival, _ = await opened()
    held = await requests.claim(A, never)
    proxy.cut()
    await requests.release(held)
    with pytest.raises(StoreUnavailable):
        await requests.claim(B, never)
    await proxy.restore()
    assert not (await until_held(rival, A)).again


async def test_without_a_database_nothing_is_decided_and_nothing_hangs() -> None:
    never_asked: Any = None
    requests = PostgresRequests.on(never_asked, "postgresql://127.0.0.1:1/x", SCHEMA)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="no lease"):
            await requests.claim(A, never)
    await requests.close()


_OWNER = """
import asyncio, sys
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.postgres_requests import PostgresRequests
from tests.stores.store_contract import A

async def main(dsn, lease):
    store = await PostgresStore.open(dsn, "idemconsumer", connections=2, longest_run=30.0)
    requests = PostgresRequests.on(store.pool, dsn, "idemconsumer", lease=float(lease))
    held = await requests.claim(A, lambda: None)
    print(held.token, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


_LEASE: Final = "select w.until from idemconsumer.request as r join idemconsumer.worker as w on w.id = r.worker"


@pytest.mark.kill
async def test_the_claim_of_a_killed_process_is_over_with_its_lease_and_not_before(
    book: Ledger, open_store: OpenStore
) -> None:
    """H22."""
    rival = PostgresRequests.on((await open_store(book.dsn)).pool, book.dsn, SCHEMA, lease=30.0)
    command = [sys.executable, "-c", _OWNER, book.dsn, str(STEADY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            token = int(await asyncio.to_thread(owner.stdout.readline))
            first = book.run(_LEASE)
            await until(lambda: book.run(_LEASE) != first, "it is renewed")
            assert isinstance(await rival.claim(A, never), Running)
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    held = await until_held(rival, A)
    assert held.again
    assert held.token > token
    assert await rival.complete(held, CREATED)
    await rival.close()


async def test_the_thread_goes_on_to_renew_whatever_is_raised_to_it(
    book: Ledger, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H52: nobody would be told that the lease is over, and its endpoints ran beside their successors."""
    tuned(monkeypatch, heartbeat_retry_pause=0.01)
    renew, errors = Heartbeat._renew, [make() for make in FOREIGN.values()]

    def failing(heartbeat: Heartbeat, connection: Any) -> None:
        if errors:
            raise errors.pop()
        renew(heartbeat, connection)

    requests = PostgresRequests.on((await open_store(book.dsn)).pool, book.dsn, SCHEMA, lease=STEADY)
    await hold(requests, A)
    monkeypatch.setattr(Heartbeat, "_renew", failing)
    await until(lambda: errors == [], "each was raised")
    first = book.run(_LEASE)
    await until(lambda: book.run(_LEASE) != first, "it is renewed")
    await requests.close()


async def test_a_loop_that_is_blocked_for_longer_than_the_lease_keeps_its_keys(
    book: Ledger, open_store: OpenStore
) -> None:
    """H22: an endpoint that computes."""
    lost: list[str] = []
    requests = PostgresRequests.on((await open_store(book.dsn)).pool, book.dsn, SCHEMA, lease=STEADY)
    held = await requests.claim(A, lambda: lost.append("a"))
    assert isinstance(held, Held)
    ((first,),) = book.run(_LEASE)
    while book.run("select 1 where clock_timestamp() < %s + interval '0.2 s'", [first]):
        pass  # the loop stands still meanwhile
    await asyncio.sleep(0.1)  # in which the loop notices that the lease is over, if it is
    assert lost == []
    assert await requests.complete(held, CREATED)
    await requests.close()


# ------------------------------------------------------------------------------------------------------ a person looks
async def test_a_person_sees_what_runs_and_decides_about_what_was_lost(book: Ledger, opened: Open) -> None:
    """H24."""
    requests, lease = await opened()
    await requests.claim(A, never)
    known = Keys(book.dsn, SCHEMA)
    detail = await known.explain(A.key)
    assert detail.request is not None
    assert (detail.state, detail.request.owner, detail.request.lost) == ("processing", "test", False)
    assert detail.next.startswith("it would wait: its request runs")
    assert [event.what for event in detail.timeline] == ["processing", "request"]
    with pytest.raises(ConfigurationError, match="is not released: its request runs"):
        await known.release(A.key, by="me")
    with pytest.raises(ConfigurationError, match="is not forgotten: its request runs"):
        await known.forget(A.key, record=True, by="ann")
    assert not [each for each in await diagnose(book.dsn, SCHEMA) if each.level != "note"]

    await lease.expire()
    detail = await known.explain(A.key)
    assert detail.request is not None
    assert detail.request.lost
    assert "not known how far it got" in detail.next
    (found,) = [each for each in await diagnose(book.dsn, SCHEMA) if each.subject == "requests of shop/pay"]
    assert "1 were begun by processes that have ended" in found.text
    await known.release(A.key, by="me")
    assert book.run("select from idemconsumer.request") == []
    assert book.states == []


async def test_a_person_who_decides_waits_for_who_takes_the_key_just_then(book: Ledger, opened: Open) -> None:
    """H24."""
    (requests, lease), (rival, alive) = await opened(), await opened()
    await requests.claim(A, never)
    await rival.claim(B, never)
    await lease.expire()
    async with await psycopg.AsyncConnection.connect(book.dsn) as taking:
        await taking.execute("update idemconsumer.request set worker = %s where key = %s", (alive.worker, A.key))
        release = asyncio.create_task(Keys(book.dsn, SCHEMA).release(A.key, by="me"))
        waits = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        await until(lambda: len(book.run(waits)) == 1, "it waits")
    with pytest.raises(ConfigurationError, match="is not released: its request runs"):
        await release
    assert book.run("select worker from idemconsumer.request where key = %s", (A.key,)) == [(alive.worker,)]


async def test_what_nobody_comes_back_for_is_pruned_after_its_retention(book: Ledger, opened: Open) -> None:
    """H24."""
    requests, lease = await opened()
    rival, _ = await opened()
    await requests.claim(A, never)
    await rival.claim(B, never)
    book.run("update idemconsumer.request set started_at = started_at - interval '30 days'")
    await prune_once(book.dsn, SCHEMA)
    assert len(book.states) == 2
    await lease.expire()
    await prune_once(book.dsn, SCHEMA)
    assert book.run("select key from idemconsumer.record") == [(B.key,)]
    assert book.run("select key from idemconsumer.request") == [(B.key,)]
