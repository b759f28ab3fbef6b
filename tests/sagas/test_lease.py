"""The lease is the process's: kept by a thread through whatever a step does to the loop, given up in time (L5)."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import Fenced
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import State
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.worker.saga_lease import SagaLease
from tests.sagas import holding_saga, standing_saga
from tests.support import forked
from tests.support.inside import (
    beats,
    queries_of,
    register,
    renew_now,
    renewal_of,
    renewed_at,
    renewed_earlier,
    replace_queries,
    replace_renewal,
    stand_for,
    worker_of,
)
from tests.support.leases import STEADY
from tests.support.pauses import Pauses
from tests.support.sagas import SCHEMA, Bench, Remote, Station, hog, order, put, saga
from tests.support.servers.proxy import Proxy
from tests.support.waiting import PATIENCE, until

LEASE = 1.0


@asynccontextmanager
async def process(dsn: str, *, lease: float = LEASE, longest_run: float = 30.0) -> AsyncIterator[SagaLease]:
    """All that a worker process needs to hold sagas, with a real heartbeat."""
    store = await PostgresStore.open(dsn, SCHEMA, connections=4, longest_run=longest_run)
    try:
        sagas = await SagaLease.open(
            dsn,
            SCHEMA,
            Engine(store),
            NullObserver(),
            connections=4,
            lease=lease,
            longest_run=longest_run,
            build="b",
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


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    with Pauses() as pauses:
        yield pauses


def workers(bench: Bench) -> dict[int, bool]:
    """Whose lease is valid."""
    return dict(bench.run("select id, until > clock_timestamp() from idemconsumer.worker order by id"))


async def registered_anew(bench: Bench, old: int) -> None:
    """Another lease than `old` is valid, and `old` is over."""

    def another() -> bool:
        valid = workers(bench)
        return not valid.pop(old, False) and any(valid.values())

    await until(another, "it is registered anew")


class Lost:
    """When a heartbeat said that its lease is lost."""

    def __init__(self, pauses: Pauses) -> None:
        self._at = 0.0
        self._pauses = pauses
        self.told = asyncio.Event()

    def __call__(self) -> None:
        self._at = self._at or time.time()
        self.told.set()

    def in_time(self, bench: Bench, worker: int) -> bool:
        """Whether nobody might take the sagas yet, but for what the machine stood still."""
        query = "select extract(epoch from until)::float8 from idemconsumer.worker where id = %s"
        ((over,),) = bench.run(query, (worker,))
        return bool(self._at - self._pauses.seconds < over)


async def test_a_step_that_computes_for_longer_than_the_lease_keeps_its_saga(bench: Bench, two: Station) -> None:
    """Not inside a transaction, which the lease bounds."""

    async def computes(step: Step) -> None:
        hog(1.5 * STEADY)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("computed", computes)
        assert await two.take(handler) is None
        await saga.tx("last", put, "last")

    handler = saga(book)
    async with process(bench.dsn, lease=STEADY) as sagas:
        worker = worker_of(sagas.leases)
        assert await run(sagas, Work.of(handler, order())) is OutcomeKind.APPLIED
        assert worker_of(sagas.leases) == worker
    assert bench.effects == ["last"]


async def test_a_step_inside_a_transaction_is_bounded_by_the_lease_of_its_process(bench: Bench) -> None:
    async def waits(tx: Tx) -> None:
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("waits", waits)

    async with process(bench.dsn, lease=STEADY) as sagas:
        assert await run(sagas, Work.of(saga(book, timeout="20s"), order())) is OutcomeKind.RETRYING
    ((error,),) = bench.run("select error from idemconsumer.saga")
    assert "did not end within 6 s, the shortest `lease`" in error


async def test_a_lost_database_cancels_the_sagas_before_others_may_take_them(
    bench: Bench, two: Station, proxy: Proxy, proxied: str, pauses: Pauses
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
        while not begun.is_set():  # a machine that stands still costs it its lease before that
            running = asyncio.create_task(run(sagas, Work.of(handler, order())))
            beginning = asyncio.create_task(begun.wait())
            await asyncio.wait({running, beginning}, return_when=asyncio.FIRST_COMPLETED)
        worker = worker_of(sagas.leases)
        proxy.cut()
        async with asyncio.timeout(PATIENCE):
            assert await running is OutcomeKind.FENCED
        ((over,),) = bench.run(
            "select extract(epoch from until)::float8 from idemconsumer.worker where id = %s", (worker,)
        )
        assert ended - pauses.seconds < over, "cancelled while the lease still held"
        assert (await two.resume(handler)).kind is OutcomeKind.APPLIED
        await proxy.restore()


async def test_a_lost_lease_is_registered_anew_and_used(
    bench: Bench, proxy: Proxy, proxied: str, remote: Remote
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.call("c", remote.charge, "c")

    async with process(proxied) as sagas:
        old = worker_of(sagas.leases)
        proxy.cut()
        await until(lambda: not workers(bench)[old], "the lease runs out")
        await proxy.restore()
        await registered_anew(bench, old)
        outcome = OutcomeKind.FENCED
        while outcome is OutcomeKind.FENCED:  # what was begun under the old one was fenced
            with suppress(Exception):
                outcome = await run(sagas, Work.of(saga(book), order()))
        assert outcome is OutcomeKind.APPLIED
        assert bench.state is State.COMPLETED


async def test_a_lease_that_the_database_says_is_over_is_not_renewed(bench: Bench) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost.set)
    try:
        old = heartbeat.worker
        bench.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 ms'")
        async with asyncio.timeout(30):
            await lost.wait()
        await registered_anew(bench, old)
    finally:
        await heartbeat.stop()
    assert not workers(bench).get(heartbeat.worker, False), "a process that left holds no lease"


async def test_a_renewal_that_hangs_does_not_delay_the_cancelling(bench: Bench, pauses: Pauses) -> None:
    lost, thawed = Lost(pauses), threading.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    replace_renewal(heartbeat, lambda connection: thawed.wait(PATIENCE))
    await heartbeat.start(lost)
    try:
        async with asyncio.timeout(30):
            await lost.told.wait()
        assert lost.in_time(bench, heartbeat.worker), "told while the lease still held"
    finally:
        thawed.set()
        await heartbeat.stop()


async def test_a_renewal_that_the_database_does_not_answer_in_time_loses_the_lease(
    bench: Bench, pauses: Pauses
) -> None:
    lost = Lost(pauses)
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost)
    try:
        async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
            await rival.execute("select 1 from idemconsumer.worker for update")
            async with asyncio.timeout(30):
                await lost.told.wait()
            assert lost.in_time(bench, min(workers(bench))), "told while the lease still held"
    finally:
        await heartbeat.stop()


async def test_a_renewal_that_a_silent_connection_swallowed_is_followed_by_a_new_lease(
    bench: Bench, proxy: Proxy, proxied: str
) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(proxied, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost.set)
    try:
        renewed = "select 1 from pg_stat_activity where application_name = %s and query ~ '^update' and state = 'idle'"
        await until(lambda: bench.run(renewed, ("idemconsumer heartbeat",)))
        old = heartbeat.worker
        lost.clear()
        proxy.freeze()
        async with asyncio.timeout(30):
            await lost.wait()
        proxy.thaw()
        await registered_anew(bench, old)
    finally:
        await heartbeat.stop()


async def test_a_lease_whose_sagas_were_interrupted_is_not_renewed_after_all(bench: Bench) -> None:
    """They belong to it, and as long as it is valid nobody takes them."""
    told, lost = threading.Event(), asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=3.0, patience=30.0)
    renew = renewal_of(heartbeat)

    def late(connection: Any) -> None:
        told.wait()
        renew(connection)

    def both() -> None:
        told.set()
        lost.set()

    replace_renewal(heartbeat, late)
    await heartbeat.start(both)
    old = heartbeat.worker
    try:
        await lost.wait()
        await until(lambda: heartbeat.worker != old, "another lease is there")
    finally:
        told.set()
        await heartbeat.stop()


async def test_the_lease_ends_when_the_loop_stands_still_for_longer_than_a_run_may_take(bench: Bench) -> None:
    lost = asyncio.Event()
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=0.5 * LEASE)
    await heartbeat.start(lost.set)
    try:
        old = heartbeat.worker
        hog(2.5 * LEASE)
        assert not workers(bench)[old]
        await asyncio.wait_for(lost.wait(), PATIENCE)
    finally:
        await heartbeat.stop()


async def test_a_worker_whose_loop_stands_still_is_ended_and_its_end_counts(bench: Bench, one: Station) -> None:
    await one.leases.begin(_claim(standing_saga.book.plan.bind("shop")), order(), "book", None)
    bench.expire(one)
    process = await forked.start(
        *(sys.executable, "-m", "tests.sagas.standing_saga"),
        env={**os.environ, "IDEMCONSUMER_DSN": bench.dsn},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(50):  # it hogs the loop for a minute
        said, _ = await process.communicate()
    assert process.returncode == 1, said.decode()
    assert b"event loop blocked, exiting as if killed" in said
    assert b"in hog" in said
    one.register(bench)
    taken: list[LeasedSaga] = []

    async def free() -> bool:
        taken.extend(await one.leases.take("shop", ["book"], 1))
        return bool(taken)

    await until(free, "its lease is over")
    assert taken[0].stale
    assert taken[0].suspect, "two workers were lost, and no step was finished"


@pytest.mark.long  # three workers one after another
async def test_a_saga_that_holds_the_interpreter_is_put_aside_after_its_attempts(bench: Bench, one: Station) -> None:
    await one.leases.begin(_claim(holding_saga.book.plan.bind("shop")), order(), "book", None)
    bench.expire(one)
    process = await forked.start(
        *(sys.executable, "-m", "idemconsumer", "run", "tests.sagas.holding_saga:app"),
        env={**os.environ, "IDEMCONSUMER_DSN": bench.dsn},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        await until(lambda: bool(bench.letters), "it is put aside")
    finally:
        process.terminate()
        said, _ = await process.communicate()
    assert bench.letters == ["killed_worker"]
    assert said.count(b"worker shows no sign of life, killing") == 2, said.decode()


async def test_who_is_stuck_is_told_where(bench: Bench) -> None:
    places: list[str] = []
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=0.2 * LEASE, stuck=places.append)
    await heartbeat.start(lambda: None)
    try:
        hog(2.5 * LEASE)
        assert places
        assert places[0].endswith(" in hog")
    finally:
        await heartbeat.stop()


def run_and_close(main: Coroutine[Any, Any, None]) -> None:
    """Without a word to what runs in the loop."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main)
    loop.close()


