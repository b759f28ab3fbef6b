"""What has no order: any lane takes it (D14), and a failed one steps aside until it is due (D15)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import aio_pika
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from idemconsumer import App, Message, Outcome, OutcomeKind, Retry, Tx, idempotent_handler
from idemconsumer.brokers.kafka.kafka_broker import KafkaBroker
from idemconsumer.engine.work import Work
from idemconsumer.ports.broker import Delivery, Epoch, Outgoing
from idemconsumer.ports.observer import NullObserver
from idemconsumer.rules.breaker import IN_A_ROW
from idemconsumer.worker.feed import _Kind, _kind
from idemconsumer.worker.in_flight import InFlight, InHand, Strand
from idemconsumer.worker.lanes import HandlerLanes
from idemconsumer.worker.strands import Strands
from idemconsumer.worker.turns import Turns
from tests.support.failures import NoFailures
from tests.support.inside import in_flight, in_memory
from tests.support.kafka import create_topic
from tests.support.logs import LogCapture, times
from tests.support.servers.made import Server
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE, until
from tests.support.workers import Bench, Item, body, note

LONG = "30s, 30s"  # a backoff that no test waits for


# ---------------------------------------------------------------------------------------------------------- in a worker
async def test_a_message_that_takes_long_stops_nothing_but_its_own_lane(bench: Bench) -> None:
    app, go = App("spread"), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        if item.id == "long":
            await go.wait()
        await note(tx, item)

    await bench.publish("q", Item("long"), *(Item(str(n)) for n in range(100)))
    async with bench.running(app, concurrency=2) as running:
        await running.until(lambda: len(bench.effects()) >= 97)  # up to three share the long one's transaction
        go.set()
        await running.until_count(applied=101)


async def test_what_has_an_order_waits_for_its_lane_and_what_has_none_does_not(bench: Bench) -> None:
    app, go, began = App("spread"), asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", order_by=lambda m: None if b"free" in m.body else "e", group_size=1)
    async def handle(item: Item, tx: Tx) -> None:
        if item.id == "long":
            began.set()
            await go.wait()
        await note(tx, item)

    await bench.publish("q", Item("long"), *(Item(f"behind-{n}") for n in range(5)))
    async with bench.running(app, concurrency=2) as running:
        await began.wait()
        await bench.publish("q", *(Item(f"free-{n}") for n in range(20)))
        await running.until_count(applied=20)
        assert all(name.startswith("free") for name in bench.effects())
        go.set()
        await running.until_count(applied=26)
    assert bench.effects()[20:] == ["long", *(f"behind-{n}" for n in range(5))]


async def test_deliveries_of_one_key_never_meet_as_rivals(bench: Bench) -> None:
    app, started, go = App("spread"), asyncio.Event(), asyncio.Event()

    @app.idempotent_handler("memory:q", key="id", fingerprint=None, wait="0s", group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        await note(tx, item)
        if item.id == "same":
            started.set()
            await go.wait()

    def copies(number: int) -> list[Item]:
        return [Item("same", f"copy-{n}") for n in range(number)]

    await bench.publish("q", *copies(20))
    async with bench.running(app, concurrency=8) as running:
        await started.wait()
        await bench.publish("q", *copies(20), *(Item(f"other-{n}") for n in range(40)))
        await running.until_count(applied=40)
        go.set()
        await running.until_count(applied=41, duplicate=39)
    assert running.worker.counts == {"applied": 41, "duplicate": 39}, "nobody was ever busy"


async def test_a_failed_message_steps_aside_and_its_lane_goes_on(bench: Bench) -> None:
    app, runs = App("spread"), list[str]()

    @app.idempotent_handler("memory:q", key="id", backoff=LONG, group_size=4)
    async def handle(item: Item, tx: Tx) -> None:
        runs.append(item.id)
        if item.id.startswith("bad"):
            raise ValueError
        await note(tx, item)

    await bench.publish("q", *(Item(f"bad-{n}" if n % 10 == 0 else str(n)) for n in range(40)))
    async with bench.running(app, concurrency=1) as running:
        await running.until_count(applied=36, retrying=4)
        # A later delivery of its key does not run before it is due, or the backoff would be none.
        await bench.publish("q", Item("bad-0"), Item("last"))
        await running.until_count(applied=37)
        assert in_flight(running.worker) == 5
    assert runs.count("bad-0") == 1
    assert bench.attempts() == 4, "what is given back keeps its attempts"
    assert len(in_memory(bench.broker, "q")) == 5


async def test_it_runs_again_once_it_is_due_and_later_deliveries_behind_it(bench: Bench) -> None:
    app = App("spread")

    @app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx, message: Message) -> None:
        if message.attempt < 3:
            raise Retry(after="10ms")
        await note(tx, item)

    await bench.publish("q", *(Item(str(n % 10)) for n in range(20)))
    worker = await bench.until_empty(app)
    assert worker.counts == {"applied": 10, "duplicate": 10, "retrying": 20}
    assert sorted(bench.effects()) == [str(n) for n in range(10)]
    assert bench.attempts() == 0


async def test_of_a_thousand_rabbitmq_messages_the_failing_ones_hold_up_none(bench: Bench, rabbitmq: Server) -> None:
    """Two in a hundred fail. None of them is due before all others are through."""
    queue, broken = f"failing-{uuid4().hex}", True

    def app() -> App:
        made = App("spread")

        @made.idempotent_handler(f"rabbitmq:{queue}", key="id", backoff=LONG)
        async def handle(item: Item, tx: Tx) -> None:
            if broken and int(item.id) % 50 == 0:
                raise ValueError
            await note(tx, item)

        return made

    async with await aio_pika.connect(rabbitmq.address) as connection, connection.channel() as channel:
        await channel.declare_queue(queue, durable=True)
        for n in range(1_000):
            await channel.default_exchange.publish(aio_pika.Message(body(Item(str(n)))), routing_key=queue)
        async with bench.running(app(), concurrency=4, rabbitmq=rabbitmq.address) as running:
            await running.until_count(applied=980, retrying=20)
            assert running.worker.counts["retrying"] == 20, "each failed once and waits"
            assert in_flight(running.worker) == 20
        assert bench.attempts() == 20
        broken = False
        async with bench.running(app(), concurrency=4, rabbitmq=rabbitmq.address) as running:
            await running.until_count(applied=20)
    assert sorted(map(int, bench.effects())) == list(range(1_000))


async def test_records_without_a_key_use_all_lanes_though_they_have_one_partition(bench: Bench, kafka: Server) -> None:
    topic, app, go, inside = f"keyless-{uuid4().hex}", App("spread"), asyncio.Event(), 0

    @app.idempotent_handler(f"kafka:{topic}", key="id", group_size=1, consumer_group=topic)
    async def handle(item: Item, tx: Tx) -> None:
        nonlocal inside
        inside += 1
        await go.wait()
        await note(tx, item)

    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.address)
    await admin.start()
    await create_topic(admin, topic)
    await admin.close()
    broker = KafkaBroker(bench.settings(kafka=kafka.address))
    await broker.publish(topic, [Outgoing(body(Item(str(n)))) for n in range(20)])
    await broker.close()
    async with bench.running(app, concurrency=4, kafka=kafka.address) as running:
        await running.until(lambda: inside == 4)
        go.set()
        await running.until_count(applied=20)
    assert sorted(map(int, bench.effects())) == list(range(20))


async def test_only_so_many_may_wait_aside(bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, lane_room=2)
    app, runs = App("spread"), list[str]()

    @app.idempotent_handler("memory:q", key="id", backoff=LONG)
    async def handle(item: Item, tx: Tx) -> None:
        runs.append(item.id)
        raise ValueError

    await bench.publish("q", *(Item(str(n)) for n in range(20)))
    async with bench.running(app, concurrency=1) as running:
        await running.until(lambda: times(logged, "too many retries wait, lane waits") == 1)
        assert len(runs) == 3
    assert len(in_memory(bench.broker, "q")) == 20


async def test_a_lane_that_waits_for_room_goes_on_when_a_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned(monkeypatch, lane_room=2)
    place, lost, applied = Place(NoFailures()), Epoch(), asyncio.Event()

    async def run(group: Sequence[InFlight], **_: object) -> list[Outcome]:
        if names(group) == "d":
            applied.set()
            return [Outcome(OutcomeKind.APPLIED)]
        return [Outcome(OutcomeKind.RETRYING, due=60.0, attempt=1)]

    monkeypatch.setattr(place.in_hand, "run", run)
    lanes = HandlerLanes(place.bound, place.in_hand, Turns(1), asyncio.Event(), lanes=1, index=0)
    place.strands = lanes.strands
    working = asyncio.create_task(lanes.work())
    place.add(*"abc", epoch=lost)
    lanes.look()
    await until(lambda: lanes.strands.full, "two wait")
    place.add("d")
    lost.end()
    await asyncio.wait_for(applied.wait(), PATIENCE)
    place.in_hand.draining = True
    lanes.drain()
    await working


# ---------------------------------------------------------------------------------------------------------- one handler
@idempotent_handler("memory:q", key="id")
async def anything(item: Item, tx: Tx) -> None: ...


class Place:
    def __init__(self, ledger: NoFailures | None = None) -> None:
        engine: Any = ledger or NoFailures()
        self.in_hand = InHand(engine, NullObserver())
        self.strands = Strands(engine, self.in_hand.forget, 10)
        self.bound = anything.plan.bind("spread")

    def add(
        self, *names: str, epoch: Epoch | None = None, headers: Mapping[str, str | bytes] | None = None
    ) -> list[InFlight]:
        nobody: Any = None
        arrived = []
        for name in names:
            message = Message("memory:q", body(Item(name)), headers or {})
            held = InFlight(Work.of(self.bound, message), Delivery(message, epoch or Epoch()), nobody)
            self.in_hand.in_flight += 1
            self.strands.add(held, None)
            arrived.append(held)
        return arrived

    def take(self, size: int, *, beside: int = 0) -> list[InFlight]:
        return self.strands.take(size, 0.0, beside=beside)

    def rest(self, held: InFlight) -> None:
        held.due = 30.0
        self.strands.rest(held.strand, 0.0)


class FailingTenant(NoFailures):
    def failed_beside(self, work: Work) -> int:
        return IN_A_ROW if work.call is not None and work.call.key.isupper() else 0


def names(deliveries: Sequence[InFlight]) -> str:
    return "".join(held.work.call.key for held in deliveries if held.work.call is not None)


def test_lanes_with_nothing_to_do_get_as_much_as_far_as_they_may_run() -> None:
    place = Place()
    place.add(*"abcdefghijkl")
    assert names(place.take(32, beside=3)) == "abc"
    assert names(place.take(32, beside=1)) == "defgh", "one more may open a group"
    assert names(place.take(2)) == "ij", "no more than a group"
    assert names(place.take(32)) == "kl"


def test_one_lane_alone_tries_a_tenant_that_fails_while_there_is_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages may hang."""
    place = Place(FailingTenant())
    place.add(*"ABCDEFGabcdefg")
    monkeypatch.setattr(Work, "tenant", "t")
    taken = names([place.take(1)[0] for _ in range(8)])
    assert "".join(filter(str.islower, taken)) == "abcdefg"
    assert names(place.take(1)).isupper(), "there is nothing else"


