"""Many deliveries of one key at once: one effect, the others get its result, and none pins a connection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from idemconsumer import Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.handlers.decorator import Handler
from idemconsumer.ports.observer import Point, SagaPoint
from idemconsumer.rules.values import Outcome, State
from idemconsumer.stores.joined import PostgresStore
from tests.support.ledger import SCHEMA, SOURCE, Ledger, works, write
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until

RIVALS = 50


class Meeting:
    """The handler waits here; tests say when it goes on."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.go_on = asyncio.Event()
        self.runs = 0

    async def __call__(self) -> None:
        self.runs += 1
        self.running.set()
        await self.go_on.wait()


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


@idempotent_handler(SOURCE, key="id")
async def pay(order: dict[str, Any], tx: Tx) -> str:
    await write(tx, order["id"])
    return "paid"


def counted(outcomes: list[Outcome]) -> Counter[str]:
    return Counter(str(outcome.kind) for outcome in outcomes)


async def test_of_fifty_rivals_one_runs_and_the_others_get_its_result(
    ledger: Ledger, store: PostgresStore, meeting: Meeting
) -> None:
    @idempotent_handler(SOURCE, key="id", wait="20s")
    async def held(order: dict[str, Any], tx: Tx) -> str:
        await write(tx, order["id"])
        await meeting()
        return "paid"

    engine = Engine(store)
    async with asyncio.timeout(PATIENCE):
        tasks = [asyncio.create_task(engine.process(*works(held, 1))) for _ in range(RIVALS)]
        await meeting.running.wait()
        await until(lambda: len(transactions(ledger)) > 1, "rivals have come")
        before = transactions(ledger)
        await until(lambda: len(before & transactions(ledger)) == 1, "all but the winner let go of a connection", 5)
        meeting.go_on.set()
        outcomes = await asyncio.gather(*tasks)

    assert counted(list(outcomes)) == {"applied": 1, "duplicate": RIVALS - 1}
    assert {outcome.result for outcome in outcomes} == {b'"paid"'}
    assert (ledger.effects, meeting.runs) == (["1"], 1)


def transactions(ledger: Ledger) -> set[tuple[Any, ...]]:
    """Those that are open now: a connection and when its transaction began."""
    return set(
        ledger.run(
            "select pid, xact_start from pg_stat_activity where application_name = 'idemconsumer'"
            " and datname = current_database() and xact_start is not null"
        )
    )


