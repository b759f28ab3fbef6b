"""What docs/protocol.md says that a message costs in round trips is what it costs, on each Postgres."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.pq import ExecStatus

from idemconsumer import Message, Reject, Retry, Saga, Tx, idempotent_handler
from idemconsumer.app.enqueuing import enqueue_in
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.brokers.postgres_session import PostgresSession
from idemconsumer.engine.engine import Engine
from idemconsumer.handlers.arguments import Step
from idemconsumer.handlers.decorator import Handler
from idemconsumer.message.message import StoredResult, Subscription
from idemconsumer.ports.broker import Bounds, Delivery, Outgoing
from idemconsumer.ports.requests import Held
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import Mark, Outcome, Record
from idemconsumer.settings import Settings
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.postgres_requests import PostgresRequests
from tests.support import ROOT
from tests.support.flights import Cost, Wire
from tests.support.inside import look_again_at, renew_now
from tests.support.leases import UnkeptLease
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, work
from tests.support.sagas import Bench, Station, put, saga, take_back
from tests.support.servers.made import PostgresServer
from tests.support.servers.postgres import fresh_database
from tests.support.tuning import as_it_is
from tests.support.waiting import PATIENCE

MANY = 4
ROW = re.compile(r"^\| ([^|]+) \| ([\dn+ ]+) \| ([\dn+ ]+) \|$", re.MULTILINE)


class Failed(Exception):
    pass


# ------------------------------------------------------------------------------------------------------------- handlers
async def act(order: dict[str, Any], tx: Tx, message: Message) -> str | None:
    await tx.execute("insert into witness (id) values (%s)", (str(order["id"]),))
    match order.get("act"):
        case "fails":
            raise Failed
        case "is wrong":
            await tx.send("select 1 / %s", (0,))
        case "refuses":
            raise Reject("no")
        case "later":
            raise Retry(after="3d")
        case "answers":
            return "done"
        case "publishes":
            await enqueue_in(tx, SCHEMA, "emails", Outgoing(b"1"))
    return None


async def looks(order: dict[str, Any], tx: Tx) -> None:
    assert (await tx.execute("insert into witness (id) values (%s)", (str(order["id"]),))).rowcount == 1


ACTS = idempotent_handler(SOURCE, key="id", name="acts")(act)
LOOKS = idempotent_handler(SOURCE, key="id", name="looks")(looks)
ONCE = idempotent_handler(SOURCE, key="id", name="once", max_attempts=1)(act)
TENANTS = idempotent_handler(SOURCE, key="id", name="tenants", tenant="id")(act)
DEFERRED = idempotent_handler(SOURCE, key="id", name="deferred", wait="0s")(act)


class World:
    """A process with one connection for each of its purposes, all of them on the wire."""

    def __init__(
        self, stack: AsyncExitStack, wire: Wire, bench: Bench, ledger: Ledger, store: PostgresStore,
        session: PostgresSession,
    ) -> None:  # fmt: skip
        self.stack = stack
        self.wire = wire
        self.bench = bench
        self.ledger = ledger
        self.store = store
        self.engine = Engine(store)
        self.watched = Engine(store, watched=True)
        self.station = Station(store, bench.register(), None)
        self.session = session
        self.broker = PostgresBroker(Settings(dsn=wire.dsn))
        self._last = 0

    async def open(self, dsn: str = "") -> PostgresStore:
        store = await PostgresStore.open(dsn or self.wire.dsn, SCHEMA, connections=1, longest_run=30.0)
        self.stack.push_async_callback(store.close)
        return store

    async def rival(self, claim: Claim) -> AsyncExitStack:
        """Holds the key until it is closed, and is not on the wire."""
        holding = await self.stack.enter_async_context(AsyncExitStack())
        claims = await holding.enter_async_context((await self.open(self.ledger.dsn)).transaction(group=1))
        assert await claims.claim([claim]) == [Mark.CLAIMED]
        return holding

    def new(self, n: int = 1) -> list[int]:
        self._last += n
        return list(range(self._last - n + 1, self._last + 1))

    async def run(
        self, ids: list[int], expected: str, *, handler: Handler[..., Any] = ACTS, engine: Engine | None = None,
        suspect: bool = False, **more: object,
    ) -> list[Outcome]:  # fmt: skip
        """Run them as one group, of which as many are decided as kinds are expected."""
        bound = handler.plan.bind("shop")
        group = [work(bound, message(id, **more), suspect=suspect) for id in ids]
        outcomes = await (engine or self.engine).run(group)
        assert kinds(outcomes) == expected.split(), outcomes
        return outcomes


Act = Callable[[], Awaitable[object]]
Path = Callable[[World, int], Awaitable[Act]]
PATHS: dict[str, Path] = {}


def path(name: str) -> Callable[[Path], Path]:
    """A function that gets everything ready, and returns what is to be counted. `name`: the row of the table."""

    def added(fn: Path) -> Path:
        PATHS[name] = fn
        return fn

    return added


# ---------------------------------------------------------------------------------------------------------- joined mode
@path("n new messages")
async def new_messages(world: World, n: int) -> Act:
    ids = world.new(n)
    return lambda: world.run(ids, "applied " * n)


@path("n new messages of a handler that looks at each answer")
async def looked_at(world: World, n: int) -> Act:
    ids = world.new(n)
    return lambda: world.run(ids, "applied " * n, handler=LOOKS)


@path("n new messages, whose results are stored")
async def results(world: World, n: int) -> Act:
    ids = world.new(n)
    return lambda: world.run(ids, "applied " * n, act="answers")


@path("n duplicates")
async def duplicates(world: World, n: int) -> Act:
    ids = world.new(n)
    await world.run(ids, "applied " * n)
    return lambda: world.run(ids, "duplicate " * n)


@path("n new messages and n duplicates")
async def mixed(world: World, n: int) -> Act:
    old, new = world.new(n), world.new(n)
    await world.run(old, "applied " * n)
    return lambda: world.run(old + new, "duplicate " * n + "applied " * n)


@path("n new messages, of which each publishes one with `tx=`")
async def outbox(world: World, n: int) -> Act:
    ids = world.new(n)
    return lambda: world.run(ids, "applied " * n, act="publishes")


@path("a message of a scope that this process meets for the first time")
async def first_of_scope(world: World, n: int) -> Act:
    for _ in range(3):
        await world.run(world.new(), "applied", handler=TENANTS)
    ids = world.new()
    return lambda: world.run(ids, "applied", handler=TENANTS)


@path("the first message of a process, with what opens its store")
async def first(world: World, n: int) -> Act:
    ids = world.new()

    async def act() -> None:
        await world.run(ids, "applied", engine=Engine(await world.open()))

    return act


@path("a message whose key a rival holds")
async def busy(world: World, n: int) -> Act:
    (given,) = [work(DEFERRED.plan.bind("shop"), message(id)) for id in world.new()]
    rival = await world.rival(given.claim)

    async def run() -> None:
        assert kinds(await world.engine.run([given])) == ["busy"]
        await rival.aclose()

    return run


@path("n new messages, and behind them one that fails")
async def failing_behind(world: World, n: int) -> Act:
    bound = ACTS.plan.bind("shop")
    group = [work(bound, message(id)) for id in world.new(n)]
    group += [work(bound, message(id, act="fails")) for id in world.new()]
    await world.run(world.new(), "applied")

    async def run() -> None:
        assert kinds(await world.engine.run(group)) == ["applied"] * n + ["retrying"]

    return run


@path("a new message, and behind it one whose statement fails")
async def wrong_behind(world: World, n: int) -> Act:
    bound = ACTS.plan.bind("shop")
    (before,), (behind,) = world.new(), world.new()
    group = [work(bound, message(before)), work(bound, message(behind, act="is wrong"))]
    await world.run(world.new(), "applied")

    async def run() -> None:
        assert kinds(await world.engine.run(group)) == ["applied"]
        assert kinds(await world.engine.run(group[1:])) == ["retrying"]

    return run


@path("a message that fails, to be tried again soon")
async def failing(world: World, n: int) -> Act:
    await world.run(world.new(), "applied")
    ids = world.new()
    return lambda: world.run(ids, "retrying", act="fails")


@path("a message that is to be tried again in days")
async def later(world: World, n: int) -> Act:
    await world.run(world.new(), "applied", engine=world.watched)
    ids = world.new()
    return lambda: world.run(ids, "retrying", act="later", engine=world.watched)


@path("a message that is rejected")
async def rejected(world: World, n: int) -> Act:
    ids = world.new()
    return lambda: world.run(ids, "failed", act="refuses")


@path("a message that fails for the last time: a dead letter")
async def dead(world: World, n: int) -> Act:
    await world.run(world.new(), "applied", handler=ONCE)
    ids = world.new()
    return lambda: world.run(ids, "dead", act="fails", handler=ONCE)


@path("a message whose record is dead")
async def dead_again(world: World, n: int) -> Act:
    await world.run(world.new(), "applied", handler=ONCE)
    ids = world.new()
    await world.run(ids, "dead", act="fails", handler=ONCE)
    return lambda: world.run(ids, "dead", act="fails", handler=ONCE)


@path("a message whose key has come with another payload")
async def conflict(world: World, n: int) -> Act:
    ids = world.new()
    await world.run(ids, "applied")
    return lambda: world.run(ids, "conflict", amount=2)


@path("n suspects, of which nothing is on record")
async def suspects(world: World, n: int) -> Act:
    ids = world.new(n)
    return lambda: world.run(ids, "applied " * n, suspect=True)


@path("a suspect that was begun before and never ended")
async def begun(world: World, n: int) -> Act:
    bound = ACTS.plan.bind("shop")
    (given,) = [work(bound, message(id), suspect=True) for id in world.new()]
    await world.store.mark_attempts([given.claim])

    async def run() -> None:
        assert kinds(await world.engine.run([given])) == ["applied"]

    return run


# -------------------------------------------------------------------------------------------------- the Postgres queue
async def taken(world: World, n: int) -> list[Delivery]:
    world.ledger.run("truncate idemconsumer.queue")
    await world.broker.publish("emails", [Outgoing(b"1")] * n)
    look_again_at(world.session, asyncio.get_running_loop().time() + 60)
    deliveries = await fetched(world)
    assert len(deliveries) == n
    return deliveries


async def fetched(world: World) -> list[Delivery]:
    """Once it was told of them."""
    while not (deliveries := list(await world.session.fetch())):
        pass
    return deliveries


@path("publish n, and connect for it")
async def publish(world: World, n: int) -> Act:
    return lambda: world.broker.publish("emails", [Outgoing(b"1")] * n)


@path("take n")
async def take(world: World, n: int) -> Act:
    await world.broker.publish("emails", [Outgoing(b"1")] * n)
    look_again_at(world.session, asyncio.get_running_loop().time() + 60)
    deliveries: list[Delivery] = []

    async def run() -> None:
        deliveries.extend(await fetched(world))
        assert len(deliveries) == n

    return run


@path("look, move what has fallen due, and take n")
async def fall_due(world: World, n: int) -> Act:
    await world.broker.publish("emails", [Outgoing(b"1")] * n)
    look_again_at(world.session, 0.0)

    async def run() -> None:
        assert len(await fetched(world)) == n

    return run


@path("delete n that are finished")
async def finish(world: World, n: int) -> Act:
    deliveries = await taken(world, n)
    return lambda: world.session.settle(deliveries)


@path("give n back")
async def give_back(world: World, n: int) -> Act:
    deliveries = await taken(world, n)

    async def run() -> None:
        await world.session.release(deliveries)

    return run


# ---------------------------------------------------------------------------------------------------------- leased mode
async def charge(step: Step, name: str) -> str:
    return f"charged:{name}"


def steps(n: int, kind: str, end: Exception | None = None) -> Any:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        for number in range(n):
            if kind == "tx":
                await saga.tx(f"step{number}", put, "x", undo=take_back)
            elif kind == "call":
                await saga.call(f"step{number}", charge, "x")
            else:
                await saga.sleep(f"step{number}", 3600)
        if end is not None:
            raise end

    return saga(book)


def delivered(world: World, n: int, kind: str, expected: str, end: Exception | None = None) -> Act:
    handler, given = steps(n, kind, end), Message("memory:orders", json.dumps({"id": world.new()[0]}).encode())

    async def run() -> None:
        outcome = await world.station.deliver(handler, given)
        assert str(outcome.kind) == expected, outcome

    return run


async def known(world: World) -> None:
    """Nobody has looked at the answers of its steps, nor of their undos, three times."""
    await delivered(world, as_it_is("runs_before_ahead"), "tx", "failed", Reject("no"))()


@path("a saga with n steps in a transaction")
async def tx_steps(world: World, n: int) -> Act:
    await known(world)
    return delivered(world, n, "tx", "applied")


@path("a saga with n calls")
async def call_steps(world: World, n: int) -> Act:
    return delivered(world, n, "call", "applied")


@path("a saga with n steps in a transaction, rejected and undone")
async def undone(world: World, n: int) -> Act:
    await known(world)
    return delivered(world, n, "tx", "failed", Reject("no"))


@path("a saga that begins to sleep for long")
async def sleeps(world: World, n: int) -> Act:
    return delivered(world, 1, "sleep", "busy")


@path("a saga that fails behind n steps in a transaction")
async def saga_fails(world: World, n: int) -> Act:
    await known(world)
    world.bench.clear()
    world.station.register(world.bench)
    return delivered(world, n, "tx", "retrying", Failed())


@path("a saga that is resumed behind n steps in a transaction")
async def resumed(world: World, n: int) -> Act:
    await (await saga_fails(world, n))()
    handler = steps(n, "tx")
    world.bench.run("update idemconsumer.saga set due = clock_timestamp()")

    async def run() -> None:
        assert str((await world.station.resume(handler)).kind) == "applied"

    return run


@path("take sagas that are due")
async def take_sagas(world: World, n: int) -> Act:
    return lambda: world.station.leases.take("shop", ["book"], 5)


@path("look for sagas that are due")
async def look(world: World, n: int) -> Act:
    return lambda: world.station.leases.look("shop", ["book"])


@path("renew the lease of all sagas of a process")
async def renew(world: World, n: int) -> Act:
    heartbeat = Heartbeat(world.wire.dsn, SCHEMA, lease=30.0, patience=30.0)
    await heartbeat.start(lambda: None)
    world.stack.push_async_callback(heartbeat.stop)

    async def run() -> None:
        await renew_now(heartbeat, PATIENCE)

    await run()  # connects
    return run


# ------------------------------------------------------------------------------------------------------------- requests
async def answered(world: World, requests: PostgresRequests) -> Claim:
    claim = Claim(world.new()[0].to_bytes(32, "big"), "shop/-/POST *", b"f" * 32, expires=60.0)
    held = await requests.claim(claim, lambda: None)
    assert isinstance(held, Held)
    assert await requests.complete(held, StoredResult(b"{}", "application/json", 201))
    return claim


@path("a new request")
async def request(world: World, n: int) -> Act:
    requests = PostgresRequests(world.store.pool, UnkeptLease(world.ledger))
    await answered(world, requests)  # its scope is known from now on
    return lambda: answered(world, requests)


def repeated(claim: Claim, requests: PostgresRequests) -> Act:
    async def run() -> None:
        assert isinstance(await requests.claim(claim, lambda: None), Record)

    return run


@path("a repetition that comes to the same process")
async def repetition(world: World, n: int) -> Act:
    requests = PostgresRequests(world.store.pool, UnkeptLease(world.ledger))
    return repeated(await answered(world, requests), requests)


@path("a repetition that comes to another process")
async def repetition_elsewhere(world: World, n: int) -> Act:
    other = PostgresRequests(world.store.pool, UnkeptLease(world.ledger))
    return repeated(await answered(world, other), PostgresRequests(world.store.pool, UnkeptLease(world.ledger)))


# ------------------------------------------------------------------------------------------------------------ the tests
@pytest.fixture(scope="module")
def _one_database(postgres18: PostgresServer) -> Iterator[tuple[Bench, Ledger]]:
    with (
        fresh_database(postgres18.dsn) as dsn,
        closing(Bench(dsn)) as bench,
        closing(Ledger(dsn)) as ledger,
    ):
        yield bench, ledger


@pytest.fixture
async def world(_one_database: tuple[Bench, Ledger]) -> AsyncIterator[World]:
    bench, ledger = _one_database
    ledger.clear()
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(ledger.dsn))
        store = await PostgresStore.open(wire.dsn, SCHEMA, connections=1, longest_run=30.0)
        stack.push_async_callback(store.close)
        broker = PostgresBroker(Settings(dsn=wire.dsn))
        session = await broker.open(
            [Subscription("postgres:emails", "send", "shop")], Bounds(lanes=1, group=99, room=99)
        )
        stack.push_async_callback(session.close)
        yield World(stack, wire, bench, ledger, store, session)


def documented() -> dict[str, tuple[str, str]]:
    """What the tables say: flights and statements by row."""
    page = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    section = page.partition("\n## What a message costs in round trips\n")[2].partition("\n## ")[0]
    rows = ROW.findall(section)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (flights, statements) for name, flights, statements in rows}


def value(cell: str, n: int) -> int:
    """Of a sum such as `4 + 2n`."""
    terms = (term.strip() for term in cell.split("+"))
    return sum(int(term[:-1] or 1) * n if term.endswith("n") else int(term) for term in terms)


def test_each_row_is_measured() -> None:
    assert documented().keys() == PATHS.keys()


@pytest.mark.parametrize("name", PATHS)
async def test_it_costs_what_is_documented(world: World, name: str) -> None:
    seen, wanted = {}, {}
    for n in (1, MANY):
        await (await PATHS[name](world, n))()
        counted = await PATHS[name](world, n)
        await world.run(world.new(7), "applied " * 7)  # so that the connection has a statement that it has prepared
        world.wire.taken()
        await counted()
        seen[n] = world.wire.taken()
        flights, statements = documented()[name]
        wanted[n] = Cost(value(flights, n), value(statements, n))
    assert seen == wanted


async def test_what_is_sent_without_waiting_is_one_flight(database: str) -> None:
    """Though the answer to one statement is there before the next one is sent."""
    with psycopg.connect(database, autocommit=True) as direct:

        def await_answer(pid: int, query: bytes) -> None:
            """Meanwhile the event loop stands still."""
            done = "select state = 'idle' and query = %s from pg_stat_activity where pid = %s"
            end = time.monotonic() + 10
            while direct.execute(done, (query.decode(), pid)).fetchone() != (True,):
                assert time.monotonic() < end

        async def passes(of_the_loop: int) -> None:
            for _ in range(of_the_loop):
                await asyncio.sleep(0)

        async with Wire(database) as wire, await AsyncConnection.connect(wire.dsn, autocommit=True) as connection:
            wire.taken()
            server = connection.pgconn
            server.enter_pipeline_mode()
            for number in range(3):
                query = b"select %d" % number
                server.send_query_params(query, None)
                server.pipeline_sync()
                server.flush()
                await passes(5)
                await_answer(server.backend_pid, query)
                await passes(5)
            left = 3
            async with asyncio.timeout(PATIENCE):
                while left:
                    await asyncio.sleep(0)
                    server.consume_input()
                    while left and not server.is_busy():
                        result = server.get_result()
                        left -= result is not None and result.status == ExecStatus.PIPELINE_SYNC
            server.exit_pipeline_mode()
            assert wire.taken() == Cost(flights=1, statements=3)
            for _ in range(3):
                await connection.execute("select 1")
            assert wire.taken() == Cost(flights=3, statements=3)
