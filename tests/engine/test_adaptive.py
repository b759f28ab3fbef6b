"""Groups that size themselves, and take turns where they collide (G2, G3, G4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import replace

from idemconsumer import Message, Reject, Tx, idempotent_handler
from idemconsumer.engine.engine import Engine
from idemconsumer.engine.work import Work
from idemconsumer.handlers.decorator import Handler
from idemconsumer.handlers.handler import BoundHandler
from idemconsumer.ports.observer import Point
from idemconsumer.rules.group_size import Gate
from idemconsumer.stores.claims import PostgresClaims
from idemconsumer.stores.joined import PostgresStore
from tests.support.collisions import a_lock_is_taken, collide
from tests.support.inside import replace_size, sizes_of
from tests.support.ledger import SCHEMA, SOURCE, Ledger, kinds, message, to_the_end, work, works, write
from tests.support.points import Points
from tests.support.waiting import PATIENCE, until


@pytest.fixture
async def other_store(ledger: Ledger) -> AsyncIterator[PostgresStore]:
    """Of another process, as far as the database can tell."""
    store = await PostgresStore.open(ledger.dsn, SCHEMA, connections=4, longest_run=30.0)
    yield store
    await store.close()


@pytest.fixture(autouse=True)
def hot_rows(ledger: Ledger) -> None:
    ledger.run("create table if not exists hot (id int primary key, hits int)")
    ledger.run("truncate hot")
    ledger.run("insert into hot select n, 0 from generate_series(1, 4) n")


def waiting(ledger: Ledger) -> bool:
    """Whether a connection of ours waits for a lock: at the gate, or for a row."""
    return bool(
        ledger.run(
            "select 1 from pg_stat_activity where datname = current_database() and application_name = 'idemconsumer'"
            " and wait_event_type = 'Lock'"
        )
    )


class Meeting:
    """Makes two groups hold a row each at the same time, unless one of them waits, or is done.

    The lane `first` goes on first and waits for the other's row: Postgres rolls back who has waited for longest.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._inside = 0
        self.open_lanes = 2
        self.first = 0

    async def join(self, lane: int) -> None:
        self._inside += 1
        await until(lambda: (lane == self.first and self._inside == 2) or self.open_lanes == 1 or waiting(self._ledger))

    def leave(self) -> None:
        self._inside -= 1


def hitting(meeting: Meeting, **options: Any) -> Handler[..., Any]:
    """Each message hits its row; at the first of a group the two lanes meet."""

    @idempotent_handler(SOURCE, key="id", max_attempts=1, **options)
    async def hit(order: dict[str, Any], tx: Tx) -> None:
        await tx.execute("update hot set hits = hits + 1 where id = %s", (order["row"],))
        await write(tx, order["id"])
        if order["first"]:
            await meeting.join(order["lane"])
            meeting.leave()

    return hit


def group(handler: BoundHandler, lane: int, name: str, rows: Sequence[int]) -> list[Work]:
    return [work(handler, message(f"{name}{n}", row=row, lane=lane, first=n == 0)) for n, row in enumerate(rows)]


async def two_lanes(
    meeting: Meeting, engines: Sequence[Engine], handlers: Sequence[BoundHandler], *, groups: int
) -> list[str]:
    """The kinds of outcomes of two lanes that take the rows in opposite order, group by group."""

    async def lane(number: int) -> list[str]:
        done: list[str] = []
        for n in range(groups):
            rows = [1, 2, 3, 4] if number == 0 else [4, 3, 2, 1]
            done += kinds(await to_the_end(engines[number], group(handlers[number], number, f"{number}-{n}-", rows)))
        meeting.open_lanes -= 1
        return done

    meeting.open_lanes = 2
    async with asyncio.timeout(PATIENCE):
        return [kind for lane_kinds in await asyncio.gather(lane(0), lane(1)) for kind in lane_kinds]


def shut(engine: Engine, handler: BoundHandler) -> bool:
    """Whether the handler's groups have collided, however long ago."""
    return sizes_of(engine).of(handler).gate.until > float("-inf")


