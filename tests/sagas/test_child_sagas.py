"""Sagas that start others, wait for their ends, and stop them when they are undone (L47 to L49)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import psycopg
import pytest

from idemconsumer import (
    App,
    Cancellation,
    Child,
    Handler,
    Message,
    Outcome,
    OutcomeKind,
    Reject,
    Saga,
    SignalTimeout,
    StoreUnavailable,
    Tx,
)
from idemconsumer.admin.orphans import find_orphans
from idemconsumer.admin.sagas import SagaAdmin
from idemconsumer.engine.letters import dead_letter
from idemconsumer.engine.work import Work
from idemconsumer.errors import BadMessage, Fenced
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.message import keys
from idemconsumer.message.headers import decode_headers
from idemconsumer.ports.leases import Kinship
from idemconsumer.ports.store import DeadLetter
from idemconsumer.rules.values import State, StepKind
from idemconsumer.settings import Settings
from idemconsumer.stores.leases import PostgresStep
from idemconsumer.worker.retention import prune_once
from tests.support.sagas import SCHEMA, Bench, Station, locked, order, put, take_back
from tests.support.waiting import until


class Ride(msgspec.Struct):
    driver: str


Body = Callable[[Any, Saga], Awaitable[object]]


class Family:
    """An app with a parent `book` and a child `ride`, run by one station. `rides`: the payloads of the children that
    ran; `ride` is what they do, and `book` what the parent does."""

    def __init__(self, bench: Bench, station: Station) -> None:
        self.bench, self.station = bench, station
        self.app = app = App("shop")
        self.rides: list[object] = []
        self.ride: Body = drive
        self.book: Body

        @app.idempotent_handler("memory:rides", key="id", name="ride", backoff="1ms, 1ms", max_attempts=2)
        async def ride(payload: dict[str, Any], saga: Saga) -> Ride:
            self.rides.append(payload)
            return await self.ride(payload, saga)  # type: ignore[return-value]

        @app.idempotent_handler("memory:orders", key="id", name="book", backoff="1ms, 1ms")
        async def book(order: dict[str, Any], saga: Saga) -> Any:
            return await self.book(order, saga)

        self.handler: Handler[[dict[str, Any], Saga], Ride] = ride
        self.bound: dict[str, BoundHandler] = {each.name: each for each in app.bound_handlers(Settings(dsn=bench.dsn))}

    async def begin(self, book: Body) -> Outcome:
        self.book = book
        return await self.station.deliver(self.bound["book"])

    async def resume(self, name: str = "book") -> Outcome:
        return await self.station.resume(self.bound[name])

    async def deliver(self) -> Outcome:
        """The next message of a child."""
        ((name, key, body, headers),) = self.bench.run(
            "delete from idemconsumer.queue where id = (select min(id) from idemconsumer.queue)"
            " returning name, message_id, body, headers"
        )
        message = Message(f"postgres:{name}", body, decode_headers(headers), message_id=key)
        return await self.station.deliver(self.bound["ride"], message)

    @property
    def queued(self) -> int:
        return len(self.bench.run("select 1 from idemconsumer.queue"))

    def states(self) -> dict[str, State]:
        rows = self.bench.run(
            "select c.name, r.state from idemconsumer.record as r join idemconsumer.scope as c on c.id = r.scope_id"
        )
        return {scope.rpartition("/")[2]: State(state) for scope, state in rows}

    @asynccontextmanager
    async def ending(self, key: bytes) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Somebody, it may be a worker of an earlier version, is at the COMMIT that completes this saga."""
        async with await psycopg.AsyncConnection.connect(self.bench.dsn) as rival:
            await rival.execute("select set_config('idemconsumer.open', 't', true)")
            await rival.execute("update idemconsumer.record set state = 3 where key = %s", (key,))
            await rival.execute("delete from idemconsumer.saga where key = %s", (key,))
            await rival.execute(
                "insert into idemconsumer.result (key, body, content_type) values (%s, %s, 'application/json')",
                (key, b'{"driver":"Ann"}'),
            )
            await rival.execute("select idemconsumer.seal('t')")
            await rival.execute("set constraints all immediate")
            yield rival


async def drive(payload: dict[str, Any], saga: Saga) -> Ride:
    await saga.tx("driven", put, "driven")
    return Ride("Ann")


async def nap(payload: dict[str, Any], saga: Saga) -> Ride:
    await saga.tx("driven", put, "driven", undo=take_back)
    await saga.sleep("nap", "3d")
    return Ride("Ann")


async def refuse(payload: dict[str, Any], saga: Saga) -> None:
    raise Reject("no_driver", {"at": 7})


@pytest.fixture
async def family(bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Family]:
    monkeypatch.setenv("IDEMCONSUMER_DSN", bench.dsn)
    family = Family(bench, one)
    yield family
    await family.app.close()


def simple(family: Family, key: str | None = None, **more: Any) -> Body:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("noted", put, "noted", undo=take_back)
        child = await saga.start("ride", family.handler, {"to": "sea"}, key=key, **more)
        ride = await saga.result("ride_done", child)
        await saga.tx("billed", put, f"billed {ride.driver}")
        return f"with {ride.driver}"

    return book


