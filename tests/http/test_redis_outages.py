"""Redis is full, takes no writes or is away while a request runs, for longer than its lease (H53, H26, H35)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest
from starlette.routing import Route as StarletteRoute

from idemconsumer.http import Route
from idemconsumer.stores.redis.redis_requests import LEASE, RedisRequests
from tests.http.endpoints import Counting
from tests.http.site import Client, MakeDoor, client, problem, replayed, service
from tests.support.leases import STEADY
from tests.support.servers.made import PrivateRedis
from tests.support.servers.redis import RedisServer
from tests.support.waiting import PATIENCE, until

LONG = pytest.param(LEASE, marks=[pytest.mark.long, pytest.mark.timeout(120)], id="38 s")
ROUTES = {"POST /orders": Route(), "POST /reviewed": Route(on_stale="review")}


def seconds(lease: float) -> float:
    """Of an outage: longer than the lease, as 38 are than 30."""
    return lease * 38 / 30


async def over(begun: float, lease: float) -> None:
    await until(lambda: time.monotonic() > begun + seconds(lease), within=2 * seconds(lease) + PATIENCE)


def setting(name: str, value: object) -> Callable[[RedisServer], object]:
    return lambda server: server.ask("CONFIG", "SET", name, value)


def fill(server: RedisServer) -> None:
    """It has more than it may have by now."""
    setting("maxmemory", int(server.ask("INFO", "memory")["used_memory"]) // 2)(server)


@pytest.mark.parametrize("lease", [STEADY, LONG])
async def test_what_runs_while_redis_is_full_goes_on_and_is_stored(
    make_door: MakeDoor, private_redis: PrivateRedis, endpoint: Counting, lease: float
) -> None:
    """H53: longer than a lease, which is renewed meanwhile."""
    server = private_redis()
    store = RedisRequests(server.address, lease=lease)
    endpoint.go.clear()
    async with client(service(make_door(store=store, routes=ROUTES), endpoint.__call__)) as shop:
        running = asyncio.create_task(shop.post())
        await endpoint.inside.wait()
        begun = time.monotonic()
        fill(server)
        refused = await shop.post(key="another")
        assert (refused.status_code, problem(refused)) == (503, "unavailable")
        await over(begun, lease)
        assert not running.done()
        endpoint.go.set()
        first, again = await running, await shop.post()
    await store.close()
    assert [(each.status_code, each.content, replayed(each)) for each in (first, again)] == [
        (201, b"run 1", False), (201, b"run 1", True),
    ]  # fmt: skip
    assert (endpoint.runs, endpoint.cancelled) == (1, False)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param(setting("min-replicas-to-write", 1), setting("min-replicas-to-write", 0), id="no writes"),
        pytest.param(RedisServer.kill, RedisServer.start, id="away"),
    ],
)
@pytest.mark.parametrize("lease", [1.0, LONG])
async def test_what_cannot_be_renewed_is_cut_off_before_another_may_have_it(
    make_door: MakeDoor,
    private_redis: PrivateRedis,
    lease: float,
    begin: Callable[[RedisServer], object],
    end: Callable[[RedisServer], object],
) -> None:
    """H26, H35: it runs again, unless its route says otherwise."""
    server = private_redis()
    store = RedisRequests(server.address, lease=lease)
    order, reviewed = Counting(), Counting()
    for each in (order, reviewed):
        each.go.clear()
    more = StarletteRoute("/reviewed", reviewed.__call__, methods=["POST"])
    async with client(service(make_door(store=store, routes=ROUTES), order.__call__, more)) as shop:
        running = [asyncio.create_task(shop.post(path=path)) for path in ("/orders", "/reviewed")]
        for each in (order, reviewed):
            await each.inside.wait()
        begun = time.monotonic()
        begin(server)
        cut = await asyncio.gather(*running)
        assert [(each.status_code, problem(each)) for each in cut] == [(503, "outcome-unknown")] * 2
        assert (order.cancelled, reviewed.cancelled) == (True, True)
        order.go.set()
        assert problem(await shop.post(key="another")) == "unavailable"
        await over(begun, lease)
        end(server)
        again = await there(shop, "/orders")
        assert (again.status_code, again.content, replayed(again)) == (201, b"run 2", False)
        for _ in range(2):
            assert problem(await there(shop, "/reviewed")) == "outcome-unknown"
    await store.close()
    assert (order.runs, reviewed.runs) == (2, 1)


async def there(shop: Client, path: str) -> httpx.Response:
    """The first answer that is not of the outage."""
    async with asyncio.timeout(PATIENCE):
        while True:
            got = await shop.post(path=path)
            if got.status_code != 503 or problem(got) != "unavailable":
                return got
            await asyncio.sleep(0.02)
