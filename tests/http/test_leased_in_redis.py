"""Leased routes whose keys are in Redis: what a client is told when Redis is frozen, or the loop is blocked (H34)."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from structlog.testing import LogCapture

from idemconsumer.http import Route
from idemconsumer.stores.redis.redis_requests import RedisRequests
from tests.http.site import MakeDoor, client, problem, replayed, service
from tests.support.leases import STEADY
from tests.support.servers.made import PrivateRedis
from tests.support.servers.redis import RedisServer
from tests.support.tuning import tuned
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

    lost, store = RedisRequests(private.address, lease=1.0), RedisRequests(private.address, lease=STEADY)
    doors = [make_door(store=each, default=WAITS) for each in (lost, store)]  # as in two processes
    async with client(service(doors[0], endpoint)) as one, client(service(doors[1], endpoint)) as shop:
        first = asyncio.create_task(one.post())
        await inside.wait()
        private.freeze()
        got = await asyncio.wait_for(first, PATIENCE)
        private.thaw()
        assert (got.status_code, problem(got)) == (503, "outcome-unknown")
        second, third = await shop.post(), await shop.post()
    assert [(each.content, replayed(each)) for each in (second, third)] == [(b"run 2", False), (b"run 2", True)]
    for each in (lost, store):
        await each.close()


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


async def test_a_redis_that_begins_to_evict_is_an_outage_and_is_said_once(
    make_door: MakeDoor, private_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, redis_asked_every=0.0)
    server = private_redis()
    door = make_door(store="redis", redis=server.address, default=Route())

    async def endpoint(request: StarletteRequest) -> Response:
        return Response("done", 201)

    async with client(service(door, endpoint)) as shop:
        assert (await shop.post()).status_code == 201
        for name, value in (("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")):
            server.ask("CONFIG", "SET", name, value)
        for key in ("k", "another"):
            got = await shop.post(key=key)
            assert (got.status_code, got.headers.get("retry-after")) == (503, "2"), got.content
            assert problem(got) == "unavailable"
        (said,) = [each for each in logged.entries if "answers 503" in each["event"]]
        assert said["log_level"] == "error"
        assert "CONFIG SET maxmemory-policy noeviction" in said["error"]
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        assert replayed(await shop.post())
        assert (await shop.post(key="another")).status_code == 201
