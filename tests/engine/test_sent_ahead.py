"""Statements that nobody looks at are not waited for, and that changes nothing else (J26, J27)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idemconsumer import Batch, Outcome, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import RunEagerly
from idemconsumer.handlers.decorator import Handler
from idemconsumer.rules import habits
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from tests.support.clock import forward
from tests.support.flights import Cost, Wire
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, to_the_end, work, works
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

INSERT = "insert into only_once (id) values (%s)"


@pytest.fixture(autouse=True)
def only_once(ledger: Ledger) -> Iterator[None]:
    ledger.run("create table only_once (id text primary key)")
    yield
    ledger.run("drop table only_once")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be learnt first."""
    tuned(monkeypatch, runs_before_ahead=0)


@pytest.fixture
async def wire(ledger: Ledger) -> AsyncIterator[Wire]:
    async with Wire(ledger.dsn) as wire:
        yield wire


@pytest.fixture
async def far(wire: Wire) -> AsyncIterator[Engine]:
    store = await PostgresStore.open(wire.dsn, SCHEMA, connections=1, longest_run=30.0)
    yield Engine(store)
    await store.close()


async def decided(engine: Engine, group: list[Work]) -> list[str]:
    """The kinds, as a lane would get them: what does not fit into a transaction with the first ones comes after it."""
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while rest := group[len(found) :]:
            found += kinds(await engine.run(rest))
    return found


def delivery(handler: Handler[..., Any], id: str, row: str) -> Work:
    return work(handler.plan.bind("shop"), message(id, row=row))


def written(ledger: Ledger) -> list[str]:
    return [row[0] for row in ledger.run("select id from only_once order by id")]


# -------------------------------------------------------------------------------------------------- what is waited for
@idempotent_handler(SOURCE, key="id", group_size=8)
async def writes(order: dict[str, Any], tx: Tx) -> None:
    await tx.execute(INSERT, (order["id"],))


@idempotent_handler(SOURCE, key="id", group_size=8)
async def counts(order: dict[str, Any], tx: Tx) -> None:
    rows = await tx.execute(INSERT, (order["id"],))
    assert rows.rowcount == 1


@idempotent_handler(SOURCE, key="id", group_size=8)
async def sends(order: dict[str, Any], tx: Tx) -> None:
    await tx.send(INSERT, (order["id"],))


@idempotent_handler(SOURCE, key="id", group_size=8)
async def reads_first(order: dict[str, Any], tx: Tx) -> None:
    rows = await tx.execute("select count(*) from only_once where id = %s", (order["id"],))
    if await rows.one() == (0,):
        await tx.execute(INSERT, (order["id"],))


async def learnt(engine: Engine, wire: Wire, handler: Any) -> Cost:
    """What a group of four costs once the handler is known."""
    for number in range(4):
        assert await decided(engine, works(handler, *(f"{number}{n}" for n in "abcd"))) == ["applied"] * 4
    wire.taken()
    assert await decided(engine, works(handler, *"wxyz")) == ["applied"] * 4
    return wire.taken()


@pytest.mark.parametrize(
    ("handler", "flights", "statements"),
    [(writes, 2, 9), (counts, 6, 9), (sends, 2, 9), (reads_first, 6, 13)],
    ids=lambda given: given.plan.name if hasattr(given, "plan") else "",
)
async def test_what_nobody_looks_at_is_in_one_flight_with_the_commit(
    ledger: Ledger, wire: Wire, far: Engine, handler: Any, flights: int, statements: int
) -> None:
    assert await learnt(far, wire, handler) == Cost(flights, statements)
    assert len(written(ledger)) == 20