CLAIM_LOCK = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea for 8), 'hex'))::bit(64)::bigint)"
RIDE = keys.digest("shop", None, "ride", "r")


# ------------------------------------------------------------------------------------------------- start and end (L47)
async def test_a_parent_is_in_no_process_until_its_child_has_ended(family: Family, bench: Bench) -> None:
    waits = await family.begin(simple(family))
    assert (waits.kind, waits.state, family.queued) == (OutcomeKind.BUSY, State.PROCESSING, 1)
    assert bench.run("select worker from idemconsumer.saga") == [(None,)]
    assert not family.station.engine._in_hand
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.station.leases.look("shop", ["book"])).due["book"] <= 0
    assert (await family.resume()).result == b'"with Ann"'
    assert (bench.effects, family.rides) == (["noted", "driven", "billed Ann"], [{"to": "sea"}])


async def test_workers_run_a_parent_and_its_child(family: Family, bench: Bench) -> None:
    family.book, parent = simple(family), family.app.handlers["book"]
    await family.app.start(parent, {"id": "t"}, key="t")
    worker = family.app.worker(Settings(dsn=bench.dsn, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        outcome = await family.app.result(parent, key="t", wait="25s")
    finally:
        worker.drain()
        await running
    assert (outcome.state, outcome.result) == (State.COMPLETED, b'"with Ann"')
    assert bench.effects == ["noted", "driven", "billed Ann"]


async def test_a_child_begins_with_the_step_that_starts_it_and_once(family: Family, bench: Bench) -> None:
    start, fails = family.app.start, [ValueError("after it"), ValueError("after it")]

    async def failing(*given: Any, **more: Any) -> None:
        await start(*given, **more)
        if fails:
            raise fails.pop()

    family.app.start = failing  # type: ignore[method-assign]
    assert (await family.begin(simple(family))).kind is OutcomeKind.RETRYING
    assert (family.queued, bench.run("select 1 from idemconsumer.child")) == (0, [])
    assert (await family.resume()).kind is OutcomeKind.RETRYING
    assert (await family.resume()).kind is OutcomeKind.BUSY
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert family.queued == 1


async def test_a_child_that_ends_before_its_parent_gives_itself_up_is_not_missed(family: Family) -> None:
    """The parent has looked, and found that the child runs; it ends, and finds nobody who waits."""
    pause = family.station.leases.pause

    async def meanwhile(*given: Any) -> float:
        assert (await family.deliver()).kind is OutcomeKind.APPLIED
        return await pause(*given)

    family.station.leases.pause = meanwhile  # type: ignore[assignment, method-assign]
    assert (await family.begin(simple(family))).due <= 0
    family.station.leases.pause = pause  # type: ignore[method-assign]
    assert (await family.resume()).result == b'"with Ann"'


async def test_an_end_that_is_being_committed_while_the_parent_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    pause, family.ride = family.station.leases.pause, nap
    gave_up = asyncio.Event()

    async def beside(*given: Any) -> float:
        assert (await family.deliver()).kind is OutcomeKind.BUSY
        async with family.ending(RIDE) as rival:
            pausing = asyncio.create_task(pause(*given))
            gave_up.set()
            await until(lambda: bench.waiting() == 1, "the parent waits for who ends the child")
            await rival.commit()
            return await pausing

    def once(*given: Any) -> Awaitable[float]:
        return pause(*given) if gave_up.is_set() or given[0].handler == "ride" else beside(*given)

    family.station.leases.pause = once  # type: ignore[assignment, method-assign]
    assert (await family.begin(simple(family, "r"))).due <= 0
    assert (await family.resume()).result == b'"with Ann"'


async def test_who_ends_a_child_waits_for_a_parent_that_gives_itself_up(family: Family, bench: Bench) -> None:
    """The other way round: the parent waits as soon as the child's end looks for it."""
    family.ride = nap
    await family.begin(simple(family, "r"))
    await family.deliver()
    ((parent,),) = bench.run("select key from idemconsumer.saga where handler = 'book'")
    bench.run("update idemconsumer.saga set signals = null where handler = 'book'")
    lock = "select pg_advisory_xact_lock(('x' || encode(substring(%s::bytea from 9 for 8), 'hex'))::bit(64)::bigint)"

    async def end() -> None:
        async with family.ending(RIDE) as rival:
            await rival.commit()

    async with await psycopg.AsyncConnection.connect(bench.dsn) as worker:
        await worker.execute(lock, (parent,))
        ends = asyncio.create_task(end())
        await until(lambda: bench.waiting() == 1, "who ends the child waits")
        await worker.execute(
            "update idemconsumer.saga set signals = array['child:' || encode(%s, 'hex')] where key = %s",
            (RIDE, parent),
        )
        await worker.commit()
    await ends
    assert (await family.resume()).result == b'"with Ann"'


async def test_ends_of_one_commit_are_told_to_all_their_parents(family: Family, bench: Bench) -> None:
    """As of workers that end many sagas in one statement; a child may have several parents."""
    family.ride, family.book = nap, simple(family, "r")
    for key in ("k1", "k2"):
        await family.station.deliver(family.bound["book"], order(key))
    family.book = simple(family, "s")
    await family.station.deliver(family.bound["book"], order("k3"))
    while family.queued:
        await family.deliver()
    other = keys.digest("shop", None, "ride", "s")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute("select set_config('idemconsumer.open', 't', true)")
        await rival.execute("update idemconsumer.record set state = 4 where key = any(%s)", ([RIDE, other],))
        await rival.execute("delete from idemconsumer.saga where key = any(%s)", ([RIDE, other],))
        await rival.execute("select idemconsumer.seal('t')")
    due = "select count(*) from idemconsumer.saga where handler = 'book' and due <= clock_timestamp()"
    assert bench.run(due) == [(3,)]
    assert bench.run("select count(*) from idemconsumer.child where ended and state = 4") == [(3,)]


async def test_parents_are_told_in_the_order_of_their_keys(family: Family, bench: Bench) -> None:
    """So that two who end several children do not wait for each other."""
    family.ride, family.book = nap, simple(family, "r")
    high, low = sorted(("k1", "k2"), key=lambda key: keys.digest("shop", None, "book", key), reverse=True)
    for key in (high, low):
        await family.station.deliver(family.bound["book"], order(key))
    await family.deliver()
    lock = "select 1 from idemconsumer.saga where key = %s for update"

    async def end() -> None:
        async with family.ending(RIDE) as rival:
            await rival.commit()

    async with locked(bench, lock, keys.digest("shop", None, "book", low)):
        ends = asyncio.create_task(end())
        await until(lambda: bench.waiting() == 1, "it waits for the first parent")
        assert bench.run(f"{lock} skip locked", (keys.digest("shop", None, "book", high),)) == [(1,)]
    await ends


async def test_a_start_waits_for_the_end_of_what_runs_under_its_key(family: Family, bench: Bench) -> None:
    """Else that end would not see who waits for it, and the parent not see the end."""
    family.ride = nap
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    await family.deliver()
    async with family.ending(RIDE) as rival:
        begins = asyncio.create_task(family.begin(simple(family, "r")))
        await until(lambda: bench.waiting() == 1, "the start waits")
        await rival.commit()
    assert (await begins).result == b'"with Ann"'


async def test_a_start_waits_for_a_claim_of_its_key(family: Family, bench: Bench) -> None:
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(CLAIM_LOCK, (RIDE,))
        begins = asyncio.create_task(family.begin(simple(family, "r")))
        await until(lambda: bench.waiting() == 1, "the start waits")
        await rival.commit()
    assert (await begins).kind is OutcomeKind.BUSY
    await family.deliver()
    assert (await family.resume()).result == b'"with Ann"'


# --------------------------------------------------------------------------------------------------- how it ended (L48)
async def test_a_rejected_child_rejects_its_parent_and_stays_so(family: Family, bench: Bench) -> None:
    caught: list[Reject] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child)
        except Reject as refused:
            caught.append(refused)
        if len(caught) == 1:
            raise ValueError("once more")
        raise caught[-1]

    family.ride = refuse
    await family.begin(book)
    assert (await family.deliver()).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.RETRYING
    bench.run("delete from idemconsumer.child")  # nothing but the parent's own record is asked
    ended = await family.resume()
    assert [(each.code, each.body) for each in caught] == [("no_driver", {"at": 7})] * 2
    assert (ended.kind, ended.result) == (OutcomeKind.FAILED, b'{"code":"no_driver","body":{"at":7}}')


async def test_a_child_that_was_pruned_before_its_parent_looked(family: Family, bench: Bench) -> None:
    await family.begin(simple(family))
    await family.deliver()
    bench.script(
        "begin; select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.record set changed_at = changed_at - interval '100 d' where state = 3;"
        "select idemconsumer.seal('t'); commit"
    )
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert family.states() == {"book": State.PROCESSING}
    assert (await family.resume()).result == b'"with Ann"'
    bench.script(
        "begin; select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.record set changed_at = changed_at - interval '100 d';"
        "select idemconsumer.seal('t'); commit"
    )
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert bench.run("select 1 from idemconsumer.child") == []


async def test_a_parent_waits_while_its_child_waits_for_a_person(family: Family, bench: Bench) -> None:
    async def broken(payload: dict[str, Any], saga: Saga) -> None:
        raise ValueError("never")

    family.ride = broken
    await family.begin(simple(family))
    assert (await family.deliver()).kind is OutcomeKind.RETRYING
    assert (await family.resume("ride")).kind is OutcomeKind.DEAD
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    admin = SagaAdmin(bench.dsn, SCHEMA)
    (parent,) = await admin.sagas(handler="book")
    ((child,),) = bench.run("select key from idemconsumer.saga where handler = 'ride'")
    assert parent.waits == [f"child {child.hex()[:12]}"]
    detail = await admin.look_up(bytes.fromhex(parent.key))
    assert detail is not None
    assert any(event.what == f"step ride_done waits for child {child.hex()[:12]}" for event in detail.timeline)
    await admin.abandon(child, undo=False)
    assert b'"code":"abandoned"' in ((await family.resume()).result or b"")


async def test_a_child_that_takes_too_long(family: Family, bench: Bench) -> None:
    caught: list[Reject] = []

    async def book(order: dict[str, Any], saga: Saga) -> None:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child, timeout=0)
        except SignalTimeout as late:
            caught.append(late)
        await saga.sleep("nap", "3d")

    assert (await family.begin(book)).kind is OutcomeKind.BUSY
    await family.deliver()
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert len(caught) == 2


