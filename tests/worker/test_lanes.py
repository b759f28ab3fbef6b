"""Lanes: what is serial, what runs beside it, and where each outcome leaves a delivery."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from idemconsumer import App, Message, Reject, Retry, Tx, idempotent_handler
from idemconsumer.engine.work import Work
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.ports.observer import NullObserver, Point
from idemconsumer.worker.in_flight import InFlight, InHand
from idemconsumer.worker.lanes import HandlerLanes
from tests.support.inside import draining, in_flight, in_memory
from tests.support.tuning import tuned
from tests.support.workers import Bench, Item, note


async def test_each_message_is_applied_once_and_in_order_of_its_entity(bench: Bench) -> None:
    app = App("lanes")

    @app.idempotent_handler("memory:q", key="id", order_by="entity", group_size=8)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    items = [Item(f"{entity}-{n}", entity) for n in range(30) for entity in "abcdef"]
    await bench.publish("q", *items, *items[::7])
    worker = await bench.until_empty(app)
    assert worker.counts == {"applied": 180, "duplicate": 26}
    by_entity = defaultdict(list)
    for name in bench.effects():
        by_entity[name[0]].append(int(name[2:]))
    assert by_entity == {entity: list(range(30)) for entity in "abcdef"}


async def test_an_inline_retry_holds_the_messages_behind_it_and_their_order(bench: Bench) -> None:
    app = App("lanes")
    runs: list[tuple[str, int]] = []

    @app.idempotent_handler("memory:q", key="id", order_by="entity", backoff="20ms, 20ms", group_size=4)
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        runs.append((item.id, message.attempt))
        await note(tx, item)
        if item.id in ("2", "5") and message.attempt < 3:
            raise ValueError("not yet")
        if item.id == "3" and message.attempt == 1:
            raise Retry(after="30ms")

    await bench.publish("q", *(Item(str(n), "one") for n in range(8)))
    worker = await bench.until_empty(app)
    assert bench.effects() == [str(n) for n in range(8)]
    assert worker.counts == {"applied": 8, "retrying": 5}
    for name, last in (("2", 3), ("3", 2), ("5", 3)):
        assert runs.index((name, last)) < [run[0] for run in runs].index(str(int(name) + 1))
    assert bench.attempts() == 0, "what was applied in the end leaves no count behind"


async def test_a_failed_one_stops_its_own_order_alone(bench: Bench) -> None:
    """In one lane, and with later deliveries of its key that claim another order."""
    app, runs = App("lanes"), list[str]()

    @app.idempotent_handler("memory:q", key="id", order_by="entity", fingerprint=None, backoff="30s, 30s")
    async def handle(item: Item, tx: Tx) -> None:
        runs.append(item.id)
        if item.id == "a0":
            raise ValueError("it is not due again in this test")
        await note(tx, item)

    others = [Item(f"b{n}", "b") for n in range(10)]
    await bench.publish("q", *(Item(f"a{n}", "a") for n in range(3)), Item("a0", "c"), *others)
    async with bench.running(app, concurrency=1) as running:
        await running.until_count(applied=10)
        await bench.publish("q", Item("a0", "d"), Item("a3", "a"), Item("d0", "d"))
        await running.until_count(applied=11)
        assert in_flight(running.worker) == 6
    assert runs.count("a0") == 1
    assert bench.effects() == [*(f"b{n}" for n in range(10)), "d0"]
    assert len(in_memory(bench.broker, "q")) == 6


async def test_what_comes_while_one_of_its_order_has_failed_runs_behind_it(bench: Bench) -> None:
    app, up = App("lanes"), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", order_by="entity", backoff="10ms, 10ms", max_attempts=1_000)
    async def handle(item: Item, tx: Tx) -> None:
        if item.id == "a0" and not up.is_set():
            raise ValueError("until the others are through")
        await note(tx, item)

    await bench.publish("q", *(Item(f"a{n}", "a") for n in range(3)))
    async with bench.running(app, concurrency=1) as running:
        await running.until_count(retrying=1)
        await bench.publish("q", *(Item(f"a{n}", "a") for n in range(3, 6)), Item("b", "b"))
        await running.until_count(applied=1)
        up.set()
        await running.until_count(applied=7)
    assert bench.effects() == ["b", *(f"a{n}" for n in range(6))]


async def test_a_delivery_follows_the_one_of_its_key_that_is_in_flight_and_never_meets_it_as_a_rival(
    bench: Bench,
) -> None:
    app = App("lanes")
    started, go = asyncio.Event(), asyncio.Event()

    # Ordered by something that differs between two deliveries of one key: only the lane rule brings them together.
    @app.idempotent_handler("memory:q", key="id", order_by="entity", fingerprint=None, wait="0s")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id == "same":
            started.set()
            await go.wait()

    await bench.publish("q", *(Item("same", f"entity-{n}") for n in range(20)))
    async with bench.running(app, concurrency=8) as running:
        await started.wait()
        # They would come behind a rival in seven of the eight lanes.
        await bench.publish("q", *(Item(f"other-{n}", f"entity-{n}") for n in range(40)))
        await running.until_count(applied=25)
        go.set()
        await running.until_count(applied=41, duplicate=19)
    assert running.worker.counts == {"applied": 41, "duplicate": 19}, "nobody was ever busy"
    assert bench.effects().count("same") == 1


async def test_different_keys_run_beside_each_other(bench: Bench) -> None:
    app = App("lanes")
    inside, most, together = 0, 0, asyncio.Event()

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 4:
            together.set()
        await together.wait()
        await tx.execute("select pg_sleep(0.02)")
        inside -= 1

    await bench.publish("q", *(Item(str(n)) for n in range(40)))
    await bench.until_empty(app, concurrency=4)
    assert most == 4


async def test_several_handlers_on_several_brokers_keep_to_their_own(bench: Bench) -> None:
    app = App("lanes")

    @app.idempotent_handler("memory:first", "postgres:second", key="id", group_size=4)
    async def one(item: Item, tx: Tx) -> None:
        await note(tx, Item(f"one {item.id}"))

    @app.idempotent_handler("memory:third", key="id", group_size=4)
    async def two(item: Item, tx: Tx) -> None:
        await note(tx, Item(f"two {item.id}"))

    items = [Item(str(n)) for n in range(10)]
    await bench.publish("first", *items)
    bench.enqueue("second", *items[:5], Item("only here"))
    await bench.publish("third", *items)
    worker = await bench.until_empty(app)
    # The same key under another handler is another message; under one handler with two sources it is the same.
    assert Counter(bench.effects()) == Counter(
        [f"{handler} {n}" for handler in ("one", "two") for n in range(10)] + ["one only here"]
    )
    assert worker.counts == {"applied": 21, "duplicate": 5}


async def test_a_rejection_a_bad_message_and_a_dead_one_do_not_stop_their_lane(bench: Bench) -> None:
    app = App("lanes")

    @app.idempotent_handler("memory:q", key="id", order_by="entity", max_attempts=2, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id == "refused":
            raise Reject("never")
        if item.id == "poison":
            raise ValueError

    first, last = Item("first", "e"), Item("last", "e")
    await bench.publish("q", first, Item("refused", "e"), b"\xff", Item("poison", "e"), Item("refused", "e"), last)
    worker = await bench.until_empty(app, concurrency=1)
    assert worker.counts == {"applied": 2, "failed": 1, "duplicate": 1, "dead": 2, "retrying": 2}
    assert bench.effects() == ["first", "last"]


async def test_nothing_is_settled_before_its_commit(bench: Bench) -> None:
    app = App("lanes")

    @app.idempotent_handler("memory:q", key="id", group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    await bench.publish("q", *(Item(str(n)) for n in range(12)))
    async with bench.running(app, concurrency=1) as running:
        await running.until_count(applied=12)
    order = [point for point, _ in running.points.seen if point in (Point.COMMITTED, Point.SETTLING)]
    assert order[::2] == [Point.COMMITTED] * (len(order) // 2)
    assert order[1::2] == [Point.SETTLING] * (len(order) // 2)


@pytest.mark.parametrize("size", [1, 8])
async def test_while_the_cpu_is_busy_what_arrives_goes_with_a_later_group(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("idemconsumer.worker.turns.open_groups", lambda limit, lanes, busy: 1)
    tuned(monkeypatch, turn_look_pause=0.0, turn_patience=math.inf)
    app, began, go_on = App("lanes"), asyncio.Event(), asyncio.Event()
    running = most = 0

    @app.idempotent_handler("memory:q", key="id", group_size=size)
    async def handle(item: Item, tx: Tx) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        began.set()
        await go_on.wait()
        running -= 1

    async with bench.running(app, concurrency=4) as worker:
        await bench.publish("q", Item("first"))
        await worker.until(began.is_set)
        await bench.publish("q", *(Item(f"i{n}") for n in range(40)))
        if size == 1:  # a message that runs alone gains nothing by waiting
            await worker.until(lambda: running == 4)
        go_on.set()
        await worker.until_count(applied=41)
        assert most == (4 if size == 1 else 1)
        assert worker.points.count(Point.COMMITTED) == 41 if size == 1 else worker.points.count(Point.COMMITTED) < 20


async def test_a_lane_that_waits_for_its_turn_begins_nothing_once_the_worker_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemconsumer.worker.turns.open_groups", lambda limit, lanes, busy: 1)
    tuned(monkeypatch, turn_look_pause=0.0, turn_patience=math.inf)
    app, began, go_on = App("lanes"), asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", group_size=8)
    async def handle(item: Item, tx: Tx) -> None:
        began.set()
        await go_on.wait()
        await note(tx, item)

    async with bench.running(app, concurrency=4) as running:
        await bench.publish("q", Item("first"))
        await running.until(began.is_set)
        await bench.publish("q", *(Item(f"i{n}") for n in range(20)))
        await running.until(lambda: running.points.count(Point.DISPATCHED) == 21)
        running.worker.drain()
        await running.until(lambda: draining(running.worker))
        go_on.set()
    assert bench.effects() == ["first"]


async def test_a_lane_that_is_cancelled_from_inside_ends_the_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TaskGroup takes a cancelled child for one that is done, and the other lanes would go on."""
    app = App("lanes")

    @app.idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)

    async def cancelled(self: HandlerLanes) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(HandlerLanes, "work", cancelled)
    with pytest.raises(RuntimeError, match="a lane was cancelled"):
        await bench.until_empty(app)


async def test_a_delivery_is_settled_once_its_own_session_has_been_told() -> None:
    @idempotent_handler("memory:q", key="id")
    async def handle(item: Item, tx: Tx) -> None: ...

    seen: list[list[bool]] = []

    class Telling:
        async def settle(self, theirs: Sequence[Delivery]) -> None:
            seen.append([held.settled for held in deliveries])

    message = Message("memory:q", b'{"id": "1"}')
    work = Work.of(handle.plan.bind("lanes"), message)
    sessions: list[Any] = [Telling(), Telling()]
    deliveries = [InFlight(work, Delivery(message, Epoch()), session) for session in sessions]
    nobody: Any = None
    await InHand(nobody, NullObserver())._settle(deliveries)
    assert seen == [[False, False], [True, False]]
    assert all(held.settled for held in deliveries)
