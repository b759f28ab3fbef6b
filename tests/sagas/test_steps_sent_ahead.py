"""What a step or an undo does not look at is sent and not waited for, and that changes nothing else (J26, J27)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from idemconsumer import OutcomeKind, Reject, Saga, Tx
from idemconsumer.engine.work import Work
from idemconsumer.stores.ahead import Ahead
from tests.support.sagas import Bench, Remote, Station, lost, order, put, saga, take_back
from tests.support.tuning import tuned

APPLIED, FAILED, DEAD = OutcomeKind.APPLIED, OutcomeKind.FAILED, OutcomeKind.DEAD


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Nothing has to be learnt first. What was sent ahead."""
    tuned(monkeypatch, runs_before_ahead=0)
    texts: list[bytes] = []
    send = Ahead.send

    def noted(self: Ahead, sent: Any, query: bytes, *more: Any, **others: Any) -> None:
        texts.append(query)
        send(self, sent, query, *more, **others)

    monkeypatch.setattr(Ahead, "send", noted)
    return texts


async def twice(tx: Tx, name: str) -> None:
    await tx.execute("insert into effect (name) values (%s)", (name,))
    await tx.execute("create temporary table once (id int unique) on commit drop")
    await tx.execute("insert into once values (1)")
    await tx.send("insert into once values (1)")


async def test_a_step_and_its_undo_send_ahead(bench: Bench, one: Station, sent: list[bytes]) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.tx("b", put, "b", undo=take_back)
        raise Reject("no")

    assert (await one.deliver(saga(book))).kind is FAILED
    assert bench.effects == ["a", "b", "undo:b:out:b", "undo:a:out:a"]
    assert len([text for text in sent if b"effect" in text]) == 4


async def test_who_looks_at_its_answer_waits(bench: Bench, one: Station, sent: list[bytes]) -> None:
    async def looks(tx: Tx, name: str) -> None:
        rows = await tx.execute("insert into effect (name) values (%s)", (name,))
        assert rows.rowcount == 1

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", looks, order["id"])

    assert (await one.deliver(saga(book), order("a"))).kind is APPLIED
    sent.clear()  # it is known by now
    assert (await one.deliver(saga(book), order("b"))).kind is APPLIED
    assert (bench.effects, sent) == (["a", "b"], [])


async def test_what_may_have_killed_a_worker_waits(bench: Bench, one: Station, two: Station, sent: list[bytes]) -> None:
    """As in joined mode: nothing of it is on its way when it does so again."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")

    handler = saga(book)
    await lost(bench, one, handler)
    sent.clear()
    taken = await two.take(handler)
    assert taken is not None
    work = Work.of(handler, taken.message, leased=replace(taken, suspect=True))
    assert (await two.run(work)).kind is APPLIED
    assert (bench.effects, sent) == (["a"], [])


async def test_who_catches_an_error_catches_it_where_it_always_did(bench: Bench, one: Station) -> None:
    """The first run learns at its commit that a statement has failed. That counts nothing, and repeats no step."""
    runs = 0

    async def step(tx: Tx) -> str:
        nonlocal runs
        runs += 1
        try:
            await tx.execute("insert into effect (name) values (%s)", (None,))
        except psycopg.errors.NotNullViolation:
            raise Reject("empty") from None
        return "not reached with an error"

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a", undo=take_back)
        await saga.tx("b", step)

    bench.run("alter table effect alter name set not null")
    outcome = await one.deliver(saga(book, max_attempts=1))
    assert (outcome.kind, runs) == (FAILED, 2)
    assert bench.effects == ["a", "undo:a:out:a"]


async def test_a_statement_that_fails_is_counted_as_often_as_one_that_is_waited_for(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("a", put, "a")
        await saga.tx("b", twice, "b")

    handler = saga(book, max_attempts=2)
    *_, last = await one.to_the_end(handler, await one.deliver(handler))
    assert (last.kind, last.attempt, bench.effects) == (DEAD, 2, ["a"])
    assert "UniqueViolation" in bench.letter


async def test_a_count_that_is_not_known_yet_is_waited_for_in_the_next_run(bench: Bench, one: Station) -> None:
    counts: list[int] = []

    async def step(tx: Tx) -> None:
        counts.append((await tx.execute("insert into effect (name) values ('c')")).rowcount)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("c", step)

    assert (await one.deliver(saga(book, max_attempts=1))).kind is APPLIED
    assert (counts, bench.effects) == ([1], ["c"])


async def test_a_table_that_has_changed_costs_no_attempt(bench: Bench, one: Station) -> None:
    async def step(tx: Tx) -> None:
        await (await tx.execute("select * from effect where length(name) = %s", (1,))).all()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("c", step)

    handler = saga(book, max_attempts=1)
    for number in range(24):  # each of its connections has the step's statement prepared
        assert (await one.deliver(handler, order(f"{number}"))).kind is APPLIED
    bench.run("alter table effect add column more text")
    for number in range(24, 30):
        assert (await one.deliver(handler, order(f"{number}"))).kind is APPLIED


async def test_a_handler_that_runs_again_gets_its_payload_as_it_was(bench: Bench, one: Station) -> None:
    async def step(tx: Tx, id: str) -> None:
        assert (await tx.execute("insert into effect (name) values (%s)", (id,))).rowcount == 1

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("c", step, order.pop("id"))

    assert (await one.deliver(saga(book, max_attempts=1))).kind is APPLIED
    assert bench.effects == ["k"]


async def test_a_call_beside_it_keeps_its_key(bench: Bench, one: Station, remote: Remote) -> None:
    """The run that meets the failure is closed like any that is interrupted."""

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("charged", remote.charge, "x")
        await saga.tx("b", twice, "b")

    handler = saga(book, max_attempts=2)
    *_, last = await one.to_the_end(handler, await one.deliver(handler))
    assert (last.kind, len(remote.calls)) == (DEAD, 1)
