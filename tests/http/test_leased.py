"""Leased mode: the key is held while the endpoint runs, and the response is stored behind it (H6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response, StreamingResponse

from idemconsumer import ConfigurationError
from idemconsumer.errors import CommitUnknown, Contention, IdemConsumerError, StoreUnavailable
from idemconsumer.http import IdempotencyMiddleware, Route
from idemconsumer.http.exchanged import CutOff
from idemconsumer.rules.values import State
from tests.http.endpoints import Counting
from tests.http.fake_requests import FakeRequests
from tests.http.site import Call, MakeDoor, client, problem, replayed, service
from tests.support.ledger import Ledger
from tests.support.servers.redis import RedisServer
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE


async def test_keys_are_kept_in_postgres_unless_another_store_is_named(
    ledger: Ledger, make_door: MakeDoor, endpoint: Counting
) -> None:
    elsewhere = service(make_door(), endpoint.__call__)  # as in another process
    async with client(service(make_door(), endpoint.__call__)) as shop, client(elsewhere) as other:
        endpoint.go.clear()
        first = asyncio.create_task(shop.post(1))
        await endpoint.inside.wait()
        assert [problem(await each.post(n)) for each in (shop, other) for n in (1, 2)] == [
            "in-progress", "key-reused", "in-progress", "key-reused",
        ]  # fmt: skip
        endpoint.go.set()
        assert (await first).status_code == 201
        again = await other.post(1)
        assert (again.status_code, again.content, replayed(again)) == (201, b"run 1", True)
        endpoint.status = 500
        assert [(await each.post(key="fails")).content for each in (shop, other)] == [b"run 2", b"run 3"]
    assert (endpoint.runs, ledger.states) == (3, [State.COMPLETED])


async def test_a_response_that_postgres_cannot_keep_gives_the_key_back(ledger: Ledger, make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        return Response(headers={"content-type": "a\0b"})

    async with client(service(make_door(), endpoint)) as shop:
        assert [(await shop.post()).status_code for _ in range(2)] == [500, 500]
    assert ledger.states == []


@pytest.mark.parametrize("store", ["redis", "hybrid"])
async def test_or_in_redis(
    ledger: Ledger, make_door: MakeDoor, endpoint: Counting, redis_server: RedisServer, store: str
) -> None:
    doors = [make_door(store=store, redis=redis_server.address) for _ in range(2)]  # as in two processes
    async with (
        client(service(doors[0], endpoint.__call__)) as shop,
        client(service(doors[1], endpoint.__call__)) as other,
    ):
        key = str(uuid4())
        first, again, another = await shop.post(key=key), await other.post(key=key), await other.post(2, key=key)
    assert (first.content, again.content, replayed(again)) == (b"run 1", b"run 1", True)
    assert problem(another) == "key-reused"
    assert len(ledger.states) == (store == "hybrid")


async def test_redis_without_an_address_says_what_to_set(make_door: MakeDoor, endpoint: Counting) -> None:
    app = IdempotencyMiddleware(service(make_door(default=None), endpoint.__call__), make_door(store="redis"))
    call = Call(app)
    with pytest.raises(ConfigurationError, match="IDEMCONSUMER_REDIS"):
        await asyncio.wait_for(call.task, PATIENCE)


async def test_what_runs_without_a_claim_is_sent_and_not_stored(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    store.fails_open = True
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        answers = [await shop.post() for _ in range(2)]
    assert [answer.content for answer in answers] == [b"run 1", b"run 2"]
    assert [answer.headers["Idempotent-Unclaimed"] for answer in answers] == ["true", "true"]
    assert (store.records, store.released) == ({}, 0)


@pytest.mark.parametrize("status", [200, 204, 303, 404, 409, 422])
async def test_what_is_kept_is_replayed(make_door: MakeDoor, store: FakeRequests, status: int) -> None:
    endpoint = Counting(status)
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        first, again = await shop.post(), await shop.post()
    assert (first.status_code, again.status_code, again.content) == (status, status, first.content)
    assert (replayed(first), replayed(again), endpoint.runs) == (False, True, 1)
    assert [record.state.name for record in store.records.values()] == ["COMPLETED" if status < 400 else "FAILED"]


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_what_may_pass_gives_the_key_back(make_door: MakeDoor, store: FakeRequests, status: int) -> None:
    endpoint = Counting(status)
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert [(await shop.post()).status_code for _ in range(2)] == [status] * 2
    assert (endpoint.runs, store.released, store.records) == (2, 2, {})


async def test_an_error_gives_the_key_back(make_door: MakeDoor, store: FakeRequests, endpoint: Counting) -> None:
    endpoint.error = RuntimeError("broken")
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert (await shop.post()).status_code == 500
        endpoint.error = None
        assert (await shop.post()).status_code == 201
    assert endpoint.runs == 2


async def test_a_store_that_fails_gives_back_no_key(make_door: MakeDoor, store: FakeRequests) -> None:
    def fails(response: object) -> bool:
        raise LookupError("no such header")

    endpoint = Counting(201)
    async with client(service(make_door(store=store, default=Route(store=fails)), endpoint.__call__)) as shop:
        first, again = await shop.post(), await shop.post()
    assert (first.status_code, again.status_code, replayed(again), endpoint.runs) == (201, 201, True, 1)


async def test_without_a_key_or_a_need_for_one_it_passes_untouched(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert [(await shop.post(key=None, tenant=None)).status_code for _ in range(2)] == [201, 201]
    assert (endpoint.runs, store.records) == (2, {})


async def test_in_progress_is_409_and_another_request_under_the_key_422(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    endpoint.go.clear()
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        first = asyncio.create_task(shop.post(1))
        await endpoint.inside.wait()
        same, other = await shop.post(1), await shop.post(2)
        endpoint.go.set()
        assert (await first).status_code == 201
    assert [(each.status_code, problem(each)) for each in (same, other)] == [(409, "in-progress"), (422, "key-reused")]
    assert endpoint.runs == 1


async def test_waiting_gets_the_response(make_door: MakeDoor, store: FakeRequests, endpoint: Counting) -> None:
    endpoint.go.clear()
    async with client(service(make_door(store=store, default=Route(wait="30s")), endpoint.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await endpoint.inside.wait()
        second = asyncio.create_task(shop.post())
        endpoint.go.set()
        async with asyncio.timeout(PATIENCE):
            got = await asyncio.gather(first, second)
    assert [(each.status_code, each.content) for each in got] == [(201, b"run 1")] * 2


async def test_a_lost_key_ends_the_endpoint_and_its_response_is_not_stored(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    endpoint.go.clear()
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await endpoint.inside.wait()
        store.lose()
        got = await asyncio.wait_for(first, PATIENCE)
    assert (got.status_code, problem(got)) == (503, "outcome-unknown")
    assert (endpoint.cancelled, store.records) == (True, {})


async def test_a_response_that_comes_after_the_loss_is_refused(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    async def losing(request: StarletteRequest) -> Response:
        store.held.clear()  # without a word: another one has it
        return Response("late")

    async with client(service(make_door(store=store), losing)) as shop:
        got = await shop.post()
    assert (got.status_code, problem(got), store.records) == (503, "outcome-unknown", {})


async def test_an_unknown_end_is_asked_for_again(make_door: MakeDoor, store: FakeRequests, endpoint: Counting) -> None:
    store.unknown = 2
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert (await shop.post()).status_code == 201
        assert replayed(await shop.post())
    assert endpoint.runs == 1


@pytest.mark.parametrize("error", [Contention("a lock is not given"), ConfigurationError("no standby")])
async def test_an_end_that_is_refused_for_now_gives_back_no_key(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """H6: what it did is done, and the next one would do it again."""
    complete, refusals = store.complete, [error, error]

    async def refused(*given: Any, **more: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return await complete(*given, **more)

    tuned(monkeypatch, response_retry_pause=0.0)
    monkeypatch.setattr(store, "complete", refused)
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert [(await shop.post()).content for _ in range(2)] == [b"run 1"] * 2
    assert (endpoint.runs, store.released) == (1, 0)


@pytest.mark.parametrize("error", [CommitUnknown("x"), StoreUnavailable("x"), Contention("x")])
async def test_an_outage_that_the_endpoint_has_met_is_its_own_error(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, error: IdemConsumerError
) -> None:
    """H6, B12: as `app.publish` in it raises. It is not run once more, nor said that nothing was done."""
    endpoint.error = error
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        assert (await shop.post()).status_code == 500
    assert (endpoint.runs, store.released) == (1, 1)


async def test_a_store_that_is_away_is_503_and_nothing_runs(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    store.down = True
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        got = await shop.post()
        assert (got.status_code, problem(got), "retry-after" in got.headers) == (503, "unavailable", True)
        store.down = False
        assert (await shop.post()).status_code == 201
    assert endpoint.runs == 1


async def test_a_store_that_goes_while_it_runs_is_waited_for_and_then_given_up(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, response_retry_pause=0.01)
    endpoint.go.clear()
    async with client(service(make_door(store=store), endpoint.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await endpoint.inside.wait()
        store.down = True
        endpoint.go.set()
        await asyncio.sleep(0)
        store.down = False
        assert (await first).status_code == 201

        tuned(monkeypatch, response_patience=0.02)
        endpoint.go.clear()
        endpoint.inside.clear()
        second = asyncio.create_task(shop.post(key="other"))
        await endpoint.inside.wait()
        store.down = True
        endpoint.go.set()
        assert problem(await second) == "outcome-unknown"


async def test_a_client_that_goes_away_changes_nothing(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    endpoint.go.clear()
    call = Call(service(make_door(store=store), endpoint.__call__))
    await endpoint.inside.wait()
    call.gone.set()
    endpoint.go.set()
    await asyncio.wait_for(call.task, PATIENCE)
    assert len(store.records) == 1


class Unkept:
    """A stream that is not kept, whose parts the test gives."""

    def __init__(self) -> None:
        self.more = asyncio.Queue[str]()
        self.runs = 0
        self.ended = asyncio.Event()

    async def parts(self) -> AsyncIterator[str]:
        try:
            while part := await self.more.get():
                yield part
        finally:
            self.ended.set()

    async def __call__(self, request: StarletteRequest) -> Response:
        self.runs += 1
        return StreamingResponse(self.parts(), 503, media_type="text/event-stream")


async def test_a_stream_that_is_not_kept_holds_its_key_until_it_ends(make_door: MakeDoor, store: FakeRequests) -> None:
    stream = Unkept()
    door = make_door(store=store)
    app = service(door, stream.__call__)
    call = Call(app)
    assert (await call.next())["status"] == 503
    stream.more.put_nowait("a")
    assert (await call.next())["body"] == b"a"
    async with client(app) as shop:
        assert problem(await shop.post(content=b'{"id": 1}')) == "in-progress"
    assert (stream.runs, store.released) == (1, 0)
    closing = asyncio.create_task(door.close())  # which waits for it
    stream.more.put_nowait("")
    await asyncio.wait_for(closing, PATIENCE)
    await call.task
    assert (store.released, store.held) == (1, {})


async def test_a_stream_whose_client_has_gone_gives_its_key_back(make_door: MakeDoor, store: FakeRequests) -> None:
    stream = Unkept()
    call = Call(service(make_door(store=store), stream.__call__))
    assert (await call.next())["status"] == 503
    await call.cancel()
    assert (stream.ended.is_set(), store.released, store.held) == (True, 1, {})


async def test_a_stream_that_loses_its_key_is_cut_off(make_door: MakeDoor, store: FakeRequests) -> None:
    stream = Unkept()
    call = Call(service(make_door(store=store), stream.__call__))
    assert (await call.next())["status"] == 503
    stream.more.put_nowait("a")
    assert (await call.next())["body"] == b"a"
    store.lose()
    with pytest.raises(CutOff, match="lost in the middle"):
        await asyncio.wait_for(call.task, PATIENCE)
    assert (stream.ended.is_set(), store.released, store.records) == (True, 0, {})
    assert call.sent.empty()  # so the response has no end


async def test_a_stream_is_on_record_before_it_goes_out(make_door: MakeDoor, store: FakeRequests) -> None:
    more = asyncio.Queue[str]()

    async def events() -> AsyncIterator[str]:
        while True:
            yield await more.get()

    async def endpoint(request: StarletteRequest) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    app = service(make_door(store=store), endpoint)
    call = Call(app)
    assert (await call.next())["status"] == 200
    assert len(store.records) == 1
    more.put_nowait("a")
    assert (await call.next())["body"] == b"a"
    async with client(app) as shop:
        assert problem(await shop.post(content=b'{"id": 1}')) == "not-replayable"
    await call.cancel()
