"""A leased request goes on when nobody waits for it any more, and its key stays held meanwhile (H13, H14)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from starlette.background import BackgroundTask
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response, StreamingResponse

from idemconsumer import App
from idemconsumer.http import Idempotency, Route
from idemconsumer.http import Response as Given
from idemconsumer.http import leased_request as leased
from idemconsumer.http.policy import compile_route
from idemconsumer.message.message import StoredResult
from idemconsumer.ports.observer import Point
from idemconsumer.ports.requests import Held, Running
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Record, State
from tests.http.endpoints import Counting
from tests.http.fake_requests import FakeRequests
from tests.http.site import Call, MakeDoor, by_header, client, problem, replayed, service
from tests.support.ledger import Ledger
from tests.support.logs import LogCapture, times
from tests.support.points import Points
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

BRIEF = Route(timeout="50ms")
HOW = ["over time", "cancelled", "cancelled at each step"]
BODY = b'{"id": 1}'


class InThread:
    """An endpoint that runs in a thread, which nobody can cancel."""

    def __init__(self) -> None:
        self.runs = 0
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self, request: StarletteRequest) -> Response:
        self.runs += 1
        self.inside.set()
        self.go.wait(PATIENCE)
        return Response(f"run {self.runs}", 201)


async def leave(call: Call, how: str) -> None:
    """The client has its answer, or is gone."""
    match how:
        case "over time":
            assert (await call.next())["status"] == 503
            assert b"timed-out" in (await call.next())["body"]
            await asyncio.wait_for(call.task, PATIENCE)
        case "cancelled":
            await call.cancel()
        case "cancelled at each step":  # as anyio does
            async with asyncio.timeout(PATIENCE):
                while not call.task.done():
                    call.task.cancel()
                    await asyncio.sleep(0)


def left(app: Any, **options: Any) -> Call:
    return Call(app, body=BODY, **options)


# ------------------------------------------------------------------------------------------------ its client is gone
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", ["in the loop", "in a thread"])
async def test_what_its_client_does_not_wait_for_keeps_its_key_and_its_response_is_stored(
    ledger: Ledger, make_door: MakeDoor, endpoint: Counting, how: str, where: str
) -> None:
    """H13."""
    each: Any = endpoint if where == "in the loop" else InThread()
    each.go.clear()
    app = service(make_door(default=BRIEF if how == "over time" else Route()), each.__call__)
    call = left(app)
    await until(each.inside.is_set)
    await leave(call, how)
    async with client(app) as shop:
        for _ in range(3):
            assert problem(await shop.post(content=BODY)) == "in-progress"
        assert (each.runs, ledger.states) == (1, [State.PROCESSING])
        each.go.set()
        await until(lambda: ledger.states == [State.COMPLETED])
        while (again := await shop.post(content=BODY)).status_code == 409:
            pass  # it is committed, and its holder does not know it yet
    assert (again.status_code, again.content, replayed(again)) == (201, b"run 1", True)
    assert (each.runs, endpoint.cancelled, call.sent.qsize()) == (1, False, 0)


async def test_the_limit_says_that_it_goes_on(make_door: MakeDoor, store: FakeRequests, endpoint: Counting) -> None:
    endpoint.go.clear()
    async with client(service(make_door(store=store, default=BRIEF), endpoint.__call__)) as shop:
        got = await shop.post()
        assert (got.status_code, problem(got), "retry-after" in got.headers) == (503, "timed-out", True)
        assert "goes on" in got.json()["detail"]
        endpoint.go.set()
        await until(lambda: store.records)
    assert store.released == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("large", [True, False])
async def test_background_tasks_run_behind_the_stored_response(
    make_door: MakeDoor, store: FakeRequests, how: str, *, large: bool
) -> None:
    inside, go, stored = asyncio.Event(), asyncio.Event(), list[int]()

    async def endpoint(request: StarletteRequest) -> Response:
        inside.set()
        await go.wait()
        return Response("x" * 200, background=BackgroundTask(lambda: stored.append(len(store.records))))

    route = Route(timeout="50ms" if how == "over time" else None, max_response=100 if large else 200)
    call = left(service(make_door(store=store, default=route), endpoint))
    await inside.wait()
    await leave(call, how)
    go.set()
    await until(lambda: stored)
    assert stored == [1]


@pytest.mark.parametrize("large", [True, False])
async def test_what_is_sent_once_is_sent_to_nobody(make_door: MakeDoor, store: FakeRequests, *, large: bool) -> None:
    """H7: a stream whose client has gone is ended, since it may be endless."""
    go, inside, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[str]:
        while True:
            yield "event"
            await asyncio.sleep(0)

    class Endless(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                closed.set()

    async def endpoint(request: StarletteRequest) -> Response:
        inside.set()
        await go.wait()
        return Endless(events(), media_type="text/plain" if large else "text/event-stream")

    app = service(make_door(store=store, default=Route(timeout="50ms", max_response=100)), endpoint)
    call = left(app)
    await inside.wait()
    await leave(call, "over time")
    go.set()
    await until(lambda: store.records)
    async with client(app) as shop:
        assert problem(await shop.post(content=BODY)) == "not-replayable"
    await asyncio.wait_for(closed.wait(), PATIENCE)
    assert call.sent.qsize() == 0


@pytest.mark.parametrize("status", [0, 500])
async def test_an_error_after_the_limit_gives_the_key_back(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, logged: LogCapture, status: int
) -> None:
    endpoint.go.clear()
    endpoint.status = status or 201
    endpoint.error = None if status else RuntimeError("broken")
    async with client(service(make_door(store=store, default=BRIEF), endpoint.__call__)) as shop:
        assert problem(await shop.post()) == "timed-out"
        endpoint.go.set()
        await until(lambda: store.released)
        await until(lambda: times(logged, "a request failed after its client had left") == (not status))
        endpoint.status, endpoint.error = 201, None
        assert (await shop.post()).content == b"run 2"


async def test_a_key_that_is_lost_after_the_limit_ends_the_endpoint(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    endpoint.go.clear()
    async with client(service(make_door(store=store, default=BRIEF), endpoint.__call__)) as shop:
        assert problem(await shop.post()) == "timed-out"
        store.lose()
        await until(lambda: endpoint.cancelled)
    assert (store.records, store.released) == ({}, 0)


async def test_a_store_that_goes_after_the_limit_is_waited_for(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()
    complete = store.complete

    async def asked_in_vain(held: Held, result: StoredResult, *, failed: bool = False) -> bool:
        asked.set()
        return await complete(held, result, failed=failed)

    tuned(monkeypatch, response_retry_pause=0.01)
    monkeypatch.setattr(store, "complete", asked_in_vain)
    endpoint.go.clear()
    async with client(service(make_door(store=store, default=BRIEF), endpoint.__call__)) as shop:
        assert problem(await shop.post()) == "timed-out"
        store.down, store.unknown = True, 1
        endpoint.go.set()
        await asked.wait()
        store.down = False
        await until(lambda: store.records)
        assert replayed(await shop.post())
    assert endpoint.runs == 1


async def test_an_endpoint_that_cancels_itself_has_failed(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    async def cancels_itself(request: StarletteRequest) -> Response:
        raise asyncio.CancelledError

    async with client(service(make_door(store=store), cancels_itself)) as shop:
        assert (await shop.post()).status_code == 500
    assert store.released == 1


# --------------------------------------------------------------------------------------------------- before it began
async def test_what_has_not_begun_when_it_is_cancelled_does_not_begin(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming, cancelled = asyncio.Event(), asyncio.Event()

    async def claim(claim: Claim, lost: Callable[[], None], *, again: bool = True) -> Held | Running | Record:
        claiming.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    tuned(monkeypatch, request_patience=2 * PATIENCE)
    monkeypatch.setattr(store, "claim", claim)
    call = left(service(make_door(store=store), endpoint.__call__))
    await claiming.wait()
    await leave(call, "cancelled at each step")
    assert (cancelled.is_set(), endpoint.runs) == (True, 0)


async def test_one_that_waits_for_another_and_is_cancelled_does_not_begin(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    endpoint.go.clear()
    app = service(make_door(store=store, default=Route(wait="1h")), endpoint.__call__)
    first = left(app)
    await endpoint.inside.wait()
    second = left(app)
    await asyncio.sleep(0)
    await leave(second, "cancelled")
    endpoint.status = 500  # so that the second one would run
    endpoint.go.set()
    await asyncio.wait_for(first.task, PATIENCE)
    assert endpoint.runs == 1


async def test_what_is_cancelled_as_it_begins_has_begun(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting
) -> None:
    """H13: it holds its key by then, and nobody else would give it back."""
    points = Points()
    call = left(service(make_door(store=store, observer=points), endpoint.__call__))
    points.on(Point.CLAIMED, call.task.cancel)
    await asyncio.wait({call.task}, timeout=PATIENCE)
    assert call.task.cancelled()
    await until(lambda: store.records)
    assert endpoint.runs == 1


@pytest.mark.parametrize("unclaimed", [True, False])
async def test_what_runs_without_a_claim_has_no_limit(store: FakeRequests, *, unclaimed: bool) -> None:
    """Nobody but its client can get its response."""
    store.fails_open = unclaimed
    limits = list[float | None]()

    async def run(limit: float | None = None) -> Given:
        limits.append(limit)
        return Given(201, (), b"")

    claim = Claim(key=b"k" * 32, scope="s", fingerprint=None)
    await leased.Leased(store, lambda *_: None).attempt(claim, compile_route("POST /orders", BRIEF), run)
    assert limits == [None if unclaimed else 0.05]


# -------------------------------------------------------------------------------------------------------- the end
async def test_closing_waits_for_what_runs(make_door: MakeDoor, store: FakeRequests, endpoint: Counting) -> None:
    """H14."""
    endpoint.go.clear()
    door = make_door(store=store)
    call = left(service(door, endpoint.__call__))
    await endpoint.inside.wait()
    await leave(call, "cancelled")
    closing = asyncio.create_task(door.close())
    await asyncio.sleep(0)
    endpoint.go.set()
    await asyncio.wait_for(closing, PATIENCE)
    assert (store.closed, len(store.records), endpoint.cancelled) == (True, 1, False)


async def test_what_runs_for_longer_keeps_its_key_and_all_is_closed_behind_it(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14."""
    tuned(monkeypatch, closing_grace=0.01)
    endpoint.go.clear()
    door = make_door(store=store)
    call = left(service(door, endpoint.__call__))
    await endpoint.inside.wait()
    await leave(call, "cancelled")
    await asyncio.wait_for(door.close(), PATIENCE)
    assert (store.closed, len(store.held)) == (False, 1)
    endpoint.go.set()
    await until(lambda: store.closed)
    assert (len(store.records), store.released) == (1, 0)


