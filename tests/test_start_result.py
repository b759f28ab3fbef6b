"""Sagas begun from code, asked for their results, and run by `process`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from idemconsumer import (
    App,
    BadMessage,
    Cancellation,
    ConfigurationError,
    Message,
    Outcome,
    OutcomeKind,
    Reject,
    Retry,
    Saga,
    SagaStatus,
    StoreUnavailable,
    Tx,
)
from idemconsumer.message.message import StoredResult
from idemconsumer.rules.values import Record, State
from idemconsumer.settings import Settings
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.stores.leases import PostgresLeases
from tests.support.servers.postgres import migrated
from tests.support.waiting import until


class Ride(msgspec.Struct):
    rider: str
    km: int = 1


class Rides:
    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.app = App("rides")
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.fails: list[Exception] = []
        self.runs = 0

        async def note(tx: Tx, rider: str) -> str:
            await tx.execute("insert into ride values (%s)", (rider,))
            return rider

        @self.app.idempotent_handler("memory:rides", key="rider", lease="30s", backoff="20ms, 20ms", wait="45s")
        async def book(ride: Ride, saga: Saga, message: Message) -> str:
            self.runs += 1
            self.begun.set()
            noted = await saga.tx("noted", note, ride.rider)
            await self.go.wait()
            if self.fails:
                raise self.fails.pop()
            return f"{noted} by {message.key}"

        @self.app.idempotent_handler("memory:joined", key="rider")
        async def joined(ride: Ride, tx: Tx) -> None: ...

        self.book, self.joined = book, joined

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        worker = self.app.worker(Settings(dsn=self.dsn, concurrency=2))
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(30):
                yield
        finally:
            worker.drain()
            await running

    async def sql(self, query: str) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            return await (await connection.execute(query.encode())).fetchall()

    async def do(self, statement: str) -> None:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            await connection.execute(statement.encode())

    async def noted(self) -> bool:
        """Whether the first step of the one saga is on record."""
        return await self.sql("select count(*) from idemconsumer.step where state = 2") == [(1,)]


@pytest.fixture
async def rides(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rides]:
    migrated(database, "idemconsumer")
    monkeypatch.setenv("IDEMCONSUMER_DSN", database)
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await connection.execute("create table ride (rider text)")
    rides = Rides(database)
    yield rides
    await rides.app.close()


def message(rider: str = "ann", **more: Any) -> Message:
    return Message("memory:rides", json.dumps({"rider": rider} | more).encode())


# ---------------------------------------------------------------------------------------------------- start and result
async def test_a_saga_begun_from_code_runs_once_under_the_key_it_was_given(rides: Rides) -> None:
    for _ in range(3):
        await rides.app.start(rides.book, Ride("ann"), key="k-1")
    async with rides.worker():
        outcome = await rides.app.result(rides.book, key="k-1", wait="20s")
    assert outcome == Outcome(
        OutcomeKind.DUPLICATE, result=b'"ann by k-1"', content_type="application/json", state=State.COMPLETED
    )
    assert await rides.sql("select * from ride") == [("ann",)]


@asynccontextmanager
async def few(rides: Rides, monkeypatch: pytest.MonkeyPatch, connections: int) -> AsyncIterator[str]:
    """The app's role may have so many connections, and has none in the end."""
    role = f"few_{secrets.token_hex(4)}"
    groups = "pg_read_all_data, pg_write_all_data"
    await rides.do(f"create role {role} login password 'few' connection limit {connections} in role {groups}")
    await rides.do(f"grant usage on all sequences in schema idemconsumer to {role}")
    await rides.do(f"grant execute on all functions in schema idemconsumer to {role}")
    monkeypatch.setenv("IDEMCONSUMER_DSN", make_conninfo(rides.dsn, user=role, password="few"))
    monkeypatch.setenv("IDEMCONSUMER_CONCURRENCY", "4")
    try:
        yield role
    finally:
        await rides.app.close()
        await rides.do(f"drop owned by {role}; drop role {role}")


