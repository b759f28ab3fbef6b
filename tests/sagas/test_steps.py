"""What a step is: effect, output and checkpoint at once, known by its name, never run again once finished."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, LiteralString

import pytest

from idemconsumer import OutcomeKind, Reject, Saga, Step, Tx
from idemconsumer.rules.values import State
from tests.support.sagas import Bench, Remote, Station, order, put, saga


@dataclass
class Receipt:
    number: int
    lines: list[str]


async def print_receipt(tx: Tx) -> Receipt:
    await tx.execute("insert into effect (name) values ('receipt')")
    return Receipt(7, ["a"])


async def test_steps_run_once_in_order_and_a_duplicate_gets_the_result(
    bench: Bench, one: Station, remote: Remote
) -> None:
    points: list[str | None] = []

    async def book(order: dict[str, Any], saga: Saga) -> str:
        points.append(saga.recovery_point)
        await saga.tx("first", put, "a")
        points.append(saga.recovery_point)
        charge = await saga.call("second", remote.charge, "b")
        points.append(saga.recovery_point)
        await saga.tx("third", put, charge)
        return charge

    first = await one.deliver(saga(book))
    again = await one.deliver(saga(book))
    assert (first.kind, again.kind) == (OutcomeKind.APPLIED, OutcomeKind.DUPLICATE)
    assert first.result == again.result == b'"charged:b"'
    assert bench.effects == ["a", "charged:b"]
    assert [name for name, _ in remote.calls] == ["b"]
    assert points == [None, "first", "second"]
    assert (bench.state, bench.held, bench.steps) == (State.COMPLETED, False, ["first", "second", "third"])


async def test_a_resumed_saga_gets_stored_outputs_in_their_types_and_runs_nothing_again(
    bench: Bench, one: Station, two: Station, remote: Remote
) -> None:
    seen: list[object] = []
    fails = [ValueError("once")]

    async def book(order: dict[str, Any], saga: Saga) -> int:
        seen.append(saga.recovery_point)
        receipt = await saga.tx("receipt", print_receipt)
        seen.append(receipt)
        await saga.call("charged", remote.charge, "b")
        if fails:
            raise fails.pop()
        await saga.tx("last", put, "c")
        return receipt.number

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert bench.state is State.PROCESSING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b"7")
    assert seen == [None, Receipt(7, ["a"]), "charged", Receipt(7, ["a"])]
    assert bench.effects == ["receipt", "c"]
    assert len(remote.calls) == 1


async def test_a_name_used_twice_in_one_run_is_an_error_that_says_what_to_write(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        for line in "ab":
            await saga.tx("line", put, line)

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert bench.effects == ["a"]
    assert "requested twice" in bench.letter
    assert 'f"line_{n}"' in bench.letter


async def test_names_with_a_suffix_make_a_loop(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        for n in range(3):
            await saga.tx(f"line_{n}", put, str(n))

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["0", "1", "2"]


@pytest.mark.parametrize("with_group", [False, True], ids=["gather", "TaskGroup"])
async def test_parallel_steps_run_beside_each_other_and_resume(
    bench: Bench, one: Station, two: Station, remote: Remote, with_group: bool
) -> None:
    both = asyncio.Barrier(2)
    fails = [ValueError("once")]

    async def meet(tx: Tx, name: str) -> str:
        await both.wait()
        return await put(tx, name)

    async def book(order: dict[str, Any], saga: Saga) -> list[str]:
        if with_group:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(saga.tx(name, meet, name)) for name in "ab"]
            outputs = [task.result() for task in tasks]
        else:
            outputs = await asyncio.gather(*(saga.tx(name, meet, name) for name in "ab"))
        if fails:
            raise fails.pop()
        await saga.call("c", remote.charge, "c")
        return outputs

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'["out:a","out:b"]')
    assert sorted(bench.effects) == ["a", "b"]
    assert bench.run("select bool_and(overlapped) from idemconsumer.step where kind = 1") == [(True,)]


async def test_one_of_two_parallel_steps_fails_and_only_that_one_is_run_again(
    bench: Bench, one: Station, two: Station
) -> None:
    begun, fails = asyncio.Event(), [ValueError("once")]

    async def fine(tx: Tx) -> None:
        begun.set()
        await put(tx, "fine")

    async def flaky(tx: Tx) -> None:
        await begun.wait()
        await put(tx, "flaky")
        if fails:
            raise fails.pop()

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.gather(saga.tx("fine", fine), saga.tx("flaky", flaky), return_exceptions=True)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    assert (await two.resume(saga(book))).kind is OutcomeKind.APPLIED
    assert sorted(bench.effects) == ["fine", "flaky"]


@pytest.mark.parametrize("kind", ["tx", "call"])
async def test_a_reject_of_a_step_reaches_the_handler_and_is_a_checkpoint(
    bench: Bench, one: Station, two: Station, kind: str
) -> None:
    runs: list[str] = []
    fails = [ValueError("once")]

    async def refuse_tx(tx: Tx) -> None:
        runs.append("tx")
        await put(tx, "refused")
        raise Reject("no", {"why": 1})

    async def refuse_call(step: Step) -> None:
        runs.append("call")
        raise Reject("no", {"why": 1})

    async def book(order: dict[str, Any], saga: Saga) -> object:
        try:
            await (saga.tx("s", refuse_tx) if kind == "tx" else saga.call("s", refuse_call))
        except Reject as rejection:
            if fails:
                raise fails.pop() from None
            await saga.tx("instead", put, "instead")
            return [rejection.code, rejection.body]
        return None

    assert (await one.deliver(saga(book))).kind is OutcomeKind.RETRYING
    outcome = await two.resume(saga(book))
    assert (outcome.kind, outcome.result) == (OutcomeKind.APPLIED, b'["no",{"why":1}]')
    assert runs == [kind]
    assert bench.effects == ["instead"]


ENDINGS: list[LiteralString] = [
    "commit", "commit; begin", "rollback", "rollback; begin", "rollback; begin read write", "end", "commit and chain",
]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_step_that_ends_its_transaction_is_never_done_and_commits_nothing(
    bench: Bench, one: Station, ending: LiteralString
) -> None:
    """L3: the checkpoint comes first, so that such a COMMIT meets the guard."""

    async def sly(tx: Tx) -> str:
        await put(tx, "sly")
        await tx.connection.execute(ending, prepare=False)
        await put(tx, "after")
        return "done"

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("sly", sly)

    outcome = await one.deliver(saga(book, max_attempts=1))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "attempts_exhausted")
    assert (bench.effects, bench.steps) == ([], [])


async def test_names_and_outputs_of_a_step_are_stored_as_they_are(bench: Bench, one: Station) -> None:
    names = ["it's", 'a "name"', r"back\slash \' \\", "100 %s %(name)s %%", "$1 $$ -- ; /*", "naïve ☃ 🚕"]

    async def say(tx: Tx, name: str) -> list[object]:
        return [name, None, True, -7]

    async def book(order: dict[str, Any], saga: Saga) -> None:
        for name in names:
            await saga.tx(name, say, name)

    assert (await one.deliver(saga(book))).kind is OutcomeKind.APPLIED
    stored = bench.run("select name, convert_from(output, 'utf8')::jsonb from idemconsumer.step order by position")
    assert stored == [(name, [name, None, True, -7]) for name in names]


async def test_a_step_whose_name_the_database_cannot_hold_is_refused_and_not_cut_short(
    bench: Bench, one: Station
) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("cut\0here", put, "a")

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert (bench.effects, bench.steps) == ([], [])


async def test_a_step_that_calls_commit_on_the_connection_is_never_done(bench: Bench, one: Station) -> None:
    async def sly(tx: Tx) -> str:
        await put(tx, "sly")
        await tx.connection.commit()
        return "done"

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("sly", sly)

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.DEAD
    assert (bench.effects, bench.steps) == ([], [])


async def test_attempts_are_counted_and_begin_anew_with_each_finished_step(
    bench: Bench, one: Station, remote: Remote
) -> None:
    fails = {"a": 2, "b": 2}
    attempts: list[int] = []

    async def flaky(step: Step, name: str) -> None:
        attempts.append(step.attempt)
        if fails[name]:
            fails[name] -= 1
            raise ValueError(name)
        await remote.charge(step, name)

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.call("a", flaky, "a")
        await saga.call("b", flaky, "b")

    handler = saga(book, max_attempts=3)
    *_, outcome = await one.to_the_end(handler, await one.deliver(handler))
    assert outcome.kind is OutcomeKind.APPLIED
    assert remote.effects == ["a", "b"]
    assert attempts == [1, 2, 3, 1, 2, 3]


async def test_attempts_without_progress_run_out(bench: Bench, one: Station) -> None:
    async def broken(tx: Tx) -> None:
        await put(tx, "broken")
        raise ValueError("no")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        await saga.tx("broken", broken)

    handler = saga(book, max_attempts=3)
    outcomes = await one.to_the_end(handler, await one.deliver(handler))
    assert (len(outcomes), outcomes[-1].kind) == (3, OutcomeKind.DEAD)
    assert (bench.effects, bench.letters, bench.state) == ([], ["attempts_exhausted"], State.DEAD)
    assert (await one.deliver(handler)).kind is OutcomeKind.DEAD


async def test_a_result_or_output_that_cannot_be_stored_fails_the_attempt(bench: Bench, one: Station) -> None:
    async def book(order: dict[str, Any], saga: Saga) -> object:
        await saga.tx("a", put, "a")
        return object()

    outcome = await one.deliver(saga(book, max_attempts=2), order("result"))
    assert (outcome.kind, bench.effects) == (OutcomeKind.RETRYING, ["a"])
    outcome = await one.resume(saga(book, max_attempts=2))
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "result_unencodable")
    assert "cannot be stored" in bench.letter


async def test_a_step_in_a_transaction_may_take_a_role_that_may_write_no_checkpoint(bench: Bench, one: Station) -> None:
    bench.run("do $$ begin create role clerk; exception when duplicate_object then null; end $$")
    bench.run("grant insert on effect to clerk")

    async def as_clerk(tx: Tx, name: str) -> str:
        await tx.execute("set local role clerk")
        return await put(tx, name)

    async def book(order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("first", as_clerk, "a")
        return await saga.tx("second", put, "b")

    assert (await one.deliver(saga(book, max_attempts=1))).kind is OutcomeKind.APPLIED
    assert bench.effects == ["a", "b"]