async def test_a_child_that_was_late_itself_is_no_time_out_of_its_parent(family: Family) -> None:
    async def late(payload: dict[str, Any], saga: Saga) -> None:
        await saga.wait("paid", timeout=0)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        try:
            await saga.result("ride_done", child)
        except SignalTimeout:
            return "its own"
        except Reject as refused:
            return refused.code
        return ""

    family.ride = late
    await family.begin(book)
    assert (await family.deliver()).kind is OutcomeKind.FAILED
    assert (await family.resume()).result == b'"signal_timeout"'


async def test_a_key_that_has_begun_with_another_payload_is_refused(family: Family, bench: Bench) -> None:
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.deliver()
    ended = await family.begin(simple(family, "r"))
    assert ended.kind is OutcomeKind.FAILED
    assert json.loads(ended.result or b"") == {"code": "conflict", "body": {"child": RIDE.hex()}}
    assert (family.queued, bench.effects) == (0, ["driven", "noted", "undo:noted:out:noted"])


async def test_one_parent_gives_a_key_one_payload(family: Family) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("one", family.handler, {"to": "sea"}, key="r")
        await saga.start("same", family.handler, {"to": "sea"}, key="r")
        await saga.start("other", family.handler, {"to": "hills"}, key="r")

    ended = await family.begin(book)
    assert json.loads(ended.result or b"")["code"] == "conflict"