async def test_closing_waits_for_who_is_about_to_begin(
    make_door: MakeDoor, store: FakeRequests, endpoint: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14: it would run with a key whose lease has ended."""
    claiming, go, claim = asyncio.Event(), asyncio.Event(), store.claim

    async def slow(*given: Any, **more: Any) -> Any:
        claiming.set()
        await go.wait()
        return await claim(*given, **more)

    async def begun(request: StarletteRequest) -> Response:
        return Response(f"closed: {store.closed}")

    monkeypatch.setattr(store, "claim", slow)
    door = make_door(store=store)
    async with client(service(door, begun)) as shop:
        asking = asyncio.create_task(shop.post())
        await claiming.wait()
        closing = asyncio.create_task(door.close())
        await asyncio.sleep(0.01)
        go.set()
        assert (await asking).content == b"closed: False"
        await asyncio.wait_for(closing, PATIENCE)
    assert store.closed


async def test_each_of_two_loops_has_what_it_opened(make_door: MakeDoor, endpoint: Counting) -> None:
    """H50: as of a server that has one in each thread."""
    door, stores = make_door(), list[object]()

    async def stored() -> None:
        stores.append(await door._opened.requests())

    await stored()
    other = asyncio.new_event_loop()
    for _ in range(2):
        await asyncio.to_thread(other.run_until_complete, stored())
        await stored()
    await asyncio.to_thread(other.run_until_complete, door.close())
    other.close()
    assert (stores[0] is stores[2] is stores[4], stores[1] is stores[3]) == (True, True)


async def test_what_somebody_cancels_with_all_tasks_keeps_its_key(
    make_door: MakeDoor, store: FakeRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14: as a program does that is about to end."""
    tuned(monkeypatch, closing_grace=0.01)
    slow = InThread()
    door = make_door(store=store)
    call = left(service(door, cast(Any, slow.__call__)))
    await until(slow.inside.is_set)
    everything = asyncio.all_tasks() - {asyncio.current_task()}
    for each in everything:
        each.cancel()
    await asyncio.wait(everything, timeout=PATIENCE)
    await asyncio.wait_for(door.close(), PATIENCE)
    assert (call.task.cancelled(), store.closed, len(store.held), store.released) == (True, False, 1, 0)
    slow.go.set()


async def test_a_loop_that_ends_leaves_the_keys_of_its_threads_to_their_lease(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14, H15: as a server ends its loop, with a thread in it that runs on."""
    tuned(monkeypatch, closing_grace=0.01)
    slow = InThread()

    async def serve() -> None:
        door = Idempotency(App("shop"), tenant=by_header)
        call = left(service(door, cast(Any, slow.__call__)))
        await until(slow.inside.is_set)
        await call.cancel()
        await door.close()

    await asyncio.to_thread(asyncio.run, serve())
    try:
        good = "select until > now() from idemconsumer.worker where id in (select worker from idemconsumer.request)"
        assert (ledger.states, ledger.run(good)) == ([State.PROCESSING], [(True,)])
        async with client(service(make_door(), cast(Any, slow.__call__))) as shop:
            assert problem(await shop.post(content=BODY)) == "in-progress"
            ledger.run(
                "update idemconsumer.worker set until = now() where id in (select worker from idemconsumer.request)"
            )
            slow.go.set()
            assert (await shop.post(content=BODY)).content == b"run 2"
    finally:
        slow.go.set()
