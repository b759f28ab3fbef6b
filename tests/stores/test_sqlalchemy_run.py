"""J23: a SQLAlchemy session belongs to one run, as tx does, and to its block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert, literal, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from idemconsumer import Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import HandlerFault
from idemconsumer.sqlalchemy import session
from idemconsumer.stores.joined import PostgresStore
from tests.support.clock import forward
from tests.support.items import Act, Item, stored, why, with_items, within
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, run, to_the_end, works
from tests.support.waiting import PATIENCE


@pytest.fixture
def items(book: Ledger) -> Ledger:
    return with_items(book)


@pytest.fixture
def store(one_connection: PostgresStore) -> PostgresStore:
    return one_connection


async def entered(db: AsyncSession) -> None:
    async with db.begin_nested():
        await db.execute(text("select 1"))


async def flushed(db: AsyncSession) -> None:
    db.add(Item(id="late"))
    await db.flush()


USES: dict[str, Act] = {
    "execute": lambda db: db.execute(text("select 1")),
    "begin_nested": entered,
    "connection": lambda db: db.connection(),
    "get": lambda db: db.get(Item, "late"),
    "stream": lambda db: db.stream(select(Item)),
    "sync session": lambda db: db.run_sync(lambda sync: sync.execute(select(Item))),
    "commit": lambda db: db.commit(),
    "rollback": lambda db: db.rollback(),
    "flush": flushed,  # then it wants a rollback
}


@pytest.mark.parametrize("end", ["block", "returned", "failed", "timed out", "cancelled"])
async def test_it_is_refused_at_once_after_its_block_and_after_the_run(items: Ledger, engine: Engine, end: str) -> None:
    held: list[Any] = []
    inside = asyncio.Event()

    async def refuse_all() -> None:
        db, connection, rows = held
        for use in USES.values():
            with pytest.raises(HandlerFault):
                await use(db)
        with pytest.raises((HandlerFault, SQLAlchemyError)):
            await connection.execute(insert(Item).values(id="late", qty=1))
        assert rows.scalars().all() == [1]  # received already

    async def hold(tx: Tx) -> None:
        async with session(tx) as db:
            held[:] = [db, await db.connection(), await db.execute(text("select 1"))]
            inside.set()
            if end == "failed":
                raise ValueError
            if end not in ("returned", "block"):
                await db.execute(text("select pg_sleep(60)"))
        if end == "block":
            await refuse_all()

    pid = text("select pg_backend_pid()")
    pids: list[object] = []

    async def ask(db: AsyncSession) -> None:
        pids.append(await db.scalar(pid))

    assert await within(engine, ask, "before") == ["applied"]
    running = asyncio.create_task(run(engine, hold, timeout="20s"))
    async with asyncio.timeout(PATIENCE):
        await inside.wait()
        if end == "timed out":
            forward(20.0)
        if end == "cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            assert await running == ["applied" if end in ("returned", "block") else "retrying"]
    if end != "block":
        await refuse_all()
    assert await within(engine, ask, "after") == ["applied"]
    assert (pids[0] == pids[1]) is (end in ("returned", "block"))  # whoever took it and failed: closed
    assert stored(items) == []


async def use_session(db: AsyncSession, connection: AsyncConnection) -> None:
    await asyncio.sleep(0.2)
    await db.execute(insert(Item).values(id="late", qty=1))


async def use_connection(db: AsyncSession, connection: AsyncConnection) -> None:
    del db
    await asyncio.sleep(0.2)
    await connection.execute(insert(Item).values(id="late", qty=1))


async def send(db: AsyncSession, connection: AsyncConnection) -> None:
    await connection.execute(text("select pg_sleep(60)"))


async def send_through_session(db: AsyncSession, connection: AsyncConnection) -> None:
    await db.execute(text("select pg_sleep(60)"))


async def flush(db: AsyncSession, connection: AsyncConnection) -> None:
    db.add(Item(id="late", qty=text("(select 1 from pg_sleep(60))")))
    await db.flush()


async def nest(db: AsyncSession, connection: AsyncConnection) -> None:
    """Its SAVEPOINT waits for the connection: SQLAlchemy lets nobody close such a session."""
    await asyncio.gather(connection.execute(text("select pg_sleep(60)")), entered(db))


LEFT = [use_session, use_connection, send, send_through_session, flush, nest]


@pytest.mark.parametrize("use", LEFT, ids=lambda use: use.__name__)
async def test_a_task_left_behind_with_it_is_named_and_nothing_is_committed(
    items: Ledger, engine: Engine, use: Callable[..., Any]
) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def leave(tx: Tx) -> None:
        async with session(tx) as db:
            db.add(Item(id="early"))
            await db.flush()
            tasks.append(asyncio.create_task(use(db, await db.connection()), name="audit"))
            for _ in range(5):
                await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE):
        assert await run(engine, leave, max_attempts=1) == ["dead"]
        assert ("already flushing" if use is flush else "its task") in why(items)
        assert stored(items) == []
        (ended,) = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ended, HandlerFault | SQLAlchemyError)
    assert stored(items) == []


async def test_a_task_left_behind_is_found_however_many_statements_are_compiled(items: Ledger, engine: Engine) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def many(tx: Tx) -> None:
        async with session(tx) as db:
            for number in range(500):
                await db.execute(select(*[literal(each).label(f"c{number}_{each}") for each in range(8)]))

    async def leave(tx: Tx) -> None:
        async with session(tx) as db:
            tasks.append(asyncio.create_task(use_connection(db, await db.connection()), name="audit"))
            await asyncio.sleep(0)

    assert await run(engine, many, "many") == ["applied"]
    assert await run(engine, leave, "leave", max_attempts=1) == ["dead"]
    assert "its task 'audit'" in why(items)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_another_thread_is_refused_at_once(items: Ledger, engine: Engine) -> None:
    async def in_thread(db: AsyncSession) -> None:
        async def use() -> None:
            async with asyncio.timeout(2):  # without the rule no answer comes, and no thread can be cancelled
                await db.execute(text("select 1"))

        await asyncio.to_thread(asyncio.run, use())

    async with asyncio.timeout(PATIENCE * 2):
        assert await within(engine, in_thread, max_attempts=1) == ["dead"]
    assert why(items).startswith("idemconsumer.errors.HandlerFault: tx was used outside its handler's event loop")


async def test_what_it_does_to_the_session_is_not_seen_by_the_next(items: Ledger, engine: Engine) -> None:
    paths: list[object] = []

    async def change(db: AsyncSession) -> None:
        paths.append(await db.scalar(text("show search_path")))
        for statement in ("set search_path = pg_catalog", "select pg_advisory_lock(1)", "create temp table t (n int)"):
            await db.execute(text(statement))

    assert await within(engine, change, 1, 2) == ["applied"] * 2
    assert await within(engine, change, 3) == ["applied"]
    assert len(set(paths)) == 1


async def test_what_the_engine_has_to_say_otherwise_is_said_so(items: Ledger, engine: Engine) -> None:
    async def reset(db: AsyncSession) -> None:
        await db.execute(text("reset all"))
        await db.execute(text("set constraints all immediate"))
        db.add(Item(id="reset"))

    assert await within(engine, reset, max_attempts=1) == ["applied"]
    assert stored(items) == [("reset", 0)]


async def test_messages_that_fail_in_groups_are_applied_once(items: Ledger) -> None:
    """Four lanes, each message fails once, most while its helper goes on; every fifth is rejected."""
    store = await PostgresStore.open(items.dsn, SCHEMA, connections=4, longest_run=30.0)
    engine = Engine(store, lanes=4)
    failed: set[str] = set()
    helpers: set[asyncio.Future[Any]] = set()

    @idempotent_handler(SOURCE, key="id", max_attempts=5, group_size=4)
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        id = str(order["id"])
        async with session(tx) as db:
            db.add(Item(id=id))
            await db.flush()
            if id.endswith("5"):
                raise Reject("no")
            if id in failed:
                return
            failed.add(id)
            sent = asyncio.Event()

            async def go_on() -> None:
                connection = await db.connection()
                sent.set()
                await connection.execute(text("select pg_sleep(0.01)"))
                await connection.execute(insert(Item).values(id=f"{id} again", qty=1))

            helpers.add(asyncio.ensure_future(go_on()))
            await sent.wait()
            raise ValueError

    lanes = [[f"{lane}-{n}" for n in range(10)] for lane in range(4)]
    outcomes = await asyncio.gather(*(to_the_end(engine, works(pay, *ids)) for ids in lanes))
    ended = await asyncio.gather(*helpers, return_exceptions=True)
    await store.close()
    assert all(isinstance(each, Exception) for each in ended)
    assert [kinds(lane) for lane in outcomes] == [["applied"] * 5 + ["failed"] + ["applied"] * 4] * 4
    assert [id for id, _ in stored(items)] == sorted(id for lane in lanes for id in lane if not id.endswith("5"))
