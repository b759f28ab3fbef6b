"""Postgres or Redis is away, says nothing or is empty; and clocks that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.http.blackbox.client import PATIENCE, Service, new, problem, replayed, unclaimed
from tests.http.blackbox.places import INTERFACES, Place, Running, places
from tests.http.blackbox.served.config import Config, Interface, Store
from tests.support.servers.made import PrivateRedis
from tests.support.servers.proxy import Proxy
from tests.support.servers.redis import RedisServer
from tests.support.waiting import until

Start = Callable[..., Running]

KEYS = 30
DAY = 86_400.0
EIGHT = places("postgres", "hybrid")
FOUR = [  # each mode of each store, and each mode under each interface
    Place("postgres", "joined", "asgi"), Place("postgres", "leased", "wsgi"),
    Place("hybrid", "joined", "wsgi"), Place("hybrid", "leased", "asgi"),
]  # fmt: skip
SECONDS = 15.0  # in which a client is told that nothing can be decided


@pytest.fixture
def own_redis(private_redis: PrivateRedis) -> RedisServer:
    return private_redis()


def port_of(config: Config) -> int:
    return int(str(conninfo_to_dict(config.dsn)["port"]))


def by(proxy: Proxy, config: Config) -> str:
    return make_conninfo(config.dsn, host="127.0.0.1", port=proxy.port)


def refused(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert problem(answer) == "unavailable"
    assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("of_postgres", [FOUR, pytest.param(EIGHT, marks=pytest.mark.long)], ids=["four", "eight"])
async def test_nothing_runs_while_postgres_is_away_or_says_nothing(
    of_postgres: list[Place], configs: Callable[[Store], Config], start: Start
) -> None:
    """All of them at the same time, since each takes as long as a client is to wait."""
    async with Proxy(port_of(configs("postgres"))) as proxy:
        services = [place.service(start(place, dsn=by(proxy, configs(place.store)))) for place in of_postgres]

        async def refused_and_then_served(service: Service, again: asyncio.Event) -> None:
            service.effect, key = new(), new()
            for answer in await asyncio.gather(service.send(key=key), service.send(key=new())):
                refused(answer)
            if silent and service.mode == "leased":  # what was asked before may still be on its way (H23)
                refused(await service.send(key=key))
            assert await service.effects() == 0
            waiting.release()
            await again.wait()
            assert (await service.answered(key=key)).status_code == 201
            assert (await service.answered(key=known)).content == stored[service.url, service.mode]
            assert await service.effects() == 1

        known = new()
        first = await asyncio.gather(*(service.answered(key=known) for service in services))
        stored = {(each.url, each.mode): answer.content for each, answer in zip(services, first, strict=True)}
        for silent in (False, True):
            waiting, again = asyncio.Semaphore(0), asyncio.Event()
            proxy.freeze() if silent else proxy.cut()
            async with asyncio.TaskGroup() as tasks:
                for service in services:
                    tasks.create_task(refused_and_then_served(service, again))
                for _ in services:
                    await waiting.acquire()
                proxy.thaw()
                await proxy.restore()
                again.set()


async def test_nothing_runs_while_redis_is_away_or_says_nothing(start: Start, own_redis: RedisServer) -> None:
    """A client is told so in bounded time, also by a Redis that is frozen: it takes connections, and is silent."""
    servers = [(place, start(place, redis=own_redis.address)) for place in places("redis")]
    services = [place.service(running) for place, running in servers]
    known = new()
    first = await services[0].answered(key=known)
    for stop, go_on in ((own_redis.kill, own_redis.start), (own_redis.freeze, own_redis.thaw)):
        keys = {service.url: new() for service in services}
        for service in services:
            service.effect = new()
        stop()
        async with asyncio.timeout(SECONDS):
            sent = [service.send(key=key) for service in services for key in (known, keys[service.url])]
            for answer in await asyncio.gather(*sent):
                refused(answer)
        assert [await service.effects() for service in services] == [0, 0]
        go_on()
        for service in services:  # what Redis has got to read meanwhile holds nothing (H23)
            async with asyncio.timeout(SECONDS):
                assert (await service.answered(key=keys[service.url])).status_code == 201
                again = await service.answered(key=known)
            assert (again.content, replayed(again), await service.effects()) == (first.content, True, 1)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_with_outage_open_what_runs_without_a_claim_says_so(
    interface: Interface, start: Start, own_redis: RedisServer
) -> None:
    place = Place("redis", "leased", interface)
    service, key = place.service(start(place, redis=own_redis.address, outage="open")), new()
    first = await service.send(key=key)
    assert not unclaimed(first)
    own_redis.kill()
    kinds: list[dict[str, Any]] = [{}, {"size": 70_000}, {"status": 503}]
    for kind in kinds:
        service.effect = new()
        answers = [await service.send(key=key, **kind) for _ in range(2)]
        assert [(unclaimed(answer), replayed(answer)) for answer in answers] == [(True, False)] * 2, kind
        assert [answer.status_code for answer in answers] == [kind.get("status", 201)] * 2
        assert await service.effects() == 2, kind
    own_redis.start()
    async with asyncio.timeout(PATIENCE):
        while unclaimed(again := await service.send(key=key)):
            pass
    assert (again.content, replayed(again)) == (first.content, True)


@pytest.mark.parametrize("place", places("hybrid"), ids=str)
async def test_with_hybrid_redis_may_be_emptied_frozen_and_killed_at_any_time(
    place: Place, start: Start, own_redis: RedisServer
) -> None:
    service = place.service(start(place, redis=own_redis.address))
    keys, answered = [new() for _ in range(KEYS)], 0

    async def client(key: str) -> set[bytes]:
        nonlocal answered
        contents = set()
        for _ in range(3):
            answer = await service.answered("waiting", key=key)
            assert answer.status_code == 201, answer.text
            contents.add(answer.content)
            answered += 1
        return contents

    clients = [asyncio.create_task(client(key)) for key in keys for _ in range(2)]
    await until(lambda: answered > KEYS)
    own_redis.ask("FLUSHALL")
    await until(lambda: answered > 2 * KEYS)
    own_redis.freeze()
    await until(lambda: answered > 3 * KEYS)
    own_redis.thaw()
    await until(lambda: answered > 4 * KEYS)
    own_redis.kill()
    await until(lambda: answered > 5 * KEYS)
    own_redis.start()
    contents = await asyncio.gather(*clients)
    assert all(len(each) == 1 for each in contents)
    assert len(set.union(*contents)) == KEYS
    assert await service.effects() == KEYS


async def test_the_clocks_of_servers_decide_nothing(place: Place, start: Start) -> None:
    """One is right, one is a day slow, one a day fast: as long as an answer is kept."""
    right = place.service()
    slow, fast = (place.service(start(place, skew=skew)) for skew in (-DAY, DAY))
    slow.effect = fast.effect = right.effect
    for writer in (slow, right, fast):
        key = new()
        first = await writer.send(key=key)
        for reader in (slow, right, fast):
            again = await reader.send(key=key)
            assert (again.content, replayed(again)) == (first.content, True)
    assert await right.effects() == 3

    gate, key = place.gate(), new()  # nor is what is in progress believed to be lost
    running = asyncio.create_task(right.send(key=key, gate=gate.name))
    await until(lambda: gate.arrivals)
    for wrong in (slow, fast):
        assert problem(await wrong.send(key=key, gate=gate.name)) == "in-progress"
    gate.open()
    assert (await running).status_code == 201
    assert gate.arrivals == 1
