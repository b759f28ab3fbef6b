"""Each role does its work with what `migrate grants` prints for it, and is refused the rest."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import InsufficientPrivilege
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from idemconsumer import App, ConfigurationError, Key, Message, Reject, Saga, Step, Tx
from idemconsumer.admin.dead_letters import ALL
from idemconsumer.admin.orphans import find_orphans
from idemconsumer.admin.redrives import Redrives
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.cli.main import main
from idemconsumer.http import AcceptLater, Idempotency, Route, current_tx
from idemconsumer.http import Response as Answer
from idemconsumer.rules.redriven import Redriven
from idemconsumer.stores.migrations import names
from tests.http.site import by_header, client, replayed, service
from tests.support.inside import give_settings
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.workers import SCHEMA, Bench, Item, connected, note, prepare

Made = Callable[[str], str]
UNSEALED: LiteralString = "set session_replication_role = replica"
WAITING: LiteralString = "select count(*) from idemconsumer.saga where 'go' = any (signals)"


def idemconsumer(*words: str, dsn: str | None = None, code: int = 0) -> str:
    found = CliRunner().invoke(main, list(words), env={"IDEMCONSUMER_DSN": dsn})
    assert found.exit_code == code, found.output
    return found.output if code else found.stdout


async def command(*words: str, dsn: str | None = None, code: int = 0) -> str:
    """In a thread, since it has an event loop of its own."""
    return await asyncio.to_thread(idemconsumer, *words, dsn=dsn, code=code)


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    server: PostgresServer = request.getfixturevalue(getattr(request, "param", "postgres18"))
    with fresh_database(server.dsn) as database:
        prepare(database)
        yield connected(Bench(database), monkeypatch)


@pytest.fixture
def made(bench: Bench) -> Iterator[Made]:
    """Makes a role of one kind, with only these rights; its DSN. What roles have by default is taken away."""
    names = list[str]()
    password = conninfo_to_dict(bench.dsn).get("password", "")

    def make(kind: str) -> str:
        names.append(name := f'{kind} "{secrets.token_hex(4)}"')
        do(bench.dsn, sql.SQL("create role {} login password {}").format(sql.Identifier(name), str(password)))
        do(bench.dsn, idemconsumer("migrate", "grants", f"--{kind}", name))
        return make_conninfo(bench.dsn, user=name)

    do(bench.dsn, "revoke execute on all functions in schema idemconsumer from public")
    yield make
    for name in names:
        for statement in ("drop owned by {}", "drop role {}"):
            do(bench.dsn, sql.SQL(statement).format(sql.Identifier(name)))


def do(dsn: str, statements: str | sql.Composed, *params: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        text = statements.encode() if isinstance(statements, str) else statements
        cursor = connection.execute(text, params or None)
        return cursor.fetchall() if cursor.description else []


class Shop:
    """An app with one of each: its handlers fail or wait as their messages say."""

    def __init__(self) -> None:
        self.app = App("shop")
        self.buggy = True

        @self.app.idempotent_handler("postgres:orders", key="id", max_attempts=2, backoff="1h, 1h")
        async def order(item: Item, tx: Tx) -> str:
            if item.id == "rejected":
                raise Reject("no")
            if item.id == "buggy" and self.buggy:
                raise ValueError("a bug")
            await note(tx, item)
            await self.app.publish("postgres:other", {"id": item.id}, tx=tx)
            return item.id

        @self.app.idempotent_handler("postgres:legs", key="id")
        async def leg(item: Item, saga: Saga) -> str:
            await saga.tx("driven", note, item)
            return item.id

        @self.app.every("0 0 1 1 *")
        @self.app.idempotent_handler("postgres:yearly", key="slot")
        async def yearly(slot: dict[str, str], saga: Saga) -> None: ...

        @self.app.idempotent_handler("postgres:rides", key="id", version="1")
        async def ride(item: Item, saga: Saga) -> str:
            await saga.tx("booked", note, item, undo=self.unbook)
            await saga.call("charged", self.charge, item)
            child = await saga.start("leg", leg, Item(f"{item.id}-leg"))
            await saga.result("driven", child)
            await saga.sleep("a_moment", 0.01)
            if await saga.wait("go", timeout="1h") == "undo":
                raise Reject("undone")
            return "done"

        self.order, self.ride = order, ride

    async def unbook(self, tx: Tx, output: object, item: Item) -> None:
        await tx.execute("delete from effect where id = %s", (item.id,))

    async def charge(self, step: Step, item: Item) -> str:
        return str(step.key)


async def test_a_worker_does_all_that_workers_and_commands_do(bench: Bench, made: Made) -> None:
    dsn, shop = made("worker"), Shop()
    role = sql.Identifier(str(conninfo_to_dict(dsn)["user"]))
    do(bench.dsn, sql.SQL("grant all on effect to {}").format(role))

    bench.enqueue("orders", Item("a"), Item("a"), Item("rejected"), Item("buggy"), b"unreadable")
    bench.enqueue("rides", Item("r"), Item("u"), Item("c"))
    async with bench.running(shop.app, dsn=dsn) as running:
        await running.until(lambda: bench.do("select count(*) from idemconsumer.delayed") == [(1,)])
        await running.until(lambda: bench.do(WAITING) == [(3,)])
        await shop.app.signal(shop.ride, key="r", name="go", payload="on")
        await shop.app.signal(shop.ride, key="u", name="go", payload="undo")
        await shop.app.cancel(shop.ride, key="c", undo=True)
        bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
        await running.until(lambda: bench.do("select count(*) from idemconsumer.dead_letter") == [(2,)])
        await running.until(lambda: bench.do("select count(*) from idemconsumer.saga") == [(0,)])
        shop.buggy = False
        redriven = await Redrives(dsn, SCHEMA).redrive(ALL, by="ann", run="r")
        assert dict(redriven.counts) == {Redriven.REDRIVES: 2}
        await running.until(lambda: "buggy" in bench.effects())
    assert sorted(bench.effects()) == ["a", "buggy", "c-leg", "r", "r-leg", "u-leg"]

    bench.do("update idemconsumer.scope set retain = '-1s'")
    assert json.loads(await command("prune", "--json", dsn=dsn))["pruned"] >= 9
    for words in (("check", "--help"), ("migrate", "status"), ("dead", "list"), ("sagas", "list"), ("skip",)):
        await command(*words, dsn=dsn)
    refused(
        dsn,
        "truncate idemconsumer.record",
        "drop table idemconsumer.queue",
        "delete from idemconsumer.migration",
        "create table idemconsumer.mine ()",
    )


async def test_what_later_migrations_make_is_a_workers_too(bench: Bench, made: Made) -> None:
    dsn = made("worker")
    bench.do("create table idemconsumer.newer (n int)")
    bench.do("create sequence idemconsumer.newer_token")
    assert do(dsn, "insert into idemconsumer.newer values (nextval('idemconsumer.newer_token')) returning n") == [(1,)]


async def test_a_front_door_answers_forgets_and_prunes(
    bench: Bench, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = made("front-door")
    role = sql.Identifier(str(conninfo_to_dict(dsn)["user"]))
    do(bench.dsn, sql.SQL("grant insert on effect to {}").format(role))
    monkeypatch.setenv("IDEMCONSUMER_DSN", dsn)
    inside, go = asyncio.Event(), asyncio.Event()

    async def order(request: StarletteRequest) -> Response:
        await note(current_tx(), Item("ordered"))
        return Response("ordered", 201)

    async def refuse(request: StarletteRequest) -> Response:
        return Response("no", 409)

    async def pay(request: StarletteRequest) -> Response:
        if (await request.json())["id"] == "slow":
            inside.set()
            await go.wait()
        return Response("paid", 201)

    routes = {"POST /orders": Route(tx=True), "POST /refused": Route(tx=True), "POST /paid": Route()}
    more = [StarletteRoute(path, of, methods=["POST"]) for path, of in (("/refused", refuse), ("/paid", pay))]
    door = Idempotency(App("shop"), tenant=by_header, routes=routes)
    async with client(service(door, order, *more)) as shop:
        for path, status in (("/orders", 201), ("/refused", 409), ("/paid", 201)):
            answers = [await shop.post(path=path) for _ in range(2)]
            bench.do(f"{UNSEALED}; update idemconsumer.record set expires_at = now() - interval '1 s'")
            answers.append(await shop.post(path=path))
            assert [(each.status_code, replayed(each)) for each in answers] == [
                (status, False), (status, True), (status, False),
            ]  # fmt: skip
        slow = asyncio.create_task(shop.post("slow", key="slow", path="/paid"))
        await inside.wait()
        bench.do("update idemconsumer.worker set until = now() - interval '1 s'")
        (lost,) = await door.lost()
        (listed,) = json.loads(await command("requests", "list", "--json", dsn=dsn))
        assert listed["key"] == lost.key
        assert await door.settle(lost, Answer(201, (), b"paid"))
        go.set()
        await slow
        await door.close()
    assert bench.effects() == ["ordered", "ordered"]

    ((key,),) = bench.do("select encode(key, 'hex') from idemconsumer.record where key in"
                         " (select key from idemconsumer.result where body = 'ordered')")  # fmt: skip
    await command("keys", "forget", key, "--record", "--yes", dsn=dsn)
    bench.do("update idemconsumer.scope set retain = '-1s'")
    bench.do(f"{UNSEALED}; update idemconsumer.record set expires_at = null")
    assert json.loads(await command("prune", "--json", dsn=dsn))["pruned"] == 3
    refused(
        dsn,
        "select body from idemconsumer.queue",
        "select body from idemconsumer.saga",
        "select output from idemconsumer.step",
        "select body from idemconsumer.signal",
        "insert into idemconsumer.queue (name, body) values ('q', '')",
        "insert into idemconsumer.dead_letter (handler) values ('h')",
        "update idemconsumer.saga set token = 1",
        "delete from idemconsumer.saga",
        "delete from idemconsumer.audit",
        "delete from idemconsumer.migration",
        "truncate idemconsumer.record",
    )


async def test_a_front_door_accepts_and_gives_the_stored_answer(bench: Bench, made: Made) -> None:
    """For a handler that it may not run itself."""
    dsn, shop, worker = made("front-door"), Shop(), Shop()
    give_settings(shop.app, bench.settings(dsn=dsn))
    later = AcceptLater(shop.app, shop.order, tenant=by_header, path="/orders")
    routes = [StarletteRoute(path, later) for path in ("/orders", "/orders/{id}")]
    async with client(Starlette(routes=routes)) as web:
        first = await web.post("a")
        others = [await web.post(id, key=id) for id in ("rejected", "buggy")]
        places = [each.headers["location"] for each in (first, *others)]

        async def told() -> list[int]:
            return [(await web.http.get(place, headers={"X-Tenant": "t"})).status_code for place in places]

        assert (first.status_code, await told()) == (202, [202] * 3)
        assert (await web.http.get(places[0], headers={"X-Tenant": "another"})).status_code == 404
        async with bench.running(worker.app) as running:
            await running.until(lambda: bench.do("select count(*) from idemconsumer.delayed") == [(1,)])
            bench.do("update idemconsumer.delayed set due_at = clock_timestamp()")
            await running.until(lambda: bench.do("select count(*) from idemconsumer.dead_letter") == [(1,)])
            await running.until(lambda: bench.effects() == ["a"])
            await running.until_count(failed=1)
        assert await told() == [200, 422, 500]
        assert (await web.post("a")).json() == "a"
        assert (await shop.app.result(shop.order, key="k", tenant="t")).result == b'"a"'

    other = Shop()
    give_settings(other.app, bench.settings(dsn=dsn))
    for app in (shop.app, other.app):  # one that is open, and one that is opened for it
        with pytest.raises(ConfigurationError, match="lacks rights"):
            await app.process(Message("postgres:orders", b'{"id": "b"}', position="b"))
    assert await shop.app.accepted(shop.order, key="k", tenant="t")
    await shop.app.close()
    refused(
        dsn,
        "select body from idemconsumer.queue",
        "select body from idemconsumer.accepted",
        "insert into idemconsumer.accepted (key, app, handler) values ('', 'a', 'h')",
        "update idemconsumer.accepted set until = null",
        "select idemconsumer.publish_bytes('orders', '')",
        "select idemconsumer.publish_bytes('kafka:out', '')",
        "select pg_catalog.setval('idemconsumer.queue_guard', 1)",
    )


async def test_accepting_by_a_source_takes_the_producers_rights_too(bench: Bench, made: Made) -> None:
    """It is a message that others read."""
    dsn, app = made("front-door"), App("shop")
    give_settings(app, bench.settings(dsn=dsn))

    @app.idempotent_handler("kafka:placed", key=Key.header("Idempotency-Key"))
    async def placed(item: Item, tx: Tx) -> None: ...

    with pytest.raises(ConfigurationError, match="lacks rights"):
        await app.accept(placed, Item("a"), key="k", via="kafka:placed")
    assert bench.do("select count(*) from idemconsumer.record") == [(0,)]
    do(bench.dsn, idemconsumer("migrate", "grants", "--producer", str(conninfo_to_dict(dsn)["user"])))
    assert (await app.accept(placed, Item("a"), key="k", via="kafka:placed")).new
    assert bench.do("select destination from idemconsumer.outbox") == [("kafka:placed",)]
    await app.close()


async def test_what_a_front_door_lacks_is_granted_by_what_it_says(
    bench: Bench, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = made("purge")
    monkeypatch.setenv("IDEMCONSUMER_DSN", dsn)
    door = Idempotency(App("shop"), tenant=by_header, routes={"POST /paid": Route()})
    with pytest.raises(ConfigurationError, match="lacks rights") as lacking:
        await door.lost()
    do(bench.dsn, str(lacking.value).partition("run as the schema's owner: ")[2])
    assert await door.lost() == []
    await door.close()
    refused(dsn, "select body from idemconsumer.queue")


async def test_a_producer_sends_and_reads_nothing(bench: Bench, made: Made) -> None:
    dsn, shop = made("producer"), Shop()
    do(dsn, "select idemconsumer.publish('orders', '{\"id\": \"a\"}')")
    do(dsn, "select idemconsumer.publish_bytes('orders', '{\"id\": \"b\"}', 'b', '{\"h\": \"v\"}', interval '1 ms')")
    await command("publish", "postgres:orders", '{"id": "c"}', dsn=dsn)
    do(dsn, "select idemconsumer.publish('kafka:out', '{\"id\": \"out\"}', 'k', delay => interval '1 h')")
    sending = App("shop")
    give_settings(sending, bench.settings(dsn=dsn))
    await sending.publish("postgres:orders", {"id": "d"}, delay=0.001)
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        give_settings(shop.app, bench.settings(dsn=dsn))
        await shop.app.start(shop.ride, Item("r"), key="r", tx=connection)
        early = await shop.app.signal(shop.ride, key="r", name="go", payload="on", tx=connection)
    assert early == "early"
    async with bench.running(shop.app, concurrency=2) as running:
        await running.until(lambda: len(bench.effects()) == 6)
        await running.until(lambda: bench.do("select count(*) from idemconsumer.saga") == [(0,)])
    assert sorted(bench.effects()) == ["a", "b", "c", "d", "r", "r-leg"]
    assert do(dsn, "select idemconsumer.signal('shop', 'ride', 'r', 'go')") == [("ended",)]

    refused(dsn, *(f"select * from idemconsumer.{table}" for table in (*names("table"), "migration")))
    refused(
        dsn,
        "select body from idemconsumer.queue",
        "select body from idemconsumer.outbox",
        "delete from idemconsumer.outbox",
        "update idemconsumer.queue set token = 1",
        "delete from idemconsumer.queue",
        "insert into idemconsumer.queue (name, body, deliveries) values ('q', '', 5)",
        "insert into idemconsumer.signal (key, name, scope_id, sent_at) values ('', 'n', 1, now())",
        "select idemconsumer.claim('{}'::idemconsumer.claim[], 3::smallint, true)",
    )


@pytest.mark.parametrize("bench", ["postgres15"], indirect=True)
async def test_a_signal_of_a_producer_wakes_a_saga_that_waits(bench: Bench, made: Made) -> None:
    """At the COMMIT, when before Postgres 18 no function's rights count any more."""
    dsn, shop = made("producer"), Shop()
    bench.enqueue("rides", Item("r"))
    async with bench.running(shop.app) as running:
        await running.until(lambda: bench.do(WAITING) == [(1,)])
        assert do(dsn, "select idemconsumer.signal('shop', 'ride', 'r', 'go')") == [("stored",)]
        await running.until(lambda: bench.do("select count(*) from idemconsumer.saga") == [(0,)])


