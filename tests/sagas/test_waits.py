"""Sagas that sleep, and that wait for signals (L40 to L43)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import psycopg
import pytest

from idemconsumer import OutcomeKind, Reject, Saga, SignalTimeout
from idemconsumer.brokers.postgres_broker import PostgresBroker
from idemconsumer.engine.work import Work
from idemconsumer.message import keys
from idemconsumer.message.message import Subscription
from idemconsumer.ports.broker import Bounds
from idemconsumer.rules import saga as rules
from idemconsumer.rules.values import State
from idemconsumer.sagas.run import SagaInterrupted
from idemconsumer.settings import Settings
from idemconsumer.stores.leased_saga import LeasedSaga
from idemconsumer.worker.retention import prune_once
from tests.support.inside import sagas_in_hand
from tests.support.sagas import SCHEMA, Bench, Remote, Station, locked, put, saga, take_back
from tests.support.waiting import until


def later(bench: Bench, days: float) -> None:
    """All that is due, and all ends of waits, that much earlier."""
    bench.script(
        f"begin; update idemconsumer.saga set due = due - interval '{days} d';"
        "select set_config('idemconsumer.open', 't', true);"
        f"update idemconsumer.step set until = until - interval '{days} d';"
        "select idemconsumer.seal('t'); commit"
    )


async def cool(order: dict[str, Any], saga: Saga) -> str:
    await saga.tx("a", put, "a")
    await saga.sleep("cooling_off", "3d")
    await saga.tx("b", put, "b")
    return "cool"


# ------------------------------------------------------------------------------------------------------- sleep (L40)
async def test_a_saga_that_sleeps_is_in_no_process_and_any_other_one_resumes_it(
    bench: Bench, one: Station, two: Station
) -> None:
    handler = saga(cool)
    slept = await one.deliver(handler)
    assert (slept.kind, slept.state) == (OutcomeKind.BUSY, State.PROCESSING)
    assert 0 < slept.due <= 3 * 86_400
    assert bench.run("select worker, parked, signals from idemconsumer.saga") == [(None, None, None)]
    same = "select s.due = t.until from idemconsumer.saga as s, idemconsumer.step as t where t.until is not null"
    assert bench.run(same) == [(True,)]
    assert not one.engine._active
    assert not sagas_in_hand(one.engine)
    assert await two.take(handler) is None
    later(bench, 3)
    assert (await two.resume(handler)).result == b'"cool"'
    assert bench.effects == ["a", "b"]


async def test_the_end_of_a_sleep_is_computed_once(bench: Bench, one: Station) -> None:
    """Neither a drain nor another duration in the code changes it."""
    ends = "select until from idemconsumer.step where name = 'cooling_off'"
    await one.deliver(saga(cool))
    ((end,),) = bench.run(ends)

    async def longer(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.sleep("cooling_off", "300d")

    bench.run("update idemconsumer.saga set due = clock_timestamp()")  # as a drain has it
    assert (await one.resume(saga(longer))).kind is OutcomeKind.BUSY
    assert bench.run(ends) == [(end,)]
    assert bench.run("select due from idemconsumer.saga") == [(end,)]


async def test_sleeping_costs_no_attempt_and_its_end_begins_them_anew(bench: Bench, one: Station) -> None:
    runs = 0

    async def book(order: dict[str, Any], saga: Saga) -> None:
        nonlocal runs
        runs += 1
        if runs in (1, 6):
            raise ValueError("not now")
        await saga.sleep("cooling_off", "3d")
        await saga.tx("b", put, "b")

    handler = saga(book, max_attempts=2)
    assert (await one.deliver(handler)).kind is OutcomeKind.RETRYING
    for _ in range(4):
        assert (await one.resume(handler)).kind is OutcomeKind.BUSY
        assert bench.run("select attempt from idemconsumer.saga") == [(1,)]
        bench.run("update idemconsumer.saga set due = clock_timestamp()")
    later(bench, 3)
    runs = 10
    assert (await one.resume(handler)).kind is OutcomeKind.APPLIED


async def test_a_sleep_that_is_over_is_not_slept_again(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.sleep("nap", 0 if fails else "3d")
        if fails:
            raise ValueError("after it")

    fails = True
    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    fails = False
    assert (await one.resume(saga(book))).kind is OutcomeKind.APPLIED


async def test_a_worker_whose_handler_knows_no_sleep_leaves_the_saga_to_another_build(
    bench: Bench, one: Station, two: Station
) -> None:
    """What is stored of a sleep is what an older code takes for a finished step (L29)."""
    handler = saga(cool)
    await two.deliver(handler)
    later(bench, 4)
    runs = '[{"app": "shop", "handler": "book", "version": null}]'
    bench.run("update idemconsumer.worker set build = id, runs = %s::jsonb", (runs,))

    async def without(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.tx("b", put, "b")

    outcome = await one.resume(saga(without))
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "SagaChanged")
    assert (bench.effects, bench.letters) == (["a"], [])
    stored = bench.run("select kind, state, position from idemconsumer.step where name = 'cooling_off'")
    assert stored == [(1, 2, None)]
    (left,) = await two.leases.take("shop", ["book"], 1, unheld=await two.leases.own())
    assert (await two.run(Work.of(handler, left.message, leased=left))).kind is OutcomeKind.APPLIED


@pytest.mark.parametrize("name", ["", "undo:x", "a"])
async def test_a_sleep_has_a_name_of_its_own(bench: Bench, one: Station, name: str) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.sleep(name, "1s")

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "SagaMisused")


async def test_a_step_that_has_become_a_sleep_is_a_change(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.sleep("a", "1s")

    async def before(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        raise ValueError("once")

    await one.deliver(saga(before))
    outcome = await one.resume(saga(book))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")


# ---------------------------------------------------------------------------------------------- beside others (L41)
async def test_what_runs_beside_a_sleep_is_finished_first(bench: Bench, one: Station, remote: Remote) -> None:
    async def branch(saga: Saga) -> None:
        await saga.call("first", remote.charge, "first")
        await asyncio.sleep(0.3)  # longer than the grace: the branch is known, and has its time between two steps
        await saga.call("second", remote.charge, "second")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.sleep("cooling_off", "3d"), branch(saga))
        await saga.tx("b", put, "b")

    handler = saga(book)
    assert (await one.deliver(handler)).kind is OutcomeKind.BUSY
    assert remote.effects == ["first", "second"]
    later(bench, 3)
    assert (await one.resume(handler)).kind is OutcomeKind.APPLIED
    assert (remote.effects, bench.effects) == (["first", "second"], ["b"])


async def test_the_saga_is_due_when_the_first_of_its_waits_is_over(bench: Bench, one: Station) -> None:
    async def branch(saga: Saga, days: int) -> None:
        await saga.sleep(f"{days} days", f"{days}d")
        await saga.tx(f"after {days}", put, f"after {days}")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        async with asyncio.TaskGroup() as group:
            for days in (3, 1, 2):
                group.create_task(branch(saga, days))

    handler = saga(book)
    outcome = await one.deliver(handler)
    for day in (1, 2, 3):
        assert outcome.kind is OutcomeKind.BUSY
        assert bench.effects == [f"after {n}" for n in range(1, day)]
        later(bench, 1)
        outcome = await one.resume(handler)
    assert outcome.kind is OutcomeKind.APPLIED
    assert bench.effects == ["after 1", "after 2", "after 3"]


async def test_a_short_sleep_beside_a_call_is_over_in_time(bench: Bench, one: Station, remote: Remote) -> None:
    """Nothing is paused while the call runs, and the other branch goes on."""
    slept = asyncio.Event()

    async def slow(step: Any, name: str) -> None:
        await slept.wait()

    async def branch(saga: Saga) -> None:
        await saga.sleep("nap", "20ms")
        slept.set()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.call("slow", slow, "slow"), branch(saga))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED


async def test_a_rejection_beside_a_sleep_undoes_at_once(bench: Bench, one: Station) -> None:
    async def refuse(step: Any) -> None:
        raise Reject("declined")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await asyncio.gather(saga.sleep("cooling_off", "3d"), saga.call("c", refuse))

    outcome = await one.deliver(saga(book))
    assert outcome.kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_stall_beside_a_sleep_delays_no_undo(
    bench: Bench, one: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stood still, so that the grace was over before the handler could see what it awaited."""
    monkeypatch.setattr(rules, "GRACE", 0.0)

    async def refuse(step: Any) -> None:
        raise Reject("declined")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.sleep("cooling_off", "3d"), saga.call("c", refuse))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.FAILED


