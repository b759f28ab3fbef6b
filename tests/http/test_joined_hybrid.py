"""Joined routes with copies in Redis of what is committed: they spare Postgres the repetitions, and decide nothing."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from idemconsumer.http import Route, current_tx
from idemconsumer.rules.values import State
from tests.http.site import MakeDoor, client, problem, replayed, service
from tests.support.ledger import Ledger, write
from tests.support.servers.redis import RedisServer

JOINED = {"POST /orders": Route(tx=True)}
FORGET = "truncate idemconsumer.record, idemconsumer.result"


class Endpoint:
    """Writes, and answers with a status; may wait in between."""

    def __init__(self) -> None:
        self.status = 201
        self.inside, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def __call__(self, request: StarletteRequest) -> Response:
        await write(current_tx(), self.status)
        self.inside.set()
        await self.go.wait()
        return Response(f"said {self.status}", self.status)


@pytest.mark.parametrize(("status", "effects"), [(201, ["201"]), (409, [])])
async def test_what_is_committed_is_given_back_from_its_copy(
    ledger: Ledger, make_door: MakeDoor, redis_server: RedisServer, status: int, effects: list[str]
) -> None:
    endpoint, key = Endpoint(), str(uuid4())
    endpoint.status = status
    door = make_door(store="hybrid", redis=redis_server.address, routes=JOINED)
    async with client(service(door, endpoint.__call__)) as shop:
        first = await shop.post(key=key)
        assert ledger.states == [State.COMPLETED if status == 201 else State.FAILED]
        ledger.run(FORGET)  # so that only the copy can know
        again, another = await shop.post(key=key), await shop.post(2, key=key)
    assert (first.status_code, first.content, replayed(first)) == (status, f"said {status}".encode(), False)
    assert (again.status_code, again.content, replayed(again)) == (status, f"said {status}".encode(), True)
    assert problem(another) == "key-reused"
    assert ledger.effects == effects


async def test_without_its_copy_postgres_decides(
    ledger: Ledger, make_door: MakeDoor, redis_server: RedisServer
) -> None:
    endpoint, key = Endpoint(), str(uuid4())
    door = make_door(store="hybrid", redis=redis_server.address, routes=JOINED)
    async with client(service(door, endpoint.__call__)) as shop:
        await shop.post(key=key)
        redis_server.ask("FLUSHALL")
        assert replayed(await shop.post(key=key))
    assert ledger.effects == ["201"]


async def test_nothing_that_was_rolled_back_has_a_copy(
    ledger: Ledger, make_door: MakeDoor, redis_server: RedisServer
) -> None:
    endpoint, key = Endpoint(), str(uuid4())
    door = make_door(store="hybrid", redis=redis_server.address, routes=JOINED)
    async with client(service(door, endpoint.__call__)) as shop:
        endpoint.status = 503
        assert [(await shop.post(key=key)).status_code for _ in range(2)] == [503, 503]
        assert ledger.states == []
        endpoint.status = 201
        assert not replayed(await shop.post(key=key))
    assert ledger.effects == ["201"]


async def test_who_asks_meanwhile_waits_for_the_mark(
    ledger: Ledger, make_door: MakeDoor, redis_server: RedisServer
) -> None:
    endpoint, key = Endpoint(), str(uuid4())
    endpoint.go.clear()
    one, two = (make_door(store="hybrid", redis=redis_server.address, routes=JOINED) for _ in range(2))
    async with client(service(one, endpoint.__call__)) as shop, client(service(two, endpoint.__call__)) as other:
        first = asyncio.create_task(shop.post(key=key))
        await endpoint.inside.wait()
        assert [problem(await other.post(id, key=key)) for id in (1, 2)] == ["in-progress", "key-reused"]
        endpoint.go.set()
        assert (await first).status_code == 201
        assert replayed(await other.post(key=key))
    assert ledger.effects == ["201"]
