"""RedisRequests passes the suite that ships with the library, and what Redis alone must be asked for."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import redis

from idemconsumer.errors import CannotKeep, ConfigurationError, StoreUnavailable
from idemconsumer.ports.requests import Held, Running
from idemconsumer.rules.values import Record, State
from idemconsumer.stores.redis.copies import Copies
from idemconsumer.stores.redis.redis_checks import examine
from idemconsumer.stores.redis.redis_requests import RedisRequests
from idemconsumer.stores.redis.scripts import NotReplicated, name_of
from idemconsumer.testing import RequestHarness, RequestProcess, RequestStoreContract
from tests.support import ROOT
from tests.support.inside import ask_redis, keeper_of, kept
from tests.support.leases import STEADY
from tests.support.servers.made import PrivateRedis
from tests.support.servers.proxy import Proxy
from tests.support.servers.redis import RedisCluster, RedisSentinels, RedisServer
from tests.support.tuning import tuned
from tests.support.waiting import eventually, until

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
C = replace_claim(A, key=b"c" * 32)
HELD = b"$4\r\nheld"  # how an answer begins
DONE = b":1\r\n"

Open = Callable[..., RedisRequests]


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    redis_server.ask("FLUSHALL")
    return redis_server


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Stores whose leases do not end in a test by themselves, unless it says so."""
    async with AsyncExitStack() as stack:

        def open_(address: str, *, lease: float = 3600.0, **more: Any) -> RedisRequests:
            store = RedisRequests(address, lease=lease, **more)
            stack.push_async_callback(store.close)
            return store

        yield open_


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as proxy:
        yield proxy


def through(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.port}/0"


def process_of(store: RedisRequests) -> RequestProcess:
    async def expire() -> None:
        for key in kept(store):
            await ask_redis(store, "HSET", name_of(key), "u", 0)

    return RequestProcess(store, expire)


class RedisHarness:
    def __init__(self, address: str, opened: Open) -> None:
        self._address = address
        self._opened = opened

    async def process(self) -> RequestProcess:
        return process_of(self._opened(self._address))


class TestRedis(RequestStoreContract):
    @pytest.fixture
    def harness(self, server: RedisServer, opened: Open) -> RequestHarness:
        return RedisHarness(server.address, opened)


# ----------------------------------------------------------------------------------------------------- one value a key
async def test_a_response_is_kept_so_long_as_its_claim_says_and_what_runs_longer(
    server: RedisServer, opened: Open
) -> None:
    """H25."""
    store = opened(server.address, lease=20.0)
    held = await store.claim(replace_claim(A, expires=10.0), never)
    assert isinstance(held, Held)
    assert 10_000 < server.ask("PTTL", name_of(A.key)) <= 60_000
    await store.complete(held, CREATED)
    assert 0 < server.ask("PTTL", name_of(A.key)) <= 10_000
    await store.complete(await hold(store, B), CREATED)
    assert 10_000 < server.ask("PTTL", name_of(B.key)) <= 86_400_000
    assert server.ask("DBSIZE") == 2


async def test_what_was_closed_and_claims_again_renews_again(server: RedisServer, opened: Open) -> None:
    """H26."""
    store = opened(server.address, lease=STEADY)
    await store.release(await hold(store, A))
    await store.close()
    await hold(store, A)
    first = server.ask("HGET", name_of(A.key), "u")
    await until(lambda: server.ask("HGET", name_of(A.key), "u") != first, "it is renewed")


