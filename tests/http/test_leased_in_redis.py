"""Leased routes whose keys are in Redis: what a client is told when Redis is frozen, or the loop is blocked (H34)."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from idemconsumer.http import Route
from idemconsumer.stores.redis.requests import RedisRequests
from tests.http.site import MakeDoor, client, problem, replayed, service
from tests.support.leases import STEADY
from tests.support.servers.made import PrivateRedis
from tests.support.servers.redis import RedisServer
from tests.support.waiting import PATIENCE, eventually

WAITS = Route(wait="30s")


async def test_while_redis_is_frozen_the_outcome_is_unknown_and_is_stored_once(
    make_door: MakeDoor, private_redis: PrivateRedis
) -> None:
    private, runs, inside = private_redis(), 0, asyncio.Event()

    async def endpoint(request: StarletteRequest) -> Response:
        nonlocal runs
        runs += 1
        run = runs
        inside.set()
        if run == 1:
            await asyncio.Event().wait()
        return Response(f"run {run}", 201)

    store = RedisRequests(private.address, lease=1.0)
    async with client(service(make_door(store=store, default=WAITS), endpoint)) as shop:
        first = asyncio.create_task(shop.post())
        await inside.wait()
        private.freeze()
        got = await asyncio.wait_for(first, PATIENCE)
        private.thaw()
        assert (got.status_code, problem(got)) == (503, "outcome-unknown")
        second, third = await shop.post(), await shop.post()
    assert [(each.content, replayed(each)) for each in (second, third)] == [(b"run 2", False), (b"run 2", True)]
    await store.close()


async def test_of_an_endpoint_that_blocks_the_loop_no_second_one_runs(
    make_door: MakeDoor, redis_server: RedisServer
) -> None:
    redis_server.ask("FLUSHALL")

    def milliseconds() -> int:
        seconds, micros = redis_server.ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def endpoint(request: StarletteRequest) -> Response:
        (key,) = redis_server.ask("KEYS", "*")
        until = int(redis_server.ask("HGET", key, "u"))
        eventually(lambda: milliseconds() > until, "the lease that was claimed is over")
        assert int(redis_server.ask("HGET", key, "u")) > milliseconds(), "it is free"
        return Response("done", 201)

    store = RedisRequests(redis_server.address, lease=STEADY)
    async with client(service(make_door(store=store), endpoint)) as shop:
        first, again = await shop.post(), await shop.post()
    assert [(each.status_code, replayed(each)) for each in (first, again)] == [(201, False), (201, True)]
    await store.close()
