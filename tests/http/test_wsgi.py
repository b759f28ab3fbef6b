"""IdempotencyMiddleware of WSGI, called as a server calls it (PEP 3333). What it does for clients is in `blackbox`."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from io import BytesIO
from queue import SimpleQueue
from typing import Any, LiteralString
from uuid import uuid4
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import psycopg
import pytest
from flask import Flask

from idemconsumer import App
from idemconsumer.errors import HandlerFault
from idemconsumer.http import Idempotency, Request, Route, current_key, current_sync_tx, wsgi_exchange
from idemconsumer.http.background import background
from idemconsumer.http.exchanged import CutOff
from idemconsumer.http.wsgi import IdempotencyMiddleware
from idemconsumer.http.wsgi_exchange import Environ, StartResponse, Wsgi
from idemconsumer.testing import migrate
from tests.http.fake_requests import FakeRequests
from tests.http.wsgi_client import Answer, ask
from tests.support.clock import forward
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.waiting import PATIENCE, eventually

OPEN: LiteralString = """
    select count(*) from pg_stat_activity
    where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()
"""


KEPT: list[Any] = []


class Body:
    """An iterable that knows how often it was closed."""

    def __init__(self, *parts: bytes, fails: bool = False) -> None:
        self.parts = parts
        self.fails = fails
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from self.parts
        if self.fails:
            raise RuntimeError("in the middle of its body")

    def close(self) -> None:
        self.closed += 1


class Shop:
    """An app that does what the test says, and what is known of its runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.seen: list[Any] = []
        self.act: Callable[[Environ, StartResponse], Iterable[bytes]] = self.place

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        self.runs += 1
        return self.act(environ, start_response)

    def place(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read()
        start_response("201 Made It", [("Content-Type", "text/plain"), ("X-Run", str(self.runs))])
        return [b"%d:" % self.runs, body]


Make = Callable[..., IdempotencyMiddleware]


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(scope="module")
def migrated(postgres18: PostgresServer) -> Iterator[str]:
    """One database for all of them: each test has an app, and so keys, of its own."""
    with fresh_database(postgres18.dsn) as dsn:
        migrate(dsn, "idemconsumer")
        yield dsn


@pytest.fixture
def make(migrated: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Around an app: `make(app, Route(…))` for `POST /orders`."""
    monkeypatch.setenv("IDEMCONSUMER_DSN", migrated)
    made: list[IdempotencyMiddleware] = []
    name, requests = uuid4().hex, FakeRequests()

    def wrapped(app: Wsgi, route: Route | None = None, **options: Any) -> IdempotencyMiddleware:
        given: dict[str, Any] = {"tenant": lambda request: request.header("x-tenant"), "store": requests} | options
        routes = {} if route is None else {"POST /orders": route}
        made.append(IdempotencyMiddleware(app, Idempotency(App(name), routes=routes, **given)))
        return made[-1]

    yield wrapped
    for each in made:
        each.close()


# ---------------------------------------------------------------------------------------------------------- PEP 3333
def test_both_sides_keep_to_the_protocol(make: Make) -> None:
    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [body]

    around: Any = validator(make(validator(app)))
    for _ in range(2):
        assert ask(around, body=b"as it came").body == b"as it came"
    assert ask(around, key="two words").status == "400 Bad Request"
    assert ask(around, key=None, body=b"x").body == b"x"


def test_the_answer_is_the_apps_and_a_replay_has_a_status_line(make: Make, shop: Shop) -> None:
    door = make(shop)
    first, again = ask(door), ask(door)
    assert (first.status, first.body, first.headers["x-run"], first.replayed) == ("201 Made It", b"1:{}", "1", False)
    assert (again.status, again.body, again.replayed, shop.runs) == ("201 Created", b"1:{}", True, 1)
    assert again.headers["content-length"] == "4"


def test_what_is_inside_is_asked_for_no_encoding(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        shop.seen.append(environ.get("HTTP_ACCEPT_ENCODING"))
        return shop.place(environ, start_response)

    shop.act = act
    assert ask(make(shop), HTTP_ACCEPT_ENCODING="gzip").body == b"1:{}"
    assert shop.seen == ["identity"]


def test_without_a_key_current_key_is_a_new_one_each_time(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        shop.seen.append(current_key())
        return shop.place(environ, start_response)

    shop.act, door = act, make(shop)
    assert [ask(door, None).body for _ in range(2)] == [b"1:{}", b"2:{}"]
    assert len({*shop.seen}) == 2


def test_a_status_that_nobody_has_named(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("299 Sure", [])
        return [b""]

    shop.act = act
    door = make(shop)
    assert [ask(door).status for _ in range(2)] == ["299 Sure", "299 Unknown"]


def test_a_header_that_no_server_can_send_is_no_failure_behind_an_effect(make: Make, shop: Shop) -> None:
    """H52: the key would be given back, and the next request would have the effect once more."""
    given: Any = [("X-Price", "5 €"), ("X-Number", 5)]

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("201 Made It", given)
        return [b"done"]

    shop.act, door = act, make(shop)
    first, again = ask(door), ask(door)
    assert (first.headers["x-price"], first.headers["x-number"], first.body) == ("5 ?", "5", b"done")
    assert (again.replayed, again.body, shop.runs) == (True, b"done", 1)


def test_what_is_written_is_kept_in_its_order(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        write(b"written, ")
        write(b"twice, ")
        return [b"returned"]

    shop.act = act
    door = make(shop)
    assert {ask(door).body for _ in range(2)} == {b"written, twice, returned"}
    assert shop.runs == 1


def test_an_app_may_be_a_generator(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"one "
        yield b"two"

    shop.act = act
    door = make(shop)
    assert {ask(door).body for _ in range(2)} == {b"one two"}


def test_an_error_page_replaces_headers_that_nobody_has_seen(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("X-Of", "the first")])
        try:
            raise ValueError("in the app")
        except ValueError:
            start_response("422 Bad", [("X-Of", "the second")], sys.exc_info())
        return [b"sorry"]

    shop.act = act
    answer = ask(make(shop))
    assert (answer.status, answer.headers, answer.body) == ("422 Bad", {"x-of": "the second"}, b"sorry")


def test_an_error_page_behind_a_part_of_the_body_is_the_error(make: Make, shop: Shop) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        yield b"begun"
        try:
            raise ValueError("in the app")
        except ValueError:
            start_response("500 Oops", [], sys.exc_info())
        yield b"sorry"

    shop.act = act
    door = make(shop)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the app"):
            ask(door)
    assert shop.runs == 2


@pytest.mark.parametrize("calls", [0, 2])
def test_an_app_that_starts_no_response_or_two(make: Make, shop: Shop, calls: int) -> None:
    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        for _ in range(calls):
            start_response("200 OK", [])
        return []

    shop.act = act
    door = make(shop)
    for _ in range(2):
        with pytest.raises(AssertionError if calls else RuntimeError):
            ask(door)
    assert shop.runs == 2


@pytest.mark.parametrize("route", [Route(), Route(tx=True)], ids=["leased", "joined"])
def test_a_body_is_closed_once(make: Make, shop: Shop, route: Route) -> None:
    bodies: list[Body] = []

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        bodies.append(Body(b"x" * 100, fails=environ["wsgi.input"].read() == b"fails"))
        return bodies[-1]

    shop.act = act
    door = make(shop, route)
    ask(door), ask(door)
    with pytest.raises(RuntimeError, match="in the middle"):
        ask(door, "k-2", b"fails")
    large = make(shop, Route(max_response=10))
    assert ask(large, "k-3").body == b"x" * 100
    assert ask(large, "k-3").status == "410 Gone"
    assert [body.closed for body in bodies] == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------- bodies
def test_a_body_without_a_length_ends_where_the_server_says(make: Make, shop: Shop) -> None:
    door = make(shop, Route(max_body=10))
    ended: dict[str, Any] = {"CONTENT_LENGTH": None, "wsgi__input_terminated": True}
    assert ask(door, "k-1", b"ten bytes.", **ended).body == b"1:ten bytes."
    assert ask(door, "k-2", b"ten bytes.!", **ended).status.startswith("413")
    assert ask(door, "k-3", b"nobody says where this ends", CONTENT_LENGTH="").body == b"2:"


def test_a_length_that_cannot_be_is_too_large(make: Make, shop: Shop) -> None:
    assert ask(make(shop), CONTENT_LENGTH="9" * 5000).status.startswith("413")
    assert shop.runs == 0


def test_half_a_body_runs_nothing(make: Make, shop: Shop) -> None:
    assert ask(make(shop), CONTENT_LENGTH="3").status == "400 Bad Request"
    assert shop.runs == 0


def test_paths_are_decoded(make: Make, shop: Shop) -> None:
    seen: list[str] = []

    def tenant(request: Request) -> str:
        seen.append(request.path)
        return "acme"

    door = make(shop, tenant=tenant)
    ask(door, PATH_INFO="/caf\xc3\xa9", SCRIPT_NAME="/mounted")
    ask(door, "k-2", PATH_INFO="")
    assert seen == ["/café", "/"]


# ------------------------------------------------------------------------------------------------------------ threads
def test_the_app_and_the_tenant_run_in_the_thread_of_the_server(make: Make, shop: Shop) -> None:
    caller: ContextVar[str] = ContextVar("caller", default="nobody")
    seen: list[tuple[int, str]] = []

    def look() -> None:
        seen.append((threading.get_ident(), caller.get()))

    def tenant(request: Request) -> str:
        look()
        return "acme"

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        look()
        return shop.place(environ, start_response)

    shop.act = act
    token = caller.set("this test")
    ask(make(shop, tenant=tenant))
    caller.reset(token)
    assert seen == [(threading.get_ident(), "this test")] * 2


def test_a_tenant_may_be_awaited(make: Make, shop: Shop) -> None:
    async def tenant(request: Request) -> str | None:
        return request.header("x-tenant")

    door = make(shop, tenant=tenant)
    assert ask(door).status == "201 Made It"
    assert ask(door, HTTP_X_TENANT=None).status == "401 Unauthorized"


def test_a_thread_that_the_server_ends_leaves_its_key_as_one_that_was_lost(make: Make, shop: Shop) -> None:
    """H51: as gunicorn's `timeout` ends it, in the middle of a payment."""

    def leave(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        raise SystemExit(1)

    store = FakeRequests()
    door = make(shop, store=store)
    shop.act = leave
    with pytest.raises(SystemExit):
        ask(door)
    shop.act = shop.place
    eventually(lambda: ask(door).status == "201 Made It", "its key is held")
    assert (store.ran, store.released) == (1, 1)


@pytest.mark.parametrize("ordered", ["as the thread ends", "after that"])
def test_a_thread_that_ends_before_the_app_begins_leaves_its_key(
    make: Make, shop: Shop, monkeypatch: pytest.MonkeyPatch, ordered: str
) -> None:
    """As a signal ends a worker of gunicorn while its request is being claimed."""
    store, ended = FakeRequests(), threading.Event()
    claim = store.claim

    class Left(SystemExit):
        pass

    class Orders(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if ordered == "as the thread ends":
                eventually(lambda: not self.empty())
            raise Left

    async def claimed(*given: Any, **more: Any) -> Any:
        while ordered == "after that" and not ended.is_set():
            await asyncio.sleep(0.01)
        return await claim(*given, **more)

    monkeypatch.setattr(store, "claim", claimed)
    monkeypatch.setattr(wsgi_exchange, "SimpleQueue", Orders)
    door = make(shop, store=store)
    with pytest.raises(Left):
        ask(door)
    ended.set()
    eventually(lambda: store.released == 1, "its key is held")
    assert (shop.runs, store.held, store.ran) == (0, {}, 0)


@pytest.mark.parametrize("late", ["statement", "statement under way"])
def test_what_comes_late_in_joined_mode_is_refused(make: Make, shop: Shop, migrated: str, late: str) -> None:
    """H51: the transaction is rolled back at the limit, and the thread finds out when it asks for more."""
    refused: list[type[Exception]] = []

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        tx = current_sync_tx()
        tx.execute("insert into sold values (1)")
        if shop.runs == 1:
            begun.set()
            try:
                if late == "statement":
                    over.wait(PATIENCE)
                    tx.execute("insert into sold values (2)")
                else:
                    tx.execute("select pg_sleep(60)")
            except Exception as error:
                refused.append(type(error))
        start_response("200 OK", [])
        return [b"done"]

    with psycopg.connect(migrated, autocommit=True) as db:
        db.execute("drop table if exists sold; create table sold (id int)")
        shop.act, begun, over = act, threading.Event(), threading.Event()
        door = make(shop, Route(tx=True, timeout=20.0))
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(ask, door)
            assert begun.wait(PATIENCE)
            assert ask(door, "k-2").status == "200 OK"  # another key is not held up
            background().loop.call_soon_threadsafe(forward, 20.0)
            eventually(lambda: db.execute(OPEN).fetchone() == (0,), "it is not rolled back")
            over.set()
            answer = cut.result(PATIENCE)
        assert answer.status.startswith("503"), answer.status
        assert b"timed-out" in answer.body
        assert len(refused) == 1
        assert late != "statement" or refused == [HandlerFault]
        assert ask(door).status == "200 OK"
        assert db.execute("select count(*) from sold").fetchone() == (2,)


def test_a_limit_does_not_end_a_thread_in_leased_mode(make: Make, shop: Shop) -> None:
    """H51: what it did is done, so its key is held until it has answered, and its answer is kept."""

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        here.set()
        over.wait(PATIENCE)
        return shop.place(environ, start_response)

    shop.act, here, over = act, threading.Event(), threading.Event()
    door = make(shop, Route(timeout=0.1))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, door)
        assert here.wait(PATIENCE)
        time.sleep(0.3)
        assert ask(door).status == "409 Conflict"
        over.set()
        assert late.result(PATIENCE).status == "201 Made It"
    assert ask(door).replayed
    assert shop.runs == 1


def test_a_key_that_is_lost_while_its_thread_runs_is_not_answered_for(make: Make, shop: Shop) -> None:
    store = FakeRequests()

    def act(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        background().loop.call_soon_threadsafe(store.lose)
        return shop.place(environ, start_response)

    shop.act = act
    answer = ask(make(shop, store=store))
    assert (answer.status.split()[0], b"outcome-unknown" in answer.body, store.records) == ("503", True, {})


def test_one_loop_serves_all_threads(make: Make, shop: Shop) -> None:
    door = make(shop)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: ask(door, f"k-{n}"), range(20)))
    assert {answer.status for answer in answers} == {"201 Made It"}
    assert [thread.name for thread in threading.enumerate()].count("idemconsumer-http") == 1
    assert background() is background()


# ---------------------------------------------------------------------------------------------------------- marked
def test_routes_of_flask_may_be_marked(make: Make) -> None:
    app = Flask("shop")
    idempotency = Idempotency(App("shop"), tenant=lambda request: "acme", default=None, store=FakeRequests())

    @app.post("/shops/<int:shop>/orders/<path:rest>")
    @idempotency.route(required=True)
    def place(shop: int, rest: str) -> str:
        return f"{shop} {rest}"

    @app.post("/plain")
    def plain() -> str:
        return "plain"

    door = IdempotencyMiddleware(app.wsgi_app, idempotency)
    assert ask(door, None, PATH_INFO="/shops/7/orders/a/b").status == "400 BAD REQUEST".title()
    assert ask(door, PATH_INFO="/shops/7/orders/a/b").body == b"7 a/b"
    assert ask(door, PATH_INFO="/shops/7/orders/a/b").replayed
    assert not [ask(door, PATH_INFO="/plain") for _ in range(2)][1].replayed
    door.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_stream_that_is_not_kept_holds_its_key_until_it_is_closed(make: Make, *, lost: bool) -> None:
    store = FakeRequests()
    body = Body(b"a", b"b", b"c")

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("503 Later", [("Content-Type", "text/event-stream")])
        return body

    door = make(app, store=store)
    environ: Environ = {"PATH_INFO": "/orders", "HTTP_X_TENANT": "acme", "HTTP_IDEMPOTENCY_KEY": "k"}
    environ |= {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "2", "wsgi.input": BytesIO(b"{}")}
    setup_testing_defaults(environ)
    parts: Any = door(environ, Answer().start)
    sent = iter(parts)
    assert next(sent) == b"a"
    assert ask(door, "k").status == "409 Conflict"
    if lost:
        background().loop.call_soon_threadsafe(store.lose)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), background().loop).result(PATIENCE)
        with pytest.raises(CutOff, match="lost in the middle"):
            next(sent)
    else:
        assert list(sent) == [b"b", b"c"]
    parts.close()
    assert (body.closed, store.released, store.held) == (1, int(not lost), {})


