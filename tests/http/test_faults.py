"""The database away, a pool that is full, a COMMIT without an answer, a process that is killed (H2, H10)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from idemconsumer import StoreUnavailable
from idemconsumer.embedded.postgres import free_port
from idemconsumer.http import Route, current_tx
from idemconsumer.http.problems import patience
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.stores.joined import PostgresStore
from tests.http.crashing import ROUTES
from tests.http.endpoints import Counting
from tests.http.site import MakeDoor, client, place, problem, replayed, service
from tests.support import ROOT
from tests.support.clock import forward
from tests.support.ledger import Ledger, write
from tests.support.logs import LogCapture, times
from tests.support.servers.made import PrivateRedis
from tests.support.servers.proxy import Proxy, Trap
from tests.support.tuning import as_it_is, tuned
from tests.support.waiting import PATIENCE, until

JOINED = {"POST /orders": Route(tx=True)}


@pytest.fixture
async def proxy(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(ledger.dsn)["port"]))) as proxy:
        monkeypatch.setenv("IDEMCONSUMER_DSN", make_conninfo(ledger.dsn, host="127.0.0.1", port=proxy.port))
        yield proxy


async def test_while_the_database_is_away_nothing_runs(
    ledger: Ledger, make_door: MakeDoor, proxy: Proxy, logged: LogCapture
) -> None:
    runs = 0

    async def endpoint(request: StarletteRequest) -> Response:
        nonlocal runs
        runs += 1
        return await place(request)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        proxy.cut()
        away = [await shop.post() for _ in range(2)]
        assert [(each.status_code, problem(each)) for each in away] == [(503, "unavailable")] * 2
        assert all(int(each.headers["retry-after"]) > 0 for each in away)
        assert runs == 0
        await proxy.restore()

        async def answered() -> bool:
            return (await shop.post()).status_code == 201

        await until(answered)
        assert replayed(await shop.post())
    assert (runs, ledger.effects) == (1, ["1"])
    assert times(logged, "the front door answers 503 while its store is unreachable") == 1
    assert times(logged, "the store of the front door works again") == 1


async def test_a_database_that_is_not_what_it_was_is_an_outage_too(
    ledger: Ledger, make_door: MakeDoor, logged: LogCapture
) -> None:
    """Both modes, and one that has never worked, which its author has to see."""
    door = make_door(routes=JOINED)
    paid = StarletteRoute("/paid", Counting().__call__, methods=["POST"])
    async with client(service(door, place, paid)) as shop, client(service(make_door(routes=JOINED))) as other:
        for path in ("/orders", "/paid"):
            assert (await shop.post(path=path)).status_code == 201
        ledger.run("alter schema idemconsumer rename to another")
        try:
            for path in ("/orders", "/paid"):
                got = await shop.post(path=path, key="new")
                assert (got.status_code, problem(got), got.headers.get("retry-after")) == (503, "unavailable", "2")
            assert (await other.post()).status_code == 500
        finally:
            ledger.run("alter schema another rename to idemconsumer")
        said = [each for each in logged.entries if "answers 503" in each["event"]]
        assert [(each["log_level"], "run `idemconsumer migrate up` first" in each["error"]) for each in said] == [
            ("error", True), ("error", True),
        ], "once in each mode"  # fmt: skip
        for path in ("/orders", "/paid"):
            assert (await shop.post(path=path, key="new")).status_code == 201
    assert times(logged, "the store of the front door works again") == 2


async def test_what_still_runs_has_been_claimed_so_a_redis_that_begins_to_evict_is_an_outage(
    make_door: MakeDoor, private_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch, endpoint: Counting
) -> None:
    """H58: it is the first request of its process, and takes long."""
    tuned(monkeypatch, redis_asked_every=0.0)
    server = private_redis()
    door = make_door(store="redis", redis=server.address, default=Route())
    endpoint.go.clear()
    async with client(service(door, endpoint.__call__)) as shop:
        first = asyncio.create_task(shop.post())
        await endpoint.inside.wait()
        for name, value in (("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")):
            server.ask("CONFIG", "SET", name, value)
        got = await shop.post(key="another")
        assert (got.status_code, problem(got)) == (503, "unavailable")
        endpoint.go.set()
        assert (await first).status_code == 201


FULL = """
create function full_disk() returns trigger language plpgsql as $$
begin raise exception 'no space left on device' using errcode = '53100'; end $$;
create trigger full_disk before insert on idemconsumer.record for each row execute function full_disk()
"""


@pytest.mark.parametrize("path", ["/orders", "/paid"])
async def test_what_it_still_reads_does_not_end_the_outage_of_a_store_that_is_full(
    ledger: Ledger, make_door: MakeDoor, logged: LogCapture, path: str
) -> None:
    paid = StarletteRoute("/paid", Counting().__call__, methods=["POST"])
    async with client(service(make_door(routes=JOINED), place, paid)) as shop:
        assert (await shop.post(path=path)).status_code == 201
        ledger.run(FULL)
        for key in ("new", "newer"):
            assert (await shop.post(path=path, key=key)).status_code == 503
            assert replayed(await shop.post(path=path))
        ledger.run("drop function full_disk cascade")
        assert (await shop.post(path=path, key="new")).status_code == 201
    assert times(logged, "the front door answers 503 while its store is unreachable") == 1
    assert times(logged, "the store of the front door works again") == 1


async def test_whatever_a_driver_raises_while_nothing_has_run_is_an_outage() -> None:
    with pytest.raises(StoreUnavailable, match=r"OverflowError: .* `idemconsumer check` says what to do"):
        async with patience("no answer"):
            raise OverflowError("of a driver's own")


async def test_a_database_that_says_nothing_is_503_long_before_a_statement_may_last(
    ledger: Ledger, make_door: MakeDoor, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(service(make_door(routes=JOINED), place)) as shop:
        assert (await shop.post(1)).status_code == 201
        tuned(monkeypatch, request_patience=0.05)
        proxy.freeze()
        async with asyncio.timeout(25):  # of the 35 s that the connection itself would wait
            silent = await shop.post(2, key="other")
        proxy.thaw()
    assert (silent.status_code, problem(silent)) == (503, "unavailable")
    assert ledger.effects == ["1"]


async def test_a_pool_that_is_full_is_503_and_nothing_runs(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_CONCURRENCY", "1")
    inside, go = asyncio.Event(), asyncio.Event()

    async def endpoint(request: StarletteRequest) -> Response:
        inside.set()
        await go.wait()
        return await place(request)

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        first = asyncio.create_task(shop.post(1))
        await inside.wait()
        tuned(monkeypatch, request_patience=0.05)
        full = await shop.post(2, key="other")
        assert (full.status_code, problem(full)) == (503, "unavailable")
        go.set()
        assert (await first).status_code == 201
    assert ledger.effects == ["1"]


@pytest.mark.parametrize("mode", ["joined", "leased"])
async def test_where_no_server_listens_a_client_hears_it_at_once(
    ledger: Ledger, make_door: MakeDoor, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    routes = JOINED if mode == "joined" else {"POST /orders": Route()}
    endpoint = Counting()
    async with client(service(make_door(routes=routes), endpoint.__call__)) as shop:
        assert (await shop.post()).status_code == 201
        long = 10 * PATIENCE
        tuned(monkeypatch, connection_patience=long, request_patience=long)
        proxy.cut()
        async with asyncio.timeout(PATIENCE):
            away = [await shop.post(), await shop.post(2, key="other")]
        assert [(each.status_code, problem(each)) for each in away] == [(503, "unavailable")] * 2
        await proxy.restore()
    assert endpoint.runs == 1


async def test_what_is_stored_waits_for_no_connection_of_an_endpoint(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what takes one exchange with the server: a request in leased mode, and the record of a refusal."""
    monkeypatch.setenv("IDEMCONSUMER_CONCURRENCY", "1")
    tuned(monkeypatch, request_patience=10 * PATIENCE)
    inside, go = asyncio.Event(), asyncio.Event()
    routes = {"POST /orders": Route(tx=True), "POST /refused": Route(tx=True), "POST /leased": Route()}

    async def slow(request: StarletteRequest) -> Response:
        if (await request.json())["id"] == "slow":
            inside.set()
            await go.wait()
        return await place(request)

    async def refused(request: StarletteRequest) -> Response:
        return Response("no", 409)

    def shop_of(leased: Counting) -> Any:
        more = [
            StarletteRoute(path, of, methods=["POST"])
            for path, of in (("/refused", refused), ("/leased", leased.__call__))
        ]
        return service(make_door(routes=routes), slow, *more)

    before, leased = Counting(), Counting()
    async with client(shop_of(before)) as earlier, client(shop_of(leased)) as shop:
        stored = {path: await earlier.post(path=path) for path in ("/orders", "/refused", "/leased")}
        holding = asyncio.create_task(shop.post("slow", key="slow"))
        await inside.wait()
        waiting = asyncio.create_task(shop.post(path="/refused", key="new"))  # for the connection that is held
        async with asyncio.timeout(PATIENCE):
            for path, first in stored.items():
                for _ in range(2):
                    got = await shop.post(path=path)
                    assert (got.status_code, got.content, replayed(got)) == (first.status_code, first.content, True)
            assert (await shop.post(path="/leased", key="new")).status_code == 201
        assert not holding.done()
        assert not waiting.done()
        go.set()
        assert [(await each).status_code for each in (holding, waiting)] == [201, 409]
    assert (before.runs, leased.runs) == (1, 1)
    assert ledger.effects == ["1", "slow"]