async def test_what_runs_is_renewed_and_a_killed_process_is_over_with_its_lease(
    server: RedisServer, opened: Open
) -> None:
    """H26."""
    rival = opened(server.address)
    command = [sys.executable, "-c", _OWNER, server.address, str(STEADY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            token = int(await asyncio.to_thread(owner.stdout.readline))
            first = server.ask("HGET", name_of(A.key), "u")
            await until(lambda: server.ask("HGET", name_of(A.key), "u") != first, "it is renewed")
            assert isinstance(await rival.claim(A, never), Running)
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    held = await until_held(rival, A)
    assert held.again
    assert held.token > token


_OWNER = """
import asyncio, sys
from idemconsumer.stores.redis.redis_requests import RedisRequests
from tests.stores.store_contract import A

async def main(address, lease):
    store = RedisRequests(address, lease=float(lease))
    held = await store.claim(A, lambda: None)
    print(held.token, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_whoever_holds_is_told_that_another_has_it(server: RedisServer, opened: Open) -> None:
    """H26."""
    lost = asyncio.Event()
    store, rival = opened(server.address, lease=1.0), opened(server.address)
    held = await store.claim(A, lost.set)
    assert isinstance(held, Held)
    server.ask("HSET", name_of(A.key), "u", 0)
    taken = await until_held(rival, A)
    async with asyncio.timeout(PATIENCE):
        await lost.wait()
    assert not await store.complete(held, OTHER)
    assert await rival.complete(taken, CREATED)


async def test_whoever_cannot_renew_is_told_while_the_lease_still_holds(
    private_redis: PrivateRedis, opened: Open
) -> None:
    """H26."""
    server = private_redis()
    lost = asyncio.Event()
    store = opened(server.address, lease=1.0)
    await store.claim(A, lost.set)
    server.kill()
    async with asyncio.timeout(PATIENCE):
        await lost.wait()
    assert keeper_of(store).record(A.key) is None


async def test_a_time_far_ahead_is_that_of_a_clock_that_was_set_back(server: RedisServer, opened: Open) -> None:
    """H25."""
    store, rival = opened(server.address), opened(server.address)
    await hold(store, A)
    server.ask("HINCRBY", name_of(A.key), "u", 1_000)
    assert isinstance(await rival.claim(A, never), Running), "a clock that is a little late frees nothing"
    server.ask("HINCRBY", name_of(A.key), "u", 3_700_000)
    assert (await hold(rival, A)).again


# ---------------------------------------------------------------------------------------------------------- the thread
async def until_renewed(store: RedisRequests) -> None:
    """A claim of a key of its own, by the thread (H34)."""
    claim = replace_claim(A, key=b"r" * 32)
    held = await hold(store, claim)

    async def over() -> bytes:
        found: bytes = await ask_redis(store, "HGET", name_of(claim.key), "u")
        return found

    first = await over()

    async def renewed() -> bool:
        return await over() != first

    await until(renewed, "it is renewed")
    assert await store.complete(held, CREATED)


def claimed_elsewhere(address: str) -> Held | Running | Record:
    """What another process would get, while this one's loop is blocked."""

    async def claim() -> Held | Running | Record:
        rival = RedisRequests(address, lease=3600.0)
        try:
            return await rival.claim(A, never)
        finally:
            await rival.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, claim()).result()


def block_until_the_lease_is_over(server: RedisServer) -> None:
    """The one that A was claimed with, by the clock of Redis: the loop stands still as long."""
    over = int(server.ask("HGET", name_of(A.key), "u"))

    def milliseconds() -> int:
        seconds, micros = server.ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    eventually(lambda: milliseconds() > over, "the lease is over")


async def test_a_loop_that_is_blocked_for_longer_than_the_lease_keeps_its_keys(
    server: RedisServer, opened: Open
) -> None:
    """H34."""
    lost = asyncio.Event()
    store = opened(server.address, lease=STEADY)
    held = await store.claim(A, lost.set)
    assert isinstance(held, Held)
    block_until_the_lease_is_over(server)
    assert isinstance(claimed_elsewhere(server.address), Running)
    assert await store.complete(held, CREATED)
    assert not lost.is_set()


async def test_a_loop_that_stands_still_for_too_long_keeps_nothing(server: RedisServer, opened: Open) -> None:
    """H34."""
    lost = asyncio.Event()
    store = opened(server.address, lease=1.5, longest_still=0.1)
    held = await store.claim(A, lost.set)
    assert isinstance(held, Held)
    block_until_the_lease_is_over(server)
    assert isinstance(claimed_elsewhere(server.address), Held)
    async with asyncio.timeout(PATIENCE):
        await lost.wait()
    assert not await store.complete(held, CREATED)


async def test_a_claim_that_somebody_was_told_is_lost_is_not_renewed_after_all(
    server: RedisServer, opened: Open
) -> None:
    """H34."""
    lost = list[bool]()
    store, rival = opened(server.address, lease=0.6), opened(server.address)
    await store.claim(A, lambda: lost.append(True))
    kept(store)[A.key].good = -math.inf  # as after a renewal that hangs
    keeper_of(store)._look()
    assert lost == [True]
    assert (await until_held(rival, A)).again


async def test_a_lease_that_is_over_is_not_renewed(server: RedisServer, opened: Open) -> None:
    """H34: a renewal that Redis gets late, as after it was frozen, finds the lease over."""
    lost = asyncio.Event()
    store = opened(server.address, lease=0.6)
    await store.claim(A, lost.set)
    server.ask("HSET", name_of(A.key), "u", 0)
    async with asyncio.timeout(PATIENCE):
        await lost.wait()


async def test_nothing_is_held_whose_lease_was_over_before_the_answer_came(server: RedisServer, opened: Open) -> None:
    """H34: the loop was blocked meanwhile."""
    with pytest.raises(StoreUnavailable, match="ended before the claim was confirmed"):
        await opened(server.address, lease=0.000_001).claim(A, never)


async def test_scripts_that_redis_has_forgotten_are_sent_again(server: RedisServer, opened: Open) -> None:
    """H25."""
    store = opened(server.address)
    held = await hold(store, A)
    server.ask("SCRIPT", "FLUSH")
    assert await store.complete(held, CREATED)
    server.ask("SCRIPT", "FLUSH")
    assert await store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)