async def test_many_callers_at_once_share_a_few_connections(rides: Rides, monkeypatch: pytest.MonkeyPatch) -> None:
    many = range(400)
    async with few(rides, monkeypatch, 10) as role:
        await asyncio.gather(*(rides.app.start(rides.book, Ride("ann"), key=f"k-{n}") for n in many))
        assert await rides.sql("select count(distinct message_id) from idemconsumer.queue") == [(400,)]
        assert await rides.sql(f"select count(*) from pg_stat_activity where usename = '{role}'") == [(0,)]
        outcomes = await asyncio.gather(*(rides.app.result(rides.book, key=f"k-{n}") for n in many))
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.ABSENT}
        waited = await asyncio.gather(*(rides.app.result(rides.book, key=f"k-{n}", wait="0.1s") for n in many))
        assert {outcome.kind for outcome in waited} == {OutcomeKind.ABSENT}


async def test_many_who_decide_about_sagas_at_once_share_a_few_connections(
    rides: Rides, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with few(rides, monkeypatch, 12):
        cancelled = asyncio.gather(*(rides.app.cancel(rides.book, key=f"k-{n}") for n in range(100)))
        seen = asyncio.gather(*(rides.app.saga(rides.book, key=f"k-{n}") for n in range(100)))
        assert {answer.state for answer in await cancelled} == {None}
        assert set(await seen) == {None}


async def test_a_saga_begun_from_code_keeps_its_key_when_it_is_resumed(rides: Rides) -> None:
    rides.fails = [Retry(), ValueError()]
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    async with rides.worker():
        outcome = await rides.app.result(rides.book, key="k-1", wait="20s")
    assert outcome.result == b'"ann by k-1"'
    assert rides.runs == 3
    assert await rides.sql("select * from ride") == [("ann",)]


async def test_two_keys_are_two_sagas_and_two_payloads_under_one_key_a_conflict(rides: Rides) -> None:
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    await rides.app.start(rides.book, Ride("ann"), key="k-2")
    await rides.app.start(rides.book, Ride("bob"), key="k-1")
    async with rides.worker():
        for key in ("k-1", "k-2"):
            assert (await rides.app.result(rides.book, key=key, wait="20s")).state is State.COMPLETED
        await until(lambda: rides.sql("select 1 from idemconsumer.dead_letter where reason = 'conflict'"))
    assert await rides.sql("select * from ride") == [("ann",), ("ann",)]


async def test_tenants_do_not_share_keys(rides: Rides) -> None:
    for tenant in ("north", "south"):
        await rides.app.start(rides.book, Ride(tenant), key="k-1", tenant=tenant)
    async with rides.worker():
        for tenant in ("north", "south"):
            outcome = await rides.app.result(rides.book, key="k-1", tenant=tenant, wait="20s")
            assert outcome.result == f'"{tenant} by k-1"'.encode()
    assert (await rides.app.result(rides.book, key="k-1")).state is None


async def test_within_a_transaction_it_begins_if_and_only_if_that_commits(rides: Rides) -> None:
    async with await psycopg.AsyncConnection.connect(rides.dsn) as connection:
        await rides.app.start(rides.book, Ride("ann"), key="lost", tx=connection)
        await connection.rollback()
        await rides.app.start(rides.book, Ride("bob"), key="kept", tx=connection)
        assert await rides.sql("select message_id from idemconsumer.queue") == []
    assert await rides.sql("select message_id from idemconsumer.queue") == [("kept",)]


async def test_a_handler_begins_a_saga_in_its_own_transaction(rides: Rides) -> None:
    @rides.app.idempotent_handler("memory:orders", key="rider")
    async def order(ride: Ride, tx: Tx) -> None:
        await rides.app.start(rides.book, ride, key=f"order of {ride.rider}", tx=tx)
        if ride.km > 100:
            raise Reject("too_far")

    for km, kind in ((101, OutcomeKind.FAILED), (1, OutcomeKind.APPLIED)):
        body = msgspec.json.encode(Ride(f"rider {km}", km))
        assert (await rides.app.process(Message("memory:orders", body))).kind is kind
    assert await rides.sql("select message_id from idemconsumer.queue") == [("order of rider 1",)]


async def test_a_result_that_is_not_there_yet_is_a_state(rides: Rides) -> None:
    rides.go.clear()
    assert await rides.app.result(rides.book, key="k-1", wait="50ms") == Outcome(OutcomeKind.ABSENT)
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    assert await rides.app.result(rides.book, key="k-1") == Outcome(OutcomeKind.ABSENT)
    async with rides.worker():
        await rides.begun.wait()
        assert await rides.app.result(rides.book, key="k-1", wait="60ms") == Outcome(
            OutcomeKind.BUSY, state=State.PROCESSING
        )
        rides.go.set()
        assert (await rides.app.result(rides.book, key="k-1", wait="20s")).state is State.COMPLETED


async def test_a_rejection_and_a_dead_letter_are_results_too(rides: Rides) -> None:
    rides.fails = [Reject("no_driver", {"near": 0})]
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    async with rides.worker():
        outcome = await rides.app.result(rides.book, key="k-1", wait="20s")
        assert (outcome.kind, outcome.state) == (OutcomeKind.DUPLICATE, State.FAILED)
        assert outcome.result == b'{"code":"no_driver","body":{"near":0}}'
        rides.fails = [ValueError() for _ in range(9)]
        await rides.app.start(rides.book, Ride("ann"), key="k-2")
        assert await rides.app.result(rides.book, key="k-2", wait="20s") == Outcome(OutcomeKind.DEAD, state=State.DEAD)


async def test_all_who_wait_are_answered_by_one_statement_a_look(rides: Rides, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    peek = PostgresStore.peek

    async def counted(self: PostgresStore, keys: Sequence[bytes]) -> list[Record | None]:
        looks.append(len(keys))
        return await peek(self, keys)

    monkeypatch.setattr(PostgresStore, "peek", counted)
    keys = [f"k-{n}" for n in range(40)]
    began = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(rides.app.result(rides.book, key=key, wait="20s")) for key in (*keys, *keys)]
    for key in keys:
        await rides.app.start(rides.book, Ride(key), key=key)
    async with rides.worker():
        outcomes = await asyncio.gather(*waiting)
    assert {outcome.state for outcome in outcomes} == {State.COMPLETED}
    assert max(looks) == len(keys)  # two callers that wait for one key ask for it once
    seconds = asyncio.get_running_loop().time() - began
    assert len(looks) <= seconds / 0.05 + 1  # neither callers nor results set the pace


async def test_what_the_handler_could_not_take_is_refused_at_the_start(rides: Rides) -> None:
    with pytest.raises(BadMessage, match="undecodable"):
        await rides.app.start(rides.book, {"km": 5}, key="k-1")  # type: ignore[arg-type]
    with pytest.raises(BadMessage, match="key_missing"):
        await rides.app.start(rides.book, Ride("ann"), key="")
    with pytest.raises(BadMessage, match="key_invalid"):
        await rides.app.start(rides.book, Ride("ann"), key="\0")
    assert await rides.sql("select * from idemconsumer.queue") == []


async def test_only_a_saga_of_this_app_can_be_started(rides: Rides) -> None:
    with pytest.raises(ConfigurationError, match="'joined' is not a saga of this app; start a handler that takes Saga"):
        await rides.app.start(rides.joined, Ride("ann"), key="k")
    with pytest.raises(ConfigurationError, match="app 'other': 'book' is not a saga of this app"):
        await App("other").start(rides.book, Ride("ann"), key="k")


async def test_a_result_is_only_that_of_a_handler_of_this_app_and_of_what_can_be_a_key(rides: Rides) -> None:
    other = App("other")

    @other.idempotent_handler("memory:other", key="rider", name="book")
    async def book(ride: Ride, saga: Saga) -> None: ...

    with pytest.raises(ConfigurationError, match="app 'rides': 'book' is not a handler of this app; call the app"):
        await rides.app.result(book, key="k")
    with pytest.raises(BadMessage, match="key_missing"):
        await rides.app.result(rides.book, key="")
    assert await rides.app.result(rides.joined, key="k") == Outcome(OutcomeKind.ABSENT)


async def test_a_key_is_a_text(rides: Rides) -> None:
    wrong: Any = 5
    with pytest.raises(BadMessage, match="key_invalid: key= is of type int, not a string"):
        await rides.app.start(rides.book, Ride("ann"), key=wrong)
    with pytest.raises(BadMessage, match="key_invalid: key= is of type int, not a string"):
        await rides.app.result(rides.book, key=wrong)
    with pytest.raises(BadMessage, match="key_missing"):
        await rides.app.start(rides.book, Ride("ann"), key=None)  # type: ignore[arg-type]


async def test_what_is_no_handler_and_no_transaction_is_told_so(rides: Rides) -> None:
    async def bare(ride: Ride, saga: Saga) -> None: ...

    wrong: Any = bare
    for call in (
        rides.app.start(wrong, Ride("ann"), key="k"),
        rides.app.result(wrong, key="k"),
        rides.app.process(message(), handler=wrong),
    ):
        with pytest.raises(ConfigurationError, match="app 'rides': bare is not a handler; decorate the function with"):
            await call
    with psycopg.connect(rides.dsn) as connection:
        unfit: Any
        for unfit, named in (("tx", "str"), (connection, "Connection")):
            told = f"tx= is of type {named}; pass the Tx of a handler or of a step, or a psycopg.AsyncConnection"
            with pytest.raises(ConfigurationError, match=told):
                await rides.app.start(rides.book, Ride("ann"), key="k", tx=unfit)
            with pytest.raises(ConfigurationError, match=told):
                await rides.app.publish("postgres:q", {}, tx=unfit)


async def test_a_payload_that_is_no_json_is_called_a_payload(rides: Rides) -> None:
    wrong: Any = {"rider": object()}
    with pytest.raises(TypeError, match="a payload of type dict cannot be stored as JSON"):
        await rides.app.start(rides.book, wrong, key="k")


# ------------------------------------------------------------------------------------------------------------- process
async def test_process_runs_a_saga_to_its_end_without_a_worker(rides: Rides) -> None:
    first = await rides.app.process(message())
    assert (first.kind, first.result) == (OutcomeKind.APPLIED, b'"ann by ann"')
    assert (await rides.app.process(message())).kind is OutcomeKind.DUPLICATE
    assert (await rides.app.process(message(km=2))).kind is OutcomeKind.CONFLICT
    assert rides.runs == 1


async def test_a_failed_attempt_is_gone_on_with_by_the_next_call(rides: Rides) -> None:
    rides.fails = [ValueError()]
    first = await rides.app.process(message())
    assert (first.kind, first.state) == (OutcomeKind.RETRYING, State.PROCESSING)
    await asyncio.sleep(first.due)
    assert (await rides.app.process(message())).result == b'"ann by ann"'
    assert await rides.sql("select * from ride") == [("ann",)]


async def test_a_duplicate_of_a_running_saga_waits_for_its_result(rides: Rides) -> None:
    rides.go.clear()
    first = asyncio.create_task(rides.app.process(message()))
    await rides.begun.wait()
    others = [asyncio.create_task(rides.app.process(message())) for _ in range(5)]
    await until(rides.noted)
    rides.go.set()
    assert (await first).kind is OutcomeKind.APPLIED
    for outcome in await asyncio.gather(*others):
        assert (outcome.kind, outcome.result) == (OutcomeKind.DUPLICATE, b'"ann by ann"')
    assert rides.runs == 1  # a saga that this process runs is not taken over by another call


async def test_a_saga_that_a_worker_runs_is_waited_for_so_long_and_no_longer(rides: Rides) -> None:
    @rides.app.idempotent_handler("memory:hasty", key="rider", name="hasty", wait="100ms")
    async def hasty(ride: Ride, saga: Saga) -> str:
        rides.begun.set()
        await rides.go.wait()
        return ride.rider

    rides.go.clear()
    await rides.app.start(hasty, Ride("ann"), key="ann")
    body = msgspec.json.encode(Ride("ann"))
    async with rides.worker():
        await rides.begun.wait()
        assert (await rides.app.process(Message("memory:hasty", body))).kind is OutcomeKind.BUSY
        await rides.app.start(rides.book, Ride("bob"), key="bob")
        await until(rides.noted)
        patient = asyncio.create_task(rides.app.process(Message("memory:rides", msgspec.json.encode(Ride("bob")))))
        rides.go.set()
        assert (await patient).kind is OutcomeKind.DUPLICATE
    assert rides.runs == 1


async def test_the_lease_of_the_process_suits_all_of_its_sagas_whichever_comes_first(rides: Rides) -> None:
    @rides.app.idempotent_handler("memory:slow", key="rider", lease="40s", timeout="50s")
    async def slow(ride: Ride, saga: Saga) -> str:
        return ride.rider

    @rides.app.idempotent_handler("memory:waits", key="rider", lease="1h", timeout="1h")
    async def waits(ride: Ride, tx: Tx) -> None: ...

    await rides.app.process(Message("memory:slow", msgspec.json.encode(Ride("ann"))))
    assert await rides.sql("select lease from idemconsumer.worker") == [(timedelta(seconds=30),)]
    inline = rides.app._opened.here().inline
    assert inline is not None
    assert inline._saga_lease is not None
    assert inline._saga_lease._heartbeat._patience == 50


async def test_the_next_call_goes_on_with_what_a_lost_answer_left(
    rides: Rides, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = PostgresLeases.complete

    async def lost(self: PostgresLeases, holding: LeasedSaga, state: State, result: StoredResult | None) -> None:
        monkeypatch.setattr(PostgresLeases, "complete", complete)
        raise StoreUnavailable("away")

    monkeypatch.setattr(PostgresLeases, "complete", lost)
    with pytest.raises(StoreUnavailable):
        await rides.app.process(message())
    assert (await rides.app.process(message())).result == b'"ann by ann"'
    assert await rides.sql("select * from ride") == [("ann",)]


async def test_a_cancelled_call_leaves_its_saga_to_others(rides: Rides) -> None:
    rides.go.clear()
    call = asyncio.create_task(rides.app.process(message()))
    await rides.begun.wait()
    await until(rides.noted)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    rides.go.set()
    async with rides.worker():
        assert (await rides.app.result(rides.book, key="ann", wait="20s")).state is State.COMPLETED
    assert await rides.sql("select * from ride") == [("ann",)]


# ---------------------------------------------------------------------------------------------------------- cancelled
async def test_a_saga_that_runs_is_cancelled_from_code(rides: Rides) -> None:
    rides.go.clear()
    assert await rides.app.cancel(rides.book, key="k-1") == Cancellation(accepted=False, state=None)
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    async with rides.worker():
        await until(rides.noted)
        assert await rides.app.cancel(rides.book, key="k-1") == Cancellation(accepted=True, state=State.PROCESSING)
        outcome = await rides.app.result(rides.book, key="k-1", wait="20s")
        assert (outcome.state, outcome.result) == (State.FAILED, b'{"code":"cancelled","body":null}')
    with pytest.raises(ConfigurationError, match="'joined' is not a saga of this app; only a saga can be cancelled"):
        await rides.app.cancel(rides.joined, key="k-1")


async def test_the_state_of_a_saga_is_asked_for_from_code(rides: Rides) -> None:
    rides.go.clear()
    assert await rides.app.saga(rides.book, key="k-1") is None
    rides.fails = [Retry(after="1h")]
    await rides.app.start(rides.book, Ride("ann"), key="k-1")
    async with rides.worker():
        await until(rides.noted)
        runs = await rides.app.saga(rides.book, key="k-1")
        assert runs is not None
        assert (runs.state, runs.recovery_point, runs.waiting_until) == (State.PROCESSING, "noted", None)
        (step,) = runs.steps
        assert (step.name, step.state, step.key, step.attempts) == ("noted", "done", None, 1)
        rides.go.set()

        async def waits() -> bool:
            found = await rides.app.saga(rides.book, key="k-1")
            return found is not None and found.waiting_until is not None and found.error is not None

        await until(waits)
        await rides.app.cancel(rides.book, key="k-1")
        assert (await rides.app.result(rides.book, key="k-1", wait="20s")).state is State.FAILED
    ended = await rides.app.saga(rides.book, key="k-1")
    assert ended == SagaStatus(state=State.FAILED, recovery_point="noted", steps=runs.steps)