def keep_turns(engine: Engine, handler: BoundHandler) -> None:
    """Keep the gate shut, however long the machine takes for the rest of the test."""
    assert shut(engine, handler), "they did not collide"
    replace_size(engine, handler, replace(sizes_of(engine).of(handler), gate=Gate(float("inf"))))


@pytest.mark.parametrize("apart", ["two lanes", "two processes", "two handlers"])
async def test_groups_that_collide_take_turns_and_do_not_collide_again(
    ledger: Ledger, store: PostgresStore, other_store: PostgresStore, apart: str
) -> None:
    meeting, points = Meeting(ledger), Points()
    one = Engine(store, points)
    engines = [one, Engine(other_store, points) if apart == "two processes" else one]
    hit = hitting(meeting, group_size=4, name="hit").plan.bind("shop")
    strike = hitting(meeting, group_size=4, name="strike").plan.bind("shop")
    handlers = [hit, strike if apart == "two handlers" else hit]

    for lane, (e, h) in enumerate(zip(engines, handlers, strict=True)):  # until each has been rolled back once
        meeting.first = lane
        for _ in range(5):  # a machine that stands still for a second has the other one rolled back
            if shut(e, h):
                break
            assert set(await two_lanes(meeting, engines, handlers, groups=1)) <= {"applied", "duplicate"}
            ledger.clear()
        keep_turns(e, h)
    assert points.count(Point.CLAIMED) > points.count(Point.COMMITTED)
    ledger.clear()
    ledger.run("update hot set hits = 0")
    points.seen.clear()

    assert await two_lanes(meeting, engines, handlers, groups=10) == ["applied"] * 80

    assert points.count(Point.CLAIMED) == points.count(Point.COMMITTED) == 20, "they collided"
    assert points.seen.count((Point.COMMITTED, 4)) == 20
    assert ledger.effects == sorted(f"{lane}-{n}-{m}" for lane in range(2) for n in range(10) for m in range(4))
    assert ledger.run("select distinct hits from hot") == [(20,)]
    assert (ledger.attempts, ledger.letters) == ([], [])


async def test_the_gate_is_asked_for_by_a_contended_handler_alone(ledger: Ledger, store: PostgresStore) -> None:
    asked: list[tuple[int, str | None]] = []
    collides: list[bool] = []  # as it is told of a lock that is waited for (O34)
    transaction = store.transaction

    def watched(*, group: int, gate: str | None = None) -> AbstractAsyncContextManager[PostgresClaims]:
        asked.append((group, gate))
        collides.append(engine.collides("contended"))
        return transaction(group=group, gate=gate)

    store.transaction = watched  # type: ignore[method-assign]

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def contended(order: dict[str, Any], tx: Tx) -> None:
        if order["id"] == 1 and next(collisions, None) is not None:
            await collide(tx)

    @idempotent_handler(SOURCE, key="id", group_size=8)
    async def calm(order: dict[str, Any], tx: Tx) -> None: ...

    collisions, engine = iter(range(1)), Engine(store)
    with a_lock_is_taken(ledger.dsn):
        await engine.run(works(contended, 0, 1, 2))
    await engine.run(works(contended, 3))
    await engine.run(works(calm, 0, 1))
    assert asked == [(3, None), (3, "shop"), (1, "shop"), (2, None)]
    assert collides == [False, True, False, False], "until a group is committed"


async def test_a_collision_behind_the_gate_lets_what_comes_before_it_through(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id", group_size=8, max_attempts=1)
    async def held_up(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])
        if order["id"] == 3:
            await collide(tx)

    with a_lock_is_taken(ledger.dsn):
        assert kinds(await engine.run(works(held_up, 3))) == ["retrying"]
        keep_turns(engine, held_up.plan.bind("shop"))
        assert kinds(await engine.run(works(held_up, 1, 2, 3, 4))) == ["applied", "applied"]
        assert kinds(await engine.run(works(held_up, 3, 4))) == ["retrying"]
    assert (ledger.effects, ledger.attempts) == (["1", "2"], [])


