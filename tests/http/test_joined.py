"""Joined mode: the effect, the record and the response are one commit, or nothing of it is there (H2, H3, H12)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, LiteralString, cast

import psycopg
import pytest
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route as StarletteRoute

from idemconsumer import Tx
from idemconsumer.errors import HandlerFault
from idemconsumer.http import IdempotencyMiddleware, Route, current_sync_tx, current_tx
from idemconsumer.http import Response as Given
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from tests.http.fake_requests import FakeRequests
from tests.http.site import Call, MakeDoor, client, place, problem, replayed, service
from tests.support.clock import forward
from tests.support.inside import left_behind
from tests.support.ledger import Ledger, write
from tests.support.points import Points
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

RIVALS = 50
LIMIT = 20.0  # seconds
JOINED = {"POST /orders": Route(tx=True)}


def answering(status: int) -> Callable[[StarletteRequest], Awaitable[Response]]:
    """An endpoint that has written something when it answers with this."""

    async def answer(request: StarletteRequest) -> Response:
        await write(current_tx(), status)
        return Response(None if status == 204 else f"said {status}", status)

    return answer


# ----------------------------------------------------------------------------------------------------- one commit
async def test_effect_record_and_response_are_there_at_once(ledger: Ledger, make_door: MakeDoor) -> None:
    points = Points()
    seen = []
    points.on(Point.SEALING, lambda: seen.append((ledger.effects, ledger.states)))
    points.on(Point.COMMITTED, lambda: seen.append((ledger.effects, ledger.states)))
    async with client(service(make_door(routes=JOINED, observer=points))) as shop:
        first, again = await shop.post(), await shop.post()

    assert seen == [([], []), (["1"], [State.COMPLETED])]
    assert (first.status_code, first.content, first.headers["location"]) == (201, b'{"placed":1}', "/orders/1")
    assert (again.status_code, again.content, again.headers["location"]) == (201, b'{"placed":1}', "/orders/1")
    assert (replayed(first), replayed(again)) == (False, True)
    assert ledger.effects == ["1"]


async def test_a_replay_where_the_request_was_answered_opens_no_transaction(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(service(make_door(routes=JOINED))) as shop:
        first = await shop.post()
        monkeypatch.delattr(PostgresStore, "transaction")
        again, other = await shop.post(), await shop.post(2)
    assert (replayed(again), again.content, other.status_code) == (True, first.content, 422)
    assert ledger.effects == ["1"]


async def test_what_was_answered_and_is_forgotten_runs_anew(ledger: Ledger, make_door: MakeDoor) -> None:
    async with client(service(make_door(routes=JOINED))) as shop:
        await shop.post()
        ledger.run("truncate idemconsumer.record, idemconsumer.result")
        again = await shop.post()
    assert (replayed(again), ledger.effects) == (False, ["1", "1"])


async def test_the_response_is_sent_after_the_commit_and_background_tasks_run_after_that(
    ledger: Ledger, make_door: MakeDoor
) -> None:
    order: list[object] = []

    class Watching:
        def at(self, point: Point | SagaPoint, handler: str, keys: object) -> None:
            order.append(str(point))

    async def mail() -> None:
        order.append("mail")

    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        return Response("ok", background=BackgroundTask(mail))

    app = service(make_door(routes=JOINED, observer=Watching()), endpoint)

    async def noting(scope: object, receive: object, send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
        async def noted(message: dict[str, object]) -> None:
            order.append(message["type"])
            await send(message)

        await app(scope, receive, noted)  # type: ignore[arg-type]

    async with client(noting) as shop:
        await shop.post()
    assert order == ["claimed", "sealing", "committed", "http.response.start", "http.response.body", "mail"]


@pytest.mark.parametrize("how", ["swallowed error", "own COMMIT", "own ROLLBACK", "task left behind"])
async def test_what_breaks_the_transaction_cannot_commit(ledger: Ledger, make_door: MakeDoor, how: str) -> None:
    left: list[asyncio.Task[None]] = []
    go_on = asyncio.Event()

    async def later(tx: Tx) -> None:
        await go_on.wait()
        await write(tx, "late")

    async def endpoint(request: StarletteRequest) -> Response:
        tx = current_tx()
        await write(tx, 1)
        match how:
            case "swallowed error":
                with pytest.raises(psycopg.Error):
                    await tx.execute("select 1 / 0")
            case "own COMMIT":
                await tx.connection.commit()
                await write(current_tx(), 2)
            case "own ROLLBACK":
                await tx.connection.rollback()
            case "task left behind":
                left.append(asyncio.create_task(later(tx)))
        return JSONResponse("fine", 201)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        assert (await shop.post()).status_code == 500
    go_on.set()
    await asyncio.gather(*left, return_exceptions=True)
    assert (ledger.effects, ledger.states, ledger.letters) == ([], [], [])


async def test_an_error_undoes_it_and_the_key_is_free(ledger: Ledger, make_door: MakeDoor) -> None:
    failing = True

    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        if failing:
            raise RuntimeError("broken")
        return Response("ok")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        assert (await shop.post()).status_code == 500
        assert (ledger.effects, ledger.states) == ([], [])
        failing = False
        assert (await shop.post()).status_code == 200
    assert ledger.effects == ["1"]


# ------------------------------------------------------------------------------------------------------- what is kept
@pytest.mark.parametrize("status", [200, 201, 202, 204, 303])
async def test_success_is_stored_with_its_effect(ledger: Ledger, make_door: MakeDoor, status: int) -> None:
    async with client(service(make_door(routes=JOINED), answering(status))) as shop:
        first, again = await shop.post(), await shop.post()
    assert (first.status_code, again.status_code, again.content) == (status, status, first.content)
    assert replayed(again)
    assert (ledger.effects, ledger.states) == ([str(status)], [State.COMPLETED])


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422])
async def test_a_refusal_is_stored_without_its_effect(ledger: Ledger, make_door: MakeDoor, status: int) -> None:
    async with client(service(make_door(routes=JOINED), answering(status))) as shop:
        first, again = await shop.post(), await shop.post()
    assert (first.status_code, again.status_code, again.content) == (status, status, first.content)
    assert (replayed(first), replayed(again)) == (False, True)
    assert (ledger.effects, ledger.states) == ([], [State.FAILED])


@pytest.mark.parametrize("status", [401, 407, 405, 408, 425, 429, 500, 503])
async def test_what_may_pass_is_neither_stored_nor_done(ledger: Ledger, make_door: MakeDoor, status: int) -> None:
    async with client(service(make_door(routes=JOINED), answering(status))) as shop:
        got = [await shop.post() for _ in range(2)]
    assert [(each.status_code, replayed(each)) for each in got] == [(status, False)] * 2
    assert (ledger.effects, ledger.states) == ([], [])


async def test_a_route_judges_for_itself(ledger: Ledger, make_door: MakeDoor) -> None:
    def store(given: Given) -> bool:
        return given.status == 503 and given.body == b"said 503"

    door = make_door(routes={"POST /orders": Route(tx=True, store=store)})
    async with client(service(door, answering(503))) as shop:
        assert [replayed(await shop.post()) for _ in range(2)] == [False, True]
    async with client(service(door, answering(201))) as shop:
        assert [replayed(await shop.post(key="other")) for _ in range(2)] == [False, False]
    assert (ledger.effects, ledger.states) == ([], [State.FAILED])


async def test_an_http_exception_is_a_response_like_any_other(ledger: Ledger, make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        tx = current_tx()
        await write(tx, 1)
        raise HTTPException(404, "no such thing")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        first, again = await shop.post(), await shop.post()
    assert (first.status_code, again.status_code, again.text) == (404, 404, "no such thing")
    assert (ledger.effects, replayed(again)) == ([], True)


# ----------------------------------------------------------------------------------------------------- another request
async def test_another_request_under_the_key_is_422_and_writes_no_letter(ledger: Ledger, make_door: MakeDoor) -> None:
    async with client(service(make_door(routes=JOINED))) as shop:
        await shop.post(1)
        got = [await shop.post(2), await shop.post(1, path="/orders?a=1"), await shop.post(1)]
    assert [each.status_code for each in got] == [422, 422, 201]
    assert problem(got[0]) == "key-reused"
    assert (ledger.effects, ledger.letters) == (["1"], [])


# ------------------------------------------------------------------------------------------------------- in progress
class Slow:
    """An endpoint that waits inside its transaction."""

    def __init__(self) -> None:
        self.inside = asyncio.Event()
        self.go = asyncio.Event()
        self.runs = 0

    async def __call__(self, request: StarletteRequest) -> Response:
        self.runs += 1
        await request.body()
        await write(current_tx(), 1)
        self.inside.set()
        await self.go.wait()
        if await request.is_disconnected():
            raise RuntimeError("the endpoint has learnt that its client is gone")
        return JSONResponse("done", 201)


async def test_in_progress_is_409_with_retry_after(ledger: Ledger, make_door: MakeDoor) -> None:
    slow = Slow()
    async with client(service(make_door(routes=JOINED), slow.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await slow.inside.wait()
        meanwhile = await shop.post()
        slow.go.set()
        assert (await first).status_code == 201
        assert replayed(await shop.post())
    assert (meanwhile.status_code, problem(meanwhile), meanwhile.headers["retry-after"]) == (409, "in-progress", "1")
    assert (slow.runs, ledger.effects) == (1, ["1"])


async def test_another_request_under_the_key_is_422_while_the_first_is_in_progress(
    ledger: Ledger, make_door: MakeDoor
) -> None:
    slow = Slow()
    door = make_door(routes={"POST /orders": Route(tx=True, wait="30s")})
    elsewhere = make_door(routes=JOINED)  # as in another process
    async with client(service(door, slow.__call__)) as shop, client(service(elsewhere, slow.__call__)) as other:
        first = asyncio.create_task(shop.post(1))
        await slow.inside.wait()
        got = [await each.post(2) for each in (shop, other)]
        same = await other.post(1)
        slow.go.set()
        await first
    assert [(each.status_code, problem(each)) for each in got] == [(422, "key-reused")] * 2
    assert (same.status_code, slow.runs, ledger.effects, ledger.letters) == (409, 1, ["1"], [])


async def test_waiting_gets_the_response_and_holds_no_connection(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_CONCURRENCY", "2")
    slow = Slow()
    more = StarletteRoute("/others", place, methods=["POST"])
    door = make_door(default=Route(tx=True, wait="30s"))
    async with client(service(door, slow.__call__, more)) as shop:
        first = asyncio.create_task(shop.post())
        await slow.inside.wait()
        waiting = [asyncio.create_task(shop.post()) for _ in range(3)]
        assert [(await shop.post(2, path="/others", key=f"{n}")).status_code for n in range(3)] == [201] * 3
        assert not any(each.done() for each in waiting)
        ledger.run("delete from witness where id = '2'")
        slow.go.set()
        async with asyncio.timeout(PATIENCE):
            got = await asyncio.gather(first, *waiting)
    assert [(each.status_code, each.content) for each in got] == [(201, b'"done"')] * 4
    assert [replayed(each) for each in got] == [False, True, True, True]
    assert (slow.runs, ledger.effects) == (1, ["1"])


async def test_waiting_has_an_end(make_door: MakeDoor) -> None:
    slow = Slow()
    door = make_door(routes={"POST /orders": Route(tx=True, wait="100ms")})
    async with client(service(door, slow.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await slow.inside.wait()
        assert problem(await shop.post()) == "in-progress"
        slow.go.set()
        await first


async def test_of_fifty_equal_requests_one_runs_and_all_get_its_answer(ledger: Ledger, make_door: MakeDoor) -> None:
    door = make_door(routes={"POST /orders": Route(tx=True, wait="40s")})
    async with client(service(door, place)) as shop:
        got = await asyncio.gather(*(shop.post() for _ in range(RIVALS)))
    assert {(each.status_code, each.content, each.headers["location"]) for each in got} == {
        (201, b'{"placed":1}', "/orders/1")
    }
    assert sum(not replayed(each) for each in got) == 1
    assert (ledger.effects, len(ledger.states)) == (["1"], 1)


# -------------------------------------------------------------------------------------- disconnect, cancellation, time
async def test_a_client_that_goes_away_changes_nothing(ledger: Ledger, make_door: MakeDoor) -> None:
    slow = Slow()
    app = service(make_door(routes=JOINED), slow.__call__)
    call = Call(app)
    await slow.inside.wait()
    call.gone.set()
    slow.go.set()
    await asyncio.wait_for(call.task, PATIENCE)
    assert ledger.effects == ["1"]
    async with client(app) as shop:
        again = await shop.post(content=b'{"id": 1}')
    assert (again.status_code, replayed(again)) == (201, True)


async def test_a_cancelled_request_is_rolled_back_and_its_key_is_free(ledger: Ledger, make_door: MakeDoor) -> None:
    slow = Slow()
    app = service(make_door(routes=JOINED), slow.__call__)
    call = Call(app)
    await slow.inside.wait()
    await call.cancel()
    assert call.task.cancelled()
    assert (ledger.effects, ledger.states, call.sent.qsize()) == ([], [], 0)
    slow.go.set()
    async with client(app) as shop:
        assert (await shop.post()).status_code == 201
    assert ledger.effects == ["1"]


async def test_a_request_that_takes_too_long_is_cut_off(ledger: Ledger, make_door: MakeDoor) -> None:
    slow = Slow()
    door = make_door(routes={"POST /orders": Route(tx=True, timeout=LIMIT)})
    async with client(service(door, slow.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await slow.inside.wait()
        forward(LIMIT)
        got = await first
        assert (got.status_code, problem(got)) == (503, "timed-out")
        assert (ledger.effects, ledger.states) == ([], [])
        slow.go.set()
        assert (await shop.post()).status_code == 201


# ------------------------------------------------------------------------------------------------------- asking for Tx
@pytest.mark.parametrize("default", [None, Route()])
async def test_asking_for_tx_where_it_is_not_declared_says_what_to_write(
    make_door: MakeDoor, default: Route | None
) -> None:
    said = []

    async def endpoint(request: StarletteRequest) -> Response:
        try:
            current_tx()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        return Response("ok")

    async with client(service(make_door(default=default, store=FakeRequests()), endpoint)) as shop:
        await shop.post()
    assert said[0].startswith("ConfigurationError")
    assert "Route(tx=True)" in said[0]


async def test_a_marked_endpoint_is_found(ledger: Ledger, make_door: MakeDoor) -> None:
    door = make_door(default=None)

    @door.route(tx=True)
    async def marked(request: StarletteRequest) -> Response:  # of this test alone: a mark stays on its function
        return await place(request)

    async with client(service(door, marked)) as shop:
        got = [await shop.post() for _ in range(2)]
    assert [replayed(each) for each in got] == [False, True]
    assert ledger.effects == ["1"]


async def test_a_redirect_is_replayed(ledger: Ledger, make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        return RedirectResponse("/done", 303)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        got = [await shop.post() for _ in range(2)]
    assert [(each.status_code, each.headers["location"], replayed(each)) for each in got] == [
        (303, "/done", False),
        (303, "/done", True),
    ]


@pytest.mark.parametrize("types", [("start", "start", "body"), ("body", "start")])
async def test_what_is_no_response_is_an_error_and_commits_nothing(
    ledger: Ledger, make_door: MakeDoor, types: tuple[str, ...]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await write(current_tx(), 1)
        for each in types:
            await send({"type": f"http.response.{each}", "status": 201, "headers": [], "body": b""})

    async with client(IdempotencyMiddleware(app, make_door(routes=JOINED))) as shop:
        assert (await shop.post()).status_code == 500
    assert (ledger.effects, ledger.states) == ([], [])


async def test_an_endpoint_is_waited_for_however_often_it_is_cancelled(make_door: MakeDoor) -> None:
    """anyio, and so whoever limits a request with it, cancels again at each step of the loop."""
    inside, ended = asyncio.Event(), asyncio.Event()

    async def endpoint(request: StarletteRequest) -> Response:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            ended.set()
        return Response()

    call = Call(service(make_door(routes=JOINED), endpoint))
    await inside.wait()
    while not call.task.done():
        call.task.cancel()
        await asyncio.sleep(0)
    assert ended.is_set()


# ------------------------------------------------------------------------------------------- what runs on is too late
@pytest.mark.parametrize("how", ["cancelled", "over time"])
async def test_an_endpoint_that_does_not_end_is_left_behind_and_can_do_nothing(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """H8."""
    tuned(monkeypatch, endpoint_grace=0.02)
    inside, end, mailed = asyncio.Event(), asyncio.Event(), list[str]()
    said, by_others = list[Exception](), set(left_behind())

    async def endpoint(request: StarletteRequest) -> Response:
        tx = current_tx()
        await write(tx, 1)
        inside.set()
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()
        for late in [None, current_tx]:
            try:
                await write(tx if late is None else late(), 2)
            except Exception as error:
                said.append(error)
        return Response("late", background=BackgroundTask(mailed.append, "mail"))

    call = Call(service(make_door(routes={"POST /orders": Route(tx=True, timeout=LIMIT)}), endpoint))
    await inside.wait()
    if how == "cancelled":
        await call.cancel()
    else:
        forward(LIMIT)
        assert (await call.next())["status"] == 503
        await call.task
    sent = call.sent.qsize()
    (left,) = left_behind() - by_others
    end.set()
    with pytest.raises(OSError, match="cut off"):
        await asyncio.wait_for(left, PATIENCE)
    left_behind().remove(left)
    assert [type(error) for error in said] == [HandlerFault, HandlerFault]
    assert (ledger.effects, ledger.states, call.sent.qsize(), mailed) == ([], [], sent, [])


@pytest.mark.parametrize("how", ["cancelled", "over time"])
@pytest.mark.parametrize("late", ["statement", "statement under way"])
async def test_a_thread_that_runs_on_can_write_nothing(
    ledger: Ledger, make_door: MakeDoor, how: str, late: str
) -> None:
    """H8: a thread cannot be cancelled, and has its SyncTx still."""
    inside, over, ended = threading.Event(), threading.Event(), threading.Event()
    said = list[Exception]()

    def endpoint(request: StarletteRequest) -> Response:
        tx = current_sync_tx()
        insert: LiteralString = "insert into witness (id) values (%s)"
        tx.execute(insert, ("1",))
        inside.set()
        try:
            if late == "statement":
                over.wait(PATIENCE)
            else:
                tx.execute("select pg_sleep(60)")
            tx.execute(insert, ("2",))
        except Exception as error:
            said.append(error)
        ended.set()
        return Response("late")

    app = service(make_door(routes={"POST /orders": Route(tx=True, timeout=LIMIT)}), cast(Any, endpoint))
    call = Call(app)
    await until(inside.is_set)
    if how == "cancelled":
        await call.cancel()
    else:
        forward(LIMIT)
        assert (await call.next())["status"] == 503
        await call.task
    over.set()
    await until(ended.is_set)
    assert [isinstance(error, (HandlerFault, psycopg.Error)) for error in said] == [True]
    assert (ledger.effects, ledger.states) == ([], [])