async def test_while_a_saga_is_undone_nobody_sleeps(bench: Bench, one: Station) -> None:
    async def fails(tx: Any, output: str, name: str) -> None:
        raise ValueError("not yet")

    async def refuse(step: Any) -> None:
        raise Reject("declined")

    def book(undo: Any) -> Any:
        async def book(order: dict[str, Any], saga: Saga) -> None:
            await saga.tx("a", put, "a", undo=undo)
            await asyncio.gather(saga.sleep("cooling_off", "3d"), saga.call("c", refuse))

        return saga(book)

    assert (await one.deliver(book(fails))).kind is OutcomeKind.RETRYING
    assert bench.state is State.UNDOING
    assert (await one.resume(book(take_back))).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_handler_that_forgets_its_sleep_has_failed(one: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, wait = asyncio.Event(), one.leases.wait

    async def begin(*given: Any, **named: Any) -> Any:
        found = await wait(*given, **named)
        begun.set()
        return found

    monkeypatch.setattr(one.leases, "wait", begin)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        task = asyncio.create_task(saga.sleep("cooling_off", "3d"))
        await begun.wait()
        assert not task.done()

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "SagaMisused")


async def test_no_code_turns_a_pause_into_an_end(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            await saga.sleep("cooling_off", "3d")
        except SagaInterrupted:
            return "slept well"
        return ""

    assert (await one.deliver(saga(book))).kind is OutcomeKind.BUSY
    assert bench.state is State.PROCESSING


async def test_a_drain_while_others_run_beside_a_sleep_costs_nothing(bench: Bench, one: Station) -> None:
    begun = asyncio.Event()

    async def slow(step: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.sleep("cooling_off", "3d"), saga.call("slow", slow))

    running = asyncio.create_task(one.deliver(saga(book)))
    await begun.wait()
    one.engine.drain()
    assert (await running).kind is OutcomeKind.CANCELLED
    assert bench.run("select worker, attempt from idemconsumer.saga") == [(None, 0)]


async def test_a_pause_under_an_old_token_changes_nothing(bench: Bench, one: Station, two: Station) -> None:
    """The worker was frozen until another one took the saga."""
    handler = saga(cool)
    pause = one.leases.pause

    async def frozen(*given: Any) -> float:
        bench.expire(one)
        assert await two.take(handler) is not None
        return await pause(*given)

    one.leases.pause = frozen  # type: ignore[assignment, method-assign]
    assert (await one.deliver(handler)).kind is OutcomeKind.FENCED
    assert bench.run("select worker from idemconsumer.saga") == [(two.lease.worker,)]


async def test_a_message_that_its_broker_keeps_is_held_while_its_saga_sleeps(bench: Bench, one: Station) -> None:
    outcome = await one.deliver(saga(cool, settle="finished"))
    assert (outcome.kind, outcome.state) == (OutcomeKind.BUSY, None)


# ----------------------------------------------------------------------------------------------------- signals (L42)
class Approval(msgspec.Struct):
    by: str


async def approve(order: dict[str, Any], saga: Saga) -> str:
    approval = await saga.wait("approved", into=Approval, timeout="7d")
    await saga.tx("a", put, approval.by)
    return approval.by


def send(bench: Bench, payload: str = '{"by": "Ann"}', *, name: str = "approved", key: str = "k") -> str:
    rows = bench.run("select idemconsumer.signal('shop', 'book', %s, %s, %s::jsonb)", (key, name, payload))
    return str(rows[0][0])


def unsent(bench: Bench) -> int:
    return len(bench.run("select 1 from idemconsumer.signal"))


async def test_a_signal_resumes_the_saga_on_any_worker(bench: Bench, one: Station, two: Station) -> None:
    handler = saga(approve)
    assert (await one.deliver(handler)).kind is OutcomeKind.BUSY
    assert await two.take(handler) is None
    assert send(bench, name="paid") == "stored"
    assert await two.take(handler) is None, "it waits for another one"
    assert send(bench) == "stored"
    assert (await two.resume(handler)).result == b'"Ann"'
    assert (bench.effects, unsent(bench)) == (["Ann"], 1)
    assert send(bench) == "ended"
    assert unsent(bench) == 1


async def test_a_signal_that_comes_first_is_kept(bench: Bench, one: Station) -> None:
    assert send(bench) == "early"
    assert (await one.deliver(saga(approve))).kind is OutcomeKind.APPLIED
    assert (bench.effects, unsent(bench)) == (["Ann"], 0)


async def test_each_wait_takes_one_signal_and_the_first_the_oldest(bench: Bench, one: Station) -> None:
    async def vote(order: dict[str, Any], saga: Saga) -> list[str]:
        return [(await saga.wait(f"vote {n}", into=Approval, signal="vote")).by for n in range(3)]

    for by in ("Ann", "Bob"):
        send(bench, f'{{"by": "{by}"}}', name="vote")
    handler = saga(vote)
    assert (await one.deliver(handler)).kind is OutcomeKind.BUSY
    send(bench, '{"by": "Cem"}', name="vote")
    send(bench, '{"by": "Dee"}', name="vote")
    assert (await one.resume(handler)).result == b'["Ann","Bob","Cem"]'
    assert bench.run("select body from idemconsumer.signal") == [(b'{"by": "Dee"}',)]


async def test_a_signal_is_taken_in_the_commit_that_records_it(bench: Bench, one: Station) -> None:
    """The next run gets the same payload, whatever was sent meanwhile."""
    fails = True

    async def book(order: dict[str, Any], saga: Saga) -> str:
        approval = await saga.wait("approved", into=Approval)
        if fails:
            raise ValueError("after it")
        return approval.by

    send(bench)
    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    send(bench, '{"by": "Bob"}')
    fails = False
    assert (await one.resume(saga(book))).result == b'"Ann"'
    assert unsent(bench) == 1


async def test_a_time_out_rejects_and_is_final(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.wait("approved", into=Approval, timeout="7d")

    handler = saga(book)
    await one.deliver(handler)
    later(bench, 7)
    outcome = await one.resume(handler)
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.result == b'{"code":"signal_timeout","body":{"signal":"approved"}}'
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_time_out_can_be_caught_and_stays_one_though_the_signal_comes_later(bench: Bench, one: Station) -> None:
    fails = True

    async def book(order: dict[str, Any], saga: Saga) -> str:
        try:
            await saga.wait("approved", into=Approval, timeout="7d")
        except SignalTimeout as late:
            if fails:
                raise ValueError("after it") from None
            return f"no {late.signal}"
        return "approved"

    handler = saga(book)
    await one.deliver(handler)
    later(bench, 7)
    assert (await one.resume(handler)).kind is OutcomeKind.RETRYING
    send(bench)
    fails = False
    assert (await one.resume(handler)).result == b'"no approved"'
    assert unsent(bench) == 1


async def test_a_signal_that_is_there_when_a_worker_looks_is_in_time(bench: Bench, one: Station) -> None:
    handler = saga(approve)
    await one.deliver(handler)
    later(bench, 8)
    send(bench)
    assert (await one.resume(handler)).result == b'"Ann"'


async def test_a_signal_that_does_not_decode_is_left_to_a_person(bench: Bench, one: Station) -> None:
    send(bench, '{"from": "Ann"}')
    outcome = await one.deliver(saga(approve))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "saga_changed")
    assert "the stored output of step 'approved' no longer decodes" in bench.letter


async def test_each_branch_gets_a_signal_that_is_there_though_its_time_is_over(bench: Bench, one: Station) -> None:
    """All look at once. None takes the oldest signal for gone, and itself for too late, while others are left."""

    async def vote(order: dict[str, Any], saga: Saga) -> list[Any]:
        waits = (saga.wait(f"vote {n}", into=Approval, signal="vote", timeout="7d") for n in range(3))
        return sorted([vote.by for vote in await asyncio.gather(*waits)])

    handler = saga(vote)
    await one.deliver(handler)
    later(bench, 8)
    for by in ("Ann", "Bob", "Cem"):
        send(bench, f'{{"by": "{by}"}}', name="vote")
    async with locked(bench, "select 1 from idemconsumer.signal order by id limit 1 for update"):
        resumed = asyncio.create_task(one.resume(handler))
        await until(lambda: bench.waiting() == 3, "each wait wants the oldest signal")
    assert (await resumed).result == b'["Ann","Bob","Cem"]'
    assert unsent(bench) == 0


@pytest.mark.parametrize("early", [True, False])
async def test_a_wait_that_looks_while_the_run_ends_is_not_forgotten(bench: Bench, one: Station, early: bool) -> None:
    """Another branch gives the saga up meanwhile. `early`: the look takes the signal, and nobody gets its answer."""
    wait, looking, paused = one.leases.wait, asyncio.Event(), asyncio.Event()

    async def slow(saga: LeasedSaga, name: str, *given: Any, **more: Any) -> Any:
        if name == "first":
            await wait(saga, name, *given, **more)  # begun
            if early:
                send(bench, name="first")
                assert not isinstance(await wait(saga, name, *given, **more), float)
            looking.set()
            await paused.wait()
            return 1.0
        await looking.wait()
        return await wait(saga, name, *given, **more)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.wait("first"), saga.wait("second"))

    handler = saga(book, timeout="200ms")
    one.leases.wait = slow  # type: ignore[method-assign]
    assert (await one.deliver(handler)).kind is OutcomeKind.BUSY
    paused.set()
    one.leases.wait = wait  # type: ignore[method-assign]
    if not early:
        assert (await one.leases.look("shop", ["book"])).due == {}
        send(bench, name="first")
    assert (await one.leases.look("shop", ["book"])).due["book"] <= 0


