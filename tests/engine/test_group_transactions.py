"""Many messages in one transaction: what holds for each must hold for each in a group (G1, G2, G6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import pytest
from psycopg.rows import dict_row

from idemconsumer import Message, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.failing import Subject
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import State
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.points import Points
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("both_ways")


@idempotent_handler(SOURCE, key="id", group_size=8)
async def pay(order: dict[str, Any], tx: Tx) -> str:
    await write(tx, order["id"])
    return f"paid {order['id']}"


@idempotent_handler(SOURCE, key="id", group_size=8)
async def fail_at_minus(order: dict[str, Any], tx: Tx, message: Message) -> None:
    """A negative number fails, a fraction fails at its first attempt alone."""
    await write(tx, order["id"])
    if order["id"] < 0 or (order["id"] % 1 and message.attempt == 1):
        raise ValueError


async def test_a_group_is_claimed_once_and_committed_once(ledger: Ledger, store: PostgresStore) -> None:
    points = Points()

    outcomes = await Engine(store, points).run(works(pay, *range(8)))

    assert kinds(outcomes) == ["applied"] * 8
    assert [outcome.result for outcome in outcomes] == [b'"paid %d"' % n for n in range(8)]
    assert ledger.effects == [str(n) for n in range(8)]
    assert [(p, n) for p, n in points.seen if p is not Point.HANDLED] == [
        (Point.CLAIMED, 8),
        (Point.SEALING, 8),
        (Point.COMMITTED, 8),
    ]
    assert ledger.run("select count(distinct xmin::text) from idemconsumer.record") == [(1,)]


async def test_a_key_that_comes_twice_in_a_group_is_applied_once(ledger: Ledger, engine: Engine) -> None:
    outcomes = await engine.run(works(pay, "a", "b", "a", "a", "c"))

    assert kinds(outcomes) == ["applied", "applied", "duplicate", "duplicate", "applied"]
    assert [outcome.result for outcome in outcomes[2:4]] == [b'"paid a"'] * 2
    assert ledger.effects == ["a", "b", "c"]


async def test_a_key_that_comes_twice_with_another_payload_is_a_conflict(ledger: Ledger, engine: Engine) -> None:
    bound = pay.plan.bind("shop")
    group = [work(bound, message("a", amount=1)), work(bound, message("a", amount=2)), *works(pay, "b")]

    outcomes = await engine.run(group)

    assert kinds(outcomes) == ["applied", "conflict", "applied"]
    assert ledger.effects == ["a", "b"]
    assert ledger.letters == [("conflict", 1)]
    assert ledger.states == [State.COMPLETED] * 2


async def test_a_repeated_key_whose_first_delivery_fails_is_not_answered_as_a_duplicate(
    ledger: Ledger, engine: Engine
) -> None:
    assert kinds(await to_the_end(engine, works(fail_at_minus, 0.5, 0.5))) == ["applied", "duplicate"]
    assert ledger.effects == ["0.5"]


async def test_in_a_group_of_duplicates_and_new_ones_the_new_ones_run(ledger: Ledger, engine: Engine) -> None:
    await engine.run(works(pay, 1, 3))
    outcomes = await engine.run(works(pay, 0, 1, 2, 3))
    assert kinds(outcomes) == ["applied", "duplicate", "applied", "duplicate"]
    assert [outcome.result for outcome in outcomes] == [b'"paid %d"' % n for n in range(4)]
    assert ledger.effects == ["0", "1", "2", "3"]


async def test_a_group_of_duplicates_alone_is_answered(ledger: Ledger, engine: Engine) -> None:
    await engine.run(works(pay, 1, 2))
    assert kinds(await engine.run(works(pay, 2, 1, 2))) == ["duplicate"] * 3
    assert ledger.effects == ["1", "2"]


@pytest.mark.parametrize("index", [0, 2, 4], ids=["first", "middle", "last"])
async def test_what_comes_before_a_failure_is_committed_and_what_comes_after_is_left(
    ledger: Ledger, engine: Engine, index: int
) -> None:
    ids = list(range(1, 6))
    ids[index] = -1

    outcomes = await engine.run(works(fail_at_minus, *ids))

    assert kinds(outcomes) == ["applied"] * index + ["retrying"]
    assert ledger.effects == [str(id) for id in ids[:index]]
    assert ledger.attempts == [1]


async def test_a_failure_is_counted_in_the_commit_of_what_comes_before_it(ledger: Ledger, engine: Engine) -> None:
    outcomes = await engine.run(works(fail_at_minus, 1, 2, -3, 4))

    assert [(outcome.kind, outcome.attempt) for outcome in outcomes] == [
        ("applied", 1),
        ("applied", 1),
        ("retrying", 1),
    ]
    commits = "select xmin::text from idemconsumer.record union select xmin::text from idemconsumer.attempt"
    assert len(ledger.run(commits)) == 1


async def test_a_failure_behind_one_that_has_to_be_waited_for_is_not_counted_without_it(
    ledger: Ledger, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rerun meets a rival that the first run did not."""
    transaction, opened = store.transaction, 0
    first, second, failing = works(fail_at_minus, 1, 2, -3)
    assert second.call is not None
    claim = second.call.claim

    async with transaction(group=1) as rival:

        @asynccontextmanager
        async def taken_before_the_rerun(**options: Any) -> AsyncIterator[PostgresClaims]:
            nonlocal opened
            opened += 1
            if opened == 2:
                await rival.claim([claim])
            async with transaction(**options) as claims:
                yield claims

        monkeypatch.setattr(store, "transaction", taken_before_the_rerun)
        outcomes = await Engine(store).run([first, second, failing])

    assert kinds(outcomes) == ["applied"]
    assert ledger.attempts == []


