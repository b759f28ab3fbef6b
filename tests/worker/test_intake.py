"""What may have killed a worker is on record before anything of it is decoded, and is read alone if it was begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, cast

import psycopg
import pytest

from idemconsumer import App, Message, Retry, Saga, Step, StoreUnavailable, Tx
from idemconsumer.admin.hints import hint
from idemconsumer.engine.company import Company
from idemconsumer.errors import BadMessage
from idemconsumer.handlers.decorator import Handler
from idemconsumer.message import keys
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.ports.observer import NullObserver, Point
from idemconsumer.rules.claim import Claim
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.suspect_readings import PostgresReading
from idemconsumer.worker.intake import Intake, Read
from idemconsumer.worker.outage import Outage
from tests.support.inside import draining, lanes_if_any
from tests.support.points import Killed
from tests.support.workers import SCHEMA, Bench, Item, body, note


def id_of(message: Message) -> str:
    return str(json.loads(message.body)["id"])


def reading_into(read: list[Delivery]) -> Read:
    async def into(deliveries: Sequence[Delivery], refusal: BadMessage | None) -> None:
        read.extend(deliveries)

    return into


def record_of(name: str, id: int) -> bytes:
    """The key under which the reading of a row of the queue is on record."""
    message = Message("postgres:q", body(Item(name)), position=f"q#{id}")
    return keys.digest("intake", None, "~handle", Delivery(message, Epoch()).identity)


@dataclass
class Reader:
    """An app whose key function looks at what is on record, and does `more`."""

    bench: Bench
    more: Callable[[str], object] = bool
    read: dict[str, list[int]] = field(default_factory=dict)
    app: App = field(default_factory=lambda: App("intake"))

    def __post_init__(self) -> None:
        @self.app.idempotent_handler("postgres:q", key=self.key_of, max_attempts=2)
        async def handle(item: Item, tx: Tx) -> None:
            await note(tx, item)

        self.handler: Handler[..., Any] = handle

    def key_of(self, message: Message) -> str:
        self.read[id_of(message)] = self.on_record()
        self.more(id_of(message))
        return id_of(message)

    def on_record(self) -> list[int]:
        """The counts of readings, without what was read: its handler may be on record while the next one is read."""
        run = [keys.digest("intake", None, "handle", name) for name in self.read]
        query = "select count from idemconsumer.attempt where key <> all(%s) order by 1"
        return [count for (count,) in self.bench.do(query, run)]

    def redelivered(self, *names: str, begun: str = "") -> None:
        """As a dead worker leaves them; it died while it read `begun`."""
        ids = {name: 1000 + at for at, name in enumerate(names)}
        if begun:
            self.bench.do("insert into idemconsumer.scope (name) values ('intake/-/handle') on conflict do nothing")
            self.bench.do(
                "insert into idemconsumer.attempt select %s, id, 0, null, clock_timestamp() from idemconsumer.scope"
                " where name = 'intake/-/handle'",
                record_of(begun, ids[begun]),
            )
        self.bench.do(
            "insert into idemconsumer.queue (id, name, body, deliveries) overriding system value"
            " select id, 'q', body, 1 from unnest(%s::bigint[], %s::bytea[]) as w (id, body)",
            list(ids.values()),
            [body(Item(name)) for name in ids],
        )
        self.bench.do("select setval('idemconsumer.queue_id_seq', max(id)) from idemconsumer.queue")


async def test_suspects_are_marked_together_and_new_ones_are_not(bench: Bench) -> None:
    reader = Reader(bench)
    reader.redelivered("a", "b")
    bench.enqueue("q", Item("new"))
    await bench.until_empty(reader.app)
    assert reader.read == {"a": [0, 0], "b": [0, 0], "new": []}
    assert (sorted(bench.effects()), reader.on_record()) == (["a", "b", "new"], [])


async def test_one_that_was_begun_is_counted_and_the_others_are_not_on_record_beside_it(bench: Bench) -> None:
    reader = Reader(bench)
    reader.redelivered("a", "begun", "b", begun="begun")
    await bench.until_empty(reader.app)
    assert (reader.read["a"], reader.read["begun"]) == ([0, 0, 0], [1])
    assert (sorted(bench.effects()), reader.on_record()) == (["a", "b", "begun"], [])


async def test_one_that_kills_whoever_reads_it_ends_as_a_dead_letter_and_costs_the_others_nothing(bench: Bench) -> None:
    deaths: list[str] = []

    def kill(name: str) -> None:
        if name == "bomb":
            deaths.append(name)
            raise Killed

    reader = Reader(bench, kill)
    bench.enqueue("q", Item("a"), Item("bomb"), Item("b"))
    bench.do("create table kept as select * from idemconsumer.queue where convert_from(body, 'UTF8') like '%%bomb%%'")
    for _ in range(10):
        try:
            await bench.until_empty(reader.app)
            break
        except Killed:
            bench.do("update idemconsumer.queue set visible_at = clock_timestamp()")
    assert len(deaths) == 4, "not known, marked, and counted as often as it may"
    assert sorted(bench.effects()) == ["a", "b"]

    bench.do("insert into idemconsumer.queue overriding system value select * from kept")
    bench.do("update idemconsumer.queue set deliveries = 1")
    await bench.until_empty(reader.app)
    assert len(deaths) == 4, "it came again, as if its settlement had been lost"
    assert bench.do("select reason, arrivals from idemconsumer.dead_letter") == [("killed_worker", 2)]
    letters = bench.do("select reason, error, attempts from idemconsumer.dead_letter")
    assert [(reason, attempts) for reason, _, attempts in letters] == [("killed_worker", 2)]
    assert "2 workers died while they decoded it" in letters[0][1]

    assert "Fix the cause, then `dead redrive`" in hint("killed_worker")
    assert bench.do("select key from idemconsumer.dead_letter") == [(None,)]
    reader.more = bool  # it was mended
    bench.enqueue("q", Item("bomb"))
    await bench.until_empty(reader.app)
    assert sorted(bench.effects()) == ["a", "b", "bomb"]


async def test_one_that_was_begun_is_read_while_nothing_else_runs(bench: Bench) -> None:
    running, go, seen = asyncio.Event(), asyncio.Event(), list[bool]()
    reader = Reader(bench, lambda name: seen.append(go.is_set()))

    @reader.app.idempotent_handler("memory:slow", key="id")
    async def slow(item: Item, tx: Tx) -> None:
        running.set()
        await go.wait()

    await bench.publish("slow", Item("slow"))
    async with bench.running(reader.app) as worker:
        await worker.until(running.is_set)
        reader.redelivered("begun", begun="begun")
        # Its worker comes as far as this: the message is fetched, and waits for the slow one.
        await worker.until(lambda: bench.do("select deliveries from idemconsumer.queue") == [(2,)])
        assert seen == []
        go.set()
        await worker.until_count(applied=2)
    assert seen == [True]


class Kept:
    """A store whose answers come at once. Each delivery was begun before."""

    attempts = 1
    ours = frozenset[bytes]()

    def __init__(self) -> None:
        self.begun: set[bytes] = set()

    @asynccontextmanager
    async def reading(self, claims: Sequence[Claim], reader: int) -> AsyncIterator[Kept]:
        self.begun = {claim.key for claim in claims}
        yield self

    @asynccontextmanager
    async def reading_alone(self, claim: Claim, reader: int) -> AsyncIterator[Kept]:
        self.ours = frozenset({claim.key})
        yield self

    async def end(self) -> None:
        return


async def test_one_that_a_rival_reads_right_now_is_neither_counted_nor_read(bench: Bench) -> None:
    reader = Reader(bench)
    reader.redelivered("a")
    key = record_of("a", 1000)
    claims = [Claim(key=key, scope="intake/-/handle", fingerprint=None)]
    rival = await PostgresStore.open(bench.dsn, SCHEMA, connections=1, longest_run=30.0)
    async with (
        rival.reading(claims, 1) as reading,
        bench.running(reader.app, until_empty=True) as worker,
    ):
        # Long enough for the source to be taken for empty.
        await worker.until(lambda: worker.points.count(Point.READING) > 5)
        assert (reader.read, reader.on_record()) == ({}, [0])
        await reading.end()
        await worker.until_count(applied=1)
    await rival.close()
    assert (reader.read, bench.effects(), reader.on_record()) == ({"a": [0]}, ["a"], [])


async def test_one_whose_reading_was_cut_off_is_read_again_and_nobody_has_died(bench: Bench) -> None:
    """The commit that puts it on record has no answer, as connections are cut, and its session has ended."""
    reader, read, given_up, cuts = Reader(bench), list[Delivery](), list[bool](), 0
    bound = reader.handler.plan.bind("intake")
    store = await PostgresStore.open(bench.dsn, SCHEMA, connections=1, longest_run=30.0)

    class Cut(PostgresStore):
        @asynccontextmanager
        async def cut_after(self, reading: Any) -> AsyncIterator[Any]:
            nonlocal cuts
            async with reading as begun:
                if cuts < 4 and begun.ours:
                    cuts += 1
                    given_up.append(True)
                    raise StoreUnavailable("the connection was cut")
                yield begun

        def reading(self, claims: Sequence[Claim], reader: int) -> Any:
            return self.cut_after(super().reading(claims, reader))

        def reading_alone(self, claim: Claim, reader: int) -> Any:
            return self.cut_after(super().reading_alone(claim, reader))

    store.__class__ = Cut
    intake = Intake(
        store, Company(), Outage(), lambda delivery: bound, reading_into(read),
        draining=asyncio.Event(), given_up=lambda delivery: bool(given_up), observer=NullObserver(),
    )  # fmt: skip
    delivery = Delivery(Message("postgres:q", b"{}", position="q#1"), Epoch())
    for _ in range(4):
        assert await intake.admit([delivery]) == [delivery]
        given_up.clear()
        assert (read, reader.on_record()) == ([], [0])
    assert (await intake.admit([delivery]), read, reader.on_record()) == ([], [delivery], [])
    await store.close()


async def test_one_that_was_begun_waits_for_those_inside_however_quick_the_database_is(bench: Bench) -> None:
    reader, company, read = Reader(bench), Company(), list[Delivery]()
    bound = reader.handler.plan.bind("intake")
    intake = Intake(
        cast(PostgresStore, Kept()),
        company,
        Outage(),
        lambda delivery: bound,
        reading_into(read),
        draining=asyncio.Event(),
        given_up=lambda delivery: False,
        observer=NullObserver(),
    )
    delivery = Delivery(Message("postgres:q", b"{}", position="q#1"), Epoch())
    async with company.shared():
        # A context of its own: what is inside may come in again.
        reading = asyncio.create_task(intake.admit([delivery]), context=Context())
        for _ in range(20):
            await asyncio.sleep(0)
        assert read == []
    await reading
    assert read == [delivery]


async def test_what_is_new_is_not_read_beside_one_that_was_begun(bench: Bench) -> None:
    running, go, seen = asyncio.Event(), asyncio.Event(), dict[str, bool]()
    app = App("intake")

    def key_of(message: Message) -> str:
        seen[id_of(message)] = go.is_set()
        return id_of(message)

    @app.idempotent_handler("postgres:begun", key="id")
    async def begun(item: Item, tx: Tx) -> None:
        running.set()
        await go.wait()

    @app.idempotent_handler("memory:new", key=key_of)
    async def new(item: Item, tx: Tx) -> None:
        await note(tx, item)

    bench.do("insert into idemconsumer.scope (name) values ('intake/-/begun')")
    bench.do(
        "insert into idemconsumer.attempt select %s, id, 0, null, clock_timestamp() from idemconsumer.scope",
        begun.plan.bind("intake").call_for(Message("postgres:begun", body(Item("a")))).claim.key,
    )
    bench.enqueue("begun", Item("a"))
    bench.do("update idemconsumer.queue set deliveries = 1")
    async with bench.running(app) as worker:
        await worker.until(running.is_set)
        fetched = worker.points.count(Point.FETCHED)
        await bench.publish("new", Item("b"))
        await worker.until(lambda: worker.points.count(Point.FETCHED) > fetched)
        assert seen == {}
        go.set()
        await worker.until_count(applied=2)
    assert seen == {"b": True}


async def test_a_drain_gives_back_what_still_waits_to_be_read(bench: Bench) -> None:
    running, go = asyncio.Event(), asyncio.Event()
    reader = Reader(bench)

    @reader.app.idempotent_handler("memory:slow", key="id")
    async def slow(item: Item, tx: Tx) -> None:
        running.set()
        await go.wait()

    await bench.publish("slow", Item("slow"))
    async with bench.running(reader.app) as worker:
        await worker.until(running.is_set)
        reader.redelivered("begun", "behind", begun="begun")
        await worker.until(lambda: bench.do("select deliveries from idemconsumer.queue") == [(2,), (2,)])
        worker.worker.drain()
        await worker.until(lambda: draining(worker.worker))
        go.set()
    assert reader.read == {}
    rows = bench.do("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue")
    assert rows == [(1, True), (1, True)]
    assert reader.on_record() == [0]


async def test_a_drain_waits_for_what_is_being_read_and_gives_it_back(bench: Bench) -> None:
    reader = Reader(bench)
    reader.redelivered("a")
    waiting = (
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%insert into%attempt (%'"
    )
    await bench.opened_before()
    async with await psycopg.AsyncConnection.connect(bench.dsn) as other:
        await other.execute("lock table idemconsumer.attempt in access exclusive mode")
        async with bench.running(reader.app) as worker:
            await worker.until(lambda: bench.do(waiting) == [(1,)])
            worker.worker.drain()
            await worker.until(lambda: (lanes := lanes_if_any(worker.worker)) is not None and lanes.finished.is_set())
            for _ in range(20):  # the worker would leave
                await asyncio.sleep(0)
            await other.rollback()
    rows = bench.do("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue")
    assert (rows, bench.effects(), reader.on_record()) == ([(1, True)], [], [])


async def test_a_database_that_is_away_meanwhile_is_waited_for(bench: Bench) -> None:
    reader = Reader(bench)
    cut = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name like '% worker 0'"
    reader.redelivered("a")
    async with bench.running(reader.app) as worker:
        worker.points.on(Point.READING, lambda: bench.do(cut))
        await worker.until_count(applied=1)
    assert (bench.effects(), reader.on_record()) == (["a"], [])


async def test_a_saga_whose_message_kills_whoever_reads_it_is_put_aside_unread(bench: Bench) -> None:
    app, reads = App("intake"), list[str]()

    def key_of(message: Message) -> str:
        reads.append(id_of(message))
        if len(reads) > 1:
            raise Killed
        return id_of(message)

    @app.idempotent_handler("postgres:q", key=key_of, max_attempts=2)
    async def handle(item: Item, saga: Saga) -> None:
        raise Retry(after="1h")

    bench.enqueue("q", Item("a"))
    async with bench.running(app) as worker:
        await worker.until_count(retrying=1)
    # Both of its attempts began with a worker that died.
    bench.do("update idemconsumer.saga set attempt = 3, suspicion = 2, due = clock_timestamp()")
    async with bench.running(app) as worker:
        await worker.until_count(dead=1)
    assert reads == ["a"]
    assert bench.do("select reason from idemconsumer.dead_letter") == [("killed_worker",)]


async def test_a_step_has_its_own_attempts_in_a_worker(bench: Bench) -> None:
    """More than its handler has: what was never suspected is decoded whatever its attempt (L45)."""
    app, attempts = App("intake"), list[int]()

    async def flaky(step: Step) -> None:
        attempts.append(step.attempt)
        if len(attempts) < 4:
            raise ValueError("not yet")

    @app.idempotent_handler("postgres:q", key="id", max_attempts=1)
    async def handle(item: Item, saga: Saga) -> None:
        await saga.call("flaky", flaky, max_attempts=5, backoff="1ms, 1ms")

    bench.enqueue("q", Item("a"))
    async with bench.running(app) as worker:
        await worker.until_count(applied=1)
    assert len(attempts) == 4


class Unforgetting(PostgresStore):
    """The database goes away for good as soon as something was read; `meanwhile` is what else happens then."""

    meanwhile: Callable[[], object]

    @asynccontextmanager
    async def reading(self, claims: Sequence[Claim], reader: int) -> AsyncIterator[PostgresReading]:
        async with super().reading(claims, reader) as reading:
            yield reading
            self.meanwhile()
            raise StoreUnavailable("away")

    async def end_reading(self, claims: Sequence[Claim], reader: int) -> None:
        raise StoreUnavailable("away")


async def test_what_was_read_is_not_given_back_as_well(bench: Bench) -> None:
    reader, draining, read = Reader(bench), asyncio.Event(), list[Delivery]()
    bound = reader.handler.plan.bind("intake")
    store = await Unforgetting.open(bench.dsn, SCHEMA, connections=1, longest_run=30.0)
    assert isinstance(store, Unforgetting)
    store.meanwhile = draining.set
    intake = Intake(
        store,
        Company(),
        Outage(),
        lambda delivery: bound,
        reading_into(read),
        draining=draining,
        given_up=lambda delivery: draining.is_set(),
        observer=NullObserver(),
    )
    deliveries = [Delivery(Message("postgres:q", b"{}", position=f"q#{n}"), Epoch()) for n in range(3)]
    assert await intake.admit(deliveries) == []
    assert read == deliveries
    await store.close()


class Panic(BaseException):
    """As an extension in Rust raises it."""


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), Panic()], ids=repr)
async def test_a_key_function_that_ends_its_worker_by_an_exception_has_only_failed(
    bench: Bench, error: BaseException
) -> None:
    def end(name: str) -> None:
        if name == "bad":
            raise error

    reader = Reader(bench, end)
    bench.enqueue("q", Item("a"), Item("bad"), Item("b"))
    await bench.until_empty(reader.app)
    assert sorted(bench.effects()) == ["a", "b"]
    assert bench.do("select reason from idemconsumer.dead_letter") == [("undecodable",)]


@pytest.mark.parametrize("anonymous", [True, False])
def test_what_identifies_a_delivery_that_was_not_decoded(anonymous: bool) -> None:
    def identity(body: bytes, position: str, message_id: str | None = None, **headers: str) -> str:
        message = Message("rabbitmq:q", body, headers, position=position, message_id=message_id)
        return Delivery(message, Epoch(), anonymous=anonymous).identity

    assert (identity(b"x", "q#1") == identity(b"x", "q#2")) is anonymous
    assert identity(b"x", "q#1") != identity(b"y", "q#1")
    assert (identity(b"x", "q#1", "a") == identity(b"x", "q#1", "b")) is not anonymous
    assert (identity(b"x", "q#1", key="a") == identity(b"x", "q#1", key="b")) is not anonymous
    first, again = {"x-delivery-count": "1", "key": "a"}, {"key": "a", "x-delivery-count": "2", "x-death": "[]"}
    assert identity(b"x", "q#1", **first) == identity(b"x", "q#1", **again), "brokers add these"


@pytest.mark.parametrize(
    ("anonymous", "position", "message_id", "own"),
    [(False, "q-0-1", "m", "q-0-1"), (True, "q#m", "m", "m"), (True, "q#1", None, None), (True, "q#1", "", None)],
)
def test_what_is_the_same_for_each_delivery_and_for_no_other_message(
    anonymous: bool, position: str, message_id: str | None, own: str | None
) -> None:
    message = Message("rabbitmq:q", b"", position=position, message_id=message_id)
    assert Delivery(message, Epoch(), anonymous=anonymous).own_id == own