@pytest.mark.parametrize(("into", "kind"), [(Approval, OutcomeKind.DEAD), (Approval | None, OutcomeKind.APPLIED)])
async def test_a_signal_without_a_payload_is_null_to_its_type(
    bench: Bench, one: Station, into: Any, kind: OutcomeKind
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> bool:
        return await saga.wait("go", into=into) is None

    bench.run("select idemconsumer.signal('shop', 'book', 'k', 'go')")
    assert (await one.deliver(saga(book))).kind is kind


@pytest.mark.parametrize("signal", ["", "a\0b", "x" * 201, 5, "child:ab"])
async def test_nobody_waits_for_a_signal_that_cannot_be_sent(bench: Bench, one: Station, signal: Any) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.wait("w", signal=signal)

    outcome = await one.deliver(saga(book))
    assert (outcome.kind, outcome.error) == (OutcomeKind.RETRYING, "ConfigurationError")


def test_no_sql_sends_a_signal_that_is_named_like_the_end_of_a_child(bench: Bench) -> None:
    """L42. It would make the parent of that child due again and again."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="for the ends of child sagas"):
        bench.run("select idemconsumer.signal('shop', 'book', 'k', 'child:ab')")


async def test_a_signal_without_a_payload(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> bool:
        return await saga.wait("go") is None

    bench.run("select idemconsumer.signal('shop', 'book', 'k', 'go')")
    assert (await one.deliver(saga(book))).result == b"true"


async def test_a_signal_that_is_being_committed_while_the_run_ends_is_not_missed(bench: Bench, one: Station) -> None:
    """Its sender has looked for a saga that waits, and the worker for a signal; neither has found any."""
    handler = saga(approve)
    async with await psycopg.AsyncConnection.connect(bench.dsn) as sender:
        pause, sent = one.leases.pause, asyncio.Event()

        async def beside(*given: Any) -> float:
            await sender.execute("select idemconsumer.signal('shop', 'book', 'k', 'approved', '{\"by\": \"Ann\"}')")
            await sender.execute("set constraints all immediate")  # as at COMMIT
            sent.set()
            return await pause(*given)

        one.leases.pause = beside  # type: ignore[assignment, method-assign]
        running = asyncio.create_task(one.deliver(handler))
        await sent.wait()
        await until(lambda: bench.waiting() == 1, "the worker waits for the sender")
        await sender.commit()
        assert (await running).due <= 0
    assert (await one.resume(handler)).result == b'"Ann"'


async def test_a_signal_waits_for_who_is_about_to_give_the_saga_up(bench: Bench, one: Station) -> None:
    """The other way round: the saga waits as soon as the sender sees it."""
    handler = saga(approve)
    pause = one.leases.pause

    async def slow(saga: LeasedSaga, waits: Sequence[str], at_most: float | None) -> float:
        async with await psycopg.AsyncConnection.connect(bench.dsn) as worker:
            lock = (
                "select pg_advisory_xact_lock("
                "('x' || encode(substring(%s::bytea from 9 for 8), 'hex'))::bit(64)::bigint)"
            )
            await worker.execute(lock, (saga.key,))
            sending = asyncio.create_task(asyncio.to_thread(send_once))
            await until(lambda: bench.waiting() == 1, "the sender waits for the worker")
            await worker.execute(
                "update idemconsumer.saga set worker = null, due = 'tomorrow', signals = '{approved}' where key = %s",
                (saga.key,),
            )
            await worker.commit()
        await sending
        return 1.0

    def send_once() -> None:
        with psycopg.connect(bench.dsn) as sender:
            sender.execute("select idemconsumer.signal('shop', 'book', 'k', 'approved', '{\"by\": \"Ann\"}')")

    one.leases.pause = slow  # type: ignore[method-assign]
    await one.deliver(handler)
    one.leases.pause = pause  # type: ignore[method-assign]
    assert (await one.resume(handler)).result == b'"Ann"'


async def test_a_signal_of_a_transaction_that_could_not_see_who_waits_is_refused(bench: Bench) -> None:
    async with await psycopg.AsyncConnection.connect(bench.dsn) as sender:
        await sender.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="isolation level repeatable read"):
            await sender.execute("select idemconsumer.signal('shop', 'book', 'k', 'approved')")


async def test_a_process_hears_of_a_signal_that_made_a_saga_due(bench: Bench, one: Station) -> None:
    await one.deliver(saga(approve))
    woken: list[str] = []
    broker = PostgresBroker(Settings(dsn=bench.dsn))
    broker.wake_sagas_by(lambda: woken.append("woken"))
    session = await broker.open([Subscription("postgres:~shop/book", "book", "shop")], Bounds(4, 1))
    try:
        send(bench, name="other")
        send(bench)
        await until(lambda: bool(woken), "it hears of it")
        assert woken == ["woken"]
    finally:
        await session.close()
        await broker.close()


async def test_a_saga_that_nobody_signals_is_looked_for_by_nobody(bench: Bench, one: Station) -> None:
    await one.deliver(saga(approve))
    assert (await one.leases.look("shop", ["book"])).due == {}
    send(bench)
    assert (await one.leases.look("shop", ["book"])).due["book"] <= 0


@pytest.mark.parametrize(("app", "tenant", "handler"), [("shop", None, "book"), ("a/b%", "-", "ü"), ("s", "", "h/i")])
def test_a_signal_has_the_key_and_the_scope_of_its_saga(
    bench: Bench, app: str, tenant: str | None, handler: str
) -> None:
    bench.run("select idemconsumer.signal(%s, %s, 'ß', 'n', null, %s)", (app, handler, tenant))
    stored = bench.run(
        "select s.key, c.name from idemconsumer.signal as s join idemconsumer.scope as c on c.id = s.scope_id"
    )
    assert stored == [(keys.digest(app, tenant, handler, "ß"), keys.scope_name(app, tenant, handler))]


async def test_a_sleeping_saga_that_is_to_be_cancelled_is_cancelled_at_once(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.sleep("cooling_off", "3d")

    handler, pause = saga(book), one.leases.pause
    await one.deliver(handler)

    async def meanwhile(*given: Any) -> float:
        bench.run("update idemconsumer.saga set cancel = true")
        return await pause(*given)

    one.leases.pause = meanwhile  # type: ignore[assignment, method-assign]
    bench.run("update idemconsumer.saga set due = clock_timestamp()")
    assert (await one.resume(handler)).due <= 0, "it learns of that only when it gives the saga up"
    assert (await one.resume(handler)).kind is OutcomeKind.FAILED
    assert bench.effects == ["a", "undo:a:out:a"]


# ------------------------------------------------------------------------------------------------------ retention (L43)
async def test_signals_that_nobody_takes_are_pruned(bench: Bench, one: Station) -> None:
    await one.deliver(saga(approve))
    for key, name in (("k", "other"), ("k", "approved"), ("never", "approved"), ("late", "approved")):
        send(bench, name=name, key=key)
    bench.run("update idemconsumer.signal set sent_at = sent_at - interval '100 d' where key <> %s", (digest("late"),))
    await prune_once(bench.dsn, SCHEMA)
    kept = "select name from idemconsumer.signal where key = %s order by name"
    assert [len(bench.run(kept, (digest(key),))) for key in ("k", "never", "late")] == [2, 0, 1]
    assert (await one.resume(saga(approve))).kind is OutcomeKind.APPLIED
    assert bench.run(kept, (digest("k"),)) == [("other",)]
    bench.script(
        "begin; update idemconsumer.signal set sent_at = clock_timestamp();"
        "select set_config('idemconsumer.open', 't', true);"
        "update idemconsumer.record set changed_at = changed_at - interval '100 d';"
        "select idemconsumer.seal('t'); commit"
    )
    assert await prune_once(bench.dsn, SCHEMA) == 1
    assert bench.run(kept, (digest("k"),)) == []


def digest(key: str) -> bytes:
    return keys.digest("shop", None, "book", key)


async def test_a_signal_for_a_saga_that_has_ended_is_not_stored(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=fails)
        raise Reject("no")

    async def fails(tx: Any, output: str, name: str) -> None:
        raise ValueError("not undone yet")

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (bench.state, send(bench), unsent(bench)) == (State.UNDOING, "ended", 0)