def never_sent(parts: Callable[[Any], Iterable[bytes]]) -> None:
    def start(*given: object) -> Any:
        raise ValueError("a header that the server does not take")

    with pytest.raises(ValueError, match="does not take"):
        parts(start)


def never_begun(parts: Callable[[Any], Iterable[bytes]]) -> None:
    parts(Answer().start)


def closed_at_once(parts: Callable[[Any], Iterable[bytes]]) -> None:
    kept: Any = parts(Answer().start)
    KEPT.append(kept)
    kept.close()


def left_early(parts: Callable[[Any], Iterable[bytes]]) -> None:
    assert next(iter(parts(Answer().start))) == b"a"


def sent_and_not_closed(parts: Callable[[Any], Iterable[bytes]]) -> None:
    assert b"".join(parts(Answer().start)) == b"ab"


@pytest.mark.parametrize("how", [never_sent, never_begun, closed_at_once, left_early, sent_and_not_closed])
def test_a_stream_that_nobody_closes_gives_its_key_back(make: Make, how: Callable[..., None]) -> None:
    """H6: a server that fails, or middleware around the door that hands on the parts and forgets `close`."""
    store = FakeRequests()

    def app(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        start_response("503 Later", [("Content-Type", "text/event-stream")])
        return Body(b"a", b"b")

    door = make(app, store=store)
    environ: Environ = {"PATH_INFO": "/orders", "HTTP_X_TENANT": "acme", "HTTP_IDEMPOTENCY_KEY": "k"}
    environ |= {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": "2", "wsgi.input": BytesIO(b"{}")}
    setup_testing_defaults(environ)
    how(lambda start: door(environ, start))
    eventually(lambda: (store.released, store.held) == (1, {}), "its key is held")
