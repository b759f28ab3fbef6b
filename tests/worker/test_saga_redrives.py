"""Dead letters of sagas are redriven: a saga goes on where it stopped, and what came of it is on record (O24)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from idemconsumer import App, Reject, Saga, Step, Tx, Unknown
from idemconsumer.admin.dead_letters import ALL, Admin, DeadLetterDetail, Which
from idemconsumer.admin.redrives import Redrives
from idemconsumer.admin.saga_admin import SagaAdmin
from idemconsumer.rules.redriven import Redriven
from idemconsumer.rules.values import State
from tests.support.workers import SCHEMA, Bench, Item, Running, note


class Rides:
    """A saga that charges, and then cannot book until `mended`."""

    def __init__(self, step: str = "charged", **options: Any) -> None:
        self.app = App("shop")
        self.charged: list[str] = []
        self.refunded: list[str] = []
        self.act: Callable[[], object] = self.buggy
        options = {"max_attempts": 1, **options}

        async def charge(step: Step, item: Item) -> str:
            self.charged.append(str(step.key))
            return f"ch-{item.id}"

        async def refund(step: Step, paid: str, item: Item) -> None:
            self.refunded.append(paid)

        async def book(tx: Tx, item: Item) -> None:
            await note(tx, item)
            self.act()

        @self.app.idempotent_handler("memory:q", key="id", **options)
        async def ride(item: Item, saga: Saga) -> str:
            undo = refund if self.act is refuse else None
            paid = await saga.call(step, charge, item, undo=undo)
            await saga.tx("booked", book, item)
            return paid

    def buggy(self) -> None:
        raise ValueError("a bug")

    def mend(self) -> None:
        self.act = lambda: None


def refuse() -> None:
    raise Reject("full")


def states(bench: Bench) -> list[State]:
    return [State(state) for (state,) in bench.do("select state from idemconsumer.record order by key")]


async def redrive(bench: Bench, which: Which = ALL, run: str = "r", **more: Any) -> dict[Redriven, int]:
    return dict((await Redrives(bench.dsn, SCHEMA).redrive(which, by="ann", run=run, **more)).counts)


async def letters(bench: Bench, *, redriven: bool = False) -> list[DeadLetterDetail]:
    return [each async for each in Admin(bench.dsn, SCHEMA).export(Which(redriven=redriven))]


async def outcomes(bench: Bench, letter: DeadLetterDetail) -> list[str]:
    return [each.outcome for each in await Admin(bench.dsn, SCHEMA).redrives(letter)]


@asynccontextmanager
async def until_all(bench: Bench, app: App, *wanted: State) -> AsyncIterator[Running]:
    async with bench.running(app) as running:
        await running.until(lambda: states(bench) == list(wanted))
        yield running


async def put_aside(bench: Bench, rides: Rides, *items: Item) -> list[DeadLetterDetail]:
    await bench.publish("q", *items)
    async with until_all(bench, rides.app, *[State.DEAD] * len(items)):
        pass
    return await letters(bench)


async def test_it_goes_on_where_it_stopped_with_attempts_anew_and_leaves_a_trace(bench: Bench) -> None:
    rides = Rides(max_attempts=2, backoff="1ms, 1ms")
    (letter,) = await put_aside(bench, rides, Item("a"))
    assert letter.reason == "attempts_exhausted"
    failed_once = list[int]()

    def fail_once() -> None:
        if not failed_once:
            failed_once.append(1)
            raise ValueError

    rides.act = fail_once
    assert await redrive(bench) == {Redriven.RESUMES: 1}
    assert (states(bench), await letters(bench)) == ([State.PROCESSING], [])
    assert await outcomes(bench, letter) == ["waiting"]
    assert await redrive(bench, run="other") == {}, "it is no letter at the moment"
    async with until_all(bench, rides.app, State.COMPLETED):
        pass
    assert (len(rides.charged), bench.effects()) == (1, ["a"]), "a finished charge is not made again"
    (trace,) = await Admin(bench.dsn, SCHEMA).redrives(letter)
    assert (trace.outcome, trace.by, trace.run, trace.ended_at is not None) == ("applied", "ann", "r", True)
    history = (await SagaAdmin(bench.dsn, SCHEMA).saga(letter.key or b"")).timeline
    assert f"letter {letter.id} redriven by ann" in [event.detail for event in history if event.what == "resumed"]
    assert await letters(bench) == []


async def test_what_is_put_aside_again_is_the_same_letter_with_its_new_reason(bench: Bench) -> None:
    rides = Rides()
    (letter,) = await put_aside(bench, rides, Item("a"))
    assert letter.reason == "attempts_exhausted"
    await redrive(bench)
    async with until_all(bench, Rides(step="paid").app, State.DEAD):
        pass
    (again,) = await letters(bench)
    assert (again.id, again.reason, again.arrivals) == (letter.id, "saga_changed", 2)
    assert await outcomes(bench, letter) == ["dead"]
    rides.mend()
    assert await redrive(bench) == {}, "of the same run each letter is redriven once"
    assert await redrive(bench, run="second") == {Redriven.RESUMES: 1}
    async with until_all(bench, rides.app, State.COMPLETED):
        pass
    assert (await outcomes(bench, letter), len(rides.charged)) == (["dead", "applied"], 1)


async def test_one_that_is_refused_is_undone_and_has_ended(bench: Bench) -> None:
    """What is undone cannot go on: there is no letter any more."""
    rides = Rides()
    (letter,) = await put_aside(bench, rides, Item("a"))
    rides.act = refuse
    await redrive(bench)
    async with until_all(bench, rides.app, State.FAILED):
        pass
    assert (rides.refunded, await outcomes(bench, letter)) == (["ch-a"], ["rejected"])
    assert await redrive(bench, Which(ids=[letter.id], redriven=True), run="second") == {Redriven.REDRIVEN: 1}
    assert states(bench) == [State.FAILED]


async def test_what_a_person_has_to_know_is_asked_again_and_not_guessed(bench: Bench) -> None:
    app, asked = App("shop"), list[str]()

    async def charge(step: Step) -> None:
        asked.append("charge")
        raise ConnectionError

    async def look(step: Step) -> Unknown:
        asked.append("look")
        return Unknown()

    @app.idempotent_handler("memory:q", key="id", max_attempts=3, backoff="1ms, 1ms")
    async def ride(item: Item, saga: Saga) -> None:
        await saga.call("charged", charge, reconcile=look)

    await bench.publish("q", Item("a"))
    async with until_all(bench, app, State.DEAD):
        pass
    (letter,) = await letters(bench)
    assert (letter.reason, asked) == ("unknown_effect", ["charge", "look"])
    await redrive(bench)
    async with until_all(bench, app, State.DEAD):
        pass
    assert (asked, await outcomes(bench, letter)) == (["charge", "look", "look"], ["dead"])


async def test_a_bulk_run_takes_messages_and_sagas_and_a_dry_one_changes_nothing(bench: Bench) -> None:
    rides = Rides()

    @rides.app.idempotent_handler("memory:other", key="id", max_attempts=1)
    async def take(item: Item, tx: Tx) -> None:
        await note(tx, item)
        rides.act()

    await bench.publish("other", Item("c"))
    await bench.publish("q", Item("a"), Item("b"), b"{")
    async with until_all(bench, rides.app, *[State.DEAD] * 3) as running:
        await running.until(lambda: bench.do("select count(*) from idemconsumer.dead_letter") == [(4,)])
    bench.do("update idemconsumer.dead_letter set body = '' where handler = 'ride' and key is not null")
    every = {Redriven.RESUMES: 2, Redriven.REDRIVES: 2}
    assert await redrive(bench, dry_run=True) == every
    assert states(bench) == [State.DEAD] * 3
    assert await redrive(bench, Which(reason="undecodable"), dry_run=True) == {Redriven.REDRIVES: 1}
    assert await redrive(bench, rate=1_000.0) == every
    rides.mend()
    async with until_all(bench, rides.app, *[State.COMPLETED] * 3):
        pass
    assert (sorted(bench.effects()), len(rides.charged)) == (["a", "b", "c"], 2)


async def test_two_at_the_same_time_give_one_and_nothing_is_waited_for(bench: Bench) -> None:
    rides = Rides()
    (letter,) = await put_aside(bench, rides, Item("a"))
    act = "select idemconsumer.redrive_saga(%s, %s, 'ben')"
    with psycopg.connect(bench.dsn) as other:
        other.execute("select from idemconsumer.saga for update")  # a person decides right now
        assert await redrive(bench) == {Redriven.BUSY: 1}
        other.rollback()
        assert other.execute(act, [letter.id, "o"]).fetchone() == ("resumes",)
        assert await redrive(bench) == {Redriven.BUSY: 1}
    assert bench.do(act, letter.id, "p") == [("redriven",)]
    bench.do("update idemconsumer.dead_letter set redriven_at = null")
    assert await redrive(bench) == {Redriven.DECIDED: 1}, "it goes on already"
    assert await outcomes(bench, letter) == ["waiting"]


async def test_what_is_put_aside_without_its_letter_is_on_record(bench: Bench) -> None:
    """Whoever does it: the trace of the redrive has come to its end."""
    rides = Rides()
    (letter,) = await put_aside(bench, rides, Item("a"))
    await redrive(bench)
    bench.do("update idemconsumer.saga set parked = 'saga_changed'")
    assert await outcomes(bench, letter) == ["dead"]
    assert bench.do("select letter from idemconsumer.saga") == [(None,)]


@pytest.mark.parametrize("undo", [False, True])
async def test_one_that_is_abandoned_later_was_rejected(bench: Bench, *, undo: bool) -> None:
    rides = Rides()
    (letter,) = await put_aside(bench, rides, Item("a"))
    await redrive(bench)
    await SagaAdmin(bench.dsn, SCHEMA).abandon(letter.key or b"", undo=undo, by="ann")
    async with until_all(bench, rides.app, State.FAILED):
        pass
    assert bench.do("select outcome from idemconsumer.redrive") == [("rejected",)]
