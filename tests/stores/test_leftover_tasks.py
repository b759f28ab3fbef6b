"""J19: what a handler leaves running with its tx undoes it, and is named. J20: tx works in its own loop alone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from idemconsumer import Batch, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import HandlerFault
from idemconsumer.stores import checkout as lending
from idemconsumer.stores.tx import PostgresTx
from tests.support.ledger import SOURCE, Ledger, kinds, to_the_end, works, write
from tests.support.waiting import PATIENCE

Leave = Callable[[Tx], Awaitable[object]]
TASKS = set[asyncio.Task[Any]]()


@pytest.fixture(autouse=True)
def _tasks() -> Iterator[None]:
    TASKS.clear()
    yield
    TASKS.clear()


def leave(coroutine: Any) -> None:
    TASKS.add(asyncio.create_task(coroutine, name="audit"))


async def audit(tx: Tx) -> None:
    await asyncio.sleep(0.2)
    await write(tx, "audited")


class Auditor:
    def __init__(self, tx: Tx) -> None:
        self.tx = tx

    async def run(self) -> None:
        await asyncio.sleep(0.2)
        await write(self.tx, "audited")


async def never_started(tx: Tx) -> None:
    leave(audit(tx))


async def asleep(tx: Tx) -> None:
    leave(audit(tx))
    await asyncio.sleep(0)


async def sending(tx: Tx) -> None:
    leave(tx.execute("select pg_sleep(30)"))
    await asyncio.sleep(0)


async def waiting_for_the_lock(tx: Tx) -> None:
    leave(tx.execute("select 1"))
    leave(tx.execute("select pg_sleep(30)"))
    await tx.execute("select 1")


async def in_an_object(tx: Tx) -> None:
    leave(Auditor(tx).run())


async def in_a_closure(tx: Tx) -> None:
    async def look() -> None:
        await asyncio.sleep(0.2)
        await tx.execute("select 1")

    leave(look())


async def in_a_function(tx: Tx) -> None:
    async def call(back: Callable[[], Awaitable[object]]) -> None:
        await asyncio.sleep(0.2)
        await back()

    leave(call(lambda: write(tx, "audited")))


async def with_a_cursor(tx: Tx) -> None:
    leave(tx.connection.cursor().execute("select 1"))


async def copying(tx: Tx) -> None:
    async def copy(cursor: Any) -> None:
        async with cursor.copy("copy witness (id) from stdin") as out:
            await asyncio.sleep(0.2)
            await out.write_row(("copied",))

    leave(copy(tx.connection.cursor()))
    await asyncio.sleep(0.05)


LEFT: list[Leave] = [
    never_started, asleep, sending, waiting_for_the_lock, in_an_object, in_a_closure, in_a_function, with_a_cursor,
    copying,
]  # fmt: skip


@pytest.mark.parametrize("leaves", LEFT, ids=lambda leaves: leaves.__name__)
@pytest.mark.parametrize("how", ["alone", "in a group", "suspect", "batch"])
async def test_a_task_left_behind_with_tx_is_named_and_nothing_is_committed(
    ledger: Ledger, engine: Engine, leaves: Leave, how: str
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1, group_size=8)
    async def forgets(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "bad":
            await leaves(tx)

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def forgets_in_a_batch(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        await write(tx, "bad")
        await leaves(tx)

    handler: Any = forgets_in_a_batch if how == "batch" else forgets
    ids = ["good", "bad", "also good"] if how == "in a group" else ["bad"]
    async with asyncio.timeout(PATIENCE):
        outcomes = await to_the_end(engine, works(handler, *ids, suspect=how == "suspect"))
    assert kinds(outcomes) == ["dead" if id == "bad" else "applied" for id in ids]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "was still using tx" in error
    assert "'audit'" in error
    assert ledger.effects == sorted(set(ids) - {"bad"})
    ended = await asyncio.gather(*TASKS, return_exceptions=True)
    assert HandlerFault in [type(each) for each in ended]


@contextmanager
def never_looked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def look(*_: object) -> None:
        raise AssertionError("tasks were searched")

    with monkeypatch.context() as patch:
        patch.setattr(lending, "left_running", look)
        yield


async def test_a_task_that_has_nothing_of_tx_is_its_authors_own_business(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = asyncio.Event()

    @idempotent_handler(SOURCE, key="id")
    async def measures(order: dict[str, Any], tx: Tx) -> None:
        leave(going_on.wait())
        await write(tx, order["id"])
        await tx.connection.execute("select 1")

    with never_looked_for(monkeypatch):
        assert kinds(await to_the_end(engine, works(measures, 1, 2, 3))) == ["applied"] * 3
    assert all(not task.done() for task in TASKS)
    going_on.set()


@pytest.mark.parametrize("what", ["tx", "connection", "both"])
async def test_who_keeps_tx_without_a_task_is_not_to_blame(ledger: Ledger, engine: Engine, what: str) -> None:
    kept: list[object] = []
    background = asyncio.create_task(asyncio.sleep(60))

    @idempotent_handler(SOURCE, key="id")
    async def keeps(order: dict[str, Any], tx: Tx) -> None:
        kept.extend({"tx": [tx], "connection": [tx.connection], "both": [tx, tx.connection]}[what])
        leave(asyncio.sleep(60))  # its result, None, is nothing of the run
        await write(tx, order["id"])

    assert kinds(await engine.run(works(keeps, 1))) == ["applied"]
    for task in (*TASKS, background):
        task.cancel()


async def test_a_statement_that_a_task_from_elsewhere_sends_is_found(ledger: Ledger, engine: Engine) -> None:
    given: asyncio.Queue[PostgresTx] = asyncio.Queue()

    async def serve() -> None:
        await (await given.get()).execute("select pg_sleep(30)")

    serving = asyncio.create_task(serve())

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def hands_on(order: dict[str, Any], tx: Tx) -> None:
        ours = cast(PostgresTx, tx)
        given.put_nowait(ours)
        while not ours.sending:
            await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE):
        assert kinds(await engine.run(works(hands_on, 1))) == ["dead"]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "while a task was still using tx" in error
    assert isinstance((await asyncio.gather(serving, return_exceptions=True))[0], HandlerFault)


async def test_a_task_that_was_awaited_is_no_offence(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def together(order: dict[str, Any], tx: Tx) -> None:
        connection = tx.connection
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write(tx, "a"))
            tasks.create_task(connection.execute("insert into witness (id) values ('b')"))

    gc.collect()
    assert kinds(await engine.run(works(together, 1))) == ["applied"]
    assert ledger.effects == ["a", "b"]


@pytest.mark.parametrize("through", ["tx", "connection", "publish"])
async def test_tx_in_another_thread_is_refused_at_once(ledger: Ledger, engine: Engine, through: str) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def in_thread(order: dict[str, Any], tx: Tx) -> None:
        connection = tx.connection if through == "connection" else None

        async def use() -> None:
            async with asyncio.timeout(2):  # without the rule no answer comes, and no thread can be cancelled
                if through == "publish":
                    cast(PostgresTx, tx).borrow()
                await (tx if connection is None else connection).execute("select 1")

        await asyncio.to_thread(asyncio.run, use())

    async with asyncio.timeout(PATIENCE):
        assert kinds(await engine.run(works(in_thread, 1))) == ["dead"]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "tx was used outside its handler's event loop" in error


async def test_a_thread_may_ask_the_loop_of_its_handler(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def asks(order: dict[str, Any], tx: Tx) -> None:
        loop = asyncio.get_running_loop()

        def in_thread() -> None:
            asyncio.run_coroutine_threadsafe(write(tx, "asked"), loop).result(10)

        await asyncio.to_thread(in_thread)

    assert kinds(await engine.run(works(asks, 1))) == ["applied"]
    assert ledger.effects == ["asked"]
