"""J18: tx.connection belongs to one run. Whoever holds it, or anything of it, longer than that reaches no server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types import TypeInfo
from psycopg.types.json import Json, set_json_dumps

from idemconsumer import Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import HandlerFault
from idemconsumer.stores.joined import PostgresStore
from tests.support.clock import forward
from tests.support.inside import connection_of
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, run, to_the_end, works, write
from tests.support.waiting import PATIENCE, until

INSERT = "insert into witness (id) values (%s)"
PID = "select pg_backend_pid()"


@pytest.fixture
def store(one_connection: PostgresStore) -> PostgresStore:
    return one_connection


async def backend(engine: Engine, id: object) -> int:
    pids: list[int] = []

    async def ask(tx: Tx) -> None:
        pids.append(await (await tx.execute(PID, into=int)).one())

    assert await run(engine, ask, id) == ["applied"]
    return pids[0]


async def test_all_that_psycopg_does_with_a_connection_works(book: Ledger, engine: Engine) -> None:
    async def use(tx: Tx) -> None:
        connection = tx.connection
        assert tx.connection is connection
        assert isinstance(connection, psycopg.AsyncConnection)
        assert (await (await connection.execute("select 1")).fetchone()) == (1,)
        connection.row_factory = dict_row
        assert await (await connection.cursor().execute("select 1 as one")).fetchone() == {"one": 1}
        async with connection.cursor().copy("copy witness (id) from stdin") as copy:
            await copy.write_row(("copied",))
        async with connection.pipeline() as pipeline:
            await connection.execute(INSERT, ["piped"])
            await tx.execute(INSERT, ("piped through tx",))
            await pipeline.sync()
        await connection.cursor().executemany(INSERT, [("many",)])
        async with connection.transaction(force_rollback=True):
            await connection.execute(INSERT, ["undone"])
        async with connection.transaction(), connection.cursor("on_the_server") as cursor:
            await cursor.execute("select generate_series(1, 3) as n")
            assert [row["n"] async for row in cursor] == [1, 2, 3]
        assert [row["n"] async for row in connection.cursor().stream("select generate_series(1, 2) as n")] == [1, 2]
        notices: list[str | None] = []
        connection.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_primary))
        await connection.execute("do $$ begin raise notice 'look'; end $$")
        assert notices == ["look"]
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert sql.SQL("select {}").format(sql.Literal("ü")).as_string(connection) == "select 'ü'"
        info = await TypeInfo.fetch(connection, "witness")
        assert info is not None
        info.register(connection)
        set_json_dumps(lambda _: "[7]", connection)
        assert await (await tx.execute("select %s::jsonb", (Json(1),), into=list)).one() == [7]
        connection.prepare_threshold = None

    assert await run(engine, use) == ["applied"]
    assert book.effects == ["copied", "many", "piped", "piped through tx"]

    async def look(tx: Tx) -> None:
        assert await (await tx.execute("select %s::jsonb", (Json(1),), into=int)).one() == 1
        assert tx.connection.prepare_threshold is not None
        assert tx.connection.row_factory is not dict_row
        assert not tx.connection._notice_handlers

    assert await run(engine, look, 2) == ["applied"]


async def stream(connection: Any) -> None:
    async for _ in connection.cursor().stream("select 1"):
        pass


async def copy(connection: Any) -> None:
    async with connection.cursor().copy("copy witness (id) from stdin") as copying:
        await copying.write_row(("late",))


async def enter(context: Any) -> None:
    async with context:
        pass


async def awaited(use: Callable[[Any], Any], connection: Any) -> None:
    if isinstance(used := use(connection), Awaitable):
        await used


USES: dict[str, Callable[[psycopg.AsyncConnection[Any]], Any]] = {
    "execute": lambda connection: connection.execute("select 1"),
    "cursor": lambda connection: connection.cursor().execute("select 1"),
    "executemany": lambda connection: connection.cursor().executemany("select %s", [(1,)]),
    "stream": stream,
    "copy": copy,
    "pipeline": lambda connection: enter(connection.pipeline()),
    "transaction": lambda connection: enter(connection.transaction()),
    "server cursor": lambda connection: connection.cursor("late").execute("select 1"),
    "cursor of its own class": lambda connection: psycopg.AsyncClientCursor(connection).execute("select 1"),
    "commit": lambda connection: connection.commit(),
    "rollback": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
    "cancel": lambda connection: connection.cancel(),
    "cancel_safe": lambda connection: connection.cancel_safe(),
    "notifies": lambda connection: anext(connection.notifies(timeout=0)),
    "autocommit": lambda connection: connection.set_autocommit(False),
    "info": lambda connection: connection.info.transaction_status,
    "adapters": lambda connection: connection.adapters,
    "prepare_threshold": lambda connection: setattr(connection, "prepare_threshold", 0),
    "fileno": lambda connection: connection.fileno(),
    "a literal": lambda connection: sql.Literal("x").as_string(connection),
}


@pytest.mark.parametrize("end", ["returned", "failed", "timed out", "cancelled"])
async def test_what_is_held_of_it_after_the_run_raises_at_once(book: Ledger, engine: Engine, end: str) -> None:
    held: list[Any] = []
    inside = asyncio.Event()

    async def hold(tx: Tx) -> None:
        connection = tx.connection
        reading, server = connection.cursor(), connection.cursor("here")
        await reading.execute("select 1 union select 2 order by 1")
        await server.execute("select generate_series(1, 9)")
        held.extend([connection, reading, server, connection.pipeline(), connection.transaction()])
        inside.set()
        if end == "failed":
            raise ValueError
        if end != "returned":
            await asyncio.sleep(60)

    running = asyncio.create_task(run(engine, hold, timeout="20s"))
    await inside.wait()
    if end == "timed out":
        forward(20.0)
    if end == "cancelled":
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    else:
        assert await running == ["applied" if end == "returned" else "retrying"]
    connection, reading, server, *contexts = held

    for use in USES.values():
        with pytest.raises(HandlerFault, match=r"tx\.connection was used after its handler returned or failed"):
            await awaited(use, connection)
    assert "ended" in repr(connection)
    for late in (reading.execute("select 1"), server.fetchone(), server.close(), *map(enter, contexts)):
        with pytest.raises(HandlerFault):
            await late
    assert await reading.fetchall() == [(1,), (2,)]  # received already
    assert book.effects == []
    assert await run(engine, lambda tx: write(tx, "next"), 2) == ["applied"]


@pytest.mark.parametrize("through", ["tx", "connection"])
async def test_what_a_helper_sends_after_its_sibling_failed_reaches_no_later_message(
    book: Ledger, engine: Engine, through: str
) -> None:
    """asyncio.gather raises the first error, and the other goes on."""
    helpers: list[asyncio.Future[Any]] = []
    going_on, next_runs = asyncio.Event(), asyncio.Event()

    @idempotent_handler(SOURCE, key="id", name="pays")
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == "next":
            next_runs.set()
            with pytest.raises(HandlerFault):
                await helpers[0]
            await write(tx, "next")
            return
        execute = tx.execute if through == "tx" else tx.connection.execute

        async def fail() -> None:
            raise ValueError

        async def go_on() -> None:
            await execute("insert into witness (id) values ('first')")
            going_on.set()
            await next_runs.wait()
            await execute("insert into witness (id) values ('second')")

        helpers.append(asyncio.ensure_future(go_on()))
        await going_on.wait()
        await asyncio.gather(fail(), helpers[0])

    assert kinds(await engine.run(works(pay, "fails"))) == ["retrying"]
    assert kinds(await engine.run(works(pay, "next"))) == ["applied"]
    assert book.effects == ["next"]


@pytest.mark.parametrize("through", ["tx", "connection"])
async def test_what_is_under_way_when_its_run_fails_ends_at_once(book: Ledger, engine: Engine, through: str) -> None:
    sleepers: list[asyncio.Task[Any]] = []
    before = await backend(engine, "before")

    async def fail(tx: Tx) -> None:
        execute = tx.execute if through == "tx" else tx.connection.execute
        for _ in range(3):  # one is sent, the others wait for the lock
            sleepers.append(asyncio.ensure_future(execute("select pg_sleep(60)")))
        await until(is_asleep)
        raise ValueError

    def is_asleep() -> bool:
        asleep = "select 1 from pg_stat_activity where wait_event = 'PgSleep' and pid = %s"
        return book.run(asleep, [before]) != []

    async with asyncio.timeout(20):
        assert await run(engine, fail) == ["retrying"]
        assert not is_asleep(), "it would keep its locks"
        assert [type(end) for end in await asyncio.gather(*sleepers, return_exceptions=True)] == [HandlerFault] * 3
    assert await backend(engine, "after") != before


async def test_what_waits_for_the_lock_when_its_run_fails_is_not_sent(book: Ledger, engine: Engine) -> None:
    helpers: list[asyncio.Task[Any]] = []
    book.run("create sequence sent")  # no rollback undoes what it counts

    async def let_go(tx: Any, lock: asyncio.Lock) -> None:
        while not tx._over:
            await asyncio.sleep(0)
        lock.release()

    async def fail(tx: Any) -> None:
        lock = tx._lending.connection.lock
        await lock.acquire()
        helpers.append(asyncio.ensure_future(tx.execute("select nextval('sent')")))
        helpers.append(asyncio.ensure_future(let_go(tx, lock)))
        await asyncio.sleep(0)
        raise ValueError

    assert await run(engine, fail) == ["retrying"]
    assert isinstance((await asyncio.gather(*helpers, return_exceptions=True))[0], HandlerFault)
    assert book.run("select is_called from sent") == [(False,)]


@pytest.mark.parametrize("through", ["tx", "connection"])
async def test_what_is_under_way_when_its_connection_is_closed_is_told_why(
    book: Ledger, store: PostgresStore, through: str
) -> None:
    async with store.transaction(group=1) as claims:
        await claims.begin()
        tx = claims.tx()
        execute = tx.execute if through == "tx" else tx.connection.execute
        sleeping = asyncio.ensure_future(execute("select pg_sleep(60)"))
        asleep = "select 1 from pg_stat_activity where wait_event = 'PgSleep' and pid = %s"
        pid = connection_of(claims).info.backend_pid
        await until(lambda: book.run(asleep, [pid]))
        claims.end()
        await connection_of(claims).close()
        with pytest.raises(HandlerFault):
            await sleeping


async def slow(*_: object) -> None:
    await asyncio.sleep(60)


async def left_streaming(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    rows = connection.cursor().stream("select generate_series(1, 5)")
    await anext(rows)
    await then()
    held.append(rows)


async def left_copying_in(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    context = connection.cursor().copy("copy witness (id) from stdin")
    held.append(context)
    await (await context.__aenter__()).write_row(("copied",))
    await then()


async def left_copying_out(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    context = connection.cursor().copy("copy (select generate_series(1, 1000000)) to stdout")
    held.append(context)
    await (await context.__aenter__()).read()
    await then()


async def waits_in_copy(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    async def copying() -> None:
        async with connection.cursor().copy("copy witness (id) from stdin") as rows:
            await rows.write_row(("copied",))
            inside.set()
            await slow()

    inside = asyncio.Event()
    helper = asyncio.ensure_future(copying())
    held.append(helper)
    await inside.wait()
    await then()


async def keeps_the_lock(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    await connection.lock.acquire()
    await then()


async def left_piping(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    context = connection.pipeline()
    held.append(context)
    await context.__aenter__()
    await then()


async def left_piping_what_was_sent(connection: Any, then: Callable[[], Awaitable[object]]) -> None:
    await left_piping(connection, at_once)
    await connection.execute("insert into witness (id) values ('piped')")
    await then()


async def at_once() -> None: ...


held: list[object] = []
LEFT_OPEN = [
    left_streaming,
    left_copying_in,
    left_copying_out,
    left_piping,
    left_piping_what_was_sent,
    waits_in_copy,
    keeps_the_lock,
]


@pytest.fixture
def holding() -> Iterator[None]:
    yield
    for each in held:
        if isinstance(each, asyncio.Future):
            each.cancel()
    held.clear()


@pytest.mark.parametrize("left", LEFT_OPEN, ids=[left.__name__ for left in LEFT_OPEN])
@pytest.mark.parametrize("end", ["returned", "failed", "timed out"])
async def test_what_is_left_open_keeps_no_lane(
    book: Ledger, engine: Engine, holding: None, left: Any, end: str
) -> None:
    """psycopg's stream() and COPY have the connection's lock while the handler looks at a row."""

    async def then() -> None:
        if end == "failed":
            raise ValueError
        if end == "timed out":
            await slow()

    async with asyncio.timeout(PATIENCE):
        assert await run(
            engine, lambda tx: left(tx.connection, then), timeout="0.3s" if end == "timed out" else "30s"
        ) == ["retrying"]
        assert await run(engine, lambda tx: write(tx, "next"), 2) == ["applied"]
    assert book.effects == ["next"]
    if end == "returned":
        ((error,),) = book.run("select error from idemconsumer.attempt")
        assert ("read a stream() to its end" in error) or left is waits_in_copy


async def test_a_stream_that_is_left_early_is_undone_with_its_block_alone(book: Ledger, engine: Engine) -> None:
    """As the handbook says. There are more rows than psycopg reads at once, so closing it cancels the statement."""
    rows = "select generate_series(1, 1000000)"

    async def first_row(connection: Any) -> None:
        async with aclosing(connection.cursor().stream(rows)) as stream:
            await anext(stream)

    async def in_a_block(tx: Tx) -> None:
        async with tx.connection.transaction(force_rollback=True):
            await first_row(tx.connection)
        await write(tx, "in a block")

    async def on_the_server(tx: Tx) -> None:
        async with tx.connection.cursor("some") as cursor:
            await cursor.execute(rows)
            assert await cursor.fetchone() == (1,)
        await write(tx, "on the server")

    assert await run(engine, in_a_block, 1) == ["applied"]
    assert await run(engine, on_the_server, 2) == ["applied"]
    assert await run(engine, lambda tx: first_row(tx.connection), 3) == ["retrying"]
    assert book.effects == ["in a block", "on the server"]


async def test_a_pipeline_of_a_run_that_has_ended_has_a_name(book: Ledger, engine: Engine) -> None:
    """psycopg logs it as it leaves its block. A name that raises would make a traceback of many lines of that."""
    pipelines: list[Any] = []

    async def pipe(tx: Tx) -> None:
        async with tx.connection.pipeline() as pipeline:
            pipelines.append(pipeline)

    assert await run(engine, pipe) == ["applied"]
    assert repr(pipelines[0]).startswith("<a pipeline of <tx.connection of a handler that has ended")


async def test_nobody_waits_for_the_lock_without_end(store: PostgresStore) -> None:
    """Whatever has it."""
    async with store.pool.connection() as connection:
        await connection.simple(b"begin")
        connection.patience = 0.1
        async with connection.lock:
            for use in (connection.simple(b"select 1"), connection.rollback()):
                async with asyncio.timeout(PATIENCE):
                    with pytest.raises(psycopg.OperationalError):
                        await use
        assert connection.closed


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError, "retrying"), (lambda: Reject("no"), "failed")], ids=["error", "reject"]
)
async def test_a_connection_that_a_failed_handler_took_is_closed(
    book: Ledger, engine: Engine, error: Callable[[], Exception], kind: str
) -> None:
    async def take(tx: Tx, *, take: bool) -> None:
        if take:
            await tx.connection.execute("select 1")
        raise error()

    before = await backend(engine, "before")
    assert await run(engine, lambda tx: take(tx, take=False), 1) == [kind]
    assert await backend(engine, "untaken") == before
    assert await run(engine, lambda tx: take(tx, take=True), 2) == [kind]
    assert await backend(engine, "taken") != before


async def test_one_that_returned_gives_it_to_the_next(book: Ledger, engine: Engine) -> None:
    before = await backend(engine, "before")
    assert await run(engine, lambda tx: tx.connection.execute("select 1")) == ["applied"]
    assert await backend(engine, "after") == before


async def test_what_a_failed_handler_does_with_its_connection_is_applied_once(book: Ledger) -> None:
    """Four lanes, forty messages. Each fails once, and its helper goes on while its lane runs the next one."""
    store = await PostgresStore.open(book.dsn, SCHEMA, connections=4, longest_run=30.0)
    engine = Engine(store, lanes=4)
    failed: set[str] = set()
    ends: list[type] = []
    late: dict[str, tuple[asyncio.Event, asyncio.Future[Any]]] = {}  # the helper that a lane's last run left

    @idempotent_handler(SOURCE, key="id", max_attempts=5)
    async def pay(order: dict[str, Any], tx: Tx) -> None:
        connection, id = tx.connection, order["id"]
        lane = id.partition("-")[0]
        if lane in late:
            go_on, helper = late.pop(lane)
            go_on.set()
            await asyncio.wait([helper])
            ends.append(type(helper.exception()))
        fails = id not in failed
        failed.add(id)
        go_on = asyncio.Event()

        async def a() -> None:
            await connection.execute("select 1")
            if fails:
                raise ValueError

        async def b() -> None:
            if fails:
                await go_on.wait()
            await connection.execute(INSERT, [id])

        helper = asyncio.ensure_future(b())
        if fails:
            late[lane] = go_on, helper
        await asyncio.gather(a(), helper)

    lanes = [[f"{lane}-{n}" for n in range(10)] for lane in range(4)]
    await asyncio.gather(*(to_the_end(engine, works(pay, *ids)) for ids in lanes))
    await store.close()
    assert len(failed) == 40
    assert ends == [HandlerFault] * 40
    assert book.effects == sorted(id for lane in lanes for id in lane)
