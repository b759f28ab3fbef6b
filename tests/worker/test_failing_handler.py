"""A handler all of whose messages fail is tried with one at a time, at no cost of attempts, until it works (D17)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from idemconsumer import App, Message, Tx
from idemconsumer.rules.breaker import IN_A_ROW
from tests.support.inside import in_memory, lanes_of
from tests.support.logs import LogCapture, times
from tests.support.tuning import tuned
from tests.support.waiting import PATIENCE
from tests.support.workers import Bench, Item, Running, note

SLOWED, WORKS = "all messages of a handler fail, trying one at a time", "handler works again"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two runs there is hardly a pause."""
    tuned(monkeypatch, next_probe_pause=0.01, failed_probe_pause=0.01)


class Service:
    """What the handler depends on."""

    def __init__(self, up: Callable[[str], bool], **options: Any) -> None:
        self.app = App("failing")
        self.up = up
        self.inside = self.most = self.calls = 0
        self.attempts: list[int] = []

        @self.app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms", **options)
        async def handle(item: Item, tx: Tx, message: Message) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.calls += 1
            self.attempts.append(message.attempt)
            try:
                await tx.execute("select pg_sleep(0.002)")
                if not self.up(item.id):
                    raise ConnectionError("the service is down")
                await note(tx, item)
            finally:
                self.inside -= 1


def lanes_at_work(running: Running) -> int:
    return lanes_of(running.worker).of("handle").running


@pytest.mark.parametrize("order", [None, "entity"])
async def test_a_dependency_that_is_down_costs_no_attempts_and_is_said_once(
    bench: Bench, logged: LogCapture, monkeypatch: pytest.MonkeyPatch, order: str | None
) -> None:
    tuned(monkeypatch, probe_hangs_after=PATIENCE)  # else a machine that stands still tries another one
    service = Service(lambda _: False, order_by=order, max_attempts=3)
    await bench.publish("q", *(Item(str(n), f"e{n}") for n in range(40)))
    async with bench.running(service.app, concurrency=8) as running:
        await running.until(lambda: times(logged, SLOWED) == 1 and lanes_at_work(running) <= 1)
        service.most = 0
        await running.until(lambda: max(service.attempts) > 3)  # the handler is told how often it was tried
        assert service.most == 1, "one at a time"
        assert bench.attempts() <= IN_A_ROW - 1
        assert bench.do("select count(*) from idemconsumer.dead_letter") == [(0,)]
        service.up = lambda _: True
        await running.until_count(applied=40)
        assert service.most > 1 or order is None, "and then all lanes run again"
    assert (times(logged, SLOWED), times(logged, WORKS)) == (1, 1)
    assert bench.attempts() == 0


async def test_poison_among_good_messages_is_buried_as_ever(bench: Bench, logged: LogCapture) -> None:
    """In one order: else a database that stands still holds up what is good, and only failures are over."""
    service = Service(lambda name: int(name) % 4 != 0, order_by="entity", max_attempts=3)
    await bench.publish("q", *(Item(str(n), "e") for n in range(60)))
    worker = await bench.until_empty(service.app)
    assert worker.counts == {"applied": 45, "retrying": 30, "dead": 15}
    assert times(logged, SLOWED) == 0


@pytest.mark.parametrize("order", [None, "entity"])
async def test_what_has_failed_lets_those_through_that_have_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture, order: str | None
) -> None:
    """Whatever comes first, and in one lane. Then its failures count, and are no sign again."""
    tuned(monkeypatch, failed_probe_pause=10_000.0)
    tried, before = list[str](), list[str]()

    def up(name: str) -> bool:
        tried.append(name)
        if name == "good":
            before.extend(tried)
        return name == "good"

    service = Service(up, order_by=order, max_attempts=3)
    names = [*(f"bad-{n}" for n in range(20)), "good"]
    await bench.publish("q", *(Item(name, name) for name in names))
    async with bench.running(service.app, concurrency=1) as running:
        await running.until_count(applied=1, dead=20)
    probed = before[before.index(f"bad-{IN_A_ROW - 1}") + 1 :]
    assert sorted(probed) == sorted(names[IN_A_ROW:]), "each once"
    assert times(logged, SLOWED) == 1
    assert bench.do("select distinct attempts from idemconsumer.dead_letter") == [(3,)]