async def test_rivals_of_two_processes_meet_in_the_database(
    ledger: Ledger, store: PostgresStore, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def held(order: dict[str, Any], tx: Tx) -> str:
        await write(tx, order["id"])
        await meeting()
        return "paid"

    other = await PostgresStore.open(ledger.dsn, SCHEMA, connections=8, longest_run=30.0)
    transaction, refused = other.transaction, asyncio.Event()

    @asynccontextmanager
    async def met(**given: Any) -> AsyncIterator[Any]:
        async with transaction(**given) as claims:
            yield claims
        refused.set()

    monkeypatch.setattr(other, "transaction", met)
    async with asyncio.timeout(PATIENCE):
        first = asyncio.create_task(Engine(store).run(works(held, 1, 2, 3)))
        await meeting.running.wait()
        second = asyncio.create_task(Engine(other).run(works(held, 3, 2, 1), defer=False))
        await refused.wait()
        done, _ = await asyncio.wait({first, second}, timeout=0.2)
        assert not done
        meeting.go_on.set()
        outcomes = [*await first, *await second]
    await other.close()

    assert counted(outcomes) == {"applied": 3, "duplicate": 1}  # the second waits for its head, the rest comes again
    assert ledger.effects == ["1", "2", "3"]


@pytest.mark.parametrize("end", ["rolls back", "rejects", "is cancelled"])
async def test_when_the_winner_ends_without_an_effect_the_next_one_is_judged_anew(
    ledger: Ledger, store: PostgresStore, meeting: Meeting, end: str
) -> None:
    @idempotent_handler(SOURCE, key="id", wait="20s")
    async def first_fails(order: dict[str, Any], tx: Tx) -> str:
        await write(tx, order["id"])
        if meeting.runs == 0:
            await meeting()
            if end != "rejects":
                raise RuntimeError
        else:
            meeting.runs += 1
        if end == "rejects":
            raise Reject("no")
        return "paid"

    engine = Engine(store)
    async with asyncio.timeout(PATIENCE):
        winner = asyncio.create_task(engine.process(*works(first_fails, 1)))
        await meeting.running.wait()
        rivals = [asyncio.create_task(engine.process(*works(first_fails, 1))) for _ in range(8)]
        done, _ = await asyncio.wait(rivals, timeout=0.2)
        assert not done
        if end == "is cancelled":
            winner.cancel()
        meeting.go_on.set()
        await asyncio.wait([winner])
        outcomes = await asyncio.gather(*rivals)

    if end == "rejects":
        # Its rejection is committed after the rollback. A rival in between is refused instead, and may hold the key
        # just then: a delivery that finds it must come again.
        outcomes = [await decided(engine, first_fails, outcome) for outcome in [*outcomes, await winner]]
        assert counted(outcomes) == {"failed": 1, "duplicate": 8}
        assert {outcome.result for outcome in outcomes} == {b'{"code":"no","body":null}'}
        assert ledger.effects == []
    else:
        assert counted(list(outcomes)) == {"applied": 1, "duplicate": 7}
        assert (ledger.effects, meeting.runs) == (["1"], 2)


async def test_a_rejection_whose_key_a_rival_holds_by_then_comes_again(
    ledger: Ledger, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, claim_lock_patience=0.1)
    with psycopg.connect(ledger.dsn) as rival:

        class Meanwhile:
            def at(self, point: Point | SagaPoint, handler: str, keys: Sequence[bytes]) -> None:
                if point is Point.REJECTING:
                    rival.execute(
                        "insert into idemconsumer.record (key, scope_id, state, changed_at) values (%s, 1, 1, now())",
                        keys,
                    )

        @idempotent_handler(SOURCE, key="id")
        async def refuse(order: dict[str, Any], tx: Tx) -> None:
            raise Reject("no")

        outcome = await Engine(store, Meanwhile()).process(*works(refuse, 1))
        assert (outcome.kind, outcome.reason) == ("retrying", "contention")
        rival.rollback()

    assert (await decided(Engine(store), refuse, outcome)).kind == "failed"
    assert ledger.states == [State.FAILED]


async def decided(engine: Engine, handler: Handler[..., Any], outcome: Outcome) -> Outcome:
    """As its lane would: presented again after a collision, which is no message's fault."""
    while outcome.reason == "contention":
        outcome = await engine.process(*works(handler, 1))
    return outcome


async def test_a_wait_that_is_over_says_busy_and_nothing_is_lost(
    ledger: Ledger, store: PostgresStore, meeting: Meeting
) -> None:
    @idempotent_handler(SOURCE, key="id", wait="150ms")
    async def held(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        await meeting()

    engine = Engine(store)
    async with asyncio.timeout(PATIENCE):
        winner = asyncio.create_task(engine.process(*works(held, 1)))
        await meeting.running.wait()
        outcomes = await asyncio.gather(*(engine.process(*works(held, 1)) for _ in range(5)))
        assert counted(list(outcomes)) == {"busy": 5}
        meeting.go_on.set()
        assert (await winner).kind == "applied"
        assert (await engine.process(*works(held, 1))).kind == "duplicate"
    assert ledger.effects == ["1"]


async def test_who_defers_does_not_wait_at_all(ledger: Ledger, store: PostgresStore, meeting: Meeting) -> None:
    @idempotent_handler(SOURCE, key="id", wait="0s", group_size=8)
    async def held(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == "held":
            await meeting()

    engine = Engine(store)
    async with asyncio.timeout(PATIENCE):
        winner = asyncio.create_task(engine.process(*works(held, "held")))
        await meeting.running.wait()
        outcomes = await engine.run(works(held, "held", 1, "held", 2))
        assert [str(outcome.kind) for outcome in outcomes] == ["busy", "applied", "busy", "applied"]
        meeting.go_on.set()
        await winner
    assert ledger.effects == ["1", "2", "held"]


async def test_who_waits_in_vain_stops_when_its_delivery_is_taken_away(store: PostgresStore, meeting: Meeting) -> None:
    @idempotent_handler(SOURCE, key="id", wait="1h")
    async def held(order: dict[str, Any], tx: Tx) -> None:
        await meeting()

    engine = Engine(store)
    async with asyncio.timeout(PATIENCE):
        winner = asyncio.create_task(engine.process(*works(held, 1)))
        await meeting.running.wait()
        (rival,) = works(held, 1)
        before_it_waits = iter([False])
        rival.abandoned = lambda: next(before_it_waits, True)
        assert (await engine.process(rival)).kind == "busy"
        meeting.go_on.set()
        await winner


async def test_many_messages_in_many_lanes_of_two_processes_are_each_applied_once(
    ledger: Ledger, store: PostgresStore
) -> None:
    """No script, only load: 60 messages, delivered to 8 lanes, to each in a different order."""

    @idempotent_handler(SOURCE, key="id", group_size=16, wait="0s")
    async def grouped(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    other = await PostgresStore.open(ledger.dsn, SCHEMA, connections=8, longest_run=30.0)
    ids = [f"{n:02}" for n in range(60)]

    async def lane(engine: Engine, start: int) -> None:
        left = works(grouped, *ids[start:], *ids[:start])
        while left:
            outcomes = await engine.run(left[:16])
            waiting = [w for w, o in zip(left, outcomes, strict=False) if o.kind in ("busy", "retrying")]
            left = [*left[len(outcomes) :], *waiting]

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(lane(Engine(store if n % 2 else other), n * 7) for n in range(8)))
    await other.close()
    assert ledger.effects == ids