@pytest.mark.parametrize("look", ["differs", "reject"])
async def test_a_pool_that_is_full_is_503_for_what_is_asked_after_the_claim_too(
    ledger: Ledger, make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    inside, go, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        inside.set()
        await go.wait()
        return Response("no", 409)

    async def full(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    one, two = make_door(routes=JOINED), make_door(routes=JOINED)
    async with client(service(one, endpoint)) as shop, client(service(two, endpoint)) as other:
        first = asyncio.create_task(shop.post())
        await inside.wait()
        monkeypatch.setattr(PostgresStore, look, full)
        asking = asyncio.create_task(other.post()) if look == "differs" else first
        if look == "reject":
            go.set()
        await asyncio.wait_for(asked.wait(), PATIENCE)
        forward(as_it_is("request_patience"))
        got = await asyncio.wait_for(asking, PATIENCE)
        monkeypatch.undo()
        go.set()
        await first
    assert (got.status_code, problem(got)) == (503, "unavailable")
    assert ledger.effects == []


async def test_an_error_of_another_store_is_the_endpoints_own(ledger: Ledger, make_door: MakeDoor) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        raise StoreUnavailable("that of another app")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        assert (await shop.post()).status_code == 500


async def test_a_connection_that_breaks_under_the_endpoint_is_503(
    ledger: Ledger, make_door: MakeDoor, proxy: Proxy
) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        await write(current_tx(), 1)
        proxy.cut()
        await write(current_tx(), 2)
        return Response("ok")

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        got = await shop.post()
    assert (got.status_code, problem(got)) == (503, "unavailable")
    assert (ledger.effects, ledger.states) == ([], [])


class CutAt:
    """Observer: springs a trap for the COMMIT that follows the point, once."""

    def __init__(self, proxy: Proxy, point: Point, mode: Literal["before", "after"]) -> None:
        self.armed = False
        self.trap: Trap | None = None
        self._proxy, self._point, self._mode = proxy, point, mode

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        if self.armed and point is self._point:
            self.armed, self.trap = False, self._proxy.cut_at(mode=self._mode)


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize(("status", "point"), [(201, Point.SEALING), (409, Point.REJECTING)])
async def test_a_commit_without_an_answer_is_asked_for_again(
    ledger: Ledger,
    make_door: MakeDoor,
    proxy: Proxy,
    mode: Literal["before", "after"],
    status: int,
    point: Point,
) -> None:
    runs = 0

    async def endpoint(request: StarletteRequest) -> Response:
        nonlocal runs
        runs += 1
        await write(current_tx(), 1)
        return Response(f"run {runs}", status)

    cut = CutAt(proxy, point, mode)
    async with client(service(make_door(routes=JOINED, observer=cut), endpoint)) as shop:
        await shop.post(key="first")  # the commit of its scope is not meant
        ledger.clear()
        runs, cut.armed = 0, True
        got, again = await shop.post(), await shop.post()
    assert cut.trap is not None
    assert cut.trap.sprung.is_set()
    assert (got.status_code, again.status_code, again.content) == (status, status, got.content)
    assert replayed(again)
    assert ledger.effects == (["1"] if status == 201 else [])
    assert runs == (2 if (mode, status) == ("before", 201) else 1)


async def test_without_a_key_a_commit_without_an_answer_is_said_not_to_be_known(
    ledger: Ledger, make_door: MakeDoor, proxy: Proxy
) -> None:
    async def endpoint(request: StarletteRequest) -> Response:
        response = await place(request)
        proxy.cut_at(mode="after")
        return response

    async with client(service(make_door(routes=JOINED), endpoint)) as shop:
        got = await shop.post(key=None)
    assert (got.status_code, problem(got)) == (503, "outcome-unknown")
    assert "retry-after" not in got.headers
    assert ledger.effects == ["1"]


@pytest.mark.kill
@pytest.mark.parametrize(
    ("point", "path", "effects", "came"),
    [
        (Point.CLAIMED, "/orders", 0, False),
        (Point.SEALING, "/orders", 0, False),
        (Point.COMMITTED, "/orders", 1, True),
        (Point.REJECTING, "/refused", 0, False),
        (Point.REJECTED, "/refused", 0, True),
    ],
)
async def test_a_process_that_is_killed_has_done_all_or_nothing(
    ledger: Ledger, make_door: MakeDoor, point: Point, path: str, effects: int, came: bool
) -> None:
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "tests.http.crashing:app", "--port", str(port), "--log-level", "error"],
        cwd=ROOT,
        env={**os.environ, "IDEMCONSUMER_DSN": ledger.dsn, "CRASH_AT": str(point)},
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as real:

            async def up() -> bool:
                assert child.poll() is None
                try:
                    await real.get("/")
                except httpx.ConnectError:
                    return False
                return True

            await until(up)
            headers = {"Idempotency-Key": "k", "X-Tenant": "t", "Host": "shop"}
            with pytest.raises(httpx.TransportError):
                await real.post(path, content=b'{"id":1}', headers=headers)
        await asyncio.to_thread(child.wait, PATIENCE)
    finally:
        child.kill()
        child.wait()
    assert len(ledger.effects) == effects

    from tests.http.crashing import made

    async with client(made(make_door(routes=ROUTES))) as shop:
        got = await shop.post(path=path, content=b'{"id":1}')
    assert (got.status_code, replayed(got)) == (201 if path == "/orders" else 409, came)
    assert ledger.effects == (["1"] if path == "/orders" else [])