async def test_a_value_that_is_none_of_ours_decides_nothing(server: RedisServer, opened: Open) -> None:
    store = opened(server.address)
    server.ask("SET", name_of(A.key), "x")
    server.ask("HSET", name_of(B.key), "s", "3", "f", "", "c", "", "r", "x")
    for claim in (A, B):
        with pytest.raises(StoreUnavailable):
            await store.claim(claim, never)


# --------------------------------------------------------------------------------------------------------- lost answers
async def test_a_claim_whose_answer_was_lost_is_held_once(server: RedisServer, opened: Open, proxy: Proxy) -> None:
    store = opened(through(proxy))
    await store.peek(A.key)
    trap = proxy.cut_at(A.key.hex().encode(), mode="after", answer=HELD)
    held = await hold(store, A)
    assert trap.sprung.is_set()
    assert not held.again
    assert await store.complete(held, CREATED)


async def test_a_claim_that_nobody_hears_of_is_taken_back(server: RedisServer, opened: Open, proxy: Proxy) -> None:
    store, rival = opened(through(proxy)), opened(server.address)
    await store.peek(A.key)
    trap = proxy.cut_at(A.key.hex().encode(), mode="after", answer=HELD)
    claiming = asyncio.create_task(store.claim(A, never))
    await trap.sprung.wait()
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await claiming
    await proxy.restore()
    assert not (await until_held(rival, A)).again


async def test_a_completion_whose_answer_was_lost_is_stored_once(
    server: RedisServer, opened: Open, proxy: Proxy
) -> None:
    store, rival = opened(through(proxy)), opened(server.address)
    held = await hold(store, A)
    trap = proxy.cut_at(A.key.hex().encode(), mode="after", answer=DONE)
    with pytest.raises(StoreUnavailable):
        await store.complete(held, CREATED)
    assert trap.sprung.is_set()
    await until_completed(rival, A)
    assert await store.complete(held, CREATED)
    assert not await store.complete(held, OTHER)


async def test_what_could_not_be_completed_is_completed_when_redis_is_back(
    server: RedisServer, opened: Open, proxy: Proxy
) -> None:
    store, rival = opened(through(proxy)), opened(server.address)
    held, other = await hold(store, A), await hold(store, B)
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await store.complete(held, CREATED)
    await store.release(other)
    assert isinstance(await store.claim(A, never), Running)
    await proxy.restore()
    await until_completed(rival, A)
    assert not (await until_held(rival, B)).again


async def test_a_claim_that_fails_does_not_take_the_place_of_an_end_that_is_due(
    server: RedisServer, opened: Open, proxy: Proxy
) -> None:
    """H23."""
    store, rival = opened(through(proxy)), opened(server.address)
    held = await hold(store, A)
    proxy.cut()
    with pytest.raises(StoreUnavailable):
        await store.complete(held, CREATED)
    keeper_of(store).drop(held)  # as when it is lost, and its client asks again
    with pytest.raises(StoreUnavailable):
        await store.claim(A, never)
    await proxy.restore()
    await until_completed(rival, A)