async def test_a_reader_reads_everything_and_changes_nothing(bench: Bench, made: Made) -> None:
    dsn, shop = made("reader"), Shop()
    bench.enqueue("orders", Item("a"), Item("buggy"), b"unreadable")
    bench.enqueue("rides", Item("r"))
    async with bench.running(shop.app) as running:
        await running.until(lambda: bench.do("select count(*) from idemconsumer.delayed") == [(1,)])
        await running.until(lambda: bench.do(WAITING) == [(1,)])
        await running.until(lambda: bench.do("select count(*) from idemconsumer.dead_letter") == [(1,)])
    ((saga,),) = bench.do("select encode(key, 'hex') from idemconsumer.saga where handler = 'ride'")
    ((letter,),) = bench.do("select id::text from idemconsumer.dead_letter")
    for words in (
        ("migrate", "status"),
        ("dead", "list"),
        ("dead", "show", letter),
        ("dead", "groups"),
        ("dead", "runs"),
        ("dead", "export"),
        ("keys", "list"),
        ("keys", "show", saga),
        ("explain", saga),
        ("sagas", "list"),
        ("sagas", "show", saga),
        ("skip",),
        ("prune", "--dry-run"),
    ):
        assert await command(*words, dsn=dsn)
    assert (await SagaAdmin(dsn, SCHEMA).look_up(bytes.fromhex(saga))) is not None
    bench.do("select idemconsumer.publish('~shop/leg', '{}', 'k')")
    assert len(await find_orphans(dsn, SCHEMA, "shop", {})) == 1
    for refusal in (("dead", "discard", letter, "--yes"), ("publish", "postgres:q", "{}")):
        assert "lacks rights" in await command(*refusal, dsn=dsn, code=2)
    refused(dsn, *(f"delete from idemconsumer.{table}" for table in names("table")))
    refused(dsn, "select idemconsumer.send_signal('', 's', 'n', null, null)")