async def test_a_key_that_begins_with_another_payload_is_no_result(family: Family, bench: Bench) -> None:
    """Both were queued when neither had begun."""
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.begin(simple(family, "r"))
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.deliver()).kind is OutcomeKind.CONFLICT
    ended = await family.resume()
    assert json.loads(ended.result or b"") == {"code": "conflict", "body": {"child": RIDE.hex()}}


async def test_what_has_begun_with_the_same_payload_is_the_child(family: Family) -> None:
    await family.app.start(family.handler, {"to": "sea"}, key="r")
    await family.deliver()
    assert (await family.begin(simple(family, "r"))).result == b'"with Ann"'
    assert (await family.deliver()).kind is OutcomeKind.DUPLICATE


# -------------------------------------------------------------------------------------------------------- undone (L49)
async def compensate(tx: Tx, child: Child[Ride], payload: dict[str, Any]) -> None:
    await put(tx, f"compensated {payload['to']}")


def undone(family: Family, **more: Any) -> Body:
    """It is rejected once its child has been started, without a look at its end."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("noted", put, "noted", undo=take_back)
        await saga.start("ride", family.handler, {"to": "sea"}, **more)
        await saga.sleep("soon", 0 if family.rides else "3d")
        raise Reject("no")

    return book


async def undo_of(family: Family, bench: Bench) -> Outcome:
    bench.script(
        "begin; update idemconsumer.saga set due = clock_timestamp() where handler = 'book';"
        "select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.step set until = clock_timestamp() where name = 'soon';"
        "select idemconsumer.seal('t'); commit"
    )
    return await family.resume()


async def test_a_child_that_still_runs_is_cancelled_and_waited_for(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(undone(family, undo=compensate))
    await family.deliver()
    waits = await undo_of(family, bench)
    assert (waits.kind, waits.state) == (OutcomeKind.BUSY, State.UNDOING)
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    (parent,) = await SagaAdmin(bench.dsn, SCHEMA).sagas(handler="book")
    assert [each.split()[0] for each in parent.waits] == ["child"]
    assert bench.effects == ["noted", "driven"]
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]
    assert family.states() == {"book": State.FAILED, "ride": State.FAILED}


async def test_a_cancelled_child_that_ends_before_its_parent_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, undo=compensate))
    await family.deliver()

    async def meanwhile(*given: Any) -> float:
        assert (await family.resume("ride")).kind is OutcomeKind.FAILED
        return await pause(*given)

    family.station.leases.pause_undo = meanwhile  # type: ignore[assignment, method-assign]
    assert (await undo_of(family, bench)).due <= 0
    assert (await family.resume()).kind is OutcomeKind.FAILED


async def test_an_end_that_is_being_committed_while_an_undo_gives_itself_up_is_not_missed(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, key="r", undo=compensate))
    await family.deliver()

    async def beside(*given: Any) -> float:
        async with family.ending(RIDE) as rival:
            pausing = asyncio.create_task(pause(*given))
            await until(lambda: bench.waiting() == 1, "the parent waits for who ends the child")
            await rival.commit()
            return await pausing

    family.station.leases.pause_undo = beside  # type: ignore[assignment, method-assign]
    assert (await undo_of(family, bench)).due <= 0
    assert (await family.resume()).kind is OutcomeKind.FAILED


async def test_an_undo_waits_for_a_claim_of_its_childs_key(family: Family, bench: Bench) -> None:
    """Else it would take a child that is beginning for one that has not."""
    family.ride = nap
    await family.begin(undone(family, key="r", undo=compensate))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute(CLAIM_LOCK, (RIDE,))
        undoing = asyncio.create_task(undo_of(family, bench))
        await until(lambda: bench.waiting() == 1, "the undo waits")
        await rival.commit()
    assert (await undoing).kind is OutcomeKind.FAILED
    assert (await family.deliver()).kind is OutcomeKind.DUPLICATE


async def test_a_worker_that_is_lost_behind_the_request_leaves_an_undo_that_goes_on(
    family: Family, bench: Bench
) -> None:
    family.ride, pause = nap, family.station.leases.pause_undo
    await family.begin(undone(family, undo=compensate))
    await family.deliver()

    async def lost(*given: Any) -> float:
        raise StoreUnavailable("the server is away")

    family.station.leases.pause_undo = lost  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreUnavailable):
        await undo_of(family, bench)
    family.station.leases.pause_undo = pause  # type: ignore[method-assign]
    bench.expire(family.station)
    family.station.register(bench)
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


async def test_a_child_that_completes_before_the_request_is_compensated_for(
    family: Family, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.ride, cancel = nap, SagaAdmin.cancel
    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()

    async def late(*given: Any, **more: Any) -> Cancellation:
        async with family.ending(RIDE) as rival:
            await rival.commit()
        return await cancel(*given, **more)

    monkeypatch.setattr(SagaAdmin, "cancel", late)
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "compensated sea", "undo:noted:out:noted"]


async def test_for_a_child_that_has_completed_the_undo_compensates(family: Family, bench: Bench) -> None:
    await family.begin(undone(family, undo=compensate))
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "compensated sea", "undo:noted:out:noted"]
    assert family.states() == {"book": State.FAILED, "ride": State.COMPLETED}


async def test_for_a_child_that_has_failed_nothing_is_undone(family: Family, bench: Bench) -> None:
    family.ride = refuse
    await family.begin(undone(family, undo=compensate))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "undo:noted:out:noted"]


async def test_a_child_that_has_not_begun_never_does(family: Family, bench: Bench) -> None:
    await family.begin(undone(family, undo=compensate))
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    late = await family.deliver()
    assert (late.kind, late.result) == (OutcomeKind.DUPLICATE, b'{"code":"cancelled","body":null}')
    assert (family.rides, bench.effects) == ([], ["noted", "undo:noted:out:noted"])


async def test_what_runs_under_its_key_with_another_payload_is_left_alone(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.app.start(family.handler, {"to": "hills"}, key="r")
    await family.begin(undone(family, key="r", undo=compensate))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.PROCESSING}
    assert bench.run("select cancel from idemconsumer.saga") == [(None,)]


async def test_a_child_without_an_undo_goes_on_alone(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(undone(family))
    await family.deliver()
    assert (await undo_of(family, bench)).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.PROCESSING}


async def test_a_parent_that_is_cancelled_while_it_waits_takes_its_child_with_it(family: Family, bench: Bench) -> None:
    family.ride = nap
    await family.begin(simple(family, undo=compensate))
    await family.deliver()
    parent = family.app.handlers["book"]
    assert (await family.app.cancel(parent, key="k", undo=True)).accepted
    assert (await family.resume()).kind is OutcomeKind.BUSY
    assert (await family.resume("ride")).kind is OutcomeKind.FAILED
    assert (await family.resume()).result == b'{"code":"cancelled","body":null}'
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


async def test_nothing_of_a_child_is_decided_under_an_old_token(family: Family, bench: Bench) -> None:
    await family.begin(simple(family, "r"))
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    held, leases = await family.station.take(family.bound["book"]), family.station.leases
    assert held is not None
    former = replace(held, token=held.token - 1)
    for begun in (
        leases.wait(former, "ride_done", StepKind.WAIT, 1.0, "child:", child=RIDE, overlapped=False),
        leases.stop_child(former, RIDE, "shop/-/ride"),
        leases.pause_undo(former, RIDE),
    ):
        with pytest.raises(Fenced):
            await begun
    assert bench.run("select worker from idemconsumer.saga") == [(held.worker,)]
    assert family.states() == {"book": State.PROCESSING}


# ------------------------------------------------------------------------- what became of the parent, or of the child
async def expire(bench: Bench, family: Family) -> None:
    """The parent is put aside: somebody has changed its handler."""
    family.book = drive
    bench.run("update idemconsumer.saga set due = clock_timestamp() where handler = 'book'")
    assert (await family.resume()).kind is OutcomeKind.DEAD


async def test_a_parent_that_was_put_aside_when_its_child_ended_goes_on_with_that(family: Family, bench: Bench) -> None:
    await family.begin(book := simple(family))
    await expire(bench, family)
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    family.book = book
    assert (await family.station.leases.look("shop", ["book"])).due == {}
    await SagaAdmin(bench.dsn, SCHEMA).resume(keys.digest("shop", None, "book", "k"))
    assert (await family.resume()).result == b'"with Ann"'


@pytest.mark.parametrize("undo", [True, False])
async def test_a_child_ends_whatever_became_of_its_abandoned_parent(family: Family, bench: Bench, undo: bool) -> None:
    await family.begin(book := simple(family))
    await expire(bench, family)
    family.book = book
    await SagaAdmin(bench.dsn, SCHEMA).abandon(keys.digest("shop", None, "book", "k"), undo=undo)
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    if undo:
        assert (await family.resume()).kind is OutcomeKind.FAILED
    assert family.states() == {"book": State.FAILED, "ride": State.COMPLETED}
    assert bench.effects == ["noted", "driven", "undo:noted:out:noted"][: 3 if undo else 2]


@pytest.mark.parametrize("moved", ["book", "ride"])
async def test_a_parent_and_its_child_find_each_other_after_a_move(family: Family, bench: Bench, moved: str) -> None:
    """Of the parent while it waits, or of the child while it runs: to a handler of another app."""
    family.ride = nap
    await family.begin(simple(family, "r"))
    assert (await family.deliver()).kind is OutcomeKind.BUSY
    other = Family(bench, family.station)
    other.app = App("fleet")
    handler = other.app.idempotent_handler("memory:moved", key="id", name="moved", backoff="1ms, 1ms")(
        simple(family, "r") if moved == "book" else nap
    )
    assert await SagaAdmin(bench.dsn, SCHEMA).move(("shop", moved), ("fleet", "moved")) == (1, 0)
    other.bound = {handler.name: other.app.bound_handlers(Settings(dsn=bench.dsn))[0]}
    bench.script(
        "begin; update idemconsumer.saga set due = clock_timestamp() where signals is null;"
        "select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.step set until = clock_timestamp() where name = 'nap';"
        "select idemconsumer.seal('t'); commit"
    )
    if moved == "ride":
        assert (await other.resume("moved")).kind is OutcomeKind.APPLIED
        assert (await family.resume()).result == b'"with Ann"'
    else:
        assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
        assert (await other.resume("moved")).result == b'"with Ann"'
    assert bench.effects == ["noted", "driven", "billed Ann"]


async def test_a_child_that_was_moved_is_cancelled_with_its_parent(family: Family, bench: Bench) -> None:
    """Its stored key is that of its former handler, which the code no longer names."""
    family.ride = nap

    @family.app.idempotent_handler("memory:moved", key="id", name="moved", backoff="1ms, 1ms")
    async def moved(payload: dict[str, Any], saga: Saga) -> Ride:
        return await nap(payload, saga)

    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()
    await SagaAdmin(bench.dsn, SCHEMA).move(("shop", "ride"), ("shop", "moved"))
    family.handler = moved
    family.bound = {each.name: each for each in family.app.bound_handlers(Settings(dsn=bench.dsn))}
    assert (await undo_of(family, bench)).kind is OutcomeKind.BUSY
    assert (await family.resume("moved")).kind is OutcomeKind.FAILED
    assert (await family.resume()).kind is OutcomeKind.FAILED
    assert bench.effects == ["noted", "driven", "undo:driven:out:driven", "undo:noted:out:noted"]


@pytest.mark.parametrize("key", [None, "r"])
async def test_children_that_nobody_begins_are_told(family: Family, bench: Bench, key: str | None) -> None:
    await family.begin(simple(family, key))
    bench.run("update idemconsumer.worker set runs = '[]'")
    await family.app.start(family.handler, {"to": "hills"}, key="begun from code, by nobody who waits")
    assert await find_orphans(bench.dsn, SCHEMA, "shop", {"book": None, "ride": None}) == []
    (found,) = await find_orphans(bench.dsn, SCHEMA, "shop", {"book": None})
    assert (found.waiting.handler, found.waiting.sagas, found.waiting.begun) == ("ride", 1, False)
    await family.deliver()
    assert await find_orphans(bench.dsn, SCHEMA, "shop", {"book": None}) == []


# ------------------------------------------------------------------------------------ a message that is not read (L66)
def unread(family: Family, body: bytes = b"{", reason: str = "undecodable") -> DeadLetter:
    """That of the message of the child `r`."""
    bound = family.bound["ride"]
    work = Work.of(bound, Message(bound.own_source, body, message_id="r"), refusal=BadMessage(reason, "at byte 1"))
    return dead_letter(work, reason, "at byte 1", 1)


@pytest.mark.parametrize("tenant", [None, "a/b%"])
async def test_a_child_whose_message_cannot_be_read_has_ended(family: Family, bench: Bench, tenant: str | None) -> None:
    """A worker puts its message aside, and the parent goes on."""
    family.book, parent = simple(family), family.app.handlers["book"]
    await family.app.start(parent, {"id": "t"}, key="t", tenant=tenant)
    bench.run(
        "create function spoil() returns trigger language plpgsql as $$ begin"
        " if new.name like '%/ride' then new.body = '{'; end if; return new; end $$"
    )
    bench.run("create trigger spoil before insert on idemconsumer.queue for each row execute function spoil()")
    worker = family.app.worker(Settings(dsn=bench.dsn, concurrency=2))
    running = asyncio.create_task(worker.run())
    try:
        outcome = await family.app.result(parent, key="t", tenant=tenant, wait="25s")
    finally:
        worker.drain()
        await running
        bench.run("drop function spoil() cascade")
    rejected = json.loads(outcome.result or b"")
    assert (outcome.state, rejected["code"], rejected["body"]["reason"]) == (State.FAILED, "dead_letter", "undecodable")
    assert [rejected["body"]["id"]] == [number for (number,) in bench.run("select id from idemconsumer.dead_letter")]
    assert family.states() == {"book": State.FAILED, "ride": State.FAILED}
    assert bench.effects == ["noted", "undo:noted:out:noted"]


async def test_a_child_that_has_begun_has_not_ended_with_a_copy_that_cannot_be_read(family: Family) -> None:
    family.ride = nap
    await family.begin(simple(family, "r"))
    await family.deliver()
    await family.station.store.bury(unread(family), None)
    assert family.states() == {"book": State.PROCESSING, "ride": State.PROCESSING}
    assert (await family.station.leases.look("shop", ["book"])).due == {}


async def test_a_child_that_begins_while_a_copy_is_put_aside_unread_has_not_ended(family: Family, bench: Bench) -> None:
    await family.begin(simple(family, "r"))
    async with await psycopg.AsyncConnection.connect(bench.dsn) as rival:
        await rival.execute("select set_config('idemconsumer.open', 't', true)")
        await rival.execute(CLAIM_LOCK, (RIDE,))
        burying = asyncio.create_task(family.station.store.bury(unread(family), None))
        await until(lambda: bench.waiting() == 1, "the letter waits for the claim")
        await rival.execute(
            "insert into idemconsumer.record (key, scope_id, state, changed_at) values (%s, 1, 1, clock_timestamp())",
            (RIDE,),
        )
        await rival.execute("select idemconsumer.seal('t')")
    await burying
    assert bench.run("select ended from idemconsumer.child") == [(False,)]


@pytest.mark.parametrize("body", [b"{", b"null"])
async def test_what_nobody_has_started_has_no_end_when_it_is_put_aside_unread(family: Family, body: bytes) -> None:
    await family.station.store.bury(unread(family, body), None)
    assert family.states() == {}


async def test_a_conflict_is_no_end_of_a_child(family: Family) -> None:
    await family.begin(simple(family, "r"))
    await family.station.store.bury(unread(family, reason="conflict"), None)
    assert family.states() == {"book": State.PROCESSING}


# ------------------------------------------------------------------------------------------------------- circles (L65)
async def circle(payload: dict[str, Any], saga: Saga, family: Family, *, key: str) -> Ride:
    return await saga.result("done", await saga.start("back", family.handler, {"depth": 2}, key=key))


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_saga_starts_none_that_has_started_it(family: Family, bench: Bench, depth: int) -> None:
    """Its parent under the same payload, or that one's parent; nothing of the start is left."""

    async def nested(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] > 2 - depth:
            child = await saga.start("next", family.handler, {"depth": payload["depth"] - 1})
            return await saga.result("done", child)
        return await circle(payload, saga, family, key="top")

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", await saga.start("ride", family.handler, {"depth": 2}, key="top"))).driver

    family.ride = nested
    await family.begin(book)
    for _ in range(depth):
        assert (await family.deliver()).kind is OutcomeKind.BUSY
    assert (await family.deliver()).error == "SagaMisused"
    assert (await family.resume("ride")).reason == "attempts_exhausted"
    assert "or has started it and has not ended" in bench.letter
    assert (family.queued, len(bench.run("select 1 from idemconsumer.child"))) == (0, depth + 1)