async def test_a_response_that_cannot_be_kept_gives_the_key_back(server: RedisServer, opened: Open) -> None:
    """H52."""
    store = opened(server.address)
    with pytest.raises(CannotKeep):
        await store.complete(await hold(store, A), replace(CREATED, content_type="\udc80"))
    assert not (await hold(store, A)).again


# -------------------------------------------------------------------------------------------------------------- outages
async def test_without_redis_nothing_runs_unless_it_is_asked_for(opened: Open) -> None:
    """H27."""
    closed, open_ = opened("redis://127.0.0.1:1"), opened("redis://127.0.0.1:1", outage="open")
    with pytest.raises(StoreUnavailable):
        await closed.claim(A, never)
    held = await open_.claim(A, never)
    assert isinstance(held, Held)
    assert held.unclaimed
    assert not await open_.complete(held, CREATED)
    await open_.release(held)
    assert isinstance(await open_.claim(A, never), Held)
    with pytest.raises(StoreUnavailable):
        await open_.peek(A.key)


async def test_what_redis_has_acknowledged_outlives_its_crash(private_redis: PrivateRedis, opened: Open) -> None:
    server = private_redis()
    store = opened(server.address)
    await store.complete(await hold(store, A), CREATED)
    held = await hold(store, B)
    server.kill()
    with pytest.raises(StoreUnavailable):
        await store.peek(A.key)
    server.start()
    assert await store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)
    assert await store.complete(held, CREATED)


# --------------------------------------------------------------------------------------------------- what Redis must be
async def test_a_server_that_evicts_is_refused(private_redis: PrivateRedis, opened: Open) -> None:
    """H28."""
    server = private_redis(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    store = opened(server.address)
    with pytest.raises(ConfigurationError, match="maxmemory-policy is allkeys-lru, so a claim could be evicted"):
        await store.claim(A, never)
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await hold(store, A)


EVICTS = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}


def set_all(server: RedisServer, **settings: str) -> None:
    for name, value in settings.items():
        server.ask("CONFIG", "SET", name, value)


