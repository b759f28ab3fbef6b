"""Whatever is cut off, and wherever: who has the connection next finds it idle (J15)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any

import pytest
from psycopg import generators, waiting
from psycopg.pq import TransactionStatus

from idemconsumer import Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.rules.habits import Habits
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.session import PoolSession
from tests.stores.store_contract import A
from tests.support.ledger import Ledger, run, write
from tests.support.waiting import until


class CutOff:
    """Cancels its task where that waits for the nth time, if it waits so often."""

    def __init__(self, run: Awaitable[Any], at: int) -> None:
        self._run, self._at = run, at
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, raised = self._run.__await__(), None
        while True:
            try:
                waited = steps.send(None) if raised is None else steps.throw(raised)
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            raised = None
            try:
                yield waited
            except BaseException as error:
                raised = error


@pytest.fixture(autouse=True)
def waits_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may let the loop run does: psycopg does so after five milliseconds in which it did not."""
    monkeypatch.setattr(waiting, "MAX_BUSY_TIME", 0.0)


async def writes_alone(store: PostgresStore) -> None:
    await store.uncount_attempt(A)


async def reads(store: PostgresStore) -> None:
    await store.pool.read("born", {})


async def looks(store: PostgresStore) -> None:
    await store.peek([A.key])


async def sends_ahead(store: PostgresStore) -> None:
    async with store.transaction(group=1) as claims:
        await claims.claim([A])
        tx = claims.tx(Habits(5.0))
        for _ in range(2):
            for number in range(20):
                await tx.send("insert into witness (id) values (%s)", (str(number),))
            await tx.execute("select 1")
        await claims.complete([], [])


async def sends_in_vain(store: PostgresStore) -> None:
    with suppress(RuntimeError):
        async with store.transaction(group=1) as claims:
            await claims.claim([A])
            tx = claims.tx(Habits(5.0))
            for number in range(20):
                await tx.send("insert into witness (id) values (%s)", (str(number),))
            raise RuntimeError


async def works(store: PostgresStore) -> None:
    async with asyncio.timeout(5.0):
        await reads(store)
        await writes_alone(store)
        await looks(store)


@pytest.mark.parametrize("act", [writes_alone, reads, looks, sends_ahead, sends_in_vain])
async def test_who_comes_next_finds_the_connection_idle(
    one_connection: PostgresStore, book: Ledger, act: Callable[[PostgresStore], Awaitable[None]]
) -> None:
    at, cut_off = 0, True
    while cut_off:
        at += 1
        run = CutOff(act(one_connection), at)

        async def cut(run: CutOff = run) -> None:
            await run

        task = asyncio.create_task(cut())
        await asyncio.wait([task])
        cut_off = run.waits >= at
        assert task.cancelled() or task.result() is None
        if act is looks:  # one look for all callers goes on without who was cut off
            await until(lambda: book.sessions("active") == 0)
        assert book.sessions("active", "idle in transaction", "idle in transaction (aborted)") == 0, at
        await works(one_connection)
    assert at > 1, "it never waits"


# ------------------------------------------------------------------------------- what libpq does not call a transaction
async def enters(connection: PoolSession) -> None:
    connection.pgconn.enter_pipeline_mode()


async def sends_no_sync(connection: PoolSession) -> None:
    await enters(connection)
    connection.pgconn.send_query_params(b"select 1", None)


async def reads_without_a_sync(connection: PoolSession) -> None:
    await sends_no_sync(connection)
    connection.pgconn.send_flush_request()
    await connection.wait(generators.execute(connection.pgconn))
    assert connection.pgconn.transaction_status == TransactionStatus.IDLE


@pytest.mark.parametrize("leave", [enters, sends_no_sync, reads_without_a_sync])
async def test_a_connection_in_a_pipeline_is_given_to_nobody(
    one_connection: PostgresStore, book: Ledger, leave: Callable[[PoolSession], Awaitable[None]]
) -> None:
    async with one_connection.pool.connection() as connection:
        await leave(connection)

    assert connection.closed
    await works(one_connection)
    assert book.sessions("active", "idle in transaction") == 0


async def test_a_pipeline_that_was_cut_off_as_it_began_is_not_left_open(
    one_connection: PostgresStore, book: Ledger
) -> None:
    async def act(tx: Tx) -> None:
        async def sends() -> None:
            async with tx.connection.pipeline():
                await tx.connection.execute("select 1")

        with suppress(asyncio.CancelledError):
            await CutOff(sends(), 1)
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        await write(tx, 1)

    assert await run(Engine(one_connection), act) == ["applied"]
