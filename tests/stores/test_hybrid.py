"""HybridRequests passes the suite too, and Redis decides nothing in it (H33)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing

import pytest
from click.testing import CliRunner

from idemconsumer.cli.main import main
from idemconsumer.errors import StoreUnavailable
from idemconsumer.ports.requests import Held, Running
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.hybrid import HybridRequests
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.postgres_requests import PostgresRequests
from idemconsumer.stores.redis.copies import Copies
from idemconsumer.testing import RequestHarness, RequestProcess, RequestStoreContract
from tests.support.leases import UnkeptLease
from tests.support.ledger import SCHEMA, Ledger
from tests.support.servers.postgres import fresh_database
from tests.support.servers.redis import RedisServer

pytest.register_assert_rewrite("idemconsumer.testing.request_contract")

from idemconsumer.testing.request_contract import (  # noqa: E402
    CREATED,
    OTHER,
    A,
    hold,
    never,
    replace_claim,
    until_held,
)

B = replace_claim(A, key=b"b" * 32)


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.ask("FLUSHALL")
    return redis_server


class Hybrids:
    """Each with a lease of its own, on one Postgres and one Redis."""

    def __init__(self, stack: AsyncExitStack, ledger: Ledger, server: RedisServer) -> None:
        self._stack = stack
        self._ledger = ledger
        self._server = server
        self.marked = 5.0

    async def process(self) -> RequestProcess:
        postgres = await PostgresStore.open(self._ledger.dsn, SCHEMA, connections=8, longest_run=30.0)
        self._stack.push_async_callback(postgres.close)
        lease = UnkeptLease(self._ledger)
        copies = Copies(self._server.address, await postgres.pool.born(), marked=self.marked)
        store = HybridRequests(PostgresRequests(postgres.pool, lease), copies)

        async def expire() -> None:
            await lease.expire()
            self._server.ask("FLUSHALL")  # else its mark is waited for

        return RequestProcess(store, expire)

    async def store(self) -> HybridRequests:
        store = (await self.process()).store
        assert isinstance(store, HybridRequests)
        self._stack.push_async_callback(store.close)
        return store


@pytest.fixture
async def hybrids(book: Ledger, server: RedisServer) -> AsyncIterator[Hybrids]:
    async with AsyncExitStack() as stack:
        yield Hybrids(stack, book, server)


class TestHybrid(RequestStoreContract):
    @pytest.fixture
    def harness(self, hybrids: Hybrids) -> RequestHarness:
        return hybrids


async def test_a_copy_is_there_from_the_commit_on_and_spares_postgres(
    hybrids: Hybrids, server: RedisServer, book: Ledger
) -> None:
    """H33."""
    one, two = await hybrids.store(), await hybrids.store()
    held = await one.claim(A, never)
    assert isinstance(held, Held)
    assert [server.ask("GET", key)[:1] for key in server.ask("KEYS", "*")] == [b"m"]
    assert await one.complete(held, CREATED)
    assert [server.ask("GET", key)[:1] for key in server.ask("KEYS", "*")] == [b"c"]
    book.run("truncate idemconsumer.record, idemconsumer.result")
    completed = Record(State.COMPLETED, A.fingerprint, CREATED)
    assert await two.claim(replace_claim(A, fingerprint=b"g" * 32), never) == completed
    await two.copies.forget(A.key)
    assert isinstance(await two.claim(A, never), Held)


async def test_databases_that_share_a_redis_share_no_copies(
    hybrids: Hybrids, server: RedisServer, book: Ledger
) -> None:
    """H33. As those of staging and production."""
    one = await hybrids.store()
    assert await one.complete(await hold(one, A), CREATED)
    with fresh_database(book.dsn) as dsn, closing(Ledger(dsn)) as other:
        async with AsyncExitStack() as stack:
            store = await Hybrids(stack, other, server).store()
            assert isinstance(await store.claim(A, never), Held)


async def test_what_postgres_did_not_commit_is_never_copied(hybrids: Hybrids, server: RedisServer) -> None:
    """H33."""
    one, two = await hybrids.process(), await hybrids.process()
    late = await hold(one.store, A)
    await one.expire()
    held = await hold(two.store, A)
    assert not await one.store.complete(late, OTHER)
    assert await two.store.claim(A, never) == Running(Record(State.PROCESSING, A.fingerprint))
    assert await two.store.complete(held, CREATED)
    assert not await one.store.complete(late, OTHER)
    assert await one.store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)
    for process in (one, two):
        await process.store.close()


async def test_a_copy_is_gone_before_its_record_has_expired(hybrids: Hybrids, server: RedisServer) -> None:
    """H33."""
    store = await hybrids.store()
    brief, lasting = replace_claim(A, expires=30.0), replace_claim(A, key=b"b" * 32, expires=86_400.0)
    await store.complete(await hold(store, brief), CREATED)
    (key,) = server.ask("KEYS", "*")
    assert 0 < server.ask("PTTL", key) <= 30_000
    server.ask("FLUSHALL")
    await store.complete(await hold(store, lasting), CREATED)
    (key,) = server.ask("KEYS", "*")
    assert 30_000 < server.ask("PTTL", key) <= 60_000


async def test_a_mark_that_nobody_lifts_is_waited_for_and_no_longer(hybrids: Hybrids, server: RedisServer) -> None:
    """H33."""
    one, two = await hybrids.store(), await hybrids.store()
    look = await one.copies.look(A)
    assert look.found is None
    waits = Running(Record(State.PROCESSING, A.fingerprint))
    assert await two.claim(A, never) == waits
    (key,) = server.ask("KEYS", "*")
    assert 0 < server.ask("PTTL", key) <= 5_000
    server.ask("PEXPIRE", key, 1)
    held = await until_held(two, A)
    await one.copies.lift(A, look)
    assert server.ask("EXISTS", key) == 1, "the mark of another is not lifted"
    assert await one.claim(A, never) == waits
    await two.release(held)
    assert isinstance(await one.claim(A, never), Held)


async def test_a_mark_of_another_payload_says_nothing(hybrids: Hybrids) -> None:
    """H33: it may be the one that is wrong."""
    one, two = await hybrids.store(), await hybrids.store()
    await one.complete(await hold(one, A), CREATED)
    await one.copies.forget(A.key)
    await one.copies.look(replace_claim(A, fingerprint=b"g" * 32))
    assert await two.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)


async def test_without_redis_postgres_decides(hybrids: Hybrids, book: Ledger) -> None:
    """H33."""
    with closing(RedisServer()) as private:
        private.start()
        hybrids._server = private
        store = await hybrids.store()
        held = await hold(store, A)
        private.freeze()
        assert await store.complete(held, CREATED)
        completed = Record(State.COMPLETED, A.fingerprint, CREATED)
        assert await store.claim(A, never) == completed
        private.thaw()
        private.kill()
        other = await hold(store, B)
        assert await store.claim(A, never) == completed
        await store.release(other)
        assert isinstance(await store.claim(B, never), Held)


async def test_nothing_runs_twice_while_redis_is_flushed_and_killed(hybrids: Hybrids, book: Ledger) -> None:
    """H33."""
    with closing(RedisServer()) as private:
        private.start()
        hybrids._server = private
        hybrids.marked = 0.2  # so long are those waited for that nobody could lift
        stores = [await hybrids.store() for _ in range(3)]
        effects: Counter[bytes] = Counter()
        claims = [replace_claim(A, key=bytes([number]) * 32) for number in range(120)]

        async def client(number: int) -> None:
            """Asks until it is answered, as clients do."""
            for claim in claims[number:] + claims[:number]:
                store = stores[number % 3]
                while not isinstance(found := await store.claim(claim, never), Record):
                    if isinstance(found, Held):
                        effects[claim.key] += 1
                        await asyncio.sleep(0)
                        await store.complete(found, CREATED)
                    else:
                        await asyncio.sleep(0.005)
                assert found == Record(State.COMPLETED, A.fingerprint, CREATED)

        async def trouble() -> None:
            while True:
                for _ in range(5):
                    with_redis = private.answers()
                    if with_redis:
                        await asyncio.to_thread(private.ask, "FLUSHALL")
                    await asyncio.sleep(0.05)
                await asyncio.to_thread(private.kill)
                await asyncio.sleep(0.1)
                await asyncio.to_thread(private.start)

        troubling = asyncio.create_task(trouble())
        await asyncio.gather(*(client(number * 17) for number in range(6)))
        troubling.cancel()
        await asyncio.wait({troubling})
        assert set(effects.values()) == {1}
        assert len(effects) == len(claims)


async def test_while_postgres_is_away_only_copies_are_given_back(
    hybrids: Hybrids, book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await hybrids.store()
    assert await store.complete(await hold(store, A), CREATED)

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(store._requests, "claim", away)
    assert await store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.claim(B, never)


async def test_what_a_person_forgets_is_forgotten_in_redis_too(
    hybrids: Hybrids, server: RedisServer, book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H33."""
    store = await hybrids.store()
    assert await store.complete(await hold(store, A), CREATED)
    monkeypatch.setenv("IDEMCONSUMER_DSN", book.dsn)
    monkeypatch.setenv("IDEMCONSUMER_REDIS", server.address)
    forget = ["keys", "forget", A.key.hex(), "--record", "--yes"]
    done = await asyncio.to_thread(CliRunner().invoke, main, forget)
    assert done.exit_code == 0, done.output
    assert server.ask("KEYS", "*") == []
    assert isinstance(await store.claim(A, never), Held)