@pytest.mark.parametrize("run_all", [asyncio.run, run_and_close])
async def test_a_heartbeat_ends_with_its_loop_and_leaves_the_lease_to_its_time(
    bench: Bench, run_all: Callable[..., None]
) -> None:
    """H15."""
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await asyncio.to_thread(run_all, heartbeat.start(lambda: None))
    ends = "select until from idemconsumer.worker order by id desc limit 1"
    first = bench.run(ends)
    await until(lambda: not beats(heartbeat), "it goes on")
    assert bench.run(ends) >= first, "it was ended before its time"
    await until(lambda: not workers(bench)[heartbeat.worker], "the lease runs out")


async def test_a_heartbeat_that_seeks_a_lease_ends_with_its_loop_too(bench: Bench, proxy: Proxy, proxied: str) -> None:
    """H15."""
    heartbeat = Heartbeat(proxied, SCHEMA, lease=LEASE, patience=30.0)
    registered, seeking = threading.Event(), threading.Event()

    async def until_it_seeks() -> None:
        await heartbeat.start(seeking.set)
        registered.set()
        await until(seeking.is_set, "the lease is lost")

    ended = asyncio.create_task(asyncio.to_thread(asyncio.run, until_it_seeks()))
    await until(registered.is_set)
    proxy.cut()
    await ended
    await until(lambda: not beats(heartbeat), "it goes on")