async def test_a_group_that_is_larger_than_what_is_sent_together_is_still_one_flight(
    ledger: Ledger, wire: Wire, far: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=100)
    async def sends(order: dict[str, Any], tx: Tx) -> None:
        await tx.send(INSERT, (order["id"],))

    await decided(far, works(sends, "first", "second"))
    wire.taken()
    assert await decided(far, works(sends, *range(100))) == ["applied"] * 100
    assert wire.taken() == Cost(2, 105)
    assert len(written(ledger)) == 102


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "lock",
    [
        "select pg_advisory_xact_lock(7)",
        "select * from only_once where id = 'locked' for update",
        "with locked as (select * from only_once where id = 'locked' for update) select 1 from locked",
        "select taken()",
        "values (taken())",
    ],
)
async def test_who_goes_on_behind_a_select_has_the_lock_that_it_takes(
    ledger: Ledger, engine: Engine, lock: str
) -> None:
    """What it does there, another service may see."""
    begun, outside = asyncio.Event(), []

    @idempotent_handler(SOURCE, key="id")
    async def locks(order: dict[str, Any], tx: Tx) -> None:
        begun.set()
        await tx.execute(lock)
        outside.append(order["id"])

    ledger.run("insert into only_once (id) values ('locked')")
    ledger.run("create or replace function taken() returns void language sql as 'select pg_advisory_xact_lock(7)'")
    with psycopg.connect(ledger.dsn) as rival:
        rival.execute("select pg_advisory_xact_lock(7), * from only_once for update")
        running = asyncio.create_task(engine.process(*works(locks, "a")))
        await begun.wait()
        await until(lambda: ledger.run("select 1 from pg_locks where not granted"), "it waits for the lock")
        assert outside == []
    assert (await running).kind == "applied"
    assert outside == ["a"]


# ------------------------------------------------------------------------------------------------------------ who looks
runs: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _no_runs() -> None:
    runs.clear()


