"""Behind an effect nothing but the store's own word gives its key back, whatever a driver raises (H52)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response

from idemconsumer.message.message import StoredResult
from idemconsumer.ports.requests import Held
from idemconsumer.stores.connection import Connection
from idemconsumer.stores.redis.redis_requests import RedisRequests
from tests.http.endpoints import Counting
from tests.http.fake_requests import FakeRequests
from tests.http.site import Client, MakeDoor, client, service
from tests.support.foreign import FOREIGN, Faults
from tests.support.servers.redis import RedisServer
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE


class Runs:
    """Counts the effects of each key. The first `refused` of a key have none, and their response is not kept."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.refused = 0

    async def __call__(self, request: StarletteRequest) -> Response:
        key = request.headers["idempotency-key"]
        self.of[key] = self.of.get(key, 0) + 1
        return Response(f"run {self.of[key]}", 201 if self.of[key] > self.refused else 503)


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
async def shop(
    request: pytest.FixtureRequest, make_door: MakeDoor, redis_server: RedisServer, runs: Runs
) -> AsyncIterator[Client]:
    store = RedisRequests(redis_server.address, lease=3600.0) if request.param == "redis" else "postgres"
    async with client(service(make_door(store=store), runs.__call__)) as shop:
        assert (await shop.post(key="first")).status_code == 201  # its connections are open
        yield shop
    if isinstance(store, RedisRequests):
        await store.close()


def around(driver: str, faults: Faults) -> None:
    if driver == "redis":
        faults.around(asyncio, "open_connection")
        faults.around(asyncio.StreamWriter, "writelines", "drain")
        faults.around(asyncio.StreamReader, "read", "readline", "readexactly")
    else:
        faults.around(Connection, "simple", "last", "rollback")


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize("shop", ["redis", "postgres"], indirect=True)
async def test_no_call_of_a_driver_lets_an_effect_happen_twice_or_keeps_its_key_for_ever(
    shop: Client, runs: Runs, error: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """H52. Before or behind each of its calls, one at a time."""
    tuned(monkeypatch, response_retry_pause=0.01, unfinished_pause=0.01)
    faults = Faults(monkeypatch)
    around(request.node.callspec.params["shop"], faults)
    for at in count():
        reached = False
        for behind in (False, True):
            key = f"{error}-{at}-{behind}"
            with faults.one(FOREIGN[error], at, behind=behind):
                first = await asyncio.wait_for(shop.post(key=key), PATIENCE)
                reached |= faults.raised
            async with asyncio.timeout(PATIENCE):
                while (got := await shop.post(key=key)).status_code != 201:
                    await asyncio.sleep(0.01)
            assert (runs.of[key], got.content) == (1, b"run 1"), f"{key}: {first.status_code} at first"
        if not reached:
            break
    assert at >= 2, "a claim and its end are two exchanges"


@pytest.mark.parametrize("error", FOREIGN)
@pytest.mark.parametrize("shop", ["redis", "postgres"], indirect=True)
async def test_a_key_that_is_to_be_given_back_is_whatever_a_driver_raises(
    shop: Client, runs: Runs, error: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """H23, H52: else it would be busy for as long as the process lives."""
    tuned(monkeypatch, response_retry_pause=0.01, unfinished_pause=0.01)
    faults = Faults(monkeypatch)
    around(request.node.callspec.params["shop"], faults)
    runs.refused = 1
    for at in count():
        key, reached = f"{error}-{at}", False
        with faults.one(FOREIGN[error], at, behind=False):
            assert (await asyncio.wait_for(shop.post(key=key), PATIENCE)).status_code == 503
            reached = faults.raised
        async with asyncio.timeout(PATIENCE):
            while (await shop.post(key=key)).status_code != 201:
                await asyncio.sleep(0.01)
        assert runs.of[key] == 2
        if not reached:
            break
    assert at >= 2, "a claim and what gives it back are two exchanges"


@pytest.mark.parametrize("error", FOREIGN)
async def test_a_store_of_somebody_elses_may_raise_what_it_likes(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H52: what it did is done, and the next one would do it again."""
    tuned(monkeypatch, response_retry_pause=0.0)
    complete, errors = store.complete, [FOREIGN[error](), FOREIGN[error]()]

    async def failing(held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        if errors:
            raise errors.pop()
        return await complete(held, result, failed=failed)

    monkeypatch.setattr(store, "complete", failing)
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert [(await shop.post()).content for _ in range(2)] == [b"run 1"] * 2
    assert (endpoint.runs, store.released) == (1, 0)