async def test_the_lease_ends_when_no_saga_gets_on_though_the_loop_does(bench: Bench) -> None:
    lost, stands = asyncio.Event(), [0.0]
    heartbeat = Heartbeat(bench.dsn, SCHEMA, lease=LEASE, patience=30.0)
    await heartbeat.start(lost.set, lambda: stands[0])
    try:
        begun = renewed_at(heartbeat)
        await until(lambda: renewed_at(heartbeat) > begun, "it is renewed while they get on")
        stands[0] = 2 * 30.0 + 61.0
        old = heartbeat.worker
        lost.clear()
        await asyncio.wait_for(lost.wait(), PATIENCE)
        stands[0] = 0.0
        await registered_anew(bench, old)
    finally:
        await heartbeat.stop()


async def test_how_long_no_saga_got_on_is_known_while_one_runs(bench: Bench, one: Station) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def waits(step: Step) -> None:
        begun.set()
        await go.wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("s", waits)

    stand_for(one.engine, 1_000)
    assert one.engine.standing() == 0, "none runs"
    running = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    assert one.engine.standing() < 100
    stand_for(one.engine, 1_000)
    assert one.engine.standing() >= 1_000
    go.set()
    assert (await running).kind is OutcomeKind.APPLIED
    assert one.engine.standing() == 0


