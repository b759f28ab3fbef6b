"""Waiting for a lock never kills (B14): the time of whoever waits is used up by whoever holds the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, LiteralString, TypeVar

import psycopg
import pytest

from idemconsumer import Batch, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.handlers.decorator import Handler
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, kinds, to_the_end, works, write
from tests.support.waiting import PATIENCE, until

Wait = Callable[[Tx], Awaitable[object]]
T = TypeVar("T")


@pytest.fixture
def stock(ledger: Ledger) -> Iterator[psycopg.Connection]:
    """Another session, with a transaction open."""
    ledger.run("create table if not exists stock (sku int, qty int)")
    ledger.run("truncate stock")
    ledger.run("insert into stock values (1, 0)")
    with psycopg.connect(ledger.dsn) as other:
        yield other
        other.rollback()


async def by_tx(tx: Tx) -> None:
    await tx.execute("update stock set qty = qty + 1")


async def many_at_once(tx: Tx) -> None:
    async with tx.connection.cursor() as cursor:
        await cursor.executemany("update stock set qty = qty + %s", [(1,), (0,)])


async def after_some_work(tx: Tx) -> None:
    await asyncio.sleep(0.2)
    await by_tx(tx)


async def swallowing_the_cancellation(tx: Tx) -> None:
    try:
        await by_tx(tx)
    except asyncio.CancelledError:
        return


async def with_another_error(tx: Tx) -> None:
    try:
        await by_tx(tx)
    except asyncio.CancelledError as error:
        raise ValueError("too slow") from error


async def by_a_statement_timeout(tx: Tx) -> None:
    """A short one while somebody else holds the row."""
    await tx.execute(
        "select set_config('statement_timeout', case count(*) when 0 then '0' else '50ms' end, true)"
        " from pg_stat_activity"
        " where datname = current_database() and backend_xid is not null and pid <> pg_backend_pid()"
    )
    await by_tx(tx)


def waiting(wait: Wait, **options: Any) -> Handler[..., Any]:
    given: Any = {"timeout": "300ms", "max_attempts": 1} | options  # of what is to run out by itself

    @idempotent_handler(SOURCE, key="id", **given)
    async def take(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        await wait(tx)

    return take


class TimeIsUp:
    """The time of a run, LIMIT, is over once it waits for a lock, and not before, however slow the machine is."""

    def __init__(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self._ledger = ledger
        self._moved = 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self._moved)

    async def of(self, running: Awaitable[T]) -> T:
        """Of a second run too, which there is if statements were sent ahead in the first one. Once for each statement
        that waits: to end it takes time too, which has limits of its own."""
        task, over = asyncio.ensure_future(running), set[tuple[object, ...]]()
        while not task.done():
            waiting = set(self._ledger.run(WAITING))
            if waiting - over:
                over |= waiting
                self._moved += LIMIT
            await asyncio.wait((task,), timeout=0.05)
        return await task


LIMIT = 5.0  # seconds
WAITING = (
    "select a.pid, a.query_start from pg_stat_activity a"
    " where a.datname = current_database() and exists (select from pg_locks l where l.pid = a.pid and not l.granted)"
)
ROW, TABLE = "update stock set qty = 0", "lock table stock"


@pytest.mark.parametrize(
    ("what", "wait"),
    [
        (TABLE, by_tx),
        (ROW, by_tx),
        (ROW, many_at_once),
        (TABLE, after_some_work),
        (ROW, swallowing_the_cancellation),
        (ROW, with_another_error),
        (ROW, by_a_statement_timeout),
    ],
)
async def test_a_timeout_while_a_lock_is_waited_for_is_a_collision(
    ledger: Ledger,
    engine: Engine,
    stock: psycopg.Connection,
    wait: Wait,
    what: LiteralString,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock.execute(what)
    group = works(waiting(wait, timeout=f"{LIMIT}s"), *range(3))
    time_is_up = TimeIsUp(ledger, monkeypatch)
    for work in group:
        for _ in range(2):
            running = engine.process(work)
            outcome = await (running if wait is by_a_statement_timeout else time_is_up.of(running))
            assert outcome.reason == "contention"
    stock.rollback()
    assert kinds(await to_the_end(engine, group)) == ["applied"] * 3
    assert (ledger.effects, ledger.letters, ledger.attempts) == (["0", "1", "2"], [], [])
    assert ledger.run("select qty from stock") == [(3,)]


async def test_a_batch_that_waits_for_a_lock_costs_no_attempt(
    ledger: Ledger, engine: Engine, stock: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    @idempotent_handler(SOURCE, key="id", timeout=f"{LIMIT}s", max_attempts=1, group_size=4)
    async def take(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        await tx.execute("set local lock_timeout = '10s'")
        await by_tx(tx)

    stock.execute("lock table stock")
    group = works(take, *range(4))
    outcomes = await TimeIsUp(ledger, monkeypatch).of(engine.run(group))
    assert {outcome.reason for outcome in outcomes} == {"contention"}
    stock.rollback()
    assert kinds(await to_the_end(engine, group)) == ["applied"] * 4


# -------------------------------------------------------------------------------------------------- and what is no wait
async def asleep(tx: Tx) -> None:
    await asyncio.Event().wait()


async def asleep_in_the_server(tx: Tx) -> None:
    await tx.execute("select pg_sleep(60)")


@pytest.mark.parametrize("wait", [asleep, asleep_in_the_server, None], ids=["asleep", "in the server", "for itself"])
async def test_a_wait_of_the_handlers_own_making_costs_an_attempt(
    ledger: Ledger, engine: Engine, stock: psycopg.Connection, wait: Wait | None
) -> None:
    async def for_itself(tx: Tx) -> None:
        await by_tx(tx)
        async with await psycopg.AsyncConnection.connect(ledger.dsn) as second:  # which waits for the first one's row
            await second.execute("update stock set qty = qty + 1")

    wait = wait or for_itself
    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, works(waiting(wait, max_attempts=2), 1))
    assert (kinds(outcomes), ledger.letters) == (["dead"], [("attempts_exhausted", 1)])
    assert "did not end within its timeout" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_an_error_of_the_handlers_own_making_costs_an_attempt_though_it_waited_for_a_lock(
    ledger: Ledger, engine: Engine, stock: psycopg.Connection
) -> None:
    """It has caught the timeout, and says that something else is wrong."""

    async def giving_up(tx: Tx) -> None:
        with suppress(asyncio.CancelledError):
            await by_tx(tx)
        raise ValueError("no stock")

    stock.execute("lock table stock")
    async with asyncio.timeout(PATIENCE):
        assert kinds(await engine.run(works(waiting(giving_up), 1))) == ["dead"]
    assert ledger.letters == [("attempts_exhausted", 1)]


async def test_a_statement_timeout_of_a_statement_that_waits_for_no_row_costs_an_attempt(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def sleeps(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("set local statement_timeout = '50ms'")
        await asleep_in_the_server(tx)

    assert kinds(await engine.run(works(sleeps, 1))) == ["dead"]
    assert ledger.letters == [("attempts_exhausted", 1)]


async def test_a_server_that_does_not_say_is_not_waited_for(
    store: PostgresStore, stock: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(True)
        await reader.read()
        writer.close()

    asked: list[bool] = []
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    info = SimpleNamespace(host="127.0.0.1", hostaddr="127.0.0.1", port=port)
    other = SimpleNamespace(info=info, server_pid=1)
    waits_for_lock = store.pool.waits_for_lock
    monkeypatch.setattr(store.pool, "waits_for_lock", lambda _: waits_for_lock(other))  # type: ignore[arg-type]
    stock.execute("lock table stock")
    async with server, asyncio.timeout(PATIENCE):
        outcome = await Engine(store).process(*works(waiting(by_tx, max_attempts=2), 1))
    assert (outcome.reason, asked) == ("retry", [True])


async def test_who_was_cancelled_meanwhile_is_cancelled_and_asks_no_more(
    ledger: Ledger, engine: Engine, stock: psycopg.Connection
) -> None:
    stock.execute("lock table stock")
    task = asyncio.create_task(engine.process(*works(waiting(by_tx, timeout="20s"), 1)))
    await until(lambda: ledger.run("select 1 from pg_locks where not granted"), "it waits for the table")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task
    assert ledger.attempts == []