@pytest.mark.parametrize("index", [0, 2, 4], ids=["first", "middle", "last"])
async def test_presented_again_the_rest_is_applied_and_the_failed_one_judged(
    ledger: Ledger, engine: Engine, index: int
) -> None:
    ids = list(range(1, 6))
    ids[index] = -1

    outcomes = await to_the_end(engine, works(fail_at_minus, *ids))

    assert kinds(outcomes) == ["dead" if id < 0 else "applied" for id in ids]
    assert ledger.effects == [str(id) for id in sorted(ids) if id > 0]
    assert ledger.letters == [("attempts_exhausted", 1)]


async def test_several_failures_of_one_group_are_each_judged(ledger: Ledger, engine: Engine) -> None:
    outcomes = await to_the_end(engine, works(fail_at_minus, -1, 0.5, 1, -2, 1.5, 2))
    assert kinds(outcomes) == ["dead", "applied", "applied", "dead", "applied", "applied"]
    assert ledger.effects == ["0.5", "1", "1.5", "2"]
    assert ledger.attempts == []


async def test_each_failure_halves_the_group_and_clean_ones_restore_it(engine: Engine) -> None:
    bound = fail_at_minus.plan.bind("shop")
    sizes = [engine.group_size(bound)]
    for n in range(4):
        await engine.run([work(bound, message(-1 - n))])
        sizes.append(engine.group_size(bound))
    for n in range(24):
        await engine.run([work(bound, message(n))])
        sizes.append(engine.group_size(bound))

    assert sizes[:5] == [8, 4, 2, 1, 1]
    assert sizes[5 + 7 :: 8] == [2, 4, 8]


async def test_groups_stay_within_the_share_of_the_lock_table(store: PostgresStore) -> None:
    bound = pay.plan.bind("shop")
    store.most_locks = 20
    assert Engine(store, lanes=4).group_size(bound) == Engine(store, lanes=4).max_group_size(bound) == 5
    assert Engine(store, lanes=100).group_size(bound) == 1