async def test_a_server_that_begins_to_evict_is_refused_until_it_is_right(
    private_redis: PrivateRedis, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H28."""
    tuned(monkeypatch, redis_asked_every=0.0)
    server = private_redis()
    store = opened(server.address)
    held = await hold(store, A)
    set_all(server, **EVICTS)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="maxmemory-policy is allkeys-lru"):
            await store.claim(B, never)
    assert await store.complete(held, CREATED), "what runs may end"
    set_all(server, **{"maxmemory-policy": "noeviction"})
    await hold(store, B)


async def test_each_new_connection_is_asked_whether_its_server_evicts(
    private_redis: PrivateRedis, opened: Open
) -> None:
    """H28. It may be another server's, as after a failover."""
    server = private_redis()
    store = opened(server.address)
    await hold(store, A)
    set_all(server, **EVICTS)
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(ConfigurationError, match="maxmemory-policy is allkeys-lru"):
        await store.claim(B, never)
    await until(lambda: server.ask("EXISTS", name_of(B.key)) == 0, "what was claimed there is taken back")


async def test_a_replica_that_would_evict_is_refused_before_it_takes_over(
    private_redis: PrivateRedis, opened: Open
) -> None:
    """H28."""
    primary, replica = private_redis(), private_redis(maxmemory="100mb", maxmemory_policy="volatile-ttl")
    replica.follow(primary)
    store = opened(primary.address)
    with pytest.raises(ConfigurationError, match="of a replica, which may take over, is volatile-ttl"):
        await store.claim(A, never)
    set_all(replica, **{"maxmemory-policy": "noeviction"})
    await hold(store, A)


async def test_a_replica_that_cannot_be_reached_says_nothing(private_redis: PrivateRedis, opened: Open) -> None:
    """H28: its address may be one that its primary alone can reach."""
    primary, replica = private_redis(), private_redis()
    replica.follow(primary)
    replica.freeze()
    try:
        await hold(opened(primary.address), A)
    finally:
        replica.thaw()


async def test_what_a_server_may_lose_is_said(private_redis: PrivateRedis, server: RedisServer) -> None:
    """H28."""
    assert await examine(server.address) == []
    (snapshots, eviction) = await examine(private_redis(appendonly="no", maxmemory_policy="allkeys-lru").address)
    assert "appendonly is off" in snapshots
    assert "maxmemory-policy is not noeviction" in eviction
    with pytest.raises(StoreUnavailable):
        await examine("redis://127.0.0.1:1")


# --------------------------------------------------------------------------------------------------------------- rights
def granted() -> list[str]:
    """The rules of the list in docs/stores.md, without the user and the password."""
    page = (ROOT / "docs" / "stores.md").read_text("utf-8")
    (rules,) = re.findall(r"^ *ACL SETUSER shop on >\S+ (.+?)^ *```", page, re.MULTILINE | re.DOTALL)
    return str(rules).replace("\\\n", " ").split()


def login(server: RedisServer, *rules: str) -> str:
    """The address of a user that has these rights and no others."""
    server.ask("ACL", "SETUSER", "shop", "reset", "on", ">secret", *rules)
    return server.address.replace("//", "//shop:secret@").replace("/0", "/1")


async def test_the_rights_that_are_listed_do(private_redis: PrivateRedis, opened: Open) -> None:
    """H57."""
    primary, replica = private_redis(), private_redis()
    replica.follow(primary)
    address = login(primary, *granted())
    assert await examine(address, 1) == []
    assert primary.ask("INFO", "keyspace") == {}, "nothing of the trial is left"
    store = opened(address, replicas=1, lease=STEADY)
    lost = asyncio.Event()
    held = await until_held(store, A)
    first = await asyncio.to_thread(of_db_1, primary, held)
    await until(lambda: of_db_1(primary, held) != first, "it is renewed")
    assert await store.complete(held, CREATED)
    assert await store.claim(A, never) == Record(State.COMPLETED, A.fingerprint, CREATED)
    other = await store.claim(B, lost.set)
    assert isinstance(other, Held)
    await store.release(other, ran=True)
    (found,) = await store.lost()
    assert await store.release_lost(found, by="ann")
    await store.release(await until_held(store, B))
    copies = Copies(address, "born")
    look = await copies.look(C)
    await copies.lift(C, look)
    await copies.keep(C, Record(State.COMPLETED, C.fingerprint, CREATED), time.monotonic())
    assert (await copies.look(C)).found == Record(State.COMPLETED, C.fingerprint, CREATED)
    await copies.close()


def of_db_1(server: RedisServer, held: Held) -> object:
    with redis.Redis(port=server.port, db=1) as client:
        return client.hget(name_of(held.claim.key).decode(), "u")


async def test_a_user_that_lacks_one_is_told_what_to_grant(private_redis: PrivateRedis) -> None:
    """H57. By a trial of each script: Redis asks what it does, as it does it."""
    server = private_redis()
    for lacking in (each for each in granted() if each != "resetchannels"):
        address = login(server, *(each for each in granted() if each != lacking))
        with pytest.raises(ConfigurationError) as refused:
            await examine(address, int(lacking == "+wait"))
        assert "grant what docs/stores.md lists" in str(refused.value), lacking


# ----------------------------------------------------------------------------------------------------------------- full
def fill(server: RedisServer) -> None:
    """It has more than it may have by now, so it takes nothing that needs memory."""
    server.ask("CONFIG", "SET", "maxmemory", int(server.ask("INFO", "memory")["used_memory"]) // 2)


async def test_on_a_server_that_is_full_what_runs_is_renewed_and_stored_and_nothing_is_claimed(
    private_redis: PrivateRedis, opened: Open
) -> None:
    """H53."""
    lost = asyncio.Event()
    server = private_redis()
    store, rival = opened(server.address, lease=STEADY), opened(server.address)
    held = await store.claim(A, lost.set)
    left = await hold(rival, C)
    assert isinstance(held, Held)
    fill(server)
    with pytest.raises(StoreUnavailable, match="OutOfMemory"):
        await rival.claim(B, never)
    first = server.ask("HGET", name_of(A.key), "u")
    await until(lambda: server.ask("HGET", name_of(A.key), "u") != first, "it is renewed")
    assert await store.complete(held, CREATED)
    assert not lost.is_set()
    await rival.release(left, ran=True)
    assert int(server.ask("HGET", name_of(C.key), "u")) == 0, "a run of which nobody knows is lost at once"
    (full,) = await examine(server.address)
    assert full.startswith("memory is full")


# ------------------------------------------------------------------------------------------------------------- replicas
async def test_what_too_few_replicas_have_does_not_count(private_redis: PrivateRedis, opened: Open) -> None:
    """H29."""
    primary, replica = private_redis(), private_redis()
    store, plain = opened(primary.address, replicas=1), opened(primary.address)
    assert "0 replicas of 1 have confirmed" in str(await until_not_replicated(lambda: store.claim(A, never)))
    assert not (await until_held(plain, A)).again, "it was taken back"
    replica.follow(primary)
    held = await until_held(store, B)
    replica.kill()
    await until_not_replicated(lambda: store.complete(held, CREATED))
    replica.start()
    replica.follow(primary)
    async with asyncio.timeout(PATIENCE):
        while not store._unfinished.idle:
            await asyncio.sleep(0.02)
    await until(lambda: confirmed(store.complete(held, CREATED)), "replicas have confirmed it")


async def until_not_replicated(ask: Callable[[], Awaitable[object]]) -> NotReplicated:
    """On a busy machine a server may not answer at all within its time."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                answer = await ask()
            except NotReplicated as said:
                return said
            except StoreUnavailable:
                continue
            pytest.fail(f"it counts: {answer}")


async def confirmed(answer: Awaitable[bool]) -> bool:
    """On a busy machine a replica may not confirm within its time."""
    with suppress(StoreUnavailable):
        return await answer
    return False


async def until_there(store: RedisRequests) -> None:
    """Sentinels name no primary while they doubt that it lives, which a busy machine gives them cause to."""

    async def there() -> bool:
        with suppress(StoreUnavailable):
            await store.peek(A.key)
            return True
        return False

    await until(there, "the Sentinels name the primary")


async def test_a_failover_by_sentinel_loses_nothing_that_a_replica_has_confirmed(
    private_redis: PrivateRedis, opened: Open
) -> None:
    """H29."""
    primary, replica = private_redis(), private_redis()
    replica.follow(primary)
    sentinels = RedisSentinels(primary)
    try:
        store = opened(sentinels.address, replicas=1)
        await until_there(store)
        held = await until_held(store, A)
        await until(lambda: confirmed(store.complete(held, CREATED)), "the replica has confirmed it")
        await until_held(store, B)
        primary.kill()
        await until(lambda: sentinels.primary_port() == replica.port, "the replica is the primary")
        rival = opened(sentinels.address)
        await until_there(rival)
        await until_completed(rival, A)
        assert await rival.claim(B, never) == Running(Record(State.PROCESSING, B.fingerprint))
    finally:
        sentinels.close()


async def test_the_keys_of_a_cluster_are_each_in_one_slot(private_redis: PrivateRedis, opened: Open) -> None:
    cluster = RedisCluster(private_redis)
    one, two = opened(cluster.address), opened(cluster.address)
    for number in range(30):
        claim = replace_claim(A, key=bytes([number]) * 32)
        held = await hold(one, claim)
        assert isinstance(await two.claim(claim, never), Running)
        assert await one.complete(held, CREATED)
        assert await two.claim(claim, never) == Record(State.COMPLETED, A.fingerprint, CREATED)
    assert all(node.ask("DBSIZE") for node in cluster.nodes)
    await until_renewed(opened(cluster.address, lease=STEADY))
    left = [replace_claim(A, key=bytes([number]) * 32) for number in range(40, 46)]
    for claim in left:
        await hold(one, claim)
    await one.close()
    assert {lost.key for lost in await two.lost()} == {claim.key.hex() for claim in left}
    await two.close()
    for node in cluster.nodes:
        login(node, *granted(), "+command", "+cluster|slots")
    assert await examine(cluster.address.replace("//", "//shop:secret@")) == [], "as docs/stores.md says (H57)"


def test_a_cluster_cannot_wait_for_replicas() -> None:
    with pytest.raises(ConfigurationError, match="leave redis_replicas at 0"):
        RedisRequests("cluster://127.0.0.1:1", replicas=1)


@pytest.mark.parametrize(
    "address",
    [
        "http://user:secret@host", "redis://user:se/cret@host", "redis://one,two", "sentinel://user:secret@one:1,two:1",
        "redis://user:secret@host/0?socket_timeout=secret", "redis://user:secret@host/0?nonsense=secret",
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_and_not_quoted(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"settings: `redis` (is not an address|has an option)") as refused:
        RedisRequests(address)
    assert "secret" not in str(refused.value)