async def test_the_purge_prunes_and_reads_no_payload(bench: Bench, made: Made) -> None:
    dsn, shop = made("purge"), Shop()
    bench.enqueue("orders", Item("a"), Item("rejected"), b"unreadable")
    bench.enqueue("rides", Item("r"))
    async with bench.running(shop.app) as running:
        await running.until(lambda: bench.do(WAITING) == [(1,)])
        for key in ("r", "another"):
            bench.do("select idemconsumer.signal('shop', 'ride', %s, 'go')", key)
        await running.until(lambda: bench.do("select count(*) from idemconsumer.saga") == [(0,)])
        await running.until(lambda: bench.do("select count(*) from idemconsumer.dead_letter") == [(1,)])
        await running.until(lambda: bench.do("select count(*) from idemconsumer.record") == [(4,)])
    bench.do("update idemconsumer.scope set retain = '-1s'")
    bench.do("update idemconsumer.dead_retention set bodies = '-1s'")

    assert json.loads(await command("prune", "--json", dsn=dsn))["pruned"] == 4
    for table in ("record", "result", "step", "signal", "child", "history"):
        assert bench.do(f"select count(*) from idemconsumer.{table}") == [(0,)], table
    assert bench.do("select body from idemconsumer.dead_letter") == [(b"",)]
    bench.do("update idemconsumer.dead_retention set letters = '-1s'")
    await command("prune", dsn=dsn)
    assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]

    refused(
        dsn,
        "select body from idemconsumer.result",
        "select output from idemconsumer.step",
        "select body from idemconsumer.saga",
        "select body from idemconsumer.queue",
        "select body from idemconsumer.signal",
        "delete from idemconsumer.saga",
        "delete from idemconsumer.queue",
        "update idemconsumer.record set state = 3",
        "insert into idemconsumer.record (key, scope_id, state, changed_at) values ('', 1, 3, now())",
    )