@pytest.mark.usefixtures("at_once")
async def test_the_first_look_at_rows_waits_for_them(engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def looks(order: dict[str, Any], tx: Tx) -> list[Any]:
        runs[order["id"]] += 1
        await tx.execute(INSERT, (order["id"],))
        one = await tx.execute("update only_once set id = id where id = %s returning id, 1", (order["id"],))
        two = await tx.execute("delete from only_once where id = %s returning 2", (order["id"],), into=int)
        return [await one.first(), await two.one(), await one.first(), (await one.all())]

    outcomes = await engine.run(works(looks, "a", "b"))
    assert [outcome.result for outcome in outcomes] == [b'[["a",1],2,null,[]]', b'[["b",1],2,null,[]]']
    assert runs == {"a": 1, "b": 1}, "nothing had to be run again"


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("swallows", [False, True])
async def test_a_count_that_is_not_known_yet_ends_the_run_and_is_waited_for_in_the_next(
    ledger: Ledger, engine: Engine, swallows: bool
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def looks(order: dict[str, Any], tx: Tx) -> int:
        runs[order["id"]] += 1
        rows = await tx.execute(INSERT, (order["id"],))
        try:
            return rows.rowcount
        except BaseException:
            if not swallows:
                raise
            return -1

    outcomes = await engine.run(works(looks, "a", "b"))
    assert [outcome.result for outcome in outcomes] == [b"1", b"1"]
    assert runs == {"a": 2, "b": 1}
    assert (written(ledger), ledger.attempts) == (["a", "b"], [])


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("wrong", [0, 1, 3])
async def test_who_catches_the_error_of_a_statement_catches_it_where_it_always_did(
    ledger: Ledger, engine: Engine, wrong: int
) -> None:
    seen: list[str] = []

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def catches(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        try:
            await tx.execute(INSERT, (order["row"],))
        except psycopg.errors.UniqueViolation:
            seen.append(order["id"])
            raise Reject("there_already") from None

    ledger.run("insert into only_once (id) values ('taken')")
    ids = [f"m{n}" for n in range(4)]
    rows = ["taken" if n == wrong else f"r{n}" for n in range(4)]
    group = [delivery(catches, id, row) for id, row in zip(ids, rows, strict=True)]

    assert await decided(engine, group) == ["failed" if n == wrong else "applied" for n in range(4)]
    assert set(seen) == {ids[wrong]}, "nobody sees the error of another message"
    assert max(runs.values()) == 2
    assert written(ledger) == sorted(rows)
    assert (sorted(ledger.states), ledger.attempts) == ([State.COMPLETED] * 3 + [State.FAILED], [])


@pytest.mark.usefixtures("at_once")
async def test_a_duplicate_and_a_held_key_in_between_do_not_shift_the_blame(
    ledger: Ledger, engine: Engine, store: PostgresStore
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1, wait="0s")
    async def inserts(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        await tx.execute(INSERT, (order["id"],))

    assert await decided(engine, works(inserts, "old")) == ["applied"]
    ledger.run("insert into only_once (id) values ('bad')")
    (held,) = works(inserts, "held")
    async with store.transaction(group=1) as rival:
        await rival.claim([held.claim])
        assert await decided(engine, works(inserts, "old", "held", "a", "bad", "b")) == [
            *("duplicate", "busy", "applied", "dead", "applied")
        ]
    assert written(ledger) == ["a", "b", "bad", "old"]
    assert (runs["held"], max(runs.values())) == (0, 2)


@pytest.mark.usefixtures("at_once")
async def test_nobody_sees_the_error_of_another_message_however_it_looks(ledger: Ledger, engine: Engine) -> None:
    seen: list[BaseException] = []

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def looks(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(INSERT, (order["row"],))
        if order["id"] == "second":
            try:
                await (await tx.execute("select 1")).one()
            except Exception as error:
                seen.append(error)

    ledger.run("insert into only_once (id) values ('taken')")
    group = [delivery(looks, "first", "taken"), delivery(looks, "second", "free")]

    assert await decided(engine, group) == ["dead", "applied"]
    assert seen == []
    assert [reason for reason, _ in ledger.letters] == ["attempts_exhausted"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("ends", [Reject("no"), Retry(after=1), RuntimeError()], ids=lambda error: type(error).__name__)
async def test_what_a_handler_raises_behind_a_statement_that_failed_decides_nothing(
    ledger: Ledger, engine: Engine, ends: Exception
) -> None:
    """It would not have got there."""

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def goes_on(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        await tx.execute(INSERT, ("taken",))
        raise ends

    ledger.run("insert into only_once (id) values ('taken')")
    assert await decided(engine, works(goes_on, "a")) == ["dead"]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "UniqueViolation" in error
    assert runs == {"a": 2}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("beside", ["execute", "send", "connection"])
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("ends", [Reject("no"), Retry(after=1), RuntimeError()], ids=lambda error: type(error).__name__)
async def test_nothing_is_decided_while_another_task_reads_the_answers(
    ledger: Ledger, engine: Engine, ends: Exception, locked: bool, beside: str
) -> None:
    """Who waits for each answer does not get as far as the service."""
    asked = asyncio.Event()

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def asks(order: dict[str, Any], tx: Tx) -> None:
        async def service() -> None:
            await asyncio.sleep(0)  # by then the other task waits
            asked.set()
            raise ends

        async def other() -> None:
            match beside:
                case "execute":
                    await (await tx.execute("select 1")).one()
                case "send":
                    await tx.send("select 1")
                    await (await tx.execute("select 2")).one()
                case _:
                    await tx.connection.execute("select 1")

        try:
            await tx.execute(INSERT, ("taken",))
        except psycopg.errors.UniqueViolation:
            raise Reject("there_already") from None
        await asyncio.gather(other(), service())

    with psycopg.connect(ledger.dsn) as rival:
        rival.execute(INSERT, ("taken",))
        if not locked:
            rival.commit()
        running = asyncio.create_task(engine.process(*works(asks, "a")))
        await asked.wait()
        rival.commit()
        assert (await running).reason == "there_already"
    assert ledger.attempts == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["group", "batch"])
async def test_nothing_of_a_group_is_decided_while_another_task_reads_the_answers(
    ledger: Ledger, engine: Engine, how: str
) -> None:
    async def writes(id: str, tx: Tx) -> None:
        async def reject() -> None:
            await asyncio.sleep(0)
            raise Reject("it asked")

        try:
            await tx.execute(INSERT, (id,))
        except psycopg.errors.UniqueViolation:
            raise Reject("there_already") from None
        if id == "b":
            await asyncio.gather(tx.execute("select pg_sleep(0.1)"), reject())

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def asks(order: dict[str, Any], tx: Tx) -> None:
        await writes(order["id"], tx)

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def asks_for_all(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        for i, order in enumerate(orders):
            try:
                await writes(order["id"], tx)
            except Reject as rejection:
                orders.reject(i, rejection.code)

    ledger.run("insert into only_once (id) values ('b')")
    outcomes = list[Outcome]()
    group = works(asks if how == "group" else asks_for_all, *("abc" if how == "group" else "ab"))
    while rest := group[len(outcomes) :]:
        outcomes += await engine.run(rest)
    assert [(str(outcome.kind), outcome.reason) for outcome in outcomes] == [
        *[("applied", None), ("failed", "there_already"), ("applied", None)][: len(group)]
    ]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("looks", [False, True])
async def test_a_handler_goes_on_behind_a_statement_that_fails_unless_it_looks(
    ledger: Ledger, engine: Engine, looks: bool
) -> None:
    outside: list[str] = []

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def calls(order: dict[str, Any], tx: Tx) -> None:
        rows = await tx.execute(INSERT, ("taken",))
        if looks:
            assert rows.rowcount == 1
        outside.append(order["id"])

    ledger.run("insert into only_once (id) values ('taken')")
    assert await decided(engine, works(calls, "a")) == ["dead"]
    assert outside == ([] if looks else ["a"])


@pytest.mark.usefixtures("at_once")
async def test_a_savepoint_waits(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def tries(order: dict[str, Any], tx: Tx) -> str:
        runs[order["id"]] += 1
        await tx.execute("savepoint before")
        try:
            await tx.execute(INSERT, ("taken",))
            await tx.execute("release before")
        except psycopg.errors.UniqueViolation:
            await tx.execute("rollback to before")
            return "there"
        return "new"

    outcomes = [*(await engine.run(works(tries, "a"))), *(await engine.run(works(tries, "b")))]
    assert [outcome.result for outcome in outcomes] == [b'"new"', b'"there"']
    assert written(ledger) == ["taken"]


@pytest.mark.usefixtures("at_once")
async def test_what_was_read_by_a_wait_that_was_cut_off_decides_nothing(ledger: Ledger, engine: Engine) -> None:
    """The second message waits for the statement of the first one, and is out of time for that."""

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def waits(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        if order["id"] == "slow":
            await tx.send("select pg_sleep(1)")
            return
        async with asyncio.timeout(0.2 if runs["quick"] == 1 else None):
            await (await tx.execute("select 1")).one()

    assert await decided(engine, works(waits, "slow", "quick")) == ["applied"] * 2
    assert ledger.attempts == []
    assert max(runs.values()) == 2


@pytest.mark.usefixtures("at_once")
async def test_who_was_out_of_time_since_he_waited_for_the_statements_of_others_has_not_failed(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, timeout="20s")
    async def waits(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        if order["id"] == "first":
            await tx.send("select pg_sleep(0.1)")
            return
        await (await tx.execute("select 1")).one()
        if runs["second"] == 1:
            forward(20.0)
            await asyncio.Event().wait()  # as if the rest of its time were too little

    assert await decided(engine, works(waits, "first", "second")) == ["applied"] * 2
    assert ledger.attempts == []
    assert runs == {"first": 2, "second": 2}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("copy", ["copy only_once to stdout", "copy only_once from stdin"])
async def test_what_needs_more_than_an_answer_is_not_sent_ahead(ledger: Ledger, engine: Engine, copy: str) -> None:
    """libpq leaves no pipeline in which there is a COPY: it would be committed, and nobody would know."""

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def copies(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(INSERT, (order["id"],))
        await tx.send(copy)

    assert await decided(engine, works(copies, "a")) == ["dead"]
    assert written(ledger) == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["cursor", "stream"])
async def test_what_psycopg_refuses_in_a_pipeline_works_behind_what_was_sent(engine: Engine, how: str) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def reads(order: dict[str, Any], tx: Tx) -> list[str]:
        await tx.execute(INSERT, (order["id"],))
        if how == "stream":
            return [row[0] async for row in tx.connection.cursor().stream("select id from only_once")]
        async with tx.connection.cursor("on_the_server") as cursor:
            await cursor.execute("select id from only_once")
            return [row[0] for row in await cursor.fetchall()]

    outcomes = await engine.run(works(reads, "a", "b"))
    assert [outcome.result for outcome in outcomes] == [b'["a"]', b'["a","b"]']


@pytest.mark.usefixtures("at_once")
async def test_texts_that_are_not_used_any_more_are_not_kept_by_the_server(ledger: Ledger) -> None:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=1, longest_run=30.0)

    @idempotent_handler(SOURCE, key="id")
    async def sends(order: dict[str, Any], tx: Tx) -> int:
        for number in range(120):
            for _ in range(7):
                await tx.send(f"select {number}, %s::text", ("a",))
        return await (await tx.execute("select count(*) from pg_prepared_statements", into=int)).one()

    (outcome,) = await Engine(store).run(works(sends, "a"))
    assert outcome.result is not None
    assert 90 <= int(outcome.result) <= 101
    await store.close()


# ----------------------------------------------------------------------------------------------------- bounds and ends
@pytest.mark.usefixtures("at_once")
async def test_who_only_sends_while_nobody_reads_does_not_stop_both(ledger: Ledger, engine: Engine) -> None:
    """The first answers and the last statement are larger than what the sockets between them hold."""
    big = "x" * 50_000_000

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def asks(order: dict[str, Any], tx: Tx) -> None:
        await tx.send("select repeat('x', 30000000)")
        await tx.send("select repeat('x', 30000000)")
        await tx.send("select length(%s)", (big,))

    async with asyncio.timeout(PATIENCE):
        assert kinds(await engine.run(works(asks, "a"))) == ["applied"]
    assert ledger.states == [State.COMPLETED]


async def test_tasks_that_send_at_a_time_to_a_server_that_does_not_keep_up_wait_for_each_other(
    ledger: Ledger, engine: Engine
) -> None:
    big = "x" * 25_000_000

    @idempotent_handler(SOURCE, key="id")
    async def asks(order: dict[str, Any], tx: Tx) -> None:
        await tx.send("select pg_sleep(0.2)")  # meanwhile the server reads nothing
        await asyncio.gather(*(tx.send("select length(%s)", (big,)) for _ in range(5)))

    async with asyncio.timeout(20):  # and not the 40 s after which a server counts as silent
        assert kinds(await engine.run(works(asks, "a"))) == ["applied"]


@pytest.mark.usefixtures("at_once")
async def test_a_statement_that_waits_for_a_lock_is_cancelled_with_its_handler(ledger: Ledger, engine: Engine) -> None:
    sent = asyncio.Event()

    @idempotent_handler(SOURCE, key="id")
    async def stays(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(INSERT, ("locked",))
        sent.set()
        await asyncio.Event().wait()

    with psycopg.connect(ledger.dsn) as rival:
        rival.execute(INSERT, ("locked",))
        task = asyncio.create_task(engine.process(*works(stays, "a")))
        await sent.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=8)  # and not the lock_timeout of ten seconds
        assert done
        assert task.cancelled()
        assert ledger.sessions("active", "idle in transaction") == 0
    assert (ledger.states, ledger.attempts) == ([], [])


@pytest.mark.usefixtures("at_once")
async def test_a_statement_that_waits_for_a_lock_does_not_outlast_the_timeout_of_its_handler(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", timeout="300ms")
    async def stays(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(INSERT, ("locked",))
        await asyncio.Event().wait()

    with psycopg.connect(ledger.dsn) as rival:
        rival.execute(INSERT, ("locked",))
        async with asyncio.timeout(8):  # and not the lock_timeout of ten seconds
            assert kinds([await engine.process(*works(stays, "a"))]) == ["retrying"]
        await until(lambda: ledger.sessions("active") == 0, "the server goes on")
    assert (ledger.states, ledger.attempts) == ([], [])


@pytest.mark.parametrize("ends", ["returns", "rejects", "sets"])
async def test_what_was_sent_takes_no_longer_than_the_timeout_of_its_handler(
    ledger: Ledger, engine: Engine, ends: str
) -> None:
    @idempotent_handler(SOURCE, key="id", timeout="300ms", max_attempts=3)
    async def sends(order: dict[str, Any], tx: Tx) -> None:
        if ends == "sets":
            await tx.execute("set local work_mem to '1MB'")
        await tx.send("select pg_sleep(60)")
        if ends == "rejects":
            raise Reject("no")

    async with asyncio.timeout(8):  # and not the 35 s after which the server ends a statement
        outcomes = await engine.run(works(sends, "a", "b"))
    assert [(outcome.kind, outcome.error) for outcome in outcomes] == [("retrying", "TimeoutError")]
    await until(lambda: ledger.sessions("active") == 0, "the server goes on")
    assert ledger.attempts == [1]


async def test_each_message_of_a_group_has_its_own_time_for_what_it_sent(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=16, timeout="3s")
    async def sends(order: dict[str, Any], tx: Tx) -> None:
        runs[order["id"]] += 1
        await tx.send("select pg_sleep(0.2)")

    assert await decided(engine, works(sends, *range(16))) == ["applied"] * 16
    assert max(runs.values()) == 1


async def test_a_statement_is_cut_off_while_it_is_written(ledger: Ledger, engine: Engine) -> None:
    """The server, which is at work, does not take all of it."""

    @idempotent_handler(SOURCE, key="id", timeout="300ms")
    async def stays(order: dict[str, Any], tx: Tx) -> None:
        await tx.send("select pg_sleep(60)")
        await tx.send("select length(%s)", ("x" * 25_000_000,))
        await tx.send("select 1")  # there is no room for it

    async with asyncio.timeout(PATIENCE):
        outcome = await engine.process(*works(stays, "a"))
    assert (outcome.kind, outcome.error) == ("retrying", "TimeoutError")
    await until(lambda: ledger.sessions("active") == 0, "the server goes on")


async def test_what_a_task_still_waits_for_is_not_waited_for_once_its_handler_has_failed(
    ledger: Ledger, engine: Engine
) -> None:
    """It has the connection, and behind it is what was sent."""

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def fails(order: dict[str, Any], tx: Tx) -> None:
        async def fail() -> None:
            raise RuntimeError("while the other one waits")

        await tx.send(INSERT, (order["id"],))
        await asyncio.gather(tx.execute("select pg_sleep(60)"), fail())

    async with asyncio.timeout(20):  # and not the 35 s after which the server ends a statement
        assert kinds([await engine.process(*works(fails, "a"))]) == ["dead"]
        await until(lambda: ledger.sessions("active") == 0, "the server goes on")
    assert written(ledger) == []


@pytest.mark.usefixtures("at_once")
async def test_a_task_that_goes_on_after_its_handler_sends_nothing_behind_the_seal(
    ledger: Ledger, engine: Engine
) -> None:
    left: list[asyncio.Task[Any]] = []

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def leaves(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(INSERT, (order["id"],))

        async def late() -> None:
            await asyncio.sleep(0)
            await tx.execute(INSERT, ("late",))

        left.append(asyncio.create_task(late()))

    assert await decided(engine, works(leaves, "a")) == ["dead"]
    await asyncio.gather(*left, return_exceptions=True)
    assert written(ledger) == []


async def test_a_worker_that_freezes_between_two_statements_is_cut_off(ledger: Ledger, engine: Engine) -> None:
    """As J6 and J11 have it: the server has answered what was sent, and hears nothing more."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=-4.7)  # 0.3 s, by the server
    (given,) = works(writes, "a")
    assert given.call is not None
    async with store.transaction(group=1) as frozen:
        await frozen.claim([given.call.claim])
        tx = frozen.tx(habits.Habits())
        await tx.send(INSERT, ("a",))
        await asyncio.sleep(0)  # the handler waits for something else, so that the statement is on its way
        async with asyncio.timeout(PATIENCE):
            assert (await engine.process(given)).kind == "applied"
        await tx.send(INSERT, ("b",))
        with pytest.raises(RunEagerly):
            await frozen.settled(late=False)
    assert written(ledger) == ["a"]
    await store.close()


@pytest.mark.parametrize(
    ("large", "params"),
    [("select length(%s)", ("x" * 25_000_000,)), (f"select 1 -- {'x' * 12_000_000}", None)],
    ids=["parameters", "text"],
)
async def test_a_worker_that_freezes_behind_a_statement_of_which_the_server_has_a_part_is_cut_off(
    ledger: Ledger, engine: Engine, large: str, params: tuple[str, ...] | None
) -> None:
    """It counts no idle time in the midst of one, so none is left there."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=-3.0)  # 2 s, by the server
    (given,) = works(writes, "a")
    assert given.call is not None
    async with store.transaction(group=1) as frozen:
        await frozen.claim([given.call.claim])
        tx = frozen.tx(habits.Habits())
        await tx.send("select pg_sleep(0.2)")  # meanwhile the server reads nothing
        await tx.send(large, params)
        async with asyncio.timeout(PATIENCE):
            assert (await engine.process(given)).kind == "applied"
    assert written(ledger) == ["a"]
    await store.close()


@pytest.mark.parametrize(
    ("statement", "params"),
    [
        ("select length(%s)", ("x" * 10_000,)),
        (f"select 1 -- {'x' * 10_000}", None),
        (f"select 1{', %s' * 600}", 600 * (1,)),
    ],
    ids=["parameters", "text", "many"],
)
async def test_nothing_that_the_server_has_a_part_of_is_without_a_sync(
    ledger: Ledger,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    params: tuple[Any, ...] | None,
) -> None:
    """A worker may freeze before its loop comes to that."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=-4.0)  # 1 s, by the server
    (given,) = works(writes, "a")
    assert given.call is not None
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def but_no_push(call: Any, *more: Any, **others: Any) -> Any:
        return None if getattr(call, "__name__", "") == "push" else call_soon(call, *more, **others)

    async with store.transaction(group=1) as frozen:
        await frozen.claim([given.call.claim])
        tx = frozen.tx(habits.Habits())
        with monkeypatch.context() as freezing:
            freezing.setattr(loop, "call_soon", but_no_push)
            await tx.send(statement, params)
        async with asyncio.timeout(PATIENCE):
            assert (await engine.process(given)).kind == "applied"
    await store.close()


# ------------------------------------------------------------------------------------------------------ random handlers
@dataclass(frozen=True)
class Op:
    """`does` what with `row`; or a savepoint around `inside`, released or rolled back to."""

    does: str
    row: int = 0
    inside: tuple[Op, ...] = ()


_ROWS = st.integers(0, 5)
_PLAIN = st.builds(
    Op, st.sampled_from(["insert", "update", "read", "returning", "count", "catch", "connection"]), _ROWS
)
_ENDS = st.builds(Op, st.sampled_from(["reject", "retry", "raise", "swallow"]), _ROWS)
_SAVED = st.builds(Op, st.sampled_from(["release", "rollback"]), _ROWS, st.lists(_PLAIN, max_size=2).map(tuple))
_MESSAGE = st.tuples(st.lists(_PLAIN | _SAVED, max_size=4), st.lists(_ENDS, max_size=1)).map(
    lambda parts: [*parts[0], *parts[1]]
)


async def does(op: Op, tx: Tx, seen: list[Any]) -> None:
    row = (f"r{op.row}",)
    match op.does:
        case "insert":
            await tx.execute(INSERT, row)
        case "update":
            await tx.execute("update only_once set touched = touched + 1 where id = %s", row)
        case "read":
            seen.append(await (await tx.execute("select touched from only_once where id = %s", row, into=int)).first())
        case "count":
            seen.append((await tx.execute("update only_once set touched = touched + 10 where id = %s", row)).rowcount)
        case "returning":
            change = "update only_once set touched = touched + 1000 where id = %s returning touched"
            seen.append(await (await tx.execute(change, row, into=int)).first())
        case "connection":
            await tx.connection.execute("update only_once set touched = touched + 100 where id = %s", row)
        case "catch":
            try:
                await tx.execute(INSERT, row)
            except psycopg.errors.UniqueViolation:
                raise Reject("there_already", op.row) from None
        case "swallow":
            with contextlib.suppress(psycopg.Error):
                await tx.execute(INSERT, row)
        case "release" | "rollback":
            await tx.execute("savepoint before")
            try:
                for each in op.inside:
                    await does(each, tx, seen)
            except psycopg.errors.UniqueViolation:
                seen.append("undone")
                await tx.execute("rollback to before")
            else:
                await tx.execute("release before" if op.does == "release" else "rollback to before")
        case "reject":
            raise Reject("no", seen)
        case "retry":
            raise Retry
        case "raise":
            raise RuntimeError(f"{seen}")


async def left_by(ledger: Ledger, engine: Engine, messages: list[list[Op]], *, eager: bool = False) -> dict[str, Any]:
    """What a group of these messages leaves, whose handler does what they say. `eager`: all is waited for."""

    @idempotent_handler(SOURCE, key="id", name="random", group_size=8, max_attempts=2)
    async def acts(order: dict[str, Any], tx: Tx) -> list[Any]:
        seen: list[Any] = []
        for op in messages[order["id"]]:
            await does(op, tx, seen)
        return seen

    ledger.clear()
    ledger.run("delete from only_once")
    group = works(acts, *range(len(messages)))
    for each in group:
        each.eager = eager
    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, group)
    return {
        "outcomes": [(str(outcome.kind), outcome.result, outcome.reason) for outcome in outcomes],
        "rows": ledger.run("select id, touched from only_once order by id"),
        "letters": ledger.run("select key, reason, error, attempts from idemconsumer.dead_letter order by key"),
        "records": ledger.run("select key, state from idemconsumer.record order by key"),
        "attempts": ledger.attempts,
    }


@pytest.mark.usefixtures("at_once")
async def test_random_handlers_leave_the_same_in_both_ways(ledger: Ledger, store: PostgresStore) -> None:
    ledger.run("alter table only_once add touched int not null default 0")

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(_MESSAGE, min_size=1, max_size=6))
    async def compared(messages: list[list[Op]]) -> None:
        assert await left_by(ledger, Engine(store), messages) == await left_by(
            ledger, Engine(store), messages, eager=True
        )

    loop = asyncio.get_running_loop()

    def in_loop(test: Any) -> Any:
        return lambda *a, **k: asyncio.run_coroutine_threadsafe(test(*a, **k), loop).result(PATIENCE)

    compared.hypothesis.inner_test = in_loop(compared.hypothesis.inner_test)  # type: ignore[attr-defined]
    await asyncio.to_thread(compared)