async def test_of_two_that_start_each_other_at_once_one_does_not_wait(family: Family, bench: Bench) -> None:
    """Neither start has seen the other one: whoever waits later sees both."""
    starting = asyncio.Barrier(2)
    kinship = PostgresStep.kinship

    async def together(step: PostgresStep, child: bytes) -> Kinship:
        found = await kinship(step, child)
        await starting.wait()
        return found

    async def each(payload: dict[str, Any], saga: Saga) -> Ride:
        other = "b" if payload["n"] == "a" else "a"
        child = await saga.start("other", family.handler, {"n": other}, key=other)
        return await saga.result("done", child)

    family.ride = each
    for key in "ab":
        await family.app.start(family.handler, {"n": key}, key=key)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PostgresStep, "kinship", together)
        outcomes = await asyncio.gather(family.deliver(), family.deliver())
    assert "SagaMisused" in {outcome.error for outcome in outcomes}


async def test_what_has_started_a_saga_and_has_ended_is_no_circle(family: Family) -> None:
    async def once(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] == 0:
            return await circle(payload, saga, family, key="top")
        await saga.start("next", family.handler, {"depth": 0})
        return Ride("first")

    family.ride = once
    await family.app.start(family.handler, {"depth": 2}, key="top")
    assert (await family.deliver()).kind is OutcomeKind.APPLIED
    assert (await family.deliver()).result == b'{"driver":"first"}'


