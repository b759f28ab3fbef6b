"""One message that fails: how it ends, what it costs, and that none of its effects remain."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psycopg
import pydantic
import pytest

from idemconsumer import Message, Reject, Retry, Tx, idempotent_handler
from idemconsumer.brokers.postgres_broker import enqueue
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import Interrupted, StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.ports.broker import Outgoing
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from idemconsumer.user_code import time_limit
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.logs import capture_logs
from tests.support.points import Killed
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until


def failing(error: BaseException, **options: Any) -> Handler[..., Any]:
    @idempotent_handler(SOURCE, key="id", **options)
    async def fail(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        raise error

    return fail


@idempotent_handler(SOURCE, key="id")
async def pay(order: dict[str, Any], tx: Tx) -> dict[str, Any]:
    await write(tx, order["id"])
    return {"paid": order["id"]}


# ------------------------------------------------------------------------------------------------- attempts and retries
async def test_a_failure_is_tried_again_until_its_attempts_are_used_up(ledger: Ledger, engine: Engine) -> None:
    seen: list[int] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=3)
    async def fail(order: dict[str, Any], tx: Tx, message: Message) -> None:
        seen.append(message.attempt)
        await write(tx, order["id"])
        raise ValueError("boom")

    outcomes = [await engine.process(*works(fail, 1)) for _ in range(3)]

    assert kinds(outcomes) == ["retrying", "retrying", "dead"]
    assert [outcome.attempt for outcome in outcomes] == [1, 2, 3]
    assert seen == [1, 1, 1], "each was a delivery of its own, and what it is about to be was not looked up"
    assert outcomes[2].reason == "attempts_exhausted"
    assert (ledger.effects, ledger.states, ledger.attempts) == ([], [State.DEAD], [])
    ((error, attempts),) = ledger.run("select error, attempts from idemconsumer.dead_letter")
    assert "ValueError: boom" in error
    assert attempts == 3


async def test_the_attempt_is_known_to_the_work_that_is_presented_again(engine: Engine) -> None:
    seen: list[int] = []

    @idempotent_handler(SOURCE, key="id", max_attempts=3)
    async def fail(order: dict[str, Any], message: Message) -> None:
        seen.append(message.attempt)
        raise ValueError

    await to_the_end(engine, works(fail, 1))
    assert seen == [1, 2, 3]


async def test_pauses_between_attempts_follow_the_backoff(store: PostgresStore) -> None:
    engine = Engine(store, chance=lambda: 0.0)
    given = works(failing(ValueError(), backoff=("1s", "3s")), 1)
    assert [(await engine.run(given))[0].due for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("after", "due"), [(0.25, 0.25), ("250ms", 0.25), ("2h", 7_200.0), ("soon", 0.0), (-1, 0.0)], ids=str
)
async def test_a_retry_says_when_and_a_bad_when_does_not_stop_the_worker(
    engine: Engine, after: Any, due: float
) -> None:
    outcome = await engine.process(*works(failing(Retry("not yet", after=after)), 1))
    assert (outcome.kind, outcome.due) == ("retrying", due)


async def test_what_fails_with_all_others_is_tried_again_within_half_a_minute(store: PostgresStore) -> None:
    """At no cost of an attempt (D17), so it is not stored; and once the others succeed it is not to wait for hours."""
    engine = Engine(store, watched=True)
    outcomes = [await engine.process(*works(failing(ValueError(), backoff="1h, 1h"), n)) for n in range(8)]
    assert [outcome.reason for outcome in outcomes] == ["scheduled"] * 4 + ["failing"] * 4
    assert all(outcome.due is not None and (outcome.due > 30) is (outcome.state is not None) for outcome in outcomes)


async def test_a_retry_that_is_asked_for_for_ever_ends_as_a_dead_letter(ledger: Ledger, engine: Engine) -> None:
    outcomes = await to_the_end(engine, works(failing(Retry(), max_attempts=3), 1))
    assert (kinds(outcomes), ledger.letters) == (["dead"], [("attempts_exhausted", 1)])


async def test_a_retry_is_tried_again_whatever_fail_on_names(ledger: Ledger, engine: Engine) -> None:
    outcome = await engine.process(*works(failing(Retry(), fail_on=(Exception,)), 1))
    assert (outcome.kind, ledger.states, len(ledger.attempts)) == ("retrying", [], 1)


async def test_what_is_in_fail_on_is_a_rejection(ledger: Ledger, engine: Engine) -> None:
    outcome = await engine.process(*works(failing(KeyError("secret"), fail_on=(LookupError,)), 1))
    assert (outcome.kind, outcome.reason, outcome.result) == (
        "failed",
        "KeyError",
        b'{"code":"KeyError","body":"\'secret\'"}',
    )
    assert (ledger.effects, ledger.states, ledger.attempts) == ([], [State.FAILED], [])


async def test_attempts_are_forgotten_once_a_message_is_applied(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def second_time(order: dict[str, Any], tx: Tx, message: Message) -> None:
        await write(tx, order["id"])
        if message.attempt == 1:
            raise ValueError

    assert kinds(await to_the_end(engine, works(second_time, 1))) == ["applied"]
    assert (ledger.effects, ledger.attempts) == (["1"], [])


# ----------------------------------------------------------------------------------------------------------- rejections
async def test_a_rejection_undoes_the_effects_and_is_replayed(ledger: Ledger, engine: Engine) -> None:
    handler = failing(Reject("no_funds", {"short": 3}))
    first = await engine.process(*works(handler, 1))
    second = await engine.process(*works(handler, 1))
    assert (first.kind, second.kind) == ("failed", "duplicate")
    assert first.result == second.result == b'{"code":"no_funds","body":{"short":3}}'
    assert (first.state, second.state) == (State.FAILED, State.FAILED)
    assert (ledger.effects, ledger.states, ledger.letters) == ([], [State.FAILED], [])


async def test_a_rejection_that_cannot_be_stored_is_an_error_like_any_other(ledger: Ledger, engine: Engine) -> None:
    outcomes = await to_the_end(engine, works(failing(Reject("odd", object()), max_attempts=2), 1))
    assert (kinds(outcomes), ledger.letters) == (["dead"], [("attempts_exhausted", 1)])
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "cannot be stored as JSON" in error


@pytest.mark.parametrize(
    "result", [object(), {1, 2, object()}, "\ud800", [[float]]], ids=["object", "set", "surrogate", "type"]
)
async def test_a_result_that_cannot_be_stored_fails_its_message_and_undoes_it(
    ledger: Ledger, engine: Engine, result: object
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
    async def give_back(order: dict[str, Any], tx: Tx) -> object:
        await write(tx, order["id"])
        return result if order["id"] == 2 else None

    outcomes = await to_the_end(engine, works(give_back, 1, 2, 3))
    assert kinds(outcomes) == ["applied", "dead", "applied"]
    assert ledger.effects == ["1", "3"]


# ---------------------------------------------------------------------------------------------- time-outs, cancellation
async def test_a_handler_that_is_too_slow_is_stopped_and_counted(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", timeout="50ms", max_attempts=2)
    async def slow(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        await tx.execute("select pg_sleep(60)")

    async with asyncio.timeout(PATIENCE):
        assert kinds(await to_the_end(engine, works(slow, 1))) == ["dead"]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "did not end within its timeout of 0.05 s" in error
    assert ledger.effects == []


async def test_a_handler_that_computes_past_its_time_out_is_late(ledger: Ledger, engine: Engine) -> None:
    """The loop had no moment to cut it off."""

    @idempotent_handler(SOURCE, key="id", timeout="50ms", max_attempts=1)
    async def compute(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        time.sleep(0.1)  # noqa: ASYNC251 - it computes, and never lets the loop cut it off

    assert kinds(await engine.run(works(compute, 1))) == ["dead"]
    assert (ledger.effects, ledger.letters) == ([], [("attempts_exhausted", 1)])


async def test_a_handler_that_was_cut_off_has_failed_even_if_our_clock_is_behind_the_loops(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @idempotent_handler(SOURCE, key="id", timeout="50ms", max_attempts=1)
    async def deaf(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)

    monkeypatch.setattr(time_limit, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert kinds(await engine.run(works(deaf, 1))) == ["dead"]
    assert (ledger.effects, ledger.letters) == ([], [("attempts_exhausted", 1)])


async def test_a_handler_that_swallows_its_time_out_is_stopped_all_the_same(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", timeout="50ms", max_attempts=1)
    async def deaf(order: dict[str, Any], tx: Tx) -> str:
        await write(tx, order["id"])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await write(tx, "late")
        return "as if nothing had happened"

    async with asyncio.timeout(PATIENCE):
        assert (await engine.process(*works(deaf, 1))).kind == "dead"
    assert ledger.effects == []


async def test_a_timeout_error_of_the_handlers_own_keeps_its_text(ledger: Ledger, engine: Engine) -> None:
    await engine.process(*works(failing(TimeoutError("the bank did not answer"), max_attempts=1), 1))
    assert "the bank did not answer" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_a_handler_that_raises_cancelled_error_by_itself_has_failed(ledger: Ledger, engine: Engine) -> None:
    outcome = await engine.process(*works(failing(asyncio.CancelledError(), max_attempts=1), 1))
    assert outcome.kind == "dead"
    assert "nothing cancelled it" in ledger.run("select error from idemconsumer.dead_letter")[0][0]
    assert ledger.effects == []


@pytest.mark.parametrize("turned_into", [None, RuntimeError], ids=["let pass", "turned into an error"])
async def test_a_cancellation_is_no_failure_even_if_the_handler_makes_it_one(
    ledger: Ledger, engine: Engine, turned_into: type[Exception] | None
) -> None:
    running = asyncio.Event()

    @idempotent_handler(SOURCE, key="id")
    async def held(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if turned_into is None:
                raise
            raise turned_into from None

    task = asyncio.create_task(engine.process(*works(held, 1)))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ledger.effects, ledger.attempts, ledger.states) == ([], [], [])
    assert ledger.sessions("active", "idle in transaction") == 0


# ----------------------------------------------------------------------------------------------------------- contention
@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "wrapped"])
async def test_contention_costs_no_attempt(ledger: Ledger, engine: Engine, wrapped: bool) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def contended(order: dict[str, Any], tx: Tx, message: Message) -> None:
        await write(tx, order["id"])
        if next(collisions, None) is None:
            return
        try:
            await collide(tx)
        except psycopg.Error as error:
            if wrapped:
                raise RuntimeError("the ORM's own") from error
            raise

    collisions = iter(range(5))
    with a_lock_is_taken(ledger.dsn):
        outcomes = [await engine.process(*works(contended, 1)) for _ in range(6)]
    assert kinds(outcomes) == ["retrying"] * 5 + ["applied"]
    assert all(0 < outcome.due < 1 and outcome.reason == "contention" for outcome in outcomes[:5])
    assert (ledger.effects, ledger.attempts) == (["1"], [])


async def test_a_rejection_for_the_sake_of_a_database_error_is_a_rejection(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def refuse(order: dict[str, Any], tx: Tx) -> None:
        try:
            await collide(tx)
        except psycopg.Error as error:
            raise Reject("taken") from error

    with a_lock_is_taken(ledger.dsn):
        assert (await engine.process(*works(refuse, 1))).kind == "failed"


async def test_running_out_of_locks_halves_what_groups_may_hold_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=32)
    async def exhausting(order: dict[str, Any], tx: Tx) -> None:
        if next(collisions, None) is not None:
            await tx.execute("select pg_advisory_xact_lock(n) from generate_series(1, 1000000) as n")

    collisions = iter(range(1))
    given = works(exhausting, *range(32))
    assert len(await engine.run(given)) == 16
    assert engine.group_size(given[0].handler) == 16
    for n in range(16):
        await engine.run(works(exhausting, f"more {n}"))
    assert engine.group_size(given[0].handler) == 16
    tuned(monkeypatch, locks_are_scarce_for=0.0)
    collisions = iter(range(1))
    assert len(await engine.run(works(exhausting, *range(100, 116)))) == 8
    for n in range(64 + 64):  # the first ones double what is allowed, the others make use of it
        await engine.run(works(exhausting, f"later {n}"))
    assert engine.group_size(given[0].handler) == 16


async def test_a_row_that_somebody_holds_is_waited_for_shortly_in_a_group(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def hit(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == 2:
            await tx.execute("update hot_row set hits = hits + 1")

    ledger.run("create table if not exists hot_row (hits int)")
    ledger.run("insert into hot_row values (0)")
    async with await psycopg.AsyncConnection.connect(ledger.dsn) as other:
        await other.execute("update hot_row set hits = hits + 1")
        async with asyncio.timeout(5):  # half of what a single message may wait
            outcomes = await engine.run(works(hit, 1, 2, 3))
        assert kinds(outcomes) == ["applied"]
        assert ledger.attempts == []
    assert kinds(await to_the_end(engine, works(hit, 1, 2, 3))) == ["duplicate", "applied", "applied"]
    assert ledger.effects == ["1", "2", "3"]


@pytest.mark.parametrize(("together", "seconds"), [(1, "10s"), (2, "50ms")])
async def test_how_long_a_row_is_waited_for(engine: Engine, together: int, seconds: str) -> None:
    seen: list[str] = []

    @idempotent_handler(SOURCE, key="id", group_size=2)
    async def look(order: dict[str, Any], tx: Tx) -> None:
        seen.append(await (await tx.execute("select current_setting('lock_timeout')", into=str)).one())

    await engine.run(works(look, *range(together)))
    assert seen == [seconds] * together


# ------------------------------------------------------------------------------------------------- duplicates of finals
async def test_a_conflict_leaves_the_record_and_its_result_alone(ledger: Ledger, engine: Engine) -> None:
    await engine.process(*works(pay, 1))
    bound = pay.plan.bind("shop")

    outcomes = [await engine.process(work(bound, message(1, amount=n))) for n in (2, 2, 3)]

    assert kinds(outcomes) == ["conflict"] * 3
    assert ledger.letters == [("conflict", 2), ("conflict", 1)]
    again = await engine.process(*works(pay, 1))
    assert (again.kind, again.result) == ("duplicate", b'{"paid":1}')
    assert (ledger.effects, ledger.states) == (["1"], [State.COMPLETED])


async def test_without_a_fingerprint_another_payload_is_a_duplicate(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", fingerprint=None)
    async def loose(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    bound = loose.plan.bind("shop")
    assert [(await engine.process(work(bound, message(1, n=n)))).kind for n in (1, 2)] == ["applied", "duplicate"]
    assert ledger.effects == ["1"]


async def test_a_later_arrival_of_a_dead_message_only_counts(ledger: Ledger, engine: Engine) -> None:
    given = works(failing(ValueError(), max_attempts=1), 1)
    outcomes = [await engine.process(each) for each in (*given, *given, *given)]
    assert kinds(outcomes) == ["dead"] * 3
    assert (ledger.letters, ledger.attempts, ledger.effects) == ([("attempts_exhausted", 3)], [], [])


# ------------------------------------------------------------------------------------------------------------- suspects
def suspect(handler: Handler[..., Any], id: object) -> Work:
    return works(handler, id, suspect=True)[0]


async def test_a_suspect_is_on_record_before_it_runs_and_counted_if_it_was_begun_before(
    ledger: Ledger, store: PostgresStore, engine: Engine
) -> None:
    recorded: list[list[int]] = []

    @idempotent_handler(SOURCE, key="id")
    async def look(order: dict[str, Any], tx: Tx) -> None:
        recorded.append(ledger.attempts)
        await write(tx, order["id"])

    assert (await engine.process(suspect(look, 1))).kind == "applied"
    await store.mark_attempts([suspect(look, 2).claim])
    assert (await engine.process(suspect(look, 2))).kind == "applied"
    assert (recorded, ledger.attempts, ledger.effects) == ([[0], [1]], [], ["1", "2"])


async def test_a_message_that_kills_its_worker_ends_as_a_dead_letter(ledger: Ledger, engine: Engine) -> None:
    handler = failing(Killed(), max_attempts=3)
    for _ in range(1 + 3):
        with pytest.raises(Killed):
            await engine.process(suspect(handler, 1))
    assert ledger.attempts == [3]

    outcome = await engine.process(suspect(handler, 1))

    assert (outcome.kind, outcome.reason) == ("dead", "killed_worker")
    assert (ledger.letters, ledger.effects, ledger.attempts) == ([("killed_worker", 1)], [], [])
    assert (await engine.process(suspect(handler, 1))).kind == "dead"


async def test_a_suspect_that_fails_is_counted_once_a_run(ledger: Ledger, engine: Engine) -> None:
    given = suspect(failing(ValueError(), max_attempts=3), 1)
    outcomes = [await engine.process(given) for _ in range(3)]
    assert (kinds(outcomes), [outcome.attempt for outcome in outcomes]) == (["retrying", "retrying", "dead"], [1, 2, 3])
    assert ledger.letters == [("attempts_exhausted", 1)]


async def test_suspects_that_were_applied_are_answered_together_and_not_counted(ledger: Ledger, engine: Engine) -> None:
    await engine.run(works(pay, 1))
    await engine.run(works(pay, 2))
    outcomes = await engine.run([suspect(pay, 1), suspect(pay, 2), suspect(pay, 3), *works(pay, 4)])
    assert kinds(outcomes) == ["duplicate", "duplicate"]
    assert ledger.attempts == []


async def test_a_suspect_that_failed_has_ended_so_it_runs_with_others_again(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def fail_first(order: dict[str, Any], tx: Tx, message: Message) -> None:
        await write(tx, order["id"])
        if order["id"] == 2 and message.attempt == 1:
            raise ValueError

    group = [*works(fail_first, 1), suspect(fail_first, 2), *works(fail_first, 3)]
    assert kinds(await engine.run(group)) == ["applied", "retrying"]
    assert ledger.attempts == [1], "a worker that dies of its next run leaves this"
    assert kinds(await engine.run(group[1:])) == ["applied"] * 2
    assert (ledger.effects, ledger.attempts) == (["1", "2", "3"], [])


async def test_one_that_was_begun_before_has_ended_too_once_it_failed(
    ledger: Ledger, store: PostgresStore, engine: Engine
) -> None:
    runs: list[int] = []

    @idempotent_handler(SOURCE, key="id")
    async def fails_first(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        if len(runs) == 1:
            raise ValueError
        await write(tx, order["id"])

    given = [suspect(fails_first, 1), *works(fails_first, 2)]
    await store.mark_attempts([given[0].claim])
    assert kinds(await engine.run(given)) == ["retrying"]
    assert ledger.attempts == [1]
    assert kinds(await engine.run(given)) == ["applied"] * 2
    assert (ledger.effects, ledger.attempts) == (["1", "2"], [])


async def test_a_cancelled_suspect_gets_its_count_back(ledger: Ledger, store: PostgresStore, engine: Engine) -> None:
    running = asyncio.Event()

    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def held(order: dict[str, Any], tx: Tx) -> None:
        running.set()
        await asyncio.Event().wait()

    await store.mark_attempts([suspect(held, 1).claim])
    for _ in range(3):
        running.clear()
        task = asyncio.create_task(engine.process(suspect(held, 1)))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ledger.attempts == [0]


@pytest.mark.parametrize("end", ["the wait is over", "cancelled while waiting"])
async def test_a_suspect_that_only_waited_for_a_rival_is_not_on_record(
    ledger: Ledger, store: PostgresStore, end: str
) -> None:
    wait = "100ms" if end == "the wait is over" else "20s"

    @idempotent_handler(SOURCE, key="id", wait=wait)
    async def never(order: dict[str, Any], tx: Tx) -> None:
        raise AssertionError

    given = suspect(never, 1)
    assert given.call is not None
    async with store.transaction(group=1) as rival:
        await rival.claim([given.call.claim])
        task = asyncio.create_task(Engine(store).process(given))
        if end == "the wait is over":
            assert (await task).kind == "busy"
        else:
            await until(lambda: ledger.attempts == [0])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert ledger.attempts == []


# -------------------------------------------------------------------------------------------------------------- outages
@pytest.mark.parametrize("raised", ["the driver's error", "an error that quotes the payload"])
async def test_a_connection_that_breaks_under_a_handler_decides_nothing(
    ledger: Ledger, engine: Engine, raised: str
) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def broken(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        try:
            await tx.execute("select pg_terminate_backend(pg_backend_pid())")
        except psycopg.Error:
            if raised == "the driver's error":
                raise
            raise ValueError(json.dumps(order)) from None

    with pytest.raises(StoreUnavailable) as caught:
        await engine.process(*works(broken, "card 4111"))
    assert "4111" not in str(caught.value)
    assert (ledger.effects, ledger.states, ledger.attempts) == ([], [], [])


async def test_a_full_disk_is_nobodys_fault(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def full(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("do $$ begin raise 'no space left' using errcode = '53100'; end $$")

    with pytest.raises(StoreUnavailable, match="53100"):
        await engine.process(*works(full, 1))
    assert (ledger.letters, ledger.attempts) == ([], [])


@pytest.mark.parametrize("after", ["its claim", "publishing"])
async def test_a_frozen_worker_cannot_hold_a_key_for_ever(ledger: Ledger, engine: Engine, after: str) -> None:
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=-4.7)  # 0.3 s, by the server
    (given,) = works(pay, 1)
    assert given.call is not None
    async with store.transaction(group=1) as frozen:
        await frozen.claim([given.call.claim])
        if after == "publishing":
            await enqueue(frozen.tx().borrow(), SCHEMA, "emails", [Outgoing(b"lost with the rest")])
        async with asyncio.timeout(PATIENCE):
            assert (await engine.process(given)).kind == "applied"
        with pytest.raises(Interrupted):
            await frozen.complete([], [])
    assert (ledger.effects, ledger.run("select 1 from idemconsumer.queue")) == (["1"], [])
    await store.close()


class Panic(BaseException):
    """As an extension in Rust raises it (`pyo3_runtime.PanicException`)."""


NO_EXCEPTIONS = [SystemExit(1), KeyboardInterrupt(), Panic("x"), GeneratorExit(), BaseExceptionGroup("x", [Panic("x")])]


@pytest.mark.parametrize("suspected", [True, False])
@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
async def test_a_handler_that_would_end_the_process_has_failed(
    ledger: Ledger, engine: Engine, error: BaseException, suspected: bool
) -> None:
    given = works(failing(error, max_attempts=2), 1, suspect=suspected)
    assert kinds(await to_the_end(engine, given)) == ["dead"]
    assert (ledger.letters, ledger.effects) == ([("attempts_exhausted", 1)], [])
    ((text,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert f"it raised {type(error).__qualname__}" in text.replace(f"{__name__}.", "")
    assert "test_failures.py" in text, "where it was"


class Panics(pydantic.BaseModel):
    paid: int = 1

    @pydantic.field_serializer("paid")
    def serialize(self, paid: int) -> int:
        raise Panic(paid)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Asked(type):
    def __getattr__(cls, name: str) -> str:
        raise Panic("asked") if name == "__pydantic_validator__" else AttributeError(name)


class AnswersItself(metaclass=Asked):
    """pydantic makes an Exception of whatever a serializer raises; here nobody does."""


async def test_nor_does_it_end_when_a_result_is_encoded_or_an_error_is_written_down(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=1)
    async def handler(order: dict[str, Any], tx: Tx) -> Any:
        if order["id"] == 1:
            raise Unspeakable
        return Panics() if order["id"] == 2 else AnswersItself()

    assert kinds(await to_the_end(engine, works(handler, 1, 2, 3))) == ["dead"] * 3
    errors = [str(error) for (error,) in ledger.run("select error from idemconsumer.dead_letter order by id")]
    assert "its text cannot be shown" in errors[0]
    assert "Panic" in errors[1]
    assert "it raised" in errors[2]


async def test_what_the_log_says_of_a_failure_holds_no_payload(engine: Engine) -> None:
    with capture_logs() as logs:
        bound = failing(ValueError("no money"), max_attempts=3).plan.bind("shop")
        await to_the_end(engine, [work(bound, message(1, card="4111"))])
        engine.endings.telling.close()
    assert [(entry["event"], entry["text"]) for entry in logs] == [
        ("handler failed", "no money"), ("dead letter", "no money"), ("handler failed again", "no money"),
    ]  # fmt: skip
    assert [entry.get("count") for entry in logs] == [None, None, 2]
    assert "in fail" in logs[0]["exception"]
    assert "4111" not in repr(logs)


@pytest.mark.parametrize("caught", [False, True], ids=["let pass", "turned into another error"])
async def test_a_task_group_that_failed_in_a_handler_leaves_the_lane_alive(
    ledger: Ledger, engine: Engine, caught: bool
) -> None:
    """Before Python 3.13 it leaves the task it ran in marked as cancelled."""

    async def fails() -> None:
        raise RuntimeError

    @idempotent_handler(SOURCE, key="id")
    async def together(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "bad":
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fails())
                    group.create_task(asyncio.sleep(60))
            except ExceptionGroup:
                if caught:
                    raise ValueError from None
                raise

    (failed,) = await engine.run(works(together, "bad"))
    (applied,) = await engine.run(works(together, "good"))
    assert (failed.kind, applied.kind, ledger.effects) == ("retrying", "applied", ["good"])