def refused(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            with pytest.raises(InsufficientPrivilege):
                connection.execute(statement.encode())


def test_no_role_can_have_our_triggers_fire_for_a_table_of_its_own(bench: Bench) -> None:
    """Those with the rights of the schema's owner."""
    exposed = bench.do(
        "select p.proname from pg_proc as p where p.pronamespace = 'idemconsumer'::regnamespace and p.prosecdef"
        " and p.proname <> 'low_water_of'"  # a number, for those who read views
        " and (has_function_privilege('public', p.oid, 'execute') or p.proconfig is null"
        "      or not 'search_path=pg_catalog, pg_temp' = any (p.proconfig))"
    )
    assert exposed == []


def test_the_check_at_the_start_knows_all_that_statements_call(bench: Bench) -> None:
    made = bench.do(
        "select distinct proname from pg_proc where pronamespace = 'idemconsumer'::regnamespace"
        " and prorettype <> 'trigger'::regtype"
    )
    assert sorted(name for (name,) in made) == sorted(names("function"))
    relations = (
        "select relname from pg_class as c where relnamespace = 'idemconsumer'::regnamespace and relkind = %s"
        " and not exists (select from pg_depend where objid = c.oid and deptype = 'i')"  # of an identity column
    )
    assert sorted(name for (name,) in bench.do(relations, "r")) == sorted([*names("table"), "migration"])
    assert sorted(name for (name,) in bench.do(relations, "S")) == sorted(names("sequence"))


async def test_a_role_has_to_be_named() -> None:
    said = await command("migrate", "grants", code=2)
    assert "name a role" in said
