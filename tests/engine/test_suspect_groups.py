"""Suspects with nothing on record run in groups, and one that kills a worker is identified all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from typing import Any

import pytest

from idemconsumer import Message, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.errors import StoreUnavailable
from idemconsumer.handlers.decorator import Handler
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.claim import Claim
from idemconsumer.rules.values import OutcomeKind
from idemconsumer.stores.joined import PostgresStore
from tests.support.inside import waiting_for
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.points import Killed, Points
from tests.support.waiting import until

MARK = Point.SUSPECTS_MARKED


class Pay:
    """A handler that writes, and does `more` for chosen messages; the ids and attempts that it was given."""

    def __init__(self, more: dict[object, Callable[[Tx], Awaitable[None]]] | None = None, **options: Any) -> None:
        self.seen: list[object] = []
        self.attempts: list[int] = []
        more = more or {}

        @idempotent_handler(SOURCE, key="id", **{"group_size": 32, **options})
        async def handle(order: dict[str, Any], tx: Tx, message: Message) -> None:
            self.seen.append(order["id"])
            self.attempts.append(message.attempt)
            await write(tx, order["id"])
            if order["id"] in more:
                await more[order["id"]](tx)

        self.handler: Handler[..., Any] = handle

    def suspects(self, *ids: object) -> list[Work]:
        return works(self.handler, *ids, suspect=True)


async def kill(tx: Tx) -> None:
    raise Killed


async def fail(tx: Tx) -> None:
    raise ValueError


async def cancel_itself(tx: Tx) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await tx.execute("select 1")


async def stay_marked_as_cancelled(tx: Tx) -> None:
    """Before Python 3.13 the failed group leaves the task so."""
    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(tx))
    raise asyncio.CancelledError


async def one_life_after_the_other(store: PostgresStore, given: Callable[[], list[Work]]) -> list[int]:
    """Start a new process after each death, until one ends. Returns how many messages each of them ran together."""
    sizes: list[int] = []
    for _ in range(50):
        engine, left = Engine(store), given()
        try:
            while left:
                outcomes = await engine.run(left)
                sizes.append(len(outcomes))
                left = left[sum(outcome.kind is not OutcomeKind.RETRYING for outcome in outcomes) :]
        except Killed:
            sizes.append(0)
        else:
            return sizes
    raise AssertionError(f"no end after {len(sizes)} runs")


async def test_suspects_take_one_commit_to_be_marked_and_one_to_be_applied(
    ledger: Ledger, store: PostgresStore
) -> None:
    meanwhile: list[list[int]] = []

    async def look(tx: Tx) -> None:
        meanwhile.append(ledger.attempts)
        assert ledger.run("select count(distinct xmin::text) from idemconsumer.attempt") == [(1,)]

    points, pay = Points(), Pay({31: look})
    assert kinds(await Engine(store, points).run(pay.suspects(*range(32)))) == ["applied"] * 32
    assert (points.count(MARK), points.count(Point.COMMITTED), points.count(Point.SUSPECT_COUNTED)) == (1, 1, 0)
    assert ledger.run("select count(distinct xmin::text) from witness") == [(1,)]
    assert (meanwhile, pay.attempts, ledger.attempts) == ([[0] * 32], [1] * 32, [])


async def test_suspects_and_others_share_a_group_in_their_order(ledger: Ledger, store: PostgresStore) -> None:
    points, pay = Points(), Pay()
    first, last = works(pay.handler, "first", "last")
    assert kinds(await Engine(store, points).run([first, *pay.suspects(1, 2), last])) == ["applied"] * 4
    assert pay.seen == ["first", 1, 2, "last"]
    assert [n for point, n in points.seen if point in (MARK, Point.COMMITTED)] == [2, 4]
    assert ledger.attempts == []


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_a_killer_among_suspects_ends_as_a_dead_letter_and_costs_the_others_nothing(
    ledger: Ledger, store: PostgresStore, max_attempts: int
) -> None:
    pay = Pay({"bomb": kill}, max_attempts=max_attempts)
    await one_life_after_the_other(store, lambda: pay.suspects("a", "bomb", "b", "c"))
    # One death for all of them, and then its own.
    assert pay.seen.count("bomb") == 1 + max_attempts
    assert ledger.letters == [("killed_worker", 1)]
    assert (ledger.effects, ledger.attempts) == (["a", "b", "c"], [])
    assert {at for at, id in zip(pay.attempts, pay.seen, strict=True) if id != "bomb"} == {1}


async def test_what_another_process_had_begun_runs_alone(ledger: Ledger, store: PostgresStore) -> None:
    deaths = 1

    async def die_once(tx: Tx) -> None:
        nonlocal deaths
        deaths -= 1
        if deaths == 0:
            raise Killed

    pay = Pay({2: die_once})
    with pytest.raises(Killed):
        await Engine(store).run(pay.suspects(1, 2, 3))
    sizes = await one_life_after_the_other(store, lambda: pay.suspects(0, 1, 2, 3, 4, 5))
    assert sizes == [1, 1, 1, 1, 2], "0 comes before them, and 4 and 5 behind: those were not begun before"
    assert (ledger.effects, ledger.attempts) == ([str(n) for n in range(6)], [])


async def test_what_was_begun_before_waits_until_other_lanes_are_quiet(ledger: Ledger, store: PostgresStore) -> None:
    running, go = asyncio.Event(), asyncio.Event()

    async def hold(tx: Tx) -> None:
        running.set()
        await go.wait()

    pay, engine = Pay({"other": hold}), Engine(store)
    await store.mark_attempts([work.claim for work in pay.suspects("begun")])
    other = asyncio.create_task(engine.run(pay.suspects("other")))
    await running.wait()
    begun = asyncio.create_task(engine.run(pay.suspects("begun")))
    await until(lambda: waiting_for(engine.company) == 1)
    behind = asyncio.create_task(engine.run(works(pay.handler, "behind")))
    await until(lambda: waiting_for(engine.company) == 2)
    assert (pay.seen, ledger.attempts) == (["other"], [0, 0]), "it is not counted either"
    go.set()
    assert [kinds(await task) for task in (other, begun, behind)] == [["applied"]] * 3
    assert pay.seen == ["other", "begun", "behind"]


async def test_what_is_taken_back_while_it_waits_for_its_turn_does_not_run(store: PostgresStore) -> None:
    pay, engine = Pay(), Engine(store)
    await store.mark_attempts([work.claim for work in pay.suspects("begun")])
    waiting = [works(pay.handler, "new"), pay.suspects("begun")]
    outside = copy_context()
    async with engine.company.alone():
        tasks = [asyncio.create_task(engine.run(group), context=outside) for group in waiting]
        await until(lambda: waiting_for(engine.company) == 2)
        for (work,) in waiting:
            work.abandoned = lambda: True
    assert (await asyncio.gather(*tasks), pay.seen) == ([[], []], [])


async def test_what_waits_behind_one_that_was_begun_before_is_not_on_record_while_that_runs(
    ledger: Ledger, store: PostgresStore
) -> None:
    pay = Pay({"bomb": kill})
    for group in (["bomb", 1], ["bomb", 1, 2, 3]):
        with pytest.raises(Killed):
            await Engine(store).run(pay.suspects(*group))
    assert ledger.attempts == [0, 1], "1, which was begun beside it, and the bomb, alone"


async def test_a_killer_that_waits_once_more_behind_one_begun_before_stays_on_record(
    ledger: Ledger, store: PostgresStore
) -> None:
    pay = Pay({"bomb": kill})
    await store.mark_attempts([call.claim for work in pay.suspects("begun") if (call := work.call)])
    with pytest.raises(Killed):
        await Engine(store).run(pay.suspects("bomb", "begun", "bomb"))
    assert ledger.attempts == [0, 0]


async def test_a_failure_among_suspects_is_one_failure(ledger: Ledger, store: PostgresStore) -> None:
    points, pay = Points(), Pay({"bad": fail}, max_attempts=2)
    engine, group = Engine(store, points), pay.suspects(1, "bad", 2, 3)
    first = await engine.run(group)
    assert (kinds(first), ledger.attempts) == (["applied", "retrying"], [1]), "2 and 3 are not on record any more"
    assert kinds(await engine.run(group[1:])) == ["dead"]
    assert (points.count(MARK), points.count(Point.SUSPECT_COUNTED)) == (2, 0), "it ended, so it killed nobody"
    assert kinds(await engine.run(group[2:])) == ["applied"] * 2
    assert pay.attempts == [1, 1, 1, 2, 1, 1]
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["1", "2", "3"], [], [("attempts_exhausted", 1)])


@pytest.mark.parametrize("how", [cancel_itself, stay_marked_as_cancelled])
async def test_a_suspect_that_cancels_its_own_task_has_failed_and_costs_nobody_else_anything(
    ledger: Ledger, engine: Engine, how: Callable[[Tx], Awaitable[None]]
) -> None:
    """It ended its worker before it was a suspect, and would end each worker after that."""
    pay = Pay({"own": how}, max_attempts=2)
    group = pay.suspects(1, "own", 2)
    assert (kinds(await engine.run(group)), ledger.attempts) == (["applied", "retrying"], [1])
    assert kinds(await to_the_end(engine, group)) == ["duplicate", "dead", "applied"]
    assert (ledger.effects, ledger.attempts, ledger.letters) == (["1", "2"], [], [("attempts_exhausted", 1)])
    assert "nothing cancelled it" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


async def test_a_suspect_that_is_too_slow_is_stopped_and_counted(ledger: Ledger, engine: Engine) -> None:
    async def hang(tx: Tx) -> None:
        await tx.execute("select pg_sleep(60)")

    pay = Pay({"slow": hang}, max_attempts=2, timeout="50ms")
    assert kinds(await to_the_end(engine, pay.suspects(1, "slow", 2))) == ["applied", "dead", "applied"]
    assert "did not end within its timeout" in ledger.run("select error from idemconsumer.dead_letter")[0][0]


class CutAtMark:
    """An observer that breaks every connection of the store once suspects are marked and claimed, the first times."""

    def __init__(self, ledger: Ledger, times: int) -> None:
        self._ledger = ledger
        self._times = times
        self.marked = 0

    def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
        if point is MARK:
            self.marked += 1
        elif point is Point.CLAIMED and self._times:
            self._times -= 1
            self._ledger.run(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and application_name = 'idemconsumer'"
            )


@pytest.mark.parametrize("redelivered", [True, False], ids=["redelivered", "held meanwhile"])
async def test_after_an_outage_the_marks_of_this_process_are_its_own(
    ledger: Ledger, store: PostgresStore, redelivered: bool
) -> None:
    observer, pay = CutAtMark(ledger, 1), Pay()
    engine, group = Engine(store, observer), pay.suspects(1, 2, 3)
    with pytest.raises(StoreUnavailable):
        await engine.run(group)
    assert ledger.attempts == [0, 0, 0]
    pay.attempts.clear()
    again = pay.suspects(1, 2, 3) if redelivered else group
    assert kinds(await engine.run(again)) == ["applied"] * 3
    assert (observer.marked, pay.attempts, ledger.attempts) == (1, [1] * 3, [])


async def test_another_process_takes_the_marks_of_an_outage_for_a_death(ledger: Ledger, store: PostgresStore) -> None:
    pay = Pay(max_attempts=1)
    with pytest.raises(StoreUnavailable):
        await Engine(store, CutAtMark(ledger, 1)).run(pay.suspects(1, 2))
    pay.attempts.clear()
    assert await one_life_after_the_other(store, lambda: pay.suspects(1, 2)) == [1, 1]
    assert (ledger.effects, ledger.attempts, pay.attempts) == (["1", "2"], [], [1, 1])


async def test_what_a_rival_finished_during_an_outage_leaves_nothing_on_record(
    ledger: Ledger, store: PostgresStore
) -> None:
    pay = Pay()
    engine, group = Engine(store, CutAtMark(ledger, 1)), pay.suspects(1, 2)
    with pytest.raises(StoreUnavailable):
        await engine.run(group)
    await to_the_end(Engine(store), works(pay.handler, 1, 2))
    assert ledger.attempts == [0, 0]
    assert kinds(await engine.run(group)) == ["duplicate", "duplicate"]
    assert ledger.attempts == []


async def test_marks_that_are_cancelled_while_they_are_made_are_taken_back(
    ledger: Ledger, store: PostgresStore
) -> None:
    marked, go = asyncio.Event(), asyncio.Event()

    async def hold_the_answer() -> None:
        marked.set()
        await go.wait()

    async with rivalled(ledger, hold_the_answer) as engine:
        task = asyncio.create_task(engine.run(Pay().suspects(1, 2)))
        await marked.wait()
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (ledger.attempts, ledger.effects) == ([], [])


async def test_a_cancelled_group_of_suspects_leaves_nothing_on_record(ledger: Ledger, store: PostgresStore) -> None:
    running = asyncio.Event()

    async def hang(tx: Tx) -> None:
        running.set()
        await asyncio.Event().wait()

    pay = Pay({2: hang})
    task = asyncio.create_task(Engine(store).run(pay.suspects(1, 2, 3)))
    await running.wait()
    assert ledger.attempts == [0, 0, 0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ledger.attempts, ledger.effects) == ([], [])


async def test_duplicates_among_suspects_are_answered_once_and_leave_nothing_on_record(
    ledger: Ledger, store: PostgresStore
) -> None:
    points, pay = Points(), Pay({"dead": fail}, max_attempts=1)
    engine, bound = Engine(store, points), pay.handler.plan.bind("shop")
    await to_the_end(engine, works(pay.handler, "done", "dead"))
    other = work(bound, message(1, amount=2), suspect=True)
    outcomes = await engine.run([*pay.suspects("done", "dead", 1, 1), other, *pay.suspects("done", "dead", 2)])
    assert kinds(outcomes) == ["duplicate", "dead"], "the first ones are answered by their records alone"
    outcomes = await engine.run([*pay.suspects(1, 1), other, *pay.suspects("done", "dead", 2)])
    assert kinds(outcomes) == ["applied", "duplicate", "conflict", "duplicate", "dead", "applied"]
    assert [n for point, n in points.seen if point is MARK] == [4], "1 three times, and 2"
    assert ledger.letters == [("attempts_exhausted", 3), ("conflict", 1)]
    assert (ledger.effects, ledger.attempts) == (["1", "2", "done"], [])


class Rivalled(PostgresStore):
    """A rival is quicker: `between` happens after a mark."""

    between: Callable[[], Awaitable[object]]

    async def mark_attempts(self, claims: Sequence[Claim]) -> set[bytes]:
        marked = await super().mark_attempts(claims)
        await self.between()
        return marked


@asynccontextmanager
async def rivalled(ledger: Ledger, between: Callable[[], Awaitable[object]]) -> AsyncIterator[Engine]:
    store = await Rivalled.open(ledger.dsn, SCHEMA, connections=2, longest_run=30.0)
    assert isinstance(store, Rivalled)
    store.between = between
    yield Engine(store)
    await store.close()


async def test_what_a_rival_finishes_after_it_was_marked_leaves_nothing_on_record(
    ledger: Ledger, store: PostgresStore
) -> None:
    pay = Pay()
    async with rivalled(ledger, lambda: Engine(store).run(works(pay.handler, 2))) as engine:
        outcomes = await engine.run(pay.suspects(1, 2, 3))
    assert (kinds(outcomes), ledger.attempts) == (["applied", "duplicate", "applied"], [])
    assert ledger.effects == ["1", "2", "3"]


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("wait", ["100ms", "0s"])
async def test_a_busy_suspect_in_a_group_did_not_run(
    ledger: Ledger, store: PostgresStore, busy: int, wait: str
) -> None:
    pay = Pay(wait=wait)
    group = pay.suspects(0, 1, 2)
    held = group[busy]
    assert held.call is not None
    engine = Engine(store)
    async with store.transaction(group=1) as rival:
        await rival.claim([held.call.claim])
        outcomes = await engine.run(group)
    deferred = [["busy", "applied", "applied"], ["applied", "busy", "applied"]]
    expected = deferred if wait == "0s" else [["busy"], ["applied"]]
    assert (kinds(outcomes), ledger.attempts) == (expected[busy], [])
    left = [work for work in group if str(work.message.position).partition("-")[2] not in ledger.effects]
    assert kinds(await engine.run(left)) == ["applied"] * len(left)
    assert (ledger.effects, ledger.attempts, set(pay.attempts)) == (["0", "1", "2"], [], {1})


async def test_a_rivals_count_is_not_taken_back_with_our_mark(ledger: Ledger, store: PostgresStore) -> None:
    """It counted while ours waited for it, and may die of it yet."""
    pay = Pay(wait="50ms")
    group = pay.suspects(1, 2)
    call = group[0].call
    assert call is not None
    async with (
        rivalled(ledger, lambda: store.count_attempt(call.claim, None)) as engine,
        store.transaction(group=1) as rival,
    ):
        await rival.claim([call.claim])
        outcomes = await engine.run(group, defer=True)
    assert (kinds(outcomes), ledger.attempts) == (["busy", "applied"], [1])