# ------------------------------------------------------------------------------------------------ duplicates in a row
async def test_duplicates_in_a_row_are_answered_from_one_read(ledger: Ledger, store: PostgresStore) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def insert(order: dict[str, Any], tx: Tx) -> None:
        await write(tx, order["id"])

    points = Points()
    engine, bound = Engine(store, points), insert.plan.bind("shop")
    ids = range(100)
    await to_the_end(engine, works(insert, *ids))
    for _ in range(3):
        assert set(kinds(await to_the_end(engine, works(insert, *ids)))) == {"duplicate"}
    assert engine.group_size(bound) > 100 > sizes_of(engine).of(bound).to_claim
    points.seen.clear()

    conflicting = work(bound, message(7, amount=1))
    assert kinds(await engine.run([*works(insert, 1, 2), conflicting, *works(insert, 3)])) == [
        "duplicate", "duplicate", "conflict", "duplicate",
    ]  # fmt: skip
    assert points.count(Point.CLAIMED) == 0, "a transaction for what a read can tell"
    assert kinds(await engine.run(works(insert, 1, 2, "new", 3))) == ["duplicate", "duplicate"]
    assert engine.group_size(bound) == sizes_of(engine).of(bound).to_claim, "something was new"
    assert kinds(await engine.run(works(insert, "new", 3))) == ["applied", "duplicate"]
    assert len(ledger.effects) == 101


async def test_no_more_is_claimed_together_where_duplicates_came_before(ledger: Ledger, engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def slow(order: dict[str, Any], tx: Tx) -> None:
        await asyncio.sleep(0.06)  # its work

    await to_the_end(engine, works(slow, *range(2)))
    for _ in range(100):
        await engine.run(works(slow, 0, 1))
    assert engine.group_size(slow.plan.bind("shop")) > 50
    assert kinds(await engine.run(works(slow, *range(10, 20)))) == ["applied"]


# ------------------------------------------------------------------------------------------------- sizes by themselves
async def test_a_slow_handler_runs_alone_and_a_fast_one_in_groups(engine: Engine) -> None:
    @idempotent_handler(SOURCE, key="id")
    async def slow(order: dict[str, Any], tx: Tx) -> None:
        await asyncio.sleep(0.06)  # its work

    @idempotent_handler(SOURCE, key="id")
    async def fast(order: dict[str, Any], tx: Tx) -> None: ...

    async def size_after(handler: Any, runs: Iterable[int]) -> int:
        size = engine.group_size(bound := handler.plan.bind("shop"))
        assert size == 1
        for n in runs:
            await engine.run(works(handler, n))
            if (size := engine.group_size(bound)) > 1:
                break
        return size

    assert await size_after(slow, range(3)) == 1
    assert await size_after(fast, range(100)) > 1, "also if the machine has stood still during the first ones"


async def test_in_a_group_that_sized_itself_each_message_gets_what_it_would_get_alone(
    ledger: Ledger, engine: Engine
) -> None:
    @idempotent_handler(SOURCE, key="id", max_attempts=3)
    async def mixed(order: dict[str, Any], tx: Tx, message: Message) -> int:
        await write(tx, order["id"])
        if order["id"] % 7 == 0:
            raise Reject("seven")
        if order["id"] % 5 == 0 and (message.attempt == 1 or order["id"] == 25):
            raise ValueError
        return int(order["id"])

    left, done = works(mixed, *range(1, 60), *range(1, 20)), list[str]()
    async with asyncio.timeout(PATIENCE):
        while left:
            outcomes = await engine.run(left[: engine.group_size(left[0].handler)])
            decided = [outcome for outcome in outcomes if outcome.kind != "retrying"]
            done += kinds(decided)
            left = left[len(decided) :]

    expected = ["failed" if n % 7 == 0 else "dead" if n == 25 else "applied" for n in range(1, 60)]
    assert done == expected + ["duplicate"] * 19
    assert ledger.effects == sorted(str(n) for n in range(1, 60) if n % 7 and n != 25)
    assert ledger.letters == [("attempts_exhausted", 1)]
    assert ledger.attempts == []
