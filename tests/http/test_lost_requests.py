"""Requests in leased mode whose process died between the effect and the stored response (H35, H36)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse

from idemconsumer import App, ConfigurationError, Done, NotDone, Unknown
from idemconsumer.http import Idempotency, LostRequest, Response, Route, current_key
from idemconsumer.stores.redis.redis_requests import RedisRequests
from tests.http.site import Client, MakeDoor, by_header, client, problem, replayed, service
from tests.support.logs import LogCapture
from tests.support.servers.redis import RedisServer
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE

CHARGED = Response(
    201, (("content-type", "text/plain"), ("Location", "/charges/1"), ("X-Bill", "7"), ("Set-Cookie", "x")), b"charged"
)


class Shop:
    """An endpoint in two processes, of which one is lost while it runs."""

    def __init__(self, make_door: MakeDoor, server: RedisServer) -> None:
        self._make_door = make_door
        self._server = server
        self._killed: asyncio.Task[Any] | None = None
        self.runs = 0
        self.keys = set[str]()
        self.inside = asyncio.Event()
        self._over = asyncio.Event()  # else its door waits for it when it is closed
        self.door: Idempotency
        self.shop: Client

    async def _endpoint(self, request: StarletteRequest) -> StarletteResponse:
        self.runs += 1
        self.keys.add(current_key())
        self.inside.set()
        if self.runs == 1:
            await self._over.wait()
        return StarletteResponse(f"run {self.runs}", 201)

    async def lose(self, stack: Any, route: Route) -> None:
        """The first request has run, and its process is gone."""
        doors = [self._make_door(store=self._store(stack), default=route) for _ in range(2)]
        first, self.shop = [await stack.enter_async_context(client(service(each, self._endpoint))) for each in doors]
        self.door = doors[1]
        self._killed = asyncio.create_task(first.post())
        stack.push_async_callback(self._end)
        await asyncio.wait_for(self.inside.wait(), PATIENCE)
        (name,) = self._server.ask("KEYS", "*")
        self._server.ask("HSET", name, "u", 0)

    def _store(self, stack: Any) -> RedisRequests:
        store = RedisRequests(self._server.address, lease=3600.0)
        stack.push_async_callback(store.close)
        return store

    async def _end(self) -> None:
        assert self._killed is not None
        self._over.set()
        self._killed.cancel()
        await asyncio.wait({self._killed})


Lose = Callable[[Route], Awaitable[Shop]]


@pytest.fixture
async def lose(make_door: MakeDoor, redis_server: RedisServer) -> AsyncIterator[Lose]:
    redis_server.ask("FLUSHALL")
    async with AsyncExitStack() as stack:

        async def lose(route: Route) -> Shop:
            shop = Shop(make_door, redis_server)
            await shop.lose(stack, route)
            return shop

        yield lose


async def test_by_default_it_runs_again(lose: Lose) -> None:
    its = await lose(Route())
    got = await its.shop.post()
    assert (got.status_code, got.content, its.runs) == (201, b"run 2", 2)
    assert len(its.keys) == 1


async def test_with_review_it_is_refused_until_it_is_settled(lose: Lose, logged: LogCapture) -> None:
    """H35, H36."""
    its = await lose(Route(on_stale="review", wait="30s"))
    same, other = await its.shop.post(), await its.shop.post(2)
    assert [(each.status_code, problem(each)) for each in (same, other)] == [
        (503, "outcome-unknown"),
        (422, "key-reused"),
    ]
    assert "retry-after" in same.headers
    (lost,) = await its.door.lost()
    assert (lost.app, lost.tenant, lost.route, {lost.key}) == ("shop", "t", "POST *", its.keys)
    assert await its.door.settle(lost, CHARGED)
    assert not await its.door.release(lost)
    got = await its.shop.post()
    assert (got.status_code, got.content, replayed(got), its.runs) == (201, b"charged", True, 1)
    assert (got.headers["location"], got.headers["x-bill"], "set-cookie" in got.headers) == ("/charges/1", "7", False)
    assert await its.door.lost() == []
    (said,) = [each for each in logged.entries if each["event"] == "a lost request was settled"]
    assert (said["by"], said["route"], said["status"]) == ("the app", "POST *", 201)


async def test_with_review_it_runs_once_it_is_released(lose: Lose, logged: LogCapture) -> None:
    """H36."""
    its = await lose(Route(on_stale="review"))
    (lost,) = await its.door.lost()
    assert await its.door.release(lost)
    assert not await its.door.settle(lost, CHARGED)
    assert [(each.content, replayed(each)) for each in [await its.shop.post() for _ in range(2)]] == [
        (b"run 2", False),
        (b"run 2", True),
    ]
    assert [each["event"] for each in logged.entries if "by" in each] == ["a lost request was released"]


async def test_what_reconcile_knows_is_stored_and_sent(lose: Lose) -> None:
    """H35."""
    asked = list[LostRequest]()

    async def reconcile(lost: LostRequest) -> Done[Response]:
        asked.append(lost)
        return Done(CHARGED)

    its = await lose(Route(reconcile=reconcile))
    (lost,) = await its.door.lost()
    got = [await its.shop.post() for _ in range(2)]
    assert [(each.status_code, each.content, each.headers["location"]) for each in got] == [
        (201, b"charged", "/charges/1")
    ] * 2
    assert [("set-cookie" in each.headers, each.headers["x-bill"], replayed(each)) for each in got] == [
        (False, "7", True)
    ] * 2
    assert its.runs == 1
    assert [(each.key, each.route, each.since) for each in asked] == [(lost.key, "POST *", lost.since)]


async def test_what_reconcile_says_was_not_done_runs(lose: Lose) -> None:
    """H35."""

    async def reconcile(lost: LostRequest) -> NotDone:
        return NotDone()

    its = await lose(Route(reconcile=reconcile, on_stale="review"))
    assert [(await its.shop.post()).content for _ in range(2)] == [b"run 2"] * 2


@pytest.mark.parametrize("how", ["unknown", "raises", "exits", "nonsense", "silent"])
async def test_what_reconcile_does_not_know_is_refused_and_asked_again(lose: Lose, how: str) -> None:
    """H35."""
    asked = 0

    async def reconcile(lost: LostRequest) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            return Done(CHARGED)
        if how == "raises":
            raise RuntimeError("the gateway is down")
        if how == "exits":
            raise SystemExit("the gateway is down")
        if how == "silent":
            await asyncio.Event().wait()
        return Unknown() if how == "unknown" else "done"

    its = await lose(Route(reconcile=reconcile, timeout="100ms" if how == "silent" else None))
    got = [await its.shop.post() for _ in range(3)]
    assert [problem(each) for each in got[:2]] == ["outcome-unknown"] * 2
    assert (got[2].content, its.runs, asked) == (b"charged", 1, 3)


async def test_what_reconcile_makes_up_and_nobody_can_keep_gives_the_key_back(lose: Lose) -> None:
    """H35: else it would be held for as long as this process lives."""
    asked = 0

    async def reconcile(lost: LostRequest) -> Done[Response]:
        nonlocal asked
        asked += 1
        return Done(CHARGED if asked == 2 else Response(201, (("x-bill", "\udc80"),), b""))

    its = await lose(Route(reconcile=reconcile))
    assert [(await its.shop.post()).status_code for _ in range(2)] == [500, 201]
    assert (its.runs, asked) == (1, 2)


async def test_a_reconcile_that_does_not_end_is_left_behind(
    lose: Lose, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    """H35: nobody else would be asked while it has the key."""
    asked, go = 0, asyncio.Event()

    async def reconcile(lost: LostRequest) -> Done[Response]:
        nonlocal asked
        asked += 1
        while asked == 1 and not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        return Done(CHARGED)

    tuned(monkeypatch, reconcile_grace=0.01)
    its = await lose(Route(reconcile=reconcile, timeout="50ms"))
    async with asyncio.timeout(PATIENCE):
        assert problem(await its.shop.post()) == "outcome-unknown"
        assert (await its.shop.post()).content == b"charged"
    go.set()
    assert [each["event"] for each in logged.entries].count("reconcile did not end after its cancellation") == 1


async def test_closing_waits_for_a_reconcile(lose: Lose, monkeypatch: pytest.MonkeyPatch) -> None:
    """H14: its key would be free, and it would be asked beside the next one."""
    inside, go = asyncio.Event(), asyncio.Event()

    async def reconcile(lost: LostRequest) -> NotDone:
        inside.set()
        await go.wait()
        return NotDone()

    its = await lose(Route(reconcile=reconcile))
    asking = asyncio.create_task(its.shop.post())
    await inside.wait()
    closing = asyncio.create_task(its.door.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go.set()
    assert (await asking).content == b"run 2"
    await asyncio.wait_for(closing, PATIENCE)


async def test_those_of_another_app_are_not_listed(lose: Lose, redis_server: RedisServer) -> None:
    its = await lose(Route())
    door = Idempotency(App("other"), tenant=by_header, store="redis", redis=redis_server.address)
    assert await door.lost() == []
    await door.close()
    assert len(await its.door.lost()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_stale": "resume"}, 'write "run" or "review"'),
        ({"reconcile": lambda lost: None}, "write an async function"),
        ({"store": asyncio.sleep}, "write a plain function of a Response"),
        ({"tx": True, "on_stale": "review"}, "leave them out"),
    ],
)
def test_what_cannot_be_is_refused(make_door: MakeDoor, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_door(routes={"POST /orders": Route(**options)})


async def test_the_key_is_known_to_endpoints_alone() -> None:
    with pytest.raises(ConfigurationError, match="outside a request"):
        current_key()
