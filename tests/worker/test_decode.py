"""`decode=` may wait, ask to be called again, and need what is away: nobody is to blame then (D26)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from idemconsumer import App, Message, Retry, Saga, Step, Tx
from idemconsumer.admin.dead_letters import ALL
from idemconsumer.admin.redrives import Redrives
from idemconsumer.brokers.memory import MemorySession
from idemconsumer.ports.broker import Delivery, Epoch
from idemconsumer.rules.breaker import IN_A_ROW
from idemconsumer.rules.values import OutcomeKind, State
from tests.support.inside import draining
from tests.support.kafka import world_of
from tests.support.logs import LogCapture, times
from tests.support.servers.made import Server
from tests.support.tuning import tuned
from tests.support.workers import SCHEMA, Bench, Item, body, note

LETTERS = "select reason, attempts from idemconsumer.dead_letter"
SOON: dict[str, Any] = {"backoff": "10ms, 20ms"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, next_probe_pause=0.01, failed_probe_pause=0.02, doubt=0.01)


@dataclass
class Registry:
    """Where decoders look up their schemas. `says`: what it does for a message, by its id, before it answers."""

    says: dict[str, Callable[[], Any]] = field(default_factory=dict)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)
    asking: Counter[str] = field(default_factory=Counter)
    at_once: int = 0

    def __post_init__(self) -> None:
        self.up.set()

    async def decode(self, body: bytes, message: Message) -> Item:
        item = self.now(body, message)
        self.asking[item.id] += 1
        self.at_once = max(self.at_once, self.asking.total())
        assert self.asking[item.id] == 1, "decoded twice at once"
        try:
            await asyncio.sleep(0.001)
            if act := self.says.get(item.id):
                await act()
        finally:
            self.asking[item.id] -= 1
        return item

    def now(self, body: bytes, message: Message) -> Item:
        item = Item(**json.loads(body))
        self.asked[item.id] += 1
        if not self.up.is_set():
            raise ConnectionRefusedError("the registry is down")
        return item


async def handle(item: Item, tx: Tx) -> None:
    await note(tx, item)


def some(count: int, entities: int = 1) -> list[Item]:
    return [Item(f"{n}", f"e{n % entities}") for n in range(count)]


@pytest.mark.parametrize("options", [{}, {"order_by": "entity"}], ids=["no order", "order"])
@pytest.mark.parametrize("waits", [True, False], ids=["async", "plain"])
async def test_a_registry_that_is_down_for_a_moment_costs_nothing(
    bench: Bench, waits: bool, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    app, registry = App("shop"), Registry()
    decode = registry.decode if waits else registry.now
    app.idempotent_handler("postgres:q", key="id", decode=decode, max_attempts=1, **SOON, **options)(handle)
    bench.enqueue("q", *some(30, 3))
    registry.up.clear()
    async with bench.running(app) as worker:
        await worker.until(lambda: registry.asked.total() > 45)
        assert (bench.effects(), bench.do(LETTERS), bench.attempts()) == ([], [], 0)
        registry.up.set()
        await worker.until_count(applied=30)
    assert (len(bench.effects()), bench.do(LETTERS), bench.attempts()) == (30, [], 0)
    if options:
        for entity in range(3):
            assert [n for n in map(int, bench.effects()) if n % 3 == entity] == list(range(entity, 30, 3))
    assert caplog.text.count("decoding deferred handler=") == 1
    assert registry.at_once <= 5 or not waits  # its lanes, and one that has failed


async def test_what_may_have_killed_a_worker_is_read_again_too_and_off_the_record_then(bench: Bench) -> None:
    app, registry = App("shop"), Registry()
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, **SOON)(handle)
    bench.enqueue("q", *some(10))
    bench.do("update idemconsumer.queue set deliveries = 1")
    registry.up.clear()
    async with bench.running(app) as worker:
        await worker.until(lambda: registry.asked.total() > 15)
        assert bench.do("select count(*) from idemconsumer.attempt") == [(0,)]
        registry.up.set()
        await worker.until_count(applied=10)
    assert (len(bench.effects()), bench.do("select count(*) from idemconsumer.attempt")) == (10, [(0,)])


@pytest.mark.parametrize("order_by", [None, "entity"], ids=["by record key", "by a field"])
async def test_a_partition_of_kafka_keeps_its_order_and_holds_up_no_other(
    bench: Bench, kafka: Server, order_by: str | None
) -> None:
    """By record keys a message holds up its key alone; whose order is not known before it is decoded, its partition."""
    app, registry, go = App("shop"), Registry(), asyncio.Event()
    away = iter([True, True, False])

    async def at_last() -> None:
        await go.wait()
        if next(away):
            raise ConnectionResetError

    registry.says["0-0"] = at_last
    given: dict[str, Any] = SOON if order_by is None else SOON | {"order_by": order_by}
    async with world_of(kafka) as world:
        await world.create(partitions=2)
        app.idempotent_handler(f"kafka:{world.topic}", key="id", decode=registry.decode, **given)(handle)
        async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
            for n in range(20):
                for partition in range(2):
                    item = Item(f"{partition}-{n}", f"{partition}-{n % 2}")
                    await producer.send_and_wait(world.topic, body(item), partition=partition, key=item.entity.encode())
        async with bench.running(app, kafka=kafka.address) as worker:
            await worker.until_count(applied=30 if order_by is None else 20)
            assert not [each for each in bench.effects() if each in ("0-0", "0-2")]
            go.set()
            await worker.until_count(applied=40)
    for partition in range(2):
        for entity in range(2):
            order = [f"{partition}-{n}" for n in range(entity, 20, 2)]
            assert [each for each in bench.effects() if each in order] == order
    assert bench.do(LETTERS) == []


async def test_one_that_hangs_ends_at_the_timeout_and_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, registry = App("shop"), Registry()
    hangs, limit, timeout = iter([True, True, False]), ContextVar[asyncio.Timeout]("limit"), asyncio.timeout

    def kept(seconds: float | None) -> asyncio.Timeout:
        limit.set(timeout(seconds))
        return limit.get()

    async def hang() -> None:
        """Until its time is over, which is soon and not in two minutes, so that nothing else runs out of its own."""
        if next(hangs):
            now, end = asyncio.get_running_loop().time(), limit.get().when()
            assert end is not None
            assert now < end <= now + 120.0
            await worker.until_count(applied=9)
            limit.get().reschedule(now)
            await asyncio.Event().wait()

    registry.says["0"] = hang
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, timeout="2m", max_attempts=1, **SOON)(handle)
    bench.enqueue("q", *some(10))
    monkeypatch.setattr("asyncio.timeout", kept)
    async with bench.running(app) as worker:
        await worker.until_count(applied=10)
    assert bench.effects()[-1] == "0"
    assert (registry.asked["0"], bench.do(LETTERS), bench.attempts()) == (3, [], 0)


async def test_a_decoder_that_hangs_keeps_none_waiting_that_was_not_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    """While all that is read fails."""
    tuned(monkeypatch, probe_hangs_after=0.01)
    app, registry, answers = App("shop"), Registry(), asyncio.Event()

    async def away() -> None:
        raise ConnectionRefusedError("the registry is down")

    registry.says |= {f"{n}": away for n in range(IN_A_ROW)} | {"hang": answers.wait}
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, timeout="2m", **SOON)(handle)
    async with bench.running(app) as worker:
        bench.enqueue("q", *some(IN_A_ROW))
        await worker.until(lambda: times(logged, "all messages of a handler fail, trying one at a time") == 1)
        bench.enqueue("q", Item("hang"))
        await worker.until(lambda: registry.asking["hang"] == 1)
        bench.enqueue("q", Item("good"))
        await worker.until_count(applied=1)
        assert bench.effects() == ["good"]
        answers.set()


async def test_a_retry_is_read_again_after_its_pause_and_the_others_go_on(bench: Bench) -> None:
    app, registry, pauses = App("shop"), Registry(), list[float]()

    async def not_yet() -> None:
        pauses.append(asyncio.get_running_loop().time())
        if len(pauses) < 8 or worker.worker.counts.get("applied", 0) < 9:  # five in a row would be an outage
            raise Retry("no schema yet", after="40ms")

    registry.says["0"] = not_yet
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, max_attempts=1, backoff="20s, 20s")(handle)
    bench.enqueue("q", *some(10))
    async with bench.running(app) as worker:
        await worker.until_count(applied=10)
    assert bench.effects()[-1] == "0"
    between = [later - earlier for earlier, later in pairwise(pauses)]
    assert min(between) >= 0.04
    assert (bench.do(LETTERS), bench.attempts()) == ([], 0)


async def test_what_a_decoder_refuses_is_a_letter_as_ever(bench: Bench) -> None:
    app, registry = App("shop"), Registry()

    async def bad() -> None:
        raise ValueError("no such schema")

    registry.says["0"] = bad
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, **SOON)(handle)
    bench.enqueue("q", *some(3))
    async with bench.running(app) as worker:
        await worker.until_count(applied=2, dead=1)
    assert bench.do(LETTERS) == [("undecodable", 0)]


async def test_a_letter_that_is_redriven_is_decoded_in_the_same_way(bench: Bench) -> None:
    app, registry = App("shop"), Registry()
    answers = iter([ValueError("no such schema")] * 2 + [ConnectionResetError()] * 2)

    async def at_last() -> None:
        if (error := next(answers, None)) is not None:
            raise error

    registry.says["0"] = at_last
    app.idempotent_handler("memory:q", key="id", decode=registry.decode, **SOON)(handle)
    await bench.publish("q", Item("0"))
    async with bench.running(app) as worker:
        await worker.until_count(dead=1)
        await Redrives(bench.dsn, SCHEMA).redrive(ALL, by="ann", run="r")
        await worker.until_count(applied=1)
    assert (registry.asked["0"], bench.effects()) == (5, ["0"])


async def test_one_that_cannot_be_read_for_a_day_is_a_letter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app, registry = App("shop"), Registry()

    async def hang() -> None:
        if registry.asked["0"] == 3:  # a day later
            tuned(monkeypatch, failing_is_free_for=0.0)
        raise TimeoutError

    registry.says["0"] = hang
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, **SOON)(handle)
    bench.enqueue("q", *some(3))
    async with bench.running(app) as worker:
        await worker.until_count(applied=2, dead=1)
    assert registry.asked["0"] > 2
    assert bench.do(LETTERS) == [("undecodable", 0)]


@pytest.mark.parametrize("delivered", [0, 1], ids=["new", "suspect"])
async def test_a_drain_does_not_wait_for_a_decoder(bench: Bench, delivered: int) -> None:
    app, registry, cut_off, begun = App("shop"), Registry(), list[str](), asyncio.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append("0")
            raise

    registry.says["0"] = hang
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, order_by="entity", timeout="1h")(handle)
    bench.enqueue("q", *some(3))
    bench.do("update idemconsumer.queue set deliveries = %s", delivered)
    async with bench.running(app, drain_timeout=3_600.0) as worker:
        await worker.until(lambda: registry.asked.total() == 3 and begun.is_set())
        await worker.leave()
    assert cut_off == ["0"]
    rows = bench.do("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue")
    assert rows == [(delivered, True)] * 3
    assert (bench.effects(), bench.do("select count(*) from idemconsumer.attempt")) == ([], [(0,)])


async def test_a_drain_does_not_wait_for_a_registry_that_is_down(bench: Bench) -> None:
    app, registry = App("shop"), Registry()
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, backoff="1h, 1h")(handle)
    bench.enqueue("q", *some(3))
    registry.up.clear()
    async with bench.running(app, drain_timeout=3_600.0) as worker:
        await worker.until(lambda: registry.asked.total() == 3)
        worker.worker.drain()
        await worker.until(lambda: draining(worker.worker))
        await worker.leave()
    rows = bench.do("select deliveries, visible_at <= clock_timestamp() from idemconsumer.queue")
    assert rows == [(0, True)] * 3


async def test_what_is_taken_back_is_no_longer_decoded_when_it_comes_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a rebalance of Kafka, in one session."""
    app, registry, epochs, in_memory = App("shop"), Registry(), [Epoch(), Epoch()], MemorySession.fetch
    hangs, begun = iter([True, False]), asyncio.Event()

    async def hang() -> None:
        begun.set()
        if next(hangs):
            await asyncio.Event().wait()

    async def fetch(session: MemorySession) -> Sequence[Delivery]:
        if not epochs:
            return await in_memory(session)
        epoch = epochs.pop(0)
        if not epochs:
            await begun.wait()
            first.end()
        return [Delivery(Message("memory:q", body(Item("0")), position="q#1"), epoch)]

    async def settle(session: MemorySession, deliveries: Sequence[Delivery]) -> None:
        return

    first = epochs[0]
    registry.says["0"] = hang
    monkeypatch.setattr(MemorySession, "fetch", fetch)
    monkeypatch.setattr(MemorySession, "settle", settle)
    app.idempotent_handler("memory:q", key="id", decode=registry.decode, **SOON)(handle)
    async with bench.running(app) as worker:
        await worker.until_count(applied=1)
    assert (registry.asked["0"], bench.effects(), bench.do(LETTERS)) == (2, ["0"], [])