async def test_an_undo_waits_for_no_saga_that_waits_for_it(family: Family, bench: Bench) -> None:
    """A circle that was begun before it was refused."""
    family.ride = nap
    await family.begin(undone(family, undo=compensate, key="r"))
    await family.deliver()
    insert = "insert into idemconsumer.child (parent, key) select key, %s from idemconsumer.saga where handler = 'ride'"
    bench.run(insert, (keys.digest("shop", None, "book", "k"),))
    assert (await undo_of(family, bench)).error == "SagaMisused"
    assert bench.run("select cancel from idemconsumer.saga where handler = 'ride'") == [(None,)]


async def test_nobody_waits_for_what_it_has_not_started(family: Family) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", Child(family.handler, "r", None, RIDE.hex()))).driver

    assert (await family.begin(book)).error == "SagaMisused"


async def test_a_child_whose_tenant_is_in_its_payload_is_not_another_saga(family: Family) -> None:
    """The parent would wait under one key, and the child begin under another."""

    @family.app.idempotent_handler("memory:fleet", key="id", tenant="of", name="fleet")
    async def fleet(payload: dict[str, Any], saga: Saga) -> str:
        return "ended"

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return await saga.result("done", await saga.start("fleet", fleet, {"id": 1, "of": "a"}))

    assert (await family.begin(book)).error == "SagaMisused"
    assert family.queued == 0