def test_what_its_broker_has_taken_back_is_in_nobodys_way() -> None:
    place, lost = Place(), Epoch()
    (first,) = place.add("a", epoch=lost)
    assert place.take(8) == [first]
    place.rest(first)
    assert (place.strands.ready, lost.waiting) == (0, 1)
    lost.end()
    (again,) = place.add("a")
    assert (lost.waiting, place.in_hand.in_flight) == (0, 1)
    assert place.take(8) == [again]


def test_one_that_was_taken_back_before_it_ran_leaves_its_place_to_those_behind_it() -> None:
    place, lost = Place(), Epoch()
    place.add("a", epoch=lost)
    (again,) = place.add("a")
    lost.end()
    assert place.take(8) == [again]
    assert place.in_hand.in_flight == 1


def test_all_that_waits_is_given_back() -> None:
    place = Place()
    given = [*place.add(*"abca"), *place.add("a")]
    (aside,) = place.take(1)
    place.rest(aside)
    place.take(1)
    assert set(place.strands.clear()) == set(given)
    assert aside.delivery.epoch.waiting == 0


async def test_only_so_many_bytes_may_wait_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers count as the body does."""
    place, headers = Place(), {"large": "x" * 1_000}
    tuned(monkeypatch, spread_bytes=2_000)
    place.add(*"abc", headers=headers)
    first, second, third = (place.take(1)[0] for _ in range(3))
    place.rest(first)
    assert not place.strands.full
    place.rest(second)
    assert place.strands.full
    place.strands.wake(30.0)
    assert not place.strands.full
    assert [each.delivery.epoch.waiting for each in (first, second, third)] == [0, 0, 0]


def test_after_an_assignment_as_many_are_suspects_as_all_lanes_could_run() -> None:
    epoch = Epoch(probation=2)
    for _ in range(6):
        assert epoch.on_probation(9, 3)
        epoch.passed(9)
    assert not epoch.on_probation(9, 3)
    assert epoch.on_probation(1, 3), "another handler has its own"


def test_of_one_order_as_many_are_suspects_as_one_lane_could_run() -> None:
    """Also where all that had come of it has ended before the next one comes."""
    epoch = Epoch(probation=2)
    for _ in range(2):
        assert epoch.on_probation(9, 3, "order")
        epoch.passed(9, "order")
    assert not epoch.on_probation(9, 3, "order")
    assert epoch.on_probation(9, 3, "other")


@pytest.mark.parametrize("inherited", [False, True])
def test_nobody_is_a_suspect_but_what_is_inherited(inherited: bool) -> None:
    in_hand: Any = InHand(cast(Any, None), NullObserver())
    lanes = HandlerLanes(anything.plan.bind("spread"), in_hand, cast(Any, None), asyncio.Event(), lanes=1, index=1)
    delivery = Delivery(Message("kafka:t", b""), Epoch(probation=1), inherited=inherited)
    held = cast(Any, SimpleNamespace(strand=Strand(None), work=SimpleNamespace(call=b""), delivery=delivery))
    assert lanes._on_probation(held) == inherited
    assert (_kind(delivery) is _Kind.SUSPECT) == inherited
