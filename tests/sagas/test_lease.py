"""The lease is the process's: kept by a thread through whatever a step does to the loop, given up in time (L5)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import OutcomeKind, Saga, Step, Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.values import State
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.worker.saga_lease import SagaLease
from tests.support.sagas import SCHEMA, Bench, Remote, Station, hog, order, put, saga
from tests.support.servers.proxy import Proxy
from tests.support.waiting import until

LEASE = 1.0


@asynccontextmanager
async def process(dsn: str, *, longest_run: float = 30.0) -> AsyncIterator[SagaLease]:
    """All that a worker process needs to hold sagas, with a real heartbeat."""
    store = await PostgresStore.open(dsn, SCHEMA, connections=4, longest_run=longest_run)
    try:
        sagas = await SagaLease.open(
            dsn, SCHEMA, Engine(store), NullObserver(), connections=4, lease=LEASE, longest_run=longest_run
        )
        try:
            yield sagas
        finally:
            await sagas.close()
    finally:
        await store.close()


async def run(sagas: SagaLease, work: Work) -> OutcomeKind:
    async def claimed() -> None:
        return

    return (await sagas.engine.run(work, claimed)).kind


@pytest.fixture
async def proxy(bench: Bench) -> AsyncIterator[Proxy]:
    async with Proxy(int(str(conninfo_to_dict(bench.dsn)["port"]))) as proxy:
        yield proxy


@pytest.fixture
def proxied(bench: Bench, proxy: Proxy) -> str:
    return make_conninfo(bench.dsn, host="127.0.0.1", port=proxy.port)


def workers(bench: Bench) -> dict[int, bool]:
    """Whose lease is valid."""
    return dict(bench.run("select id, until > clock_timestamp() from idemconsumer.worker order by id"))


async def test_a_step_that_computes_for_longer_than_the_lease_keeps_its_saga(bench: Bench, two: Station) -> None:
    """Not inside a transaction, which the lease bounds."""

    async def computes(step: Step) -> None:
        hog(2.5 * LEASE)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("computed", computes)
        assert await two.take(handler) is None
        await saga.tx("last", put, "last")

    handler = saga(book)
    async with process(bench.dsn) as sagas:
        worker = sagas.leases._lease.worker
        assert await run(sagas, Work.of(handler, order())) is OutcomeKind.APPLIED
        assert sagas.leases._lease.worker == worker
    assert bench.effects == ["last"]


async def test_a_step_inside_a_transaction_is_bounded_by_the_lease_of_its_process(bench: Bench) -> None:
    async def waits(tx: Tx) -> None:
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("waits", waits)

    async with process(bench.dsn) as sagas:
        assert await run(sagas, Work.of(saga(book, timeout="3s"), order())) is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "did not end within 1 s, the shortest `lease`" in error


async def test_a_lost_database_cancels_the_sagas_before_others_may_take_them(
    bench: Bench, two: Station, proxy: Proxy, proxied: str
) -> None:
    begun, ended = asyncio.Event(), 0.0
    hung = [True]

    async def step(step: Step) -> None:
        nonlocal ended
        if hung:
            hung.pop()
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended = time.time()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        with suppress(BaseException):
            await saga.call("s", step)

    handler = saga(book)
    async with process(proxied) as sagas:
        worker = sagas.leases._lease.worker
        running = asyncio.create_task(run(sagas, Work.of(handler, order())))
        await begun.wait()
        proxy.cut()
        async with asyncio.timeout(2 * LEASE + 3):
            assert await running is OutcomeKind.FENCED
        ((over,),) = bench.run(
            "select extract(epoch from until)::float8 from idemconsumer.worker where id = %s", (worker,)
        )
        assert ended < over, "cancelled while the lease still held"
        assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
        await proxy.restore()


async def test_a_lost_lease_is_registered_anew_and_used(
    bench: Bench, proxy: Proxy, proxied: str, remote: Remote
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", remote.charge, "c")

    async with process(proxied) as sagas:
        old = sagas.leases._lease.worker
        proxy.cut()
        await until(lambda: not workers(bench)[old], "the lease runs out")
        await proxy.restore()
        await until(lambda: sagas.leases._lease.worker != old, "it is registered anew")
        outcome = OutcomeKind.FENCED
        while outcome is OutcomeKind.FENCED:  # what was begun under the old one was fenced
            with suppress(Exception):
                outcome = await run(sagas, Work.of(saga(book), order()))
        assert outcome is OutcomeKind.APPLIED
        assert bench.state is State.COMPLETED
        assert workers(bench)[sagas.leases._lease.worker]


async def test_a_lease_that_the_database_says_is_over_is_not_renewed(bench: Bench) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost.set)
    try:
        old = heartbeat.worker
        bench.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 ms'")
        async with asyncio.timeout(5):
            await lost.wait()
        await until(lambda: heartbeat.worker != old, "it is registered anew")
        assert workers(bench) == {old: False, heartbeat.worker: True}
    finally:
        await heartbeat.stop()
    assert not workers(bench).get(heartbeat.worker, False), "a process that left holds no lease"


async def test_a_renewal_that_hangs_does_not_delay_the_cancelling(bench: Bench) -> None:
    lost, thawed = asyncio.Event(), threading.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    heartbeat._renew = lambda connection: thawed.wait(10)  # type: ignore[method-assign,assignment]
    await heartbeat.start(lost.set)
    try:
        async with asyncio.timeout(5):
            await lost.wait()
        assert workers(bench)[heartbeat.worker], "told while the lease still held"
    finally:
        thawed.set()
        await heartbeat.stop()


async def test_a_renewal_that_the_database_does_not_answer_in_time_loses_the_lease(bench: Bench) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost.set)
    try:
        async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
            await rival.execute("select 1 from idemconsumer.worker for update")
            async with asyncio.timeout(5):
                await lost.wait()
            assert workers(bench)[min(workers(bench))], "told while the lease still held"
    finally:
        await heartbeat.stop()


async def test_the_lease_ends_when_the_loop_stands_still_for_longer_than_a_run_may_take(bench: Bench) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=0.5 * LEASE)
    await heartbeat.start(lost.set)
    try:
        old = heartbeat.worker
        hog(2.5 * LEASE)
        assert not workers(bench)[old]
        await asyncio.wait_for(lost.wait(), 5)
    finally:
        await heartbeat.stop()


@pytest.mark.parametrize(
    ("worker", "stale"),
    [
        ("clock_timestamp() + interval '1 s'", False),
        ("clock_timestamp() - interval '1 ms'", True),
        ("clock_timestamp() + interval '2 hours'", True),  # more than a lease ahead: the clock stepped back
    ],
    ids=["valid", "over", "too far ahead"],
)
async def test_what_counts_as_stale(bench: Bench, one: Station, two: Station, worker: Any, stale: bool) -> None:
    call = Work.of(handler := saga(_nothing), order()).call
    assert call is not None
    await one.leases.begin(call.claim, order(), "book", None)
    bench.run("update idemconsumer.worker set until = " + worker + " where id = %s", (one.lease.worker,))
    taken = await two.take(handler)
    assert (taken is not None and taken.stale) is stale


async def test_the_saga_of_a_worker_whose_row_is_gone_is_stale(bench: Bench, one: Station, two: Station) -> None:
    call = Work.of(handler := saga(_nothing), order()).call
    assert call is not None
    await one.leases.begin(call.claim, order(), "book", None)
    bench.run("delete from idemconsumer.worker where id = %s", (one.lease.worker,))
    assert await two.take(handler) is not None


async def _nothing(order: dict[str, Any], saga: Saga) -> None:
    return