# ------------------------------------------------------------------------------------------- a step's beginning (L59)
@pytest.mark.parametrize("how", ["tx", "call"])
async def test_no_step_begins_until_the_lease_is_good(
    bench: Bench, one: Station, remote: Remote, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    asked, good = asyncio.Event(), asyncio.Event()

    async def wait(timeout: float) -> None:
        asked.set()
        await good.wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await (saga.tx("s", put, "s") if how == "tx" else saga.call("s", remote.charge, "s"))

    monkeypatch.setattr(one.lease, "good", wait)
    running = asyncio.create_task(one.deliver(saga(book)))
    await asyncio.wait_for(asked.wait(), PATIENCE)
    assert (bench.effects, remote.calls, bench.steps) == ([], [], [])
    good.set()
    assert (await running).kind is OutcomeKind.APPLIED


async def test_the_lease_is_asked_for_a_steps_own_timeout_or_its_handlers(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a connection or a commit is waited for, and after it; for an undo like for its step."""
    log = list[object]()

    async def good(timeout: float) -> None:
        log.append(timeout)

    def noted(what: str) -> Any:
        async def fn(*_: Any) -> None:
            log.append(what)

        return fn

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", noted("a"), undo=noted("undo a"))
        await saga.call("b", noted("b"), undo=noted("undo b"), timeout="7s")
        raise Reject("no")

    monkeypatch.setattr(one.lease, "good", good)
    assert (await one.deliver(saga(book, timeout=3.0))).kind is OutcomeKind.FAILED
    assert log == [3.0, 3.0, "a", 7.0, 7.0, "b", 7.0, 7.0, "undo b", 3.0, 3.0, "undo a"]


@asynccontextmanager
async def beating(dsn: str, lease: float, lost: asyncio.Event | None = None) -> AsyncIterator[Heartbeat]:
    heartbeat = Heartbeat(dsn, SCHEMA, lease=lease, patience=30.0)
    await heartbeat.start((lost or asyncio.Event()).set)
    try:
        yield heartbeat
    finally:
        await heartbeat.stop()


@pytest.mark.parametrize(
    ("ago", "covered", "timeout"),
    [(9.0, 15.0, 15.1), (11.0, 1.0, 13.1), (0.0, 20.9, None), (2.0, 3600.0, None), (4.0, 20.0, 3600.0)],
    ids=["a short step", "before a renewal is due", "just renewed", "a long step, just renewed", "a long step"],
)
async def test_a_step_begins_under_a_lease_that_covers_it_or_just_after_a_renewal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ago: float, covered: float, timeout: float | None
) -> None:
    """The last renewal began so many seconds ago, of a lease of 30 s: 24 s after it sagas would be cancelled."""
    begun, may_end, clock = threading.Event(), threading.Event(), [0.0]
    monkeypatch.setattr("idemconsumer.stores.heartbeat._now", lambda: clock[0])
    async with beating(bench.dsn, 30.0) as heartbeat:
        renew = renewal_of(heartbeat)

        def held(connection: Any) -> None:
            begun.set()
            may_end.wait(PATIENCE)
            renew(connection)

        replace_renewal(heartbeat, held)
        clock[0] += ago
        heartbeat._ticked = clock[0]
        await heartbeat.good(covered)
        assert not begun.is_set()
        if timeout is not None:
            waiting = asyncio.create_task(heartbeat.good(timeout))
            await asyncio.to_thread(begun.wait, PATIENCE)
            assert not waiting.done()
            may_end.set()
            await asyncio.wait_for(waiting, PATIENCE)
        may_end.set()


async def test_no_step_begins_while_the_heartbeats_connection_is_silent(proxied: str, proxy: Proxy) -> None:
    """It is covered no longer, and the renewal that it needs gets no answer: then the lease is over."""
    lost = asyncio.Event()
    async with beating(proxied, STEADY, lost) as heartbeat:
        proxy.freeze()
        renewed_earlier(heartbeat, 0.2 * STEADY)
        waiting = [asyncio.create_task(heartbeat.good(timeout)) for timeout in (0.65 * STEADY, 3600.0)]
        await asyncio.wait_for(lost.wait(), PATIENCE)
        assert not any(each.done() for each in waiting)
        proxy.thaw()
        for each in waiting:
            with pytest.raises(Fenced):
                await asyncio.wait_for(each, PATIENCE)


async def test_the_databases_clock_may_be_another_one(bench: Bench) -> None:
    """An hour ahead of this machine: what counts is the time since a renewal began, by one clock each."""
    async with beating(bench.dsn, 30.0) as heartbeat:
        shifted = {
            name: query.replace(b"clock_timestamp()", b"(clock_timestamp() + interval '1 hour')")
            for name, query in queries_of(heartbeat).items()
        }
        replace_queries(heartbeat, shifted)
        await asyncio.to_thread(register, heartbeat)
        await asyncio.wait_for(heartbeat.good(20.0), PATIENCE)
        renewed_earlier(heartbeat, 10.0)
        await asyncio.wait_for(heartbeat.good(20.0), PATIENCE)


async def test_no_step_begins_under_a_lease_that_the_database_calls_over(bench: Bench) -> None:
    """Its clock was set ahead. Nobody knows here until the next renewal, which a step that needs one asks for."""
    lost = asyncio.Event()
    async with beating(bench.dsn, 30.0, lost) as heartbeat:
        bench.run("update idemconsumer.worker set until = clock_timestamp() - interval '1 second'")
        renewed_earlier(heartbeat, 4.0)
        with pytest.raises(Fenced):
            await asyncio.wait_for(heartbeat.good(3600.0), PATIENCE)
        assert lost.is_set()


leases = pytest.mark.parametrize(
    ("worker", "stale"),
    [
        ("clock_timestamp() + interval '1 min'", False),
        ("clock_timestamp() - interval '1 ms'", True),
        ("clock_timestamp() + interval '2 hours'", True),  # more than a lease ahead: the clock stepped back
    ],
    ids=["valid", "over", "too far ahead"],
)


@leases
async def test_what_counts_as_stale(bench: Bench, one: Station, two: Station, worker: Any, stale: bool) -> None:
    call = Work.of(handler := saga(_nothing), order()).call
    assert call is not None
    await one.leases.begin(call.claim, order(), "book", None)
    bench.run("update idemconsumer.worker set until = " + worker + " where id = %s", (one.lease.worker,))
    taken = await two.take(handler)
    assert (taken is not None and taken.stale) is stale


@leases
async def test_a_redelivery_goes_on_with_what_counts_as_stale(
    bench: Bench, one: Station, two: Station, worker: Any, stale: bool
) -> None:
    call = Work.of(handler := saga(_nothing), order()).call
    assert call is not None
    await one.leases.begin(call.claim, order(), "book", None)
    bench.run("update idemconsumer.worker set until = " + worker + " where id = %s", (one.lease.worker,))
    assert (await two.deliver(handler)).kind is (OutcomeKind.APPLIED if stale else OutcomeKind.BUSY)


async def test_the_saga_of_a_worker_whose_row_is_gone_is_stale(bench: Bench, one: Station, two: Station) -> None:
    call = Work.of(handler := saga(_nothing), order()).call
    assert call is not None
    await one.leases.begin(call.claim, order(), "book", None)
    bench.run("delete from idemconsumer.worker where id = %s", (one.lease.worker,))
    assert await two.take(handler) is not None


def _claim(handler: BoundHandler) -> Claim:
    call = Work.of(handler, order()).call
    assert call is not None
    return call.claim


async def _nothing(order: dict[str, Any], saga: Saga) -> None:
    return


async def test_a_renewal_that_met_a_cut_connection_is_made_again_at_once(proxy: Proxy, proxied: str) -> None:
    """Not only a third of the lease later, when the next cut may come."""
    heartbeat = Heartbeat(proxied, SCHEMA, lease=60.0, patience=30.0)
    await heartbeat.start(lambda: None)
    await renew_now(heartbeat, PATIENCE)
    proxy.cut()
    await proxy.restore()
    await renew_now(heartbeat, 15.0)
    await heartbeat.stop()
