"""Handlers that take all new messages of a group at once: who is in the batch, and what becomes of each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import psycopg
import pydantic
import pytest

from idemconsumer import App, Batch, Message, Reject, Retry, StoreUnavailable, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.errors import HandlerFault
from idemconsumer.handlers.batch import Items
from idemconsumer.handlers.decorator import Handler
from idemconsumer.ports.observer import Point
from idemconsumer.rules.group_size import GroupSize
from idemconsumer.rules.values import State
from idemconsumer.stores.joined import PostgresStore
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.ledger import SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.points import Points
from tests.support.waiting import PATIENCE

Orders = Batch[dict[str, Any]]
Act = Callable[[Orders, Tx], Awaitable[object]]


class Calls:
    """A batch handler that writes an effect for each item, then does what the test wants, and notes its batches."""

    def __init__(self, act: Act | None = None, **options: Any) -> None:
        self.seen: list[list[Any]] = []

        @idempotent_handler(SOURCE, key="id", **{"group_size": 8, "max_attempts": 3} | options)
        async def handle(orders: Batch[dict[str, Any]], tx: Tx) -> None:
            self.seen.append([order["id"] for order in orders])
            await tx.connection.cursor().executemany(
                "insert into witness (id) values (%s)", [(str(order["id"]),) for order in orders]
            )
            return None if act is None else await act(orders, tx)  # type: ignore[return-value]

        self.handler: Handler[..., Any] = handle

    def group(self, *ids: object, suspect: bool = False) -> list[Any]:
        return works(self.handler, *ids, suspect=suspect)


def at(id: object, do: Callable[[Orders, int], object]) -> Act:
    """Do something about the item with this id."""

    async def act(orders: Orders, tx: Tx) -> None:
        for i, order in enumerate(orders):
            if order["id"] == id:
                do(orders, i)

    return act


def fail(orders: Orders, i: int) -> None:
    raise ValueError(f"no {i}")


async def pay(orders: Orders, tx: Tx) -> None:
    for i, order in enumerate(orders):
        orders.result(i, {"paid": order["id"]})


# ----------------------------------------------------------------------------------------------- who is in the batch
async def test_a_group_is_one_call_and_one_commit(ledger: Ledger, store: PostgresStore) -> None:
    calls, points = Calls(pay), Points()

    outcomes = await Engine(store, points).run(calls.group(*range(8)))

    assert kinds(outcomes) == ["applied"] * 8
    assert [outcome.result for outcome in outcomes] == [b'{"paid":%d}' % n for n in range(8)]
    assert calls.seen == [list(range(8))]
    assert ledger.effects == [str(n) for n in range(8)]
    assert points.seen == [(Point.CLAIMED, 8), (Point.HANDLED, 8), (Point.SEALING, 8), (Point.COMMITTED, 8)]
    commits = "select count(distinct xmin::text) from (select xmin from witness union all "
    assert ledger.run(commits + "select xmin from idemconsumer.record) as rows") == [(1,)]


async def test_only_what_is_new_is_in_the_batch_and_the_others_get_what_is_stored(
    ledger: Ledger, engine: Engine
) -> None:
    calls = Calls(pay)
    await engine.run(calls.group(1, 3))
    bound = calls.handler.plan.bind("shop")
    group = [*calls.group(0, 1, 2, 2, 3), work(bound, message(0, amount=5)), *calls.group(0, 4)]

    outcomes = await engine.run(group)

    assert kinds(outcomes) == [
        "applied", "duplicate", "applied", "duplicate", "duplicate", "conflict", "duplicate", "applied",
    ]  # fmt: skip
    paid = [b'{"paid":%d}' % n for n in (0, 1, 2, 2, 3, 0, 4)]
    assert [outcome.result for outcome in outcomes if outcome.kind != "conflict"] == paid
    assert calls.seen == [[1, 3], [0, 2, 4]]
    assert ledger.effects == ["0", "1", "2", "3", "4"]
    assert ledger.letters == [("conflict", 1)]


async def test_a_handler_is_not_called_for_an_empty_batch(ledger: Ledger, engine: Engine) -> None:
    calls = Calls(pay)
    await engine.run(calls.group(1, 2))
    assert kinds(await engine.run(calls.group(2, 1, 2))) == ["duplicate"] * 3
    assert calls.seen == [[1, 2]]


async def test_a_key_that_a_rival_holds_ends_the_batch_before_it(ledger: Ledger, store: PostgresStore) -> None:
    calls = Calls()
    engine, (held,) = Engine(store), calls.group("held")
    async with store.transaction(group=1) as rival:
        await rival.claim([held.call.claim])
        assert kinds(await engine.run(calls.group(1, 2, "held", 3))) == ["applied"] * 2
        assert kinds(await engine.run(calls.group(4, "held", 5), defer=True)) == ["applied", "busy", "applied"]
    assert calls.seen == [[1, 2], [4, 5]]


async def test_a_suspect_that_was_begun_before_is_a_batch_of_its_own(
    ledger: Ledger, engine: Engine, store: PostgresStore
) -> None:
    calls = Calls()
    (lost,) = calls.group(2)
    assert lost.call is not None
    await store.mark_attempts([lost.call.claim])  # by a worker that died of it, perhaps

    first = await engine.run(calls.group(1, 2, 3, suspect=True))
    second = await engine.run(calls.group(2, 3, suspect=True))
    assert (kinds(first), kinds(second), calls.seen) == (["applied"], ["applied"], [[1], [2]])


async def test_a_suspect_in_a_batch_that_cancels_its_own_task_is_found_and_counted(
    ledger: Ledger, engine: Engine
) -> None:
    def cancel(orders: Orders, i: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    calls = Calls(at(2, cancel), max_attempts=2)
    group = [*calls.group(0), *calls.group(1, 2, 3, suspect=True)]
    assert kinds(await to_the_end(engine, group)) == ["applied", "applied", "dead", "applied"]
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["0", "1", "3"], [], [("attempts_exhausted", 1)])


async def test_each_item_has_its_message(engine: Engine) -> None:
    keys = list[tuple[str, int, bytes]]()

    async def act(orders: Orders, tx: Tx) -> None:
        assert [orders[i] for i in range(len(orders))] == list(orders)
        messages = [orders.message(i) for i in range(len(orders))]
        keys.extend((each.key, each.attempt, each.body) for each in messages)
        if orders.message(0).attempt == 1:
            orders.retry(0)

    calls = Calls(act)
    await to_the_end(engine, calls.group("a", "b"))

    a, b = b'{"id": "a"}', b'{"id": "b"}'
    # `a` asks for another attempt twice: in the batch, and `b` when it is the first of its own.
    assert keys == [("a", 1, a), ("b", 1, b), ("a", 2, a), ("b", 1, b), ("b", 2, b)]


# --------------------------------------------------------------------------------------------------------- rejections
@pytest.mark.parametrize("index", [0, 2, 4], ids=["first", "middle", "last"])
async def test_a_rejected_item_is_failed_with_its_body_and_the_others_are_applied_once(
    ledger: Ledger, engine: Engine, index: int
) -> None:
    ids = list(range(1, 6))
    ids[index] = -1
    calls = Calls(at(-1, lambda orders, i: orders.reject(i, "negative", {"at": i})))

    outcomes = await to_the_end(engine, calls.group(*ids))

    assert kinds(outcomes) == ["failed" if id < 0 else "applied" for id in ids]
    assert outcomes[index].result == b'{"code":"negative","body":{"at":0}}'  # G7: by a run in which it came first
    assert ledger.effects == sorted(str(id) for id in ids if id > 0)
    assert ledger.states == [State.COMPLETED] * 4 + [State.FAILED]
    assert ledger.attempts == []
    again = await engine.run(calls.group(*ids))
    assert kinds(again) == ["duplicate"] * 5
    assert (again[index].state, again[index].result) == (State.FAILED, outcomes[index].result)


async def test_several_rejections_are_each_stored(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        for i, order in enumerate(orders):
            if order["id"] % 3 == 0:
                orders.reject(i, "third")

    calls = Calls(act)
    outcomes = await to_the_end(engine, calls.group(*range(8)))
    assert kinds(outcomes) == ["failed" if n % 3 == 0 else "applied" for n in range(8)]
    assert ledger.effects == [str(n) for n in range(8) if n % 3]


async def test_nothing_is_decided_by_what_a_rejected_item_had_written(ledger: Ledger, engine: Engine) -> None:
    """Both withdraw from the same account, and each alone would have its money."""
    ledger.run("create table if not exists purse (amount int)")
    ledger.run("truncate purse")
    ledger.run("insert into purse values (50)")

    async def act(orders: Orders, tx: Tx) -> None:
        for i, order in enumerate(orders):
            rows = await tx.execute("update purse set amount = amount - %s returning amount", (order["id"],))
            left = await rows.one()
            if left[0] < 0:
                orders.reject(i, "no_funds")

    outcomes = await to_the_end(engine, Calls(act).group(80, 40))

    assert kinds(outcomes) == ["failed", "applied"]
    assert ledger.run("select amount from purse") == [(10,)]


async def test_a_repeated_key_whose_first_delivery_is_rejected_gets_the_rejection(
    ledger: Ledger, engine: Engine
) -> None:
    calls = Calls(at(2, lambda orders, i: orders.reject(i, "no")))
    outcomes = await to_the_end(engine, calls.group(1, 2, 2, 3))
    assert kinds(outcomes) == ["applied", "failed", "duplicate", "applied"]
    assert outcomes[2].result == outcomes[1].result == b'{"code":"no","body":null}'


@pytest.mark.parametrize("said", ["rejected", "raised"])
async def test_an_item_behind_duplicates_is_blamed_and_not_one_of_them(
    ledger: Ledger, engine: Engine, said: str
) -> None:
    await engine.run(Calls().group(1, 3))
    calls = Calls(at(4, fail if said == "raised" else lambda orders, i: orders.reject(i, "four")), max_attempts=1)

    outcomes = await to_the_end(engine, calls.group(1, 2, 3, 2, 4, 5))

    last = "dead" if said == "raised" else "failed"
    assert kinds(outcomes) == ["duplicate", "applied", "duplicate", "duplicate", last, "applied"]
    assert ledger.effects == ["1", "2", "3", "5"]


async def test_a_rejection_after_a_database_error_is_a_rejection(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        for i, order in enumerate(orders):
            try:
                await tx.execute("select 1 / %s", (order["id"],))
            except psycopg.errors.DivisionByZero:
                orders.reject(i, "zero")

    outcomes = await to_the_end(engine, Calls(act).group(1, 0, 2))
    assert kinds(outcomes) == ["applied", "failed", "applied"]
    assert ledger.effects == ["1", "2"]


async def test_a_rejection_for_the_sake_of_an_outage_is_none(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        with pytest.raises(psycopg.OperationalError):
            await tx.execute("select pg_terminate_backend(pg_backend_pid())")
        for i in range(len(orders)):
            orders.reject(i, "broken")

    with pytest.raises(StoreUnavailable):
        await engine.run(Calls(act).group(1, 2))
    assert (ledger.effects, ledger.states, ledger.attempts) == ([], [], [])


async def test_a_rejection_that_cannot_be_stored_is_that_items_failure(ledger: Ledger, engine: Engine) -> None:
    calls = Calls(at(2, lambda orders, i: orders.reject(i, "odd", object())), max_attempts=1)
    assert kinds(await to_the_end(engine, calls.group(1, 2, 3))) == ["applied", "dead", "applied"]
    assert "cannot be stored as JSON" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


# ------------------------------------------------------------------------------------------------------------- retries
async def test_a_retried_item_is_due_when_asked_and_what_is_behind_it_waits(ledger: Ledger, engine: Engine) -> None:
    def later(orders: Orders, i: int) -> None:
        if orders.message(i).attempt == 1:
            orders.retry(i, "7s")

    calls = Calls(at(2, later))
    group = calls.group(1, 2, 3, 4)

    outcomes = await engine.run(group)
    assert kinds(outcomes) == ["applied", "retrying"]
    assert (outcomes[1].due, outcomes[1].attempt) == (7.0, 1)
    assert (ledger.effects, ledger.attempts) == (["1"], [1])

    assert kinds(await to_the_end(engine, group[1:])) == ["applied"] * 3
    assert calls.seen == [[1, 2, 3, 4], [1], [2], [3, 4]]
    assert (ledger.effects, ledger.attempts) == (["1", "2", "3", "4"], [])


async def test_an_item_that_is_retried_for_ever_is_dead_and_the_letter_names_the_line(
    ledger: Ledger, engine: Engine
) -> None:
    calls = Calls(at(2, lambda orders, i: orders.retry(i)))
    assert kinds(await to_the_end(engine, calls.group(1, 2, 3))) == ["applied", "dead", "applied"]
    assert ledger.letters == [("attempts_exhausted", 1)]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "requested by batch.retry" in error
    assert "(test_batches.py:" in error


# ---------------------------------------------------------------------------------------------------------- exceptions
@pytest.mark.parametrize("index", range(8))
async def test_an_exception_is_blamed_on_the_item_that_fails_alone(ledger: Ledger, engine: Engine, index: int) -> None:
    calls = Calls(at(index, fail))
    left, decided = calls.group(*range(8)), list[str]()
    while left:  # as a lane takes them
        outcomes = await engine.run(left[: engine.group_size(left[0].handler)])
        decided += [kind for kind in kinds(outcomes) if kind != "retrying"]
        left = left[len(outcomes) - (outcomes[-1].kind == "retrying") :]

    assert decided == ["dead" if n == index else "applied" for n in range(8)]
    assert ledger.effects == [str(n) for n in range(8) if n != index]
    assert (ledger.letters, ledger.attempts) == ([("attempts_exhausted", 1)], [])
    failed = [batch for batch in calls.seen if index in batch]
    assert failed[-3:] == [[index]] * 3
    assert len(failed) <= 3 + 3, f"in halves, and then alone: {calls.seen}"


@pytest.mark.parametrize("index", [0, 21, 63])
@pytest.mark.parametrize("found", ["by the handler", "at the commit"])
async def test_a_failure_that_is_searched_for_counts_once(
    ledger: Ledger, engine: Engine, monkeypatch: pytest.MonkeyPatch, index: int, found: str
) -> None:
    """The size of the groups follows the share of messages that fail."""
    failures, failed = list[GroupSize](), GroupSize.failed

    def counting(size: GroupSize) -> GroupSize:
        failures.append(size)
        return failed(size)

    monkeypatch.setattr(GroupSize, "failed", counting)

    async def roll_back(orders: Orders, tx: Tx) -> None:
        if index in [order["id"] for order in orders]:
            await tx.connection.execute("rollback and chain")

    calls = Calls(at(index, fail) if found == "by the handler" else roll_back, max_attempts=1, group_size=64)
    assert kinds(await to_the_end(engine, calls.group(*range(64)))).count("applied") == 63
    assert len(failures) == 1


async def test_several_items_that_fail_are_each_judged(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        for i, order in enumerate(orders):
            if order["id"] in (1, 4, 5) or (order["id"] == 6 and orders.message(i).attempt == 1):
                raise ValueError

    outcomes = await to_the_end(engine, Calls(act).group(*range(8)))
    assert kinds(outcomes) == ["dead" if n in (1, 4, 5) else "applied" for n in range(8)]
    assert ledger.effects == ["0", "2", "3", "6", "7"]
    assert ledger.attempts == []


async def test_what_failed_before_is_not_searched_for_again(ledger: Ledger, engine: Engine) -> None:
    calls = Calls(at(2, fail))
    group = calls.group(1, 2, 3, 4)
    decided = 0
    while decided < 2:
        outcomes = await engine.run(group[decided:])
        decided += sum(outcome.kind != "retrying" for outcome in outcomes)
    assert [batch for batch in calls.seen if 2 in batch][-2:] == [[2], [2]]


@pytest.mark.parametrize("error", [Reject("no"), Retry(after="5s"), KeyError()], ids=repr)
async def test_what_is_raised_means_the_item_that_is_alone(ledger: Ledger, engine: Engine, error: Exception) -> None:
    def throw(orders: Orders, i: int) -> None:
        raise error

    calls = Calls(at(2, throw), max_attempts=2, fail_on=(KeyError,))
    expected = "dead" if isinstance(error, Retry) else "failed"
    assert kinds(await to_the_end(engine, calls.group(1, 2, 3))) == ["applied", expected, "applied"]
    assert ledger.effects == ["1", "3"]


async def test_what_was_said_of_an_item_before_an_exception_does_not_count(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        if len(orders) > 1:
            orders.reject(0, "perhaps")
            raise ValueError

    assert kinds(await to_the_end(engine, Calls(act).group(1, 2))) == ["applied"] * 2


async def test_a_swallowed_database_error_is_found(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        for order in orders:
            if order["id"] == 3:
                with pytest.raises(psycopg.errors.DivisionByZero):
                    await tx.execute("select 1/0")

    outcomes = await to_the_end(engine, Calls(act, max_attempts=1).group(*range(1, 6)))
    assert kinds(outcomes) == ["applied", "applied", "dead", "applied", "applied"]
    assert "swallowed a database error" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


@pytest.mark.parametrize("end", ["commit", "rollback", "rollback and chain"])
async def test_a_batch_that_ends_its_transaction_commits_nothing(ledger: Ledger, engine: Engine, end: str) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        if any(order["id"] == 3 for order in orders):
            await tx.connection.execute(end)

    outcomes = await to_the_end(engine, Calls(act, max_attempts=1).group(*range(1, 6)))
    assert kinds(outcomes) == ["applied", "applied", "dead", "applied", "applied"]
    assert ledger.effects == ["1", "2", "4", "5"]


async def test_a_constraint_that_fails_at_commit_is_blamed_on_the_item_that_broke_it(
    ledger: Ledger, engine: Engine
) -> None:
    ledger.run("create table if not exists even (id int check (id % 2 = 0) primary key)")
    ledger.run("create table if not exists pair (id int references even deferrable initially deferred)")
    ledger.run("truncate even, pair")
    ledger.run("insert into even values (2)")

    async def act(orders: Orders, tx: Tx) -> None:
        for order in orders:
            await tx.execute("insert into pair values (%s)", (4 if order["id"] == 3 else 2,))

    outcomes = await to_the_end(engine, Calls(act, max_attempts=1).group(*range(1, 6)))
    assert kinds(outcomes) == ["applied", "applied", "dead", "applied", "applied"]
    assert ledger.effects == ["1", "2", "4", "5"]


async def test_contention_costs_a_batch_no_attempt(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        if next(collisions, None) is not None:
            await collide(tx)

    collisions = iter(range(3))
    with a_lock_is_taken(ledger.dsn):
        assert kinds(await to_the_end(engine, Calls(act, max_attempts=1).group(*range(4)))) == ["applied"] * 4
    assert (ledger.effects, ledger.letters) == (["0", "1", "2", "3"], [])


async def test_the_time_out_is_that_of_the_whole_call(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        if len(orders) > 2:
            await asyncio.Event().wait()

    calls = Calls(act, timeout="100ms", max_attempts=1)
    async with asyncio.timeout(PATIENCE):
        assert kinds(await to_the_end(engine, calls.group(*range(8)))) == ["applied"] * 8
    assert calls.seen[:3] == [list(range(8)), list(range(4)), [0, 1]]


async def test_a_cancellation_is_no_failure(ledger: Ledger, engine: Engine) -> None:
    running = asyncio.Event()

    async def act(orders: Orders, tx: Tx) -> None:
        running.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(engine.run(Calls(act).group(1, 2)))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ledger.effects, ledger.attempts, ledger.states) == ([], [], [])


# ------------------------------------------------------------------------------------------------------------- results
async def test_a_result_that_cannot_be_stored_is_that_items_failure_and_none_is_searched_for(
    ledger: Ledger, engine: Engine
) -> None:
    calls = Calls(at(2, lambda orders, i: orders.result(i, object())), max_attempts=1)
    assert kinds(await to_the_end(engine, calls.group(1, 2, 3))) == ["applied", "dead", "applied"]
    assert calls.seen == [[1, 2, 3], [1], [2], [3]]  # G7: what ends it is a run in which it came first
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "cannot be stored as JSON" in error
    assert "(test_batches.py:" in error


async def test_a_result_is_what_it_was_when_it_was_given(engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        shared: dict[str, Any] = {}
        for i, order in enumerate(orders):
            shared["id"] = order["id"]
            orders.result(i, shared)

    outcomes = await engine.run(Calls(act).group(1, 2))
    assert [outcome.result for outcome in outcomes] == [b'{"id":1}', b'{"id":2}']


async def test_what_is_returned_is_refused_since_it_could_be_anybodys(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> object:
        return [{"paid": order["id"]} for order in orders]

    assert kinds(await to_the_end(engine, Calls(act, max_attempts=1).group(1, 2))) == ["dead"] * 2
    ((error,), _) = ledger.run("select error from idemconsumer.dead_letter")
    assert "returned a list" in error
    assert "batch.result(i, value)" in error
    assert ledger.effects == []


async def test_of_several_words_about_one_item_the_last_counts(ledger: Ledger, engine: Engine) -> None:
    async def act(orders: Orders, tx: Tx) -> None:
        orders.reject(0, "no")
        orders.result(0, "yes")
        orders.result(-1, "perhaps")
        orders.result(-1, None)

    outcomes = await engine.run(Calls(act).group(1, 2))
    assert (kinds(outcomes), [outcome.result for outcome in outcomes]) == (["applied"] * 2, [b'"yes"', None])


@pytest.mark.parametrize("i", [2, -3])
def test_an_item_that_is_not_there_is_an_error(i: int) -> None:
    items = Items(["a", "b"], [message("a"), message("b")])
    acts: list[Callable[[], object]] = [
        partial(items.result, i, 1),
        partial(items.reject, i, "no"),
        partial(items.retry, i),
        partial(items.message, i),
    ]
    for act in acts:
        with pytest.raises(IndexError):
            act()
    assert items.first_failed() is None


async def test_a_batch_is_over_when_its_handler_has_returned(engine: Engine) -> None:
    kept = list[Orders]()

    async def act(orders: Orders, tx: Tx) -> None:
        kept.append(orders)

    await engine.run(Calls(act).group(1, 2))
    with pytest.raises(HandlerFault, match="batch was used after its handler returned"):
        kept[0].reject(0, "too late")


# ------------------------------------------------------------------------------------------ payloads, injection
class Order(msgspec.Struct):
    id: str
    qty: int = 1


@dataclass
class Booking:
    id: str
    qty: int = 1


class Ride(pydantic.BaseModel):
    id: str
    qty: int = 1


@pytest.mark.parametrize("type_", [Order, Booking, Ride])
async def test_payloads_are_decoded_by_the_batchs_type_and_one_that_cannot_be_is_not_among_them(
    ledger: Ledger, engine: Engine, type_: Any
) -> None:
    seen: list[Any] = []

    async def handle(orders: Any, tx: Tx) -> None:
        seen.append(list(orders))

    handle.__annotations__["orders"] = Batch[type_]
    bound = idempotent_handler(SOURCE, key="id", group_size=8, order_by="id")(handle).plan.bind("shop")
    bodies = [b'{"id":"a"}', b'{"id":"b","qty":2}', b'{"id":"c","qty":"x"}', b'{"qty":1}', b'{"id":"d"}']
    outcomes = await to_the_end(engine, [work(bound, Message(SOURCE, body)) for body in bodies])

    assert kinds(outcomes) == ["applied", "applied", "dead", "dead", "applied"]
    assert seen == [[type_(id="a"), type_(id="b", qty=2)], [type_(id="d")]]


async def test_a_batch_without_a_type_holds_what_is_json(engine: Engine) -> None:
    seen: list[Any] = []

    @idempotent_handler(SOURCE, key=lambda message: message.position, group_size=8)
    async def handle(orders: Batch) -> None:  # type: ignore[type-arg]
        seen.extend(orders)

    bound = handle.plan.bind("shop")
    await engine.run([work(bound, Message(SOURCE, body, position=str(body))) for body in (b"[1]", b'"x"', b"null")])
    assert seen == [[1], "x", None]


async def test_a_plain_function_takes_its_batch_in_a_thread(engine: Engine) -> None:
    threads: list[int] = []

    @idempotent_handler(SOURCE, key="id", group_size=8)
    def handle(orders: Batch[dict[str, Any]]) -> None:
        threads.append(threading.get_ident())
        for i, order in enumerate(orders):
            if order["id"] == 2:
                orders.reject(i, "two")
            else:
                orders.result(i, order["id"])

    outcomes = await to_the_end(engine, works(handle, 1, 2, 3))
    assert kinds(outcomes) == ["applied", "failed", "applied"]
    assert threading.get_ident() not in threads


class Client: ...


async def test_one_message_by_itself_is_a_batch_of_one_with_the_apps_resources(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDEMCONSUMER_DSN", ledger.dsn)
    app = App("shop")

    @app.resource
    async def client() -> AsyncIterator[Client]:
        yield Client()

    @app.idempotent_handler(SOURCE, key="id")
    async def pay(orders: Batch[dict[str, Any]], tx: Tx, client: Client) -> None:
        assert isinstance(client, Client)
        for i, order in enumerate(orders):
            await write(tx, order["id"])
            orders.result(i, len(orders))

    outcomes = [await app.process(message(id)) for id in (1, 1)]
    await app.close()
    assert [(outcome.kind, outcome.result) for outcome in outcomes] == [("applied", b"1"), ("duplicate", b"1")]
    assert ledger.effects == ["1"]


async def test_a_batch_may_be_copied_in(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def load(orders: Batch[dict[str, Any]], tx: Tx) -> None:
        async with tx.connection.cursor().copy("copy witness (id) from stdin") as copy:
            for order in orders:
                await copy.write_row((str(order["id"]),))

    assert kinds(await engine.run(works(load, 1, 2, 3))) == ["applied"] * 3
    assert kinds(await engine.run(works(load, 2, 3, 4))) == ["duplicate", "duplicate", "applied"]
    assert ledger.effects == ["1", "2", "3", "4"]