async def test_the_next_run_is_given_a_payload_of_its_own_and_an_outage_before_it_costs_nothing(bench: Bench) -> None:
    app, registry, runs = App("shop"), Registry(), list[str]()
    away = iter([False, True, True, False])

    async def now_and_then() -> None:
        if next(away):
            raise ConnectionResetError

    registry.says["0"] = now_and_then

    @app.idempotent_handler("postgres:q", key="id", decode=registry.decode, max_attempts=2, **SOON)
    async def handle_twice(item: Item, tx: Tx) -> None:
        runs.append(item.entity)
        item.entity = "changed"
        if len(runs) == 1:
            raise ValueError("once")
        await note(tx, item)

    bench.enqueue("q", Item("0", "as sent"))
    async with bench.running(app) as worker:
        await worker.until_count(applied=1)
    assert runs == ["as sent", "as sent"]
    assert (registry.asked["0"], bench.do(LETTERS)) == (4, [])


async def test_process_says_when_it_is_to_be_called_again(bench: Bench) -> None:
    app, registry = App("shop"), Registry()
    answers = iter([Retry(after="7s"), TimeoutError(), None, None])

    async def at_last() -> None:
        if (error := next(answers)) is not None:
            raise error

    registry.says["0"] = at_last
    app.idempotent_handler("postgres:q", key="id", decode=registry.decode, max_attempts=1)(handle)
    app.worker(bench.settings())
    message = Message("postgres:q", body(Item("0")), position="q#1")
    outcomes = [await app.process(message) for _ in range(4)]
    await app.close()
    assert [each.kind for each in outcomes] == [
        OutcomeKind.RETRYING, OutcomeKind.RETRYING, OutcomeKind.APPLIED, OutcomeKind.DUPLICATE,
    ]  # fmt: skip
    assert (outcomes[0].due, outcomes[0].error, outcomes[1].error) == (7.0, "Retry", "TimeoutError")
    assert (bench.effects(), bench.do(LETTERS), bench.attempts()) == (["0"], [], 0)


async def test_a_saga_that_is_resumed_while_the_registry_is_down_is_not_put_aside(bench: Bench) -> None:
    app, registry, steps = App("shop"), Registry(), list[int]()

    async def flaky(step: Step) -> None:
        steps.append(step.attempt)
        if len(steps) == 1:
            registry.up.clear()
            raise Retry(after="10ms")

    @app.idempotent_handler("postgres:q", key="id", decode=registry.decode, max_attempts=2, **SOON)
    async def book(item: Item, saga: Saga) -> None:
        await saga.call("flaky", flaky)

    bench.enqueue("q", Item("0"))
    async with bench.running(app) as worker:
        await worker.until(lambda: registry.asked["0"] > 4)
        assert bench.do("select suspicion from idemconsumer.saga") == [(0,)]
        registry.up.set()
        await worker.until_count(applied=1)
    assert bench.do(LETTERS) == []
    assert bench.do("select state from idemconsumer.record") == [(State.COMPLETED,)]
    assert len(steps) == 2
