"""Sagas give way to what runs alone (L23), and run alone themselves after two lost workers in a row (L22)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import Context
from typing import Any, Literal

import pytest

from idemconsumer import Outcome, OutcomeKind, Saga, Step, Tx
from idemconsumer.engine.company import Company
from idemconsumer.engine.work import Work
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.observer import Point
from idemconsumer.rules.values import State
from idemconsumer.rules.verdicts import Settlement, settle
from idemconsumer.stores.leased_saga import LeasedSaga
from tests.support.inside import set_longest, set_patience, waiting_for
from tests.support.points import Points
from tests.support.sagas import Bench, FreeLanes, Station, due_sagas, lost, order, put, saga
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until


class Rooms:
    """The company of station `one`, and others in it."""

    def __init__(self, one: Station) -> None:
        self.company: Company = one.engine._company
        set_patience(self.company, 0.0)
        self._others: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    @property
    def waiting(self) -> int:
        return waiting_for(self.company)

    async def enters(self, *, alone: bool) -> None:
        """Somebody, part of nobody else, who stays until `goes`."""
        await until(self.comes(alone=alone).is_set, "is inside")

    def comes(self, *, alone: bool) -> asyncio.Event:
        """Does not wait; set once they are inside."""
        inside, leave = asyncio.Event(), asyncio.Event()

        async def stay() -> None:
            async with self.company.alone() if alone else self.company.shared():
                inside.set()
                await leave.wait()

        self._others.append((asyncio.create_task(stay(), context=Context()), leave))
        return inside

    async def goes(self) -> None:
        """The first one leaves."""
        task, leave = self._others.pop(0)
        leave.set()
        await task


@pytest.fixture
def rooms(one: Station) -> Iterator[Rooms]:
    rooms = Rooms(one)
    yield rooms
    for _, leave in rooms._others:
        leave.set()


class Booking:
    """A saga whose call stops the first time, after the remote has heard of it."""

    def __init__(self, *, swallows: bool = False) -> None:
        self.stopped, self.freed, self.swallows = asyncio.Event(), asyncio.Event(), swallows
        self.keys: list[object] = []

    async def charge(self, step: Step) -> str:
        self.keys.append(step.key)
        while not self.freed.is_set():
            self.stopped.set()
            try:
                await self.freed.wait()
            except asyncio.CancelledError:
                if not self.swallows:
                    self.freed.set()
                    raise
        return "charged"

    async def book(self, order: dict[str, Any], saga: Saga) -> str:
        await saga.tx("a", put, "a")
        await saga.call("b", self.charge)
        await saga.tx("c", put, "c")
        return "done"


def released(bench: Bench) -> list[tuple[Any, ...]]:
    return bench.run("select worker, due <= clock_timestamp(), attempt, suspicion from idemconsumer.saga")


# ------------------------------------------------------------------------------------------------------ it gives way
async def test_a_saga_gives_way_at_no_cost_and_repeats_its_call_under_its_key(
    bench: Bench, one: Station, two: Station, rooms: Rooms
) -> None:
    booking = Booking()
    run = asyncio.create_task(one.deliver(saga(booking.book)))
    await booking.stopped.wait()
    await rooms.enters(alone=True)
    assert released(bench) == [(None, True, 0, 0)], "before the other one begins, so that its end costs nothing"
    outcome = await run
    assert (outcome.kind, outcome.state, settle(outcome)) == (
        OutcomeKind.RETRYING,
        State.PROCESSING,
        Settlement.FINISH,
    )
    assert (await two.resume(saga(booking.book))).kind is OutcomeKind.APPLIED
    assert (bench.effects, len(booking.keys), len(set(booking.keys))) == (["a", "c"], 2, 1)
    await rooms.goes()


async def test_who_does_not_give_way_is_not_waited_for_and_released_later(
    bench: Bench, one: Station, rooms: Rooms
) -> None:
    booking = Booking(swallows=True)
    set_longest(rooms.company, 0.0)
    run = asyncio.create_task(one.deliver(saga(booking.book)))
    await booking.stopped.wait()
    await rooms.enters(alone=True)
    assert not run.done()
    booking.freed.set()
    assert (await run).kind is OutcomeKind.RETRYING
    assert released(bench) == [(None, True, 0, 0)]
    await rooms.goes()


async def test_without_a_source_the_call_itself_goes_on_after_it_gave_way(
    bench: Bench, one: Station, rooms: Rooms
) -> None:
    booking = Booking()

    async def claimed() -> None:
        return

    run = asyncio.create_task(one.engine.run(Work.of(saga(booking.book), order()), claimed, unfed=True))
    await booking.stopped.wait()
    await rooms.enters(alone=True)
    await until(lambda: rooms.waiting == 1, "it waits until it may go on")
    await rooms.goes()
    outcome = await run
    assert (outcome.kind, outcome.attempt, bench.effects) == (OutcomeKind.APPLIED, 1, ["a", "c"])


async def test_a_message_that_its_broker_keeps_is_held_while_its_saga_gives_way(
    bench: Bench, one: Station, rooms: Rooms
) -> None:
    booking = Booking()
    work = Work.of(saga(booking.book, settle="finished"), order())
    run = asyncio.create_task(one.run(work))
    await booking.stopped.wait()
    await rooms.enters(alone=True)
    outcome = await run
    assert (settle(outcome), outcome.due) == (Settlement.HOLD, 0.0), "else nobody would ever settle it"
    await rooms.goes()
    outcome = await one.run(work)
    assert (settle(outcome), outcome.state, bench.effects) == (Settlement.FINISH, State.COMPLETED, ["a", "c"])


async def test_nothing_is_claimed_while_another_one_is_alone(bench: Bench, one: Station, rooms: Rooms) -> None:
    booking = Booking()
    booking.freed.set()
    await rooms.enters(alone=True)
    run = asyncio.create_task(one.deliver(saga(booking.book)))
    await until(lambda: rooms.waiting == 1)
    assert bench.run("select 1 from idemconsumer.record") == []
    await rooms.goes()
    assert (await run).kind is OutcomeKind.APPLIED


async def test_what_its_broker_has_taken_back_meanwhile_is_not_claimed(
    bench: Bench, one: Station, rooms: Rooms
) -> None:
    await rooms.enters(alone=True)
    work = Work.of(saga(Booking().book), order())
    work.abandoned = lambda: True
    run = asyncio.create_task(one.run(work))
    await until(lambda: rooms.waiting == 1)
    await rooms.goes()
    assert settle(await run) is Settlement.DROP
    assert bench.run("select 1 from idemconsumer.record") == []


async def test_a_cancellation_by_others_is_not_taken_for_giving_way(bench: Bench, one: Station, rooms: Rooms) -> None:
    booking = Booking()
    run = asyncio.create_task(one.deliver(saga(booking.book)))
    await booking.stopped.wait()
    one.engine._give_way(run)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert released(bench) == [(None, True, 0, 0)]


@pytest.mark.parametrize("end", ["drain", "lose"])
@pytest.mark.parametrize("suspect", [False, True])
async def test_one_that_waits_for_its_turn_can_be_ended(
    bench: Bench, one: Station, two: Station, rooms: Rooms, end: Literal["drain", "lose"], suspect: bool
) -> None:
    handler = saga(Booking().book)
    holding = await held(bench, one, two, handler, suspect=suspect)
    await rooms.enters(alone=True)
    run = asyncio.create_task(one.run(Work.of(handler, order(), leased=holding)))
    await until(lambda: rooms.waiting == 1)
    (one.engine.drain if end == "drain" else one.engine.lose)()
    outcome = await run
    if end == "drain":
        assert (outcome.kind, outcome.state) == (OutcomeKind.CANCELLED, State.PROCESSING)
        assert released(bench) == [(None, True, 0, 2 if suspect else 1)], "it did not run, so it is what it was"
    else:
        assert outcome.kind is OutcomeKind.FENCED
    await rooms.goes()
    async with asyncio.timeout(30), rooms.company.alone():
        assert rooms.waiting == 0


async def test_no_due_saga_is_taken_while_one_is_alone_or_waits_to_be_but_not_for_ever(
    bench: Bench, one: Station, two: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, due_saga_pause=0.0, looks_kept_out=3)
    await lost(bench, one, saga(Booking().book))
    session = await due_sagas(two, FreeLanes(1, closed=True))
    assert [len(await session.fetch()) for _ in range(4)] == [0, 0, 0, 1]
    await session.close()


# ------------------------------------------------------------------------------------------------------ it runs alone
async def held(bench: Bench, one: Station, two: Station, handler: BoundHandler, *, suspect: bool) -> LeasedSaga:
    """A saga that `one` has taken over from `two`, which was lost; a suspect if somebody was lost before."""
    await lost(bench, two, handler)
    if suspect:
        bench.run("update idemconsumer.saga set suspicion = 1")
    holding = await one.take(handler)
    assert holding is not None
    assert holding.suspect is suspect
    return holding


def suspicion(bench: Bench) -> int:
    ((found,),) = bench.run("select suspicion from idemconsumer.saga")
    return int(found)


@pytest.mark.parametrize("how", ["a finished step", "the end", "its time is over"])
async def test_a_suspect_is_counted_and_runs_alone_until(
    bench: Bench, one: Station, two: Station, rooms: Rooms, how: str
) -> None:
    begun, finish, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(tx: Tx) -> None:
        begun.set()
        await finish.wait()
        await put(tx, "a")

    async def book(order: dict[str, Any], saga: Saga) -> None:
        if how == "the end":
            begun.set()
            await finish.wait()
            return
        await saga.tx("a", slow)
        await go.wait()

    handler = saga(book)
    holding = await held(bench, one, two, handler, suspect=True)
    if how == "its time is over":
        set_longest(rooms.company, 0.0)
    await rooms.enters(alone=False)
    run = asyncio.create_task(one.run(Work.of(handler, order(), leased=holding)))
    await until(lambda: rooms.waiting == 1)
    assert (begun.is_set(), suspicion(bench)) == (False, 2)
    await rooms.goes()
    await until(begun.is_set)
    assert suspicion(bench) == 3, "on record before it runs"
    others = rooms.comes(alone=False)
    if how != "its time is over":
        await until(lambda: rooms.waiting == 1)
        assert not others.is_set()
        finish.set()
    await until(others.is_set)
    assert run.done() is (how == "the end")
    for event in (finish, go):
        event.set()
    assert (await run).kind is OutcomeKind.APPLIED
    await rooms.goes()


async def test_what_is_lost_while_it_runs_alone_costs_an_attempt_and_beside_others_none(
    bench: Bench, one: Station, two: Station, points: Points
) -> None:
    """With a single attempt, a saga outlives any number of workers that die beside it, and kills one by itself."""

    async def never(order: dict[str, Any], saga: Saga) -> None:
        await asyncio.Event().wait()

    handler = saga(never, max_attempts=1)
    holding: LeasedSaga | None = await held(bench, one, two, handler, suspect=False)
    for _ in range(3):
        bench.expire(one)
        one.register(bench)
        holding = await one.take(handler)
    assert holding is not None
    assert (holding.suspect, holding.attempt) == (True, 1)
    run = asyncio.create_task(one.run(Work.of(handler, order(), leased=holding)))
    await until(lambda: points.count(Point.SUSPECT_COUNTED) == 1)
    bench.expire(one)
    two.register(bench)
    async with asyncio.timeout(PATIENCE):
        outcome = await two.resume(handler)
    assert (outcome.kind, outcome.reason) == (OutcomeKind.DEAD, "killed_worker")
    one.engine.lose()
    await run


async def test_one_that_a_redelivery_takes_over_runs_alone_too(
    bench: Bench, one: Station, two: Station, rooms: Rooms, points: Points
) -> None:
    booking = Booking()
    booking.freed.set()
    handler = saga(booking.book)
    await lost(bench, two, handler)
    bench.run("update idemconsumer.saga set suspicion = 1")
    await rooms.enters(alone=False)
    run = asyncio.create_task(one.deliver(handler))
    await until(lambda: rooms.waiting == 1)
    assert (bench.effects, points.count(Point.SUSPECT_COUNTED)) == ([], 0)
    await rooms.goes()
    assert (await run).kind is OutcomeKind.APPLIED
    assert points.count(Point.SUSPECT_COUNTED) == 1


async def test_a_suspect_is_decoded_only_once_it_is_alone_and_counted(
    bench: Bench, one: Station, two: Station, rooms: Rooms
) -> None:
    found: list[int] = []

    def rule(message: Any) -> str:
        if found or bench.held:
            found.append(suspicion(bench))
        return "all"

    handler = saga(Booking().book, tenant=rule)
    holding = await held(bench, one, two, handler, suspect=True)
    work = Work.of(handler, order(), leased=holding)
    assert (work.call, work.key, found) == (None, holding.key, [])
    run: asyncio.Task[Outcome] = asyncio.create_task(one.run(work))
    await until(lambda: found)
    assert found == [3]
    one.engine.drain()
    await run