async def test_a_rejection_in_the_middle_is_stored_and_the_others_are_applied(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def refuse_three(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == 3:
            raise Reject("three", {"n": 3})

    outcomes = await to_the_end(engine, works(refuse_three, *range(1, 6)))

    assert kinds(outcomes) == ["applied", "applied", "failed", "applied", "applied"]
    assert outcomes[2].result == b'{"code":"three","body":{"n":3}}'
    assert ledger.effects == ["1", "2", "4", "5"]
    assert ledger.states == [State.COMPLETED] * 4 + [State.FAILED]
    again = await engine.run(works(refuse_three, *range(1, 6)))
    assert kinds(again) == ["duplicate"] * 5
    assert (again[2].state, again[2].result) == (State.FAILED, outcomes[2].result)


async def test_a_retry_in_the_middle_stops_its_group_there(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def later(order: dict[str, Any], tx: Tx, message: Message) -> None:
        await write(tx, order["id"])
        if order["id"] == 2 and message.attempt < 3:
            raise Retry(after="7s")

    outcomes = await engine.run(works(later, 1, 2, 3))
    assert kinds(outcomes) == ["applied", "retrying"]
    assert outcomes[1].due == 7.0
    assert kinds(await to_the_end(engine, works(later, 1, 2, 3))) == ["duplicate", "applied", "applied"]
    assert ledger.effects == ["1", "2", "3"]


async def test_a_constraint_that_fails_at_commit_is_blamed_on_the_one_that_broke_it(
    ledger: Ledger, engine: Engine
) -> None:
    ledger.run("create table if not exists account (id int primary key)")
    ledger.run(
        "create table if not exists booking (account int references account deferrable initially deferred, id int)"
    )
    ledger.run("truncate account, booking")
    ledger.run("insert into account values (1)")

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
    async def book(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        await tx.execute("insert into booking values (%s, %s)", (9 if order["id"] == 3 else 1, order["id"]))

    outcomes = await to_the_end(engine, works(book, *range(1, 6)))

    assert kinds(outcomes) == ["applied", "applied", "dead", "applied", "applied"]
    assert ledger.effects == ["1", "2", "4", "5"]
    assert ledger.run("select id from booking order by id") == [(1,), (2,), (4,), (5,)]
    ((error,),) = ledger.run("select error from idemconsumer.dead_letter")
    assert "violates foreign key constraint" in error


async def test_a_busy_key_in_the_middle_ends_the_group_before_it(ledger: Ledger, store: PostgresStore) -> None:
    engine = Engine(store)
    (held,) = works(pay, "held")
    assert held.call is not None
    async with store.transaction(group=1) as rival:
        await rival.claim([held.call.claim])
        outcomes = await engine.run(works(pay, 1, 2, "held", 3))
        assert kinds(outcomes) == ["applied", "applied"]
        outcomes = await engine.run(works(pay, 4, "held", 5, "held"), defer=True)
        assert kinds(outcomes) == ["applied", "busy", "applied", "busy"]
    assert ledger.effects == ["1", "2", "4", "5"]


async def test_a_busy_message_has_not_succeeded_with_its_group(ledger: Ledger, store: PostgresStore) -> None:
    """Nor has its tenant: what is known of their failures is still known (D17)."""

    @idempotent_handler(SOURCE, key="id", tenant="tenant", max_attempts=5)
    async def act(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == "bad":
            raise ValueError

    bound, engine = act.plan.bind("shop"), Engine(store, watched=True)
    good, bad, again = (work(bound, message(id, tenant=id)) for id in ("good", "bad", "bad"))
    assert kinds(await engine.run([bad])) == ["retrying"]
    assert again.call is not None
    async with store.transaction(group=1) as rival:
        await rival.claim([again.call.claim])
        assert kinds(await engine.run([good, again], defer=True)) == ["applied", "busy"]
    assert engine.endings.failing.has_failed(Subject.handler(bound), again.identity)
    assert [engine.failed_beside(each) for each in (good, again)] == [0, 1]


async def test_handlers_of_one_group_share_now_and_those_of_size_one_do_not(ledger: Ledger, engine: Engine) -> None:
    async def stamp(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("insert into witness values ('x', now()::text)")

    grouped = idempotent_handler(SOURCE, key="id", name="grouped", group_size=8)(stamp)
    alone = idempotent_handler(SOURCE, key="id", name="alone", group_size=1)(stamp)

    await engine.run(works(grouped, 1, 2, 3))
    stamps = [note for (note,) in ledger.run("select note from witness")]
    assert len(stamps) == 3
    assert len(set(stamps)) == 1

    ledger.run("truncate witness")
    for each in works(alone, 1, 2, 3):
        assert engine.group_size(each.handler) == 1
        await engine.run([each])
    stamps = [note for (note,) in ledger.run("select note from witness")]
    assert len(set(stamps)) == 3


async def test_two_groups_that_deadlock_both_come_through_without_an_attempt(
    ledger: Ledger, store: PostgresStore
) -> None:
    ledger.run("create table if not exists hot (id int primary key, hits int)")
    ledger.run("truncate hot")
    ledger.run("insert into hot values (1, 0), (2, 0)")
    meeting = asyncio.Barrier(2)
    points = Points()

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def hit(order: dict[str, Any], tx: Tx) -> None:
        rows = await tx.execute("update hot set hits = hits + 1 where id = %s", (order["row"],))
        assert rows.rowcount == 1  # they meet once both have a row
        await write(tx, order["id"])
        if order["meet"] and not meeting.broken:
            try:  # only when they first meet: each then wants the row that the other has
                await asyncio.wait_for(meeting.wait(), PATIENCE)
                await meeting.abort()
            except asyncio.BrokenBarrierError:
                pass

    bound = hit.plan.bind("shop")

    def group(name: str, rows: Sequence[int]) -> list[Any]:
        return [work(bound, message(f"{name}{n}", row=row, meet=n == 0)) for n, row in enumerate(rows)]

    async with asyncio.timeout(PATIENCE):
        outcomes = await asyncio.gather(
            to_the_end(Engine(store, points), group("a", [1, 2])), to_the_end(Engine(store, points), group("b", [2, 1]))
        )

    assert [kinds(each) for each in outcomes] == [["applied"] * 2] * 2
    assert ledger.effects == ["a0", "a1", "b0", "b1"]
    assert ledger.run("select hits from hot") == [(2,), (2,)]
    assert points.count(Point.CLAIMED) > points.count(Point.COMMITTED), "they never collided"
    assert points.count(Point.ATTEMPT_COUNTED) == 0


def purse(ledger: Ledger, amount: int) -> None:
    ledger.run("create table if not exists purse (amount int)")
    ledger.run("truncate purse")
    ledger.run("insert into purse select %s", (amount,))


async def withdraw(tx: Tx, amount: int) -> None:
    rows = await tx.execute("update purse set amount = amount - %s returning amount", (amount,))
    if (await rows.one())[0] < 0:
        raise Reject("no_funds")


async def test_no_rejection_is_stored_that_was_decided_by_what_then_was_rejected_itself(
    ledger: Ledger, engine: Engine
) -> None:
    purse(ledger, 50)
    runs = 0

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def pay_out(order: dict[str, Any], tx: Tx) -> None:
        nonlocal runs
        if order["id"] == "a":
            runs += 1
            if runs == 2:
                raise Reject("second thoughts")
        await withdraw(tx, 40)

    assert kinds(await engine.run(works(pay_out, "a", "b"))) == ["failed", "applied"]
    assert ledger.run("select amount from purse") == [(10,)]


async def test_no_rejection_is_stored_that_was_decided_by_what_a_rerun_did_not_do_again(
    ledger: Ledger, engine: Engine
) -> None:
    """No committed state ever had too little money for `b`."""
    purse(ledger, 50)
    runs: list[str] = []

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def pay_out(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        await withdraw(tx, 40 if runs.count(order["id"]) == 1 else 5)

    assert kinds(await engine.run(works(pay_out, "a", "b"))) == ["applied", "applied"]
    assert runs == ["a", "b", "a", "b"]
    assert ledger.run("select amount from purse") == [(40,)]


@pytest.mark.parametrize(
    "harm",
    [
        "set transaction read only",
        "create temp table seat (number text check (number = 'none')) on commit drop",
    ],
)
async def test_what_a_neighbour_did_to_the_transaction_ends_no_message(
    ledger: Ledger, engine: Engine, harm: LiteralString
) -> None:
    """The only attempt of `b` fails beside `a`, and by itself it does not."""
    ledger.run("create table if not exists seat (number int primary key)")
    ledger.run("truncate seat")

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def take(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute(harm if order["id"] == "a" else "insert into seat values (1)")

    assert kinds(await to_the_end(engine, works(take, "a", "b"))) == ["applied", "applied"]
    assert (ledger.letters, ledger.run("select number from seat")) == ([], [(1,)])


async def test_an_attempt_that_others_counted_does_not_end_a_message_beside_a_neighbour(
    ledger: Ledger, engine: Engine, store: PostgresStore
) -> None:
    """This process does not know of it, and learns of it only when it counts the failure beside `a`."""
    ledger.run("create table if not exists seat (number int primary key)")
    ledger.run("truncate seat")

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=2)
    async def take(order: dict[str, Any], tx: Tx) -> None:
        hidden = "create temp table seat (number text check (number = 'none')) on commit drop"
        await tx.execute(hidden if order["id"] == "a" else "insert into seat values (1)")

    group = works(take, "a", "b")
    await store.count_attempt(group[1].claim, "of another worker")
    assert kinds(await engine.run(group)) == ["applied", "applied"]
    assert (ledger.letters, ledger.run("select number from seat")) == ([], [(1,)])


async def test_no_message_ends_by_a_row_of_a_neighbour_that_is_rejected_itself(ledger: Ledger, engine: Engine) -> None:
    """`c` fails on the row of `b`, which is rejected in its rerun: the row is gone, and so is the reason."""
    ledger.run("create table if not exists seat (number int primary key)")
    ledger.run("truncate seat")
    runs: list[str] = []

    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def take(order: dict[str, Any], tx: Tx) -> None:
        runs.append(order["id"])
        await tx.execute("insert into seat values (1)")
        if runs.count("b") == 2 and order["id"] == "b":
            raise Reject("second thoughts")

    assert kinds(await to_the_end(engine, works(take, "b", "c"))) == ["failed", "applied"]
    assert (ledger.letters, ledger.run("select number from seat")) == ([], [(1,)])


async def test_no_rejection_is_stored_that_was_decided_by_what_a_rival_then_held(
    ledger: Ledger, store: PostgresStore
) -> None:
    purse(ledger, 50)

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def pay_out(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] != "between":
            await withdraw(tx, 40)

    group = works(pay_out, "a", "between", "b")
    lock = int.from_bytes(group[0].key[:8], "big", signed=True)

    class Rival(Points):
        """Quicker with `a` when it runs again."""

        def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
            if point is Point.ROLLED_BACK:
                ledger.run("select pg_advisory_lock(%s)", (lock,))

    assert kinds(await Engine(store, Rival()).run(group, defer=True)) == ["busy", "applied", "applied"]
    ledger.run("select pg_advisory_unlock(%s)", (lock,))
    assert kinds(await Engine(store).run(group[:1])) == ["failed"]
    assert ledger.run("select amount from purse") == [(10,)]


async def test_a_rejection_stands_beside_those_that_had_no_part_in_it(ledger: Ledger, engine: Engine) -> None:
    purse(ledger, 10)

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def pay_out(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] != "between":
            await withdraw(tx, 40)

    assert kinds(await engine.run(works(pay_out, "rejected before"))) == ["failed"]
    group = works(pay_out, "busy", "rejected before", "between", "b")
    ledger.run("select pg_advisory_lock(%s)", (int.from_bytes(group[0].key[:8], "big", signed=True),))
    assert kinds(await engine.run(group, defer=True)) == ["busy", "duplicate", "applied", "failed"]


# --------------------------------------------------------------------------------------------- one connection for all
async def test_what_a_handler_sets_on_its_connection_ends_with_it(ledger: Ledger, engine: Engine) -> None:
    rows: list[object] = []

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def look(order: dict[str, Any], tx: Tx) -> str:
        if order["id"] == "odd":
            tx.connection.row_factory = dict_row
        rows.append(await (await tx.execute("select 1 as one")).first())
        await write(tx, order["id"])
        return "looked"

    assert kinds(await engine.run(works(look, "odd", 1))) == ["applied"] * 2
    assert rows == [{"one": 1}, (1,)]
    assert kinds(await engine.run(works(look, 2, "odd"))) == ["applied", "duplicate"]
    assert kinds(await engine.run(works(look, 1, "odd"))) == ["duplicate"] * 2