# ------------------------------------------------------------------------------------------------------------ together
async def test_many_children_side_by_side(family: Family, bench: Bench) -> None:
    async def one(saga: Saga, n: int) -> str:
        child = await saga.start(f"ride_{n}", family.handler, {"to": str(n)})
        return (await saga.result(f"done_{n}", child)).driver

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return ",".join(await saga.all([one(saga, n) for n in range(4)]))

    async def named(payload: dict[str, Any], saga: Saga) -> Ride:
        return Ride(f"D{payload['to']}")

    family.ride = named
    assert (await family.begin(book)).kind is OutcomeKind.BUSY
    outcome = None
    for left in (3, 2, 1, 0):
        await family.deliver()
        outcome = await family.resume()
        assert family.queued == left
    assert outcome is not None
    assert outcome.result == b'"D0,D1,D2,D3"'


async def test_a_child_of_its_own_kind(family: Family) -> None:
    async def nested(payload: dict[str, Any], saga: Saga) -> Ride:
        if payload["depth"] == 0:
            return Ride("deep")
        child = await saga.start("next", family.handler, {"depth": payload["depth"] - 1})
        return await saga.result("done", child)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        return (await saga.result("done", await saga.start("ride", family.handler, {"depth": 2}))).driver

    family.ride = nested
    await family.begin(book)
    for kind in (OutcomeKind.BUSY, OutcomeKind.BUSY, OutcomeKind.APPLIED):
        assert (await family.deliver()).kind is kind
    assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
    assert (await family.resume("ride")).kind is OutcomeKind.APPLIED
    assert (await family.resume()).result == b'"deep"'