@pytest.mark.parametrize("order", [None, "id"])
@pytest.mark.parametrize("failed_too", ["a", "b"])
async def test_what_is_of_a_tenant_that_fails_comes_behind_one_that_fails_less(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, order: str | None, failed_too: str
) -> None:
    tuned(monkeypatch, next_probe_pause=0.1, failed_probe_pause=10_000.0)
    app, tried = App("failing"), list[str]()

    @app.idempotent_handler("memory:q", key="id", tenant="entity", order_by=order, backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        tried.append(item.id)
        if item.id != "good":
            raise ConnectionError("the service is down")
        await note(tx, item)

    async with bench.running(app, concurrency=1) as running:
        await bench.publish("q", *(Item(f"bad-{n}", "a") for n in range(IN_A_ROW)), Item("too", failed_too))
        await running.until(lambda: "too" in tried)
        await bench.publish("q", *(Item(f"more-{n}", "a") for n in range(40)), Item("good", "b"))
        await running.until_count(applied=1)
    assert tried.index("good") - tried.index("too") <= 15, "those that came before it was there"


async def test_a_stream_of_bad_ones_does_not_open_it_again_and_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, failed_probe_pause=10_000.0)
    service = Service(lambda name: int(name) % 20 == 19, max_attempts=2)
    await bench.publish("q", *(Item(str(n)) for n in range(240)))
    async with bench.running(service.app, concurrency=4) as running:
        await running.until_count(applied=12)
    assert 1 <= times(logged, SLOWED) <= 7


async def test_what_hangs_keeps_none_waiting_that_has_not_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, probe_hangs_after=0.01)
    app, answers, hanging = App("failing"), asyncio.Event(), list[str]()

    @app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        if item.id.startswith("hang"):
            hanging.append(item.id)
            await answers.wait()
        if item.id != "good":
            raise ConnectionError("the service is down")
        await note(tx, item)

    async with bench.running(app, concurrency=4) as running:
        await bench.publish("q", *(Item(f"bad-{n}") for n in range(IN_A_ROW)))
        await running.until(lambda: times(logged, SLOWED) == 1)
        await bench.publish("q", *(Item(name) for name in ("hang-1", "hang-2", "good")))
        await running.until_count(applied=1)
        assert hanging == ["hang-1", "hang-2"]
        answers.set()


async def test_of_those_that_have_failed_one_hangs_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, probe_hangs_after=0.01)
    app, answers, calls = App("failing"), asyncio.Event(), Counter[str]()
    hanging, hangs = list[str](), False

    @app.idempotent_handler("memory:q", key="id", backoff="10ms, 10ms")
    async def handle(item: Item, tx: Tx) -> None:
        calls[item.id] += 1
        if calls[item.id] > 1 and hangs:
            hanging.append(item.id)
            await answers.wait()
        raise ConnectionError("the service is down")

    await bench.publish("q", *(Item(f"bad-{n}") for n in range(IN_A_ROW)))
    async with bench.running(app, concurrency=4) as running:
        await running.until(lambda: times(logged, SLOWED) == 1 and lanes_at_work(running) == 0)
        hangs = True  # what begins now, begins while it is probed
        await running.until(lambda: len(hanging) > 0)
        await bench.publish("q", *(Item(f"more-{n}") for n in range(20)))
        await running.until(lambda: len(calls) == IN_A_ROW + 20)  # each a pause after the one before
        assert len(hanging) == 1
        answers.set()


@pytest.mark.parametrize("options", [{"max_attempts": 1}, {"fail_on": (ConnectionError,)}])
async def test_what_is_to_run_once_runs_once(bench: Bench, options: Any) -> None:
    service = Service(lambda _: False, **options)
    await bench.publish("q", *(Item(str(n)) for n in range(12)))
    await bench.until_empty(service.app)
    assert service.calls == 12


async def test_what_can_never_succeed_is_buried_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, logged: LogCapture
) -> None:
    tuned(monkeypatch, failing_is_free_for=0.2)
    service = Service(lambda _: False, max_attempts=2)
    await bench.publish("q", *(Item(str(n)) for n in range(10)))
    worker = await bench.until_empty(service.app)
    assert worker.counts["dead"] == 10
    assert times(logged, SLOWED) == 1


async def test_a_drain_does_not_wait_for_the_next_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, next_probe_pause=10_000.0, failed_probe_pause=10_000.0)
    service = Service(lambda _: False)
    await bench.publish("q", *(Item(str(n)) for n in range(40)))
    async with bench.running(service.app, concurrency=4) as running:
        await running.until(lambda: service.calls >= IN_A_ROW and not service.inside)
        await running.leave()
    assert len(in_memory(bench.broker, "q")) == 40