async def test_a_child_has_the_tenant_of_its_parent(family: Family, bench: Bench) -> None:
    @family.app.idempotent_handler("memory:tenants", key="id", tenant="of", name="tenants")
    async def tenants(order: dict[str, Any], saga: Saga) -> str:
        child = await saga.start("ride", family.handler, {"to": "sea"})
        assert child.tenant == "a/b%"
        return (await saga.result("done", child)).driver

    family.bound = {each.name: each for each in family.app.bound_handlers(Settings(dsn=bench.dsn))}
    await family.station.deliver(family.bound["tenants"], Message("memory:tenants", b'{"id": "k", "of": "a/b%"}'))
    await family.deliver()
    scopes = {name for (name,) in bench.run("select name from idemconsumer.scope")}
    assert scopes >= {keys.scope_name("shop", "a/b%", "ride")}
    assert (await family.resume("tenants")).result == b'"Ann"'


async def test_what_cannot_be_started_or_waited_for(family: Family) -> None:
    async def plain(payload: object) -> None:
        return

    async def itself(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("again", family.app.handlers["book"], order, key="k")

    async def nothing(order: dict[str, Any], saga: Saga) -> None:
        await saga.start("plain", plain, 1)

    async def no_child(order: dict[str, Any], saga: Saga) -> None:
        await saga.result("done", "ride")  # type: ignore[arg-type]

    for n, book in enumerate((itself, nothing, no_child)):
        family.book = book
        key = "k" if book is itself else f"k{n}"
        outcome = await family.station.deliver(family.bound["book"], order(key))
        assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "SagaMisused")


async def test_a_step_that_has_become_a_start_is_a_change(family: Family, bench: Bench) -> None:
    async def before(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("noted", put, "noted", undo=take_back)
        await saga.tx("ride", put, "ride")
        raise ValueError("once")

    await family.begin(before)
    family.book = simple(family)
    outcome = await family.resume()
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "recorded as something else" in bench.letter
